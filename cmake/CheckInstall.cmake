# cmake -DBUILD= -DWORK= -DCOMPILER= -DGENERATOR= -P: installs the build into a prefix, moves
# the prefix, and builds and runs one program against it twice: by find_package and by pkg-config.
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/first
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(RENAME ${WORK}/first ${WORK}/prefix)

file(WRITE ${WORK}/app/app.c [[
#include <stdio.h>
#include <string.h>
#include "kestrel.h"
int main(void)
{
    puts(kestrel_build_info());
    return kestrel_abi_version() != KESTREL_ABI_VERSION || strlen(kestrel_version()) == 0;
}
]])
file(WRITE ${WORK}/app/CMakeLists.txt [[
cmake_minimum_required(VERSION 3.21...4.4)
project(app LANGUAGES C)
find_package(kestrel 0.1 REQUIRED)
add_executable(app app.c)
target_link_libraries(app PRIVATE kestrel::kestrel)
]])
execute_process(
    COMMAND ${CMAKE_COMMAND} -G ${GENERATOR} -S ${WORK}/app -B ${WORK}/app/build
        -DCMAKE_C_COMPILER=${COMPILER} -DCMAKE_PREFIX_PATH=${WORK}/prefix
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK}/app/build
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${WORK}/app/build/app COMMAND_ERROR_IS_FATAL ANY)

file(GLOB_RECURSE pc_file ${WORK}/prefix/*/kestrel.pc)
find_program(PKG_CONFIG pkg-config)
if(NOT PKG_CONFIG)
    message(STATUS "pkg-config is not installed: ${pc_file} was not tried")
    return()
endif()
get_filename_component(pc_dir ${pc_file} DIRECTORY)
execute_process(
    COMMAND ${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${pc_dir}
        ${PKG_CONFIG} --cflags --libs kestrel
    OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
execute_process(COMMAND ${COMPILER} -o ${WORK}/app/by-pkg-config ${WORK}/app/app.c ${flags}
    COMMAND_ERROR_IS_FATAL ANY)
get_filename_component(lib_dir ${pc_dir} DIRECTORY)
execute_process(
    COMMAND ${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${lib_dir} ${WORK}/app/by-pkg-config
    COMMAND_ERROR_IS_FATAL ANY)
