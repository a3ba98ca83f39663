#pragma once
/// The library that is linked with MPI (libringzero_mpi). It is loaded on request, so comm and its programs
/// run without an MPI installation.

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace rz {

/// Names of functions of the library. The first returns the ringzero version it was built from; another
/// version is rejected.
inline constexpr const char* mpi_plugin_version_symbol = "rz_mpi_plugin_version";
inline constexpr const char* mpi_plugin_exchange_symbol = "rz_mpi_plugin_exchange";
using MpiPluginVersion = const char* (*)();

/// A function of the library, which is loaded once per process. Searches next to this code (build folder or
/// installed lib/), then the loader's path. Errc::unsupported with a one-line reason if the library is
/// missing, is not a ringzero backend or has another version.
void* mpi_library_function(const char* name);

/// An exchange of short texts within MPI_COMM_WORLD.
struct MpiExchange {
  int rank = 0, size = 1;             ///< as the launcher has them
  std::string launcher;               ///< its name, such as "openmpi"
  std::chrono::milliseconds timeout;  ///< of all of it, but a few seconds
  std::string own;                    ///< text of this rank
  /// Called on rank 0, perhaps in another thread, with the texts of all ranks. Its result, or the Error that
  /// it throws, is that of the exchange on every rank.
  std::function<std::string(const std::vector<std::string>&)> answer;
  bool keep = false;      ///< MPI stays initialised: a backend needs it
  bool may_start = true;  ///< the exchange may initialise MPI
};
using MpiPluginExchange = void (*)(const MpiExchange&, std::string& answer);

/// Collective over all ranks of the launch; returns the answer of rank 0. Where MPI is not initialised, it
/// does that, with MPI_THREAD_MULTIPLE, and finalises MPI before it returns, unless `keep` is set: then MPI
/// is finalised at exit. MPI that the program has initialised stays as it is, and is called in this thread
/// only.
///
/// Errc::timeout names the ranks that did not arrive; where MPI_Init itself does not return, this rank.
/// Errc::unsupported if there is no library or no MPI, the launcher is of another MPI, MPI was finalised, or
/// the program is linked with MPI but has not initialised it, and `keep` is not set.
std::string exchange_over_mpi(MpiExchange);

}  // namespace rz
