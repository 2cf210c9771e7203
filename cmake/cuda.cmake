# The CUDA language and its flags. Sets DELTIC_HAS_CUDA.
set(DELTIC_HAS_CUDA OFF)
if(NOT DELTIC_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "DELTIC_CUDA: expected AUTO, ON or OFF, got ${DELTIC_CUDA}")
endif()
if(NOT DELTIC_CUDA_SET MATCHES "^(full|ci)$")
  message(FATAL_ERROR "DELTIC_CUDA_SET: expected full or ci, got ${DELTIC_CUDA_SET}")
endif()
# Sanitizers of the host do not reach device code: AUTO leaves it out there.
if(DELTIC_CUDA STREQUAL "ON" OR (DELTIC_CUDA STREQUAL "AUTO" AND NOT DELTIC_SANITIZE))
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    # The toolkit's own place is often not on the path.
    find_program(DELTIC_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(DELTIC_NVCC)
      set(CMAKE_CUDA_COMPILER ${DELTIC_NVCC})
    endif()
  endif()
  # The kernels name their architecture themselves; without this CMake would choose one.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  if(DELTIC_CUDA STREQUAL "ON" OR CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
    enable_language(CUDA)
    # CMake 3.25 does not know nvcc's C++20 flag.
    if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
    find_package(CUDAToolkit REQUIRED)
    if(CUDAToolkit_VERSION VERSION_LESS 12.4)
      message(FATAL_ERROR "DELTIC_CUDA: expected CUDA 12.4 or later, got ${CUDAToolkit_VERSION}")
    endif()
    set(DELTIC_HAS_CUDA ON)
  endif()
endif()

if(DELTIC_HAS_CUDA)
  add_library(deltic_cuda_flags INTERFACE)
  target_compile_options(deltic_cuda_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr
      -Xcompiler=-Wall,-Wextra,-Wno-psabi -lineinfo>)
  # Device code a sixth of its size: 5 MB instead of 30. Loading it costs milliseconds, once.
  if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.8)
    target_compile_options(deltic_cuda_flags INTERFACE
      $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
  endif()
  if(DELTIC_WERROR)
    target_compile_options(deltic_cuda_flags INTERFACE
      $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
  endif()
  target_compile_definitions(deltic_cuda_flags INTERFACE
    $<$<STREQUAL:${DELTIC_CUDA_SET},ci>:DELTIC_CUDA_SET_CI>)
  message(STATUS "GPU backend: CUDA ${CUDAToolkit_VERSION}, sm_90a, kernels: ${DELTIC_CUDA_SET}")
else()
  message(STATUS "GPU backend: none")
endif()
