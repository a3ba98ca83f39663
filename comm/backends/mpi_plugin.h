#pragma once
/// Loader of the MPI backend, which is a separate library (libringzero_mpi). It is loaded on request, so comm
/// and its programs run without an MPI installation.

#include <memory>

#include "comm/backend.h"
#include "comm/options.h"
#include "comm/store.h"

namespace rz {

/// Input of the library's entry point. Plain data, since library and program are compiled separately.
struct MpiLaunchInfo {
  int rank, size;
  Store* store;          ///< for the exchange of each rank's MPI identity
  int launched_size;     ///< job size from the launcher's environment; 0 without a launcher
  const char* launcher;  ///< name of that launcher, e.g. "openmpi"
};

/// Names and types of the library's two entry points. The first returns the ringzero version it was built
/// from; another version is rejected.
inline constexpr const char* mpi_plugin_version_symbol = "rz_mpi_plugin_version";
inline constexpr const char* mpi_plugin_connect_symbol = "rz_mpi_plugin_connect";
using MpiPluginVersion = const char* (*)();
using MpiPluginConnect = Backend* (*)(const MpiLaunchInfo&, const CommOptions&);

/// Loads the library once per process, then connects. Searches next to this code (build folder or installed
/// lib/), then the loader's path. Errc::unsupported with a one-line reason if the library is missing, is not
/// a ringzero backend or has another version.
std::unique_ptr<Backend> load_mpi_backend(int rank, int size, Store& store, const CommOptions& options);

}  // namespace rz
