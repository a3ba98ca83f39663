#pragma once
/// The MPI backend lives in a library of its own, libringzero_mpi, which is loaded when it is asked for: comm
/// and all programs on it run where there is no MPI.

#include <memory>

#include "comm/backend.h"
#include "comm/communicator.h"

namespace rz {

/// What the library is told. Plain data, as both sides of the border were compiled apart.
struct MpiLaunchInfo {
  int rank, size;
  Store* store;          ///< where the ranks tell each other who they are to MPI
  int launched_size;     ///< size of the job as the launcher's variables have it; 0 without a launcher
  const char* launcher;  ///< whose variables, e.g. "openmpi"
};

/// Names and type of the library's two entry points. The first says what it was built from: a library of
/// another version is refused.
inline constexpr const char* mpi_plugin_version_symbol = "rz_mpi_plugin_version";
inline constexpr const char* mpi_plugin_connect_symbol = "rz_mpi_plugin_connect";
using MpiPluginVersion = const char* (*)();
using MpiPluginConnect = Backend* (*)(const MpiLaunchInfo&, const CommOptions&);

/// Loads the library once and connects. Looks beside this code (the build's folder, the installed lib/), then
/// along the loader's path. Errc::unsupported, one line: what could not be loaded, and why.
std::unique_ptr<Backend> load_mpi_backend(int rank, int size, Store& store, const CommOptions& options);

}  // namespace rz
