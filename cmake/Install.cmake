# What `cmake --install` puts where: components runtime and development, or python inside a wheel.
if(SKBUILD)
    install(TARGETS kestrel LIBRARY DESTINATION pykestrel COMPONENT python)
    return()
endif()

install(TARGETS kestrel EXPORT kestrel-targets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    COMPONENT runtime NAMELINK_COMPONENT development)
if(TARGET kestrel-run)
    install(TARGETS kestrel-run RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime)
endif()
install(FILES libkestrel/include/kestrel.h
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)

# The library as gdb shows it: printers and the `kestrel` command.
install(FILES debugkit/gdbside/kestrel_gdb.py DESTINATION ${CMAKE_INSTALL_LIBDIR}
    RENAME $<TARGET_FILE_NAME:kestrel>-gdb.py COMPONENT development)

# find_package(kestrel 0.1); target_link_libraries(app kestrel::kestrel)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kestrel)
install(EXPORT kestrel-targets NAMESPACE kestrel::
    DESTINATION ${package_dir} COMPONENT development)
configure_package_config_file(cmake/kestrel-config.cmake.in
    ${PROJECT_BINARY_DIR}/kestrel-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kestrel-config-version.cmake
    COMPATIBILITY SameMinorVersion)
install(FILES
    ${PROJECT_BINARY_DIR}/kestrel-config.cmake
    ${PROJECT_BINARY_DIR}/kestrel-config-version.cmake
    DESTINATION ${package_dir} COMPONENT development)

# cc app.c $(pkg-config --cflags --libs kestrel). Relative to itself, so that the tree may move.
if(NOT IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
    file(RELATIVE_PATH prefix_from_pc /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
    string(REGEX REPLACE "/$" "" prefix_from_pc "${prefix_from_pc}")
    configure_file(cmake/kestrel.pc.in ${PROJECT_BINARY_DIR}/kestrel.pc @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/kestrel.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
endif()
