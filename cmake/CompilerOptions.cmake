# kestrel_options: what every C file of this project is compiled and linked with.
#
# Three groups. Numerics: the fixed order of every float operation is the source's, so the compiler may
# neither fuse nor reassociate. Debugging: the functions that exercises break on keep their frames and
# their names at every optimisation level. Diagnostics: warnings and sanitizers.
add_library(kestrel_options INTERFACE)

target_compile_options(kestrel_options INTERFACE
    -ffp-contract=off
    -fno-math-errno
    -fno-omit-frame-pointer
    -fno-optimize-sibling-calls
    $<$<C_COMPILER_ID:GNU>:-fno-partial-inlining -fno-ipa-sra -fno-ipa-icf>
    -ffunction-sections -fdata-sections
    -Wall -Wextra
    $<$<BOOL:${KESTREL_WERROR}>:-Werror>)

# Debug builds check the session's invariants and refuse to allocate during a decode.
target_compile_definitions(kestrel_options INTERFACE $<$<CONFIG:Debug>:KS_DEBUG=1>)

if(KESTREL_SANITIZE)
    set(sanitizer -fsanitize=${KESTREL_SANITIZE} -fno-sanitize-recover=all)
    target_compile_options(kestrel_options INTERFACE ${sanitizer}
        $<$<C_COMPILER_ID:GNU>:-fno-var-tracking>) # halves the time the kernels take to compile
    target_link_options(kestrel_options INTERFACE ${sanitizer})
endif()
if(KESTREL_BUILD_FUZZERS)
    if(NOT CMAKE_C_COMPILER_ID MATCHES "Clang")
        message(FATAL_ERROR "KESTREL_BUILD_FUZZERS needs clang: libFuzzer comes with it "
                            "(Debian: apt-get install clang libclang-rt-14-dev)")
    endif()
    target_compile_options(kestrel_options INTERFACE -fsanitize=fuzzer-no-link)
endif()
