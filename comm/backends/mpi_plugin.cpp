#include "comm/backends/mpi_plugin.h"

#include "comm/bootstrap.h"
#include "comm/bootstrap/mpi_library.h"
#include "comm/core/error.h"

namespace rz {

namespace {

MpiPluginConnect find_connect() {
  try {
    return reinterpret_cast<MpiPluginConnect>(mpi_library_function(mpi_plugin_connect_symbol));
  } catch (const Error& e) {
    fail(e.code(), e.what(), ", or use RZ_BACKEND=native (--backend native)");
  }
}

}  // namespace

std::unique_ptr<Backend> load_mpi_backend(int rank, int size, Store& store, const CommOptions& options) {
  const MpiPluginConnect connect = find_connect();
  const LaunchInfo launch_info = launch_info_from_environment();
  const MpiLaunchInfo plugin_info{.rank = rank,
                                  .size = size,
                                  .store = &store,
                                  .launched_size = launch_info.launcher == "none" ? 0 : launch_info.size,
                                  .launcher = launch_info.launcher.c_str()};
  return std::unique_ptr<Backend>(connect(plugin_info, options));
}

}  // namespace rz
