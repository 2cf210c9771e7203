# Installation: what the library shows, headers, program, CMake package and pkg-config file.
include(CMakePackageConfigHelpers)

# Hidden visibility does not reach the templates of the standard library: they say default themselves.
# The linker is told by name what stays visible.
if(BUILD_SHARED_LIBS)
  set(deltic_map ${CMAKE_CURRENT_LIST_DIR}/deltic.map)
  target_link_options(deltic PRIVATE LINKER:--version-script=${deltic_map})
  set_property(TARGET deltic APPEND PROPERTY LINK_DEPENDS ${deltic_map})
endif()

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
  install(TARGETS deltic_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
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
if(DELTIC_HAS_CUDA)
  list(APPEND deltic_private_libs cudart_static dl rt)
endif()
list(TRANSFORM deltic_private_libs PREPEND "-l")
if(DELTIC_HAS_CUDA)
  list(PREPEND deltic_private_libs "-L${CUDAToolkit_LIBRARY_DIR}")
endif()
list(JOIN deltic_private_libs " " deltic_private_libs)
# Relative to the .pc file, so that the prefix can be moved.
file(RELATIVE_PATH deltic_pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" deltic_pc_prefix "${deltic_pc_prefix}")
configure_file(${CMAKE_CURRENT_LIST_DIR}/deltic.pc.in ${PROJECT_BINARY_DIR}/deltic.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/deltic.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
