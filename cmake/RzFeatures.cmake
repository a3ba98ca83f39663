# Optional features: AUTO uses what is found, ON requires it, OFF disables it. Sets RZ_HAVE_<feature>.
include(CheckLanguage)

function(rz_feature name what)
  set(RZ_${name} AUTO CACHE STRING "${what}: AUTO, ON or OFF")
  set_property(CACHE RZ_${name} PROPERTY STRINGS AUTO ON OFF)
endfunction()

function(rz_resolve name found hint)
  if(RZ_${name} AND NOT RZ_${name} STREQUAL "AUTO" AND NOT found)
    message(FATAL_ERROR "RZ_${name}=ON, but ${hint}")
  endif()
  if(found AND (RZ_${name} STREQUAL "AUTO" OR RZ_${name}))
    set(RZ_HAVE_${name} TRUE PARENT_SCOPE)
    message(STATUS "ringzero: ${name} yes")
  else()
    set(RZ_HAVE_${name} FALSE PARENT_SCOPE)
    message(STATUS "ringzero: ${name} no")
  endif()
endfunction()

rz_feature(CUDA "CUDA memory and streams")
rz_feature(NCCL "NCCL backend")
rz_feature(MPI "MPI backend")

if(RZ_CUDA)
  check_language(CUDA)
endif()
if(CMAKE_CUDA_COMPILER)
  set(rz_cuda_found TRUE)
endif()
rz_resolve(CUDA "${rz_cuda_found}" "no nvcc was found (set CUDACXX or CMAKE_CUDA_COMPILER)")
if(RZ_HAVE_CUDA)
  # Ampere, Hopper, and PTX for later architectures. One PTX serves all of them, since the kernels need
  # nothing newer, and that saves a third of the compile time. -DCMAKE_CUDA_ARCHITECTURES=90 compiles for one
  # architecture only.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES OFF)
    add_compile_options(
      "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_80,code=[compute_80,sm_80];--generate-code=arch=compute_80,code=sm_90>")
  endif()
  enable_language(CUDA)
  # CI has no GPU: device code is compiled as a check, and never run.
  if(CMAKE_UNITY_BUILD AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:--Ofast-compile=max>)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc 12 supports C++20
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  find_package(CUDAToolkit REQUIRED)
  # All libraries must share one copy of the CUDA runtime: a kernel is registered with the runtime of its own
  # library, and launched through the runtime of core.
  if(BUILD_SHARED_LIBS)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
    set(rz_cudart cudart)
    set(rz_cudart_folder ${CUDAToolkit_LIBRARY_DIR})
  else()
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    set(rz_cudart cudart_static)
  endif()
endif()

if(RZ_NCCL)
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS /usr/local/cuda/include)
  find_library(NCCL_LIBRARY nccl HINTS /usr/local/cuda/lib64)
endif()
if(NCCL_INCLUDE_DIR AND NCCL_LIBRARY AND RZ_HAVE_CUDA)
  set(rz_nccl_found TRUE)
endif()
rz_resolve(NCCL "${rz_nccl_found}" "nccl.h, libnccl or CUDA was not found")

if(RZ_MPI)
  find_package(MPI QUIET COMPONENTS CXX)
endif()
rz_resolve(MPI "${MPI_CXX_FOUND}" "no MPI was found (Debian: libopenmpi-dev)")
