#include "comm/bootstrap/mpi_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>

#include "comm/core/error.h"
#include "comm/core/lazy.h"

#ifndef RZ_MPI_PLUGIN_FILE
#define RZ_MPI_PLUGIN_FILE "libringzero_mpi.so"
#endif
#ifndef RZ_MPI_PLUGIN_FOLDERS
#define RZ_MPI_PLUGIN_FOLDERS ""
#endif

namespace rz {

namespace {

namespace fs = std::filesystem;

/// Folder of the program or library that contains this function.
fs::path library_folder() {
  Dl_info info{};
  std::error_code ignored;
  if (::dladdr(reinterpret_cast<const void*>(&mpi_library_function), &info) == 0 || !info.dli_fname)
    return {};
  fs::path file = info.dli_fname;
  if (!file.has_parent_path() || !fs::exists(file, ignored))
    file = fs::read_symlink("/proc/self/exe", ignored);
  return fs::absolute(file, ignored).parent_path();
}

/// Candidate paths, for a program in bin/ and a library in lib/, in a build tree and installed.
std::vector<std::string> plugin_candidates() {
  std::vector<std::string> all;
  const fs::path own = library_folder();
  std::error_code ignored;
  const std::string folders = RZ_MPI_PLUGIN_FOLDERS;  // separated by ':'
  for (std::size_t at = 0; !own.empty() && at <= folders.size();) {
    const auto colon = std::min(folders.find(':', at), folders.size());
    const fs::path file = (own / folders.substr(at, colon - at) / RZ_MPI_PLUGIN_FILE).lexically_normal();
    if (fs::exists(file, ignored)) all.push_back(file.string());
    at = colon + 1;
  }
  all.push_back(RZ_MPI_PLUGIN_FILE);
  return all;
}

void* open_plugin() {
  std::string problem;
  const std::vector<std::string> candidates = plugin_candidates();
  for (const std::string& file : candidates) {
    if (void* handle = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    const char* error = ::dlerror();
    if (problem.empty()) problem = error ? error : concat(file, ": unknown reason");
  }
  // The last candidate is the bare name, for the search of the dynamic linker. Where it is the only one, the
  // program does not lie in the bin folder beside the library's.
  fail(
      Errc::unsupported, "the MPI backend could not be loaded: ", problem, "; ",
      candidates.size() > 1
          ? "install the MPI that this ringzero was built with (Debian: libopenmpi3)"
          : concat("add the folder of ", RZ_MPI_PLUGIN_FILE,
                   ", PREFIX/lib of an installation with MPI, to LD_LIBRARY_PATH or to the program's rpath"));
}

void* find_function(void* library, const char* name) {
  void* address = ::dlsym(library, name);
  require(address != nullptr, Errc::unsupported, RZ_MPI_PLUGIN_FILE,
          " is no MPI backend of ringzero: it has no ", name, "; install the one of this version");
  return address;
}

void* load_library() {
  void* library = open_plugin();
  const std::string version =
      reinterpret_cast<MpiPluginVersion>(find_function(library, mpi_plugin_version_symbol))();
  require(version == RZ_VERSION, Errc::unsupported, RZ_MPI_PLUGIN_FILE, " is of ringzero ", version,
          ", but this program of ", RZ_VERSION, "; install the one of this version");
  return library;
}

}  // namespace

void* mpi_library_function(const char* name) {
  static constinit Lazy<void*> library;
  return find_function(library.get(load_library), name);
}

std::string exchange_over_mpi(MpiExchange exchange) {
  // A program that is linked with MPI would initialise it later, once more.
  exchange.may_start = exchange.keep || ::dlsym(RTLD_DEFAULT, "MPI_Init") == nullptr;
  void* function = mpi_library_function(mpi_plugin_exchange_symbol);
  std::string answer;
  reinterpret_cast<MpiPluginExchange>(function)(exchange, answer);
  return answer;
}

}  // namespace rz
