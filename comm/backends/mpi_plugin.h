#pragma once
/// Loader of the MPI backend, which is in a separate library (comm/bootstrap/mpi_library.h).

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

/// Name and type of the library's entry point.
inline constexpr const char* mpi_plugin_connect_symbol = "rz_mpi_plugin_connect";
using MpiPluginConnect = Backend* (*)(const MpiLaunchInfo&, const CommOptions&);

/// Loads the library, then connects. Errc::unsupported as of mpi_library_function().
std::unique_ptr<Backend> load_mpi_backend(int rank, int size, Store& store, const CommOptions& options);

}  // namespace rz
