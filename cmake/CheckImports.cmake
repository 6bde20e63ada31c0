# cmake -DNM= -DLIBRARY= -P: what the library takes from outside and offers to it. It promises never to
# exit, abort, print or read the environment, to need nothing beyond libc, libm and pthreads, and to
# export nothing but kestrel_*.
execute_process(COMMAND ${NM} -D --undefined-only ${LIBRARY}
    OUTPUT_VARIABLE imports COMMAND_ERROR_IS_FATAL ANY)
set(forbidden abort exit _exit _Exit quick_exit raise __assert_fail
    printf vprintf puts putchar perror __printf_chk __vprintf_chk stdout stderr
    getenv secure_getenv setenv putenv system popen fork dlopen setlocale rand srand)
foreach(name IN LISTS forbidden)
    if(imports MATCHES "[ \t]${name}(@[^\n]*)?(\n|$)")
        message(SEND_ERROR "libkestrel calls ${name}")
    endif()
endforeach()

execute_process(COMMAND ${NM} -D --defined-only ${LIBRARY}
    OUTPUT_VARIABLE exports COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]+" exports "${exports}")
set(n_exports 0)
foreach(line IN LISTS exports)
    if(line MATCHES " A KESTREL_[0-9]+")
        continue() # the version node itself
    endif()
    if(NOT line MATCHES " T kestrel_[a-z_]+@@KESTREL_0$")
        message(SEND_ERROR "libkestrel exports what is not its contract: ${line}")
    endif()
    math(EXPR n_exports "${n_exports} + 1")
endforeach()
if(n_exports EQUAL 0)
    message(SEND_ERROR "libkestrel exports nothing")
endif()
message(STATUS "${n_exports} exported functions")
