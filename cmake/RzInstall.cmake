# Installation: headers, libraries, programs, and packages for find_package and pkg-config.
include(CMakePackageConfigHelpers)

get_property(rz_floors GLOBAL PROPERTY RZ_FLOORS)
install(TARGETS ${rz_floors} EXPORT ringzero
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
# Public headers and the headers they include. tests/tools/headers_test.py compiles each of them.
file(GLOB rz_headers RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS comm/*.h comm/core/*.h tensor/*.h tensor/*.inc
     autograd_lite/*.h autograd_lite/*/*.h sharding/*/*.h sharding/checkpoint/*/*.h)
list(REMOVE_ITEM rz_headers sharding/optim/optimizer_rules.h)  # of sources alone
list(APPEND rz_headers comm/device/allocate.h comm/device/caching_allocator.h comm/device/graph.h comm/device/memory.h
     comm/device/stream.h comm/os/thread_team.h tensor/kernels/scalar/step_outcome.h
     tensor/kernels/scalar/superaccumulator.h)
if(RZ_COMM_ONLY)
  list(FILTER rz_headers INCLUDE REGEX "^comm/")
endif()
if(RZ_HAVE_MPI)
  list(APPEND rz_headers comm/backends/mpi/mpi.h comm/backends/backend_factory.h comm/device/cuda_runtime.h)
endif()
foreach(header ${rz_headers})
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES ${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ringzero/${folder} COMPONENT headers)
endforeach()

set(rz_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ringzero)
install(EXPORT ringzero NAMESPACE ringzero:: FILE ringzero-targets.cmake DESTINATION ${rz_cmake_dir})
configure_package_config_file(cmake/ringzero-config.cmake.in ringzero-config.cmake
                              INSTALL_DESTINATION ${rz_cmake_dir})
write_basic_package_version_file(ringzero-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/ringzero-config.cmake ${PROJECT_BINARY_DIR}/ringzero-config-version.cmake
        DESTINATION ${rz_cmake_dir})

# Static archives pass their dependencies on to the programs that link them.
set(RZ_PC_REQUIRES "libhwy, hwloc")
set(RZ_PC_VISIBILITY "")
set(RZ_PC_BLAS ", openblas")
set(RZ_PC_SYSTEM "")
foreach(library ${CMAKE_DL_LIBS})
  string(APPEND RZ_PC_SYSTEM " -l${library}")
endforeach()
if(RZ_HAVE_CUDA)
  string(PREPEND RZ_PC_SYSTEM " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -lpthread")
endif()
if(BUILD_SHARED_LIBS)
  set(RZ_PC_VISIBILITY ".private")
  set(RZ_PC_BLAS "")
  set(RZ_PC_SYSTEM "")
endif()
file(RELATIVE_PATH RZ_PC_INCLUDEDIR ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_FULL_INCLUDEDIR})
set(packages ringzero-comm)
if(NOT RZ_COMM_ONLY)
  list(APPEND packages ringzero)
endif()
if(RZ_HAVE_MPI)
  # Paths as found by CMake, since the pkg-config name of an MPI library differs between systems.
  list(APPEND packages ringzero-mpi)
  list(TRANSFORM MPI_CXX_INCLUDE_DIRS PREPEND -I OUTPUT_VARIABLE RZ_PC_MPI_INCLUDES)
  list(JOIN RZ_PC_MPI_INCLUDES " " RZ_PC_MPI_INCLUDES)
  list(JOIN MPI_CXX_LIBRARIES " " RZ_PC_MPI_LIBS)
endif()
foreach(package ${packages})
  configure_file(cmake/${package}.pc.in ${package}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${package}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()
