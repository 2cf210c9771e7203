# Installation: library, headers, program, CMake package and pkg-config file.
include(CMakePackageConfigHelpers)

set(deltic_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/deltic)

install(TARGETS deltic EXPORT deltic-targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES ${PROJECT_SOURCE_DIR}/include/deltic/deltic.h
              ${PROJECT_SOURCE_DIR}/include/deltic/deltic.hpp
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/deltic)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

if(DELTIC_BUILD_CLI)
  # The program finds the library beside it, wherever the prefix is moved to.
  file(RELATIVE_PATH deltic_bin_to_lib /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
  if(BUILD_SHARED_LIBS)
    set_target_properties(deltic_program PROPERTIES INSTALL_RPATH "$ORIGIN/${deltic_bin_to_lib}")
  endif()
  install(TARGETS deltic_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# find_package(deltic) gives deltic::deltic.
install(EXPORT deltic-targets NAMESPACE deltic:: FILE deltic-targets.cmake
        DESTINATION ${deltic_package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/deltic-config.cmake.in
                              ${PROJECT_BINARY_DIR}/deltic-config.cmake
                              INSTALL_DESTINATION ${deltic_package_dir})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/deltic-config-version.cmake
                                 VERSION ${PROJECT_VERSION} COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/deltic-config.cmake
              ${PROJECT_BINARY_DIR}/deltic-config-version.cmake
        DESTINATION ${deltic_package_dir})

# pkg-config. A static library needs what the compiler adds for C++ and OpenMP: --static lists it.
set(deltic_private_libs "")
foreach(library IN LISTS CMAKE_CXX_IMPLICIT_LINK_LIBRARIES OpenMP_CXX_LIB_NAMES)
  if(library MATCHES "^(stdc\\+\\+|c\\+\\+|m|gomp|omp|pthread)$" AND
     NOT library IN_LIST deltic_private_libs)
    list(APPEND deltic_private_libs ${library})
  endif()
endforeach()
list(TRANSFORM deltic_private_libs PREPEND "-l")
list(JOIN deltic_private_libs " " deltic_private_libs)
# Relative to the .pc file, so that the prefix can be moved.
file(RELATIVE_PATH deltic_pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${CMAKE_CURRENT_LIST_DIR}/deltic.pc.in ${PROJECT_BINARY_DIR}/deltic.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/deltic.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
