# cmake -DSTRIP= -DLIBRARY= -DSTRIPPED= -DLIMIT= -P: strips a copy, prints its size, fails at LIMIT bytes.
execute_process(COMMAND ${STRIP} -o ${STRIPPED} ${LIBRARY} COMMAND_ERROR_IS_FATAL ANY)
file(SIZE ${STRIPPED} size)
message(STATUS "${STRIPPED}: ${size} bytes stripped, the limit is ${LIMIT}")
if(NOT size LESS LIMIT)
    message(FATAL_ERROR "the stripped library has grown past its limit")
endif()
