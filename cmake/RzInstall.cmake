# Installation: headers, libraries, programs, and packages for find_package and pkg-config.
include(CMakePackageConfigHelpers)

get_property(rz_floors GLOBAL PROPERTY RZ_FLOORS)
install(TARGETS ${rz_floors} EXPORT ringzero
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
# The public headers: what docs/architecture.md describes as the API of each room, and what these headers include. Nothing
# else is installed. They name each other by relative paths. tests/tools/headers_test.py compiles each of them against the
# installation.
set(rz_headers
    comm/backend.h comm/bootstrap.h comm/bucket_scheduler.h comm/collective.h comm/communicator.h comm/flight_dump.h
    comm/options.h comm/registration.h comm/store.h comm/topology.h comm/work.h
    comm/core/call_site.h comm/core/deadline.h comm/core/environment.h comm/core/error.h comm/core/range.h comm/core/text.h comm/core/types.h
    comm/device/allocate.h comm/device/graph.h comm/device/memory.h comm/device/meta.h comm/device/stream.h
    comm/os/error_file.h comm/os/thread_team.h

    tensor/attention_ops.h tensor/box.h tensor/element_ops.h tensor/element_ops.inc tensor/image_ops.h
    tensor/loss_ops.h tensor/ops.h tensor/pool.h tensor/shape_ops.h tensor/tensor.h

    autograd_lite/attention_ops.h autograd_lite/element_ops.h autograd_lite/image_ops.h
    autograd_lite/losses.h autograd_lite/ops.h autograd_lite/parameter.h autograd_lite/saved_variable.h
    autograd_lite/shape_ops.h autograd_lite/tape.h
    autograd_lite/nn/containers.h autograd_lite/nn/image_layers.h autograd_lite/nn/init.h autograd_lite/nn/layers.h
    autograd_lite/nn/module.h autograd_lite/nn/parallel.h
    autograd_lite/models/generate.h autograd_lite/models/gpt2.h autograd_lite/models/gpt_neox.h
    autograd_lite/models/kv_cache.h autograd_lite/models/language_model.h autograd_lite/models/llama.h
    autograd_lite/models/lora.h

    sharding/checkpoint/open_tensors.h sharding/checkpoint/tensor_source.h
    sharding/config/arguments.h sharding/config/ds_config.h sharding/config/lr_schedule.h
    sharding/config/training_arguments.h
    sharding/data/batch_sampler.h sharding/data/continuous_batch_sampler.h sharding/data/dataset.h
    sharding/data/iterable_dataset.h sharding/data/loader.h sharding/data/loader_positions.h sharding/data/subset.h
    sharding/data/text_documents.h sharding/data/token_shards.h sharding/data/tokens.h
    sharding/engine/checkpoints/checkpoint_options.h sharding/engine/engine.h sharding/engine/engine_options.h
    sharding/engine/parse_arguments.h sharding/engine/reports/step_report.h sharding/engine/checkpoints/training_checkpoints.h
    sharding/engine/training_plan.h sharding/parallel/world.h
    sharding/huggingface/adapter.h sharding/huggingface/adapter_config.h sharding/huggingface/families.h
    sharding/huggingface/generation_config.h sharding/huggingface/gpt2_config.h sharding/huggingface/merge_adapter.h
    sharding/huggingface/llama_config.h sharding/huggingface/model_family.h sharding/huggingface/pretrained_weights.h
    sharding/huggingface/save_pretrained.h
    sharding/lm/options.h sharding/lm/run.h sharding/lm/update_report.h
    sharding/model/memory_report.h sharding/model/options.h
    sharding/optim/loss_scaler.h sharding/optim/optimizer.h sharding/optim/optimizers.h
    sharding/parallel/collectives.h sharding/parallel/mesh.h sharding/parallel/mesh_sizes.h sharding/parallel/parallelize.h
    sharding/parallel/rank_agreement.h sharding/parallel/traffic.h
    sharding/strategy/join.h sharding/strategy/logging_data.h sharding/strategy/no_sync.h sharding/strategy/optimizer_state.h
    sharding/strategy/parameter_values.h sharding/strategy/strategy.h sharding/strategy/update_settings.h
    sharding/tokenizer/tokenizer.h)
if(RZ_COMM_ONLY)
  list(FILTER rz_headers INCLUDE REGEX "^comm/")
endif()
if(RZ_HAVE_MPI)
  list(APPEND rz_headers comm/backends/mpi/mpi.h comm/backends/backend_factory.h comm/core/long_wait.h
       comm/device/cuda_runtime.h)
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
set(RZ_PC_REQUIRES "libhwy, hwloc, openssl")
set(RZ_PC_VISIBILITY "")
set(RZ_PC_FURTHER ", openblas, libutf8proc")
set(RZ_PC_SYSTEM "")
foreach(library ${CMAKE_DL_LIBS})
  string(APPEND RZ_PC_SYSTEM " -l${library}")
endforeach()
if(RZ_HAVE_CUDA)
  string(PREPEND RZ_PC_SYSTEM " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -lpthread")
endif()
if(BUILD_SHARED_LIBS)
  set(RZ_PC_VISIBILITY ".private")
  set(RZ_PC_FURTHER "")
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
