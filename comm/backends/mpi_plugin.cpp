#include "comm/backends/mpi_plugin.h"

#include <dlfcn.h>

#include <filesystem>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/core/error.h"

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
  if (::dladdr(reinterpret_cast<const void*>(&load_mpi_backend), &info) == 0 || !info.dli_fname) return {};
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
  fail(Errc::unsupported, "the MPI backend could not be loaded: ", problem, "; ",
       candidates.size() > 1
           ? "install the MPI that this ringzero was built with (Debian: libopenmpi3)"
           : concat("add the folder of ", RZ_MPI_PLUGIN_FILE,
                    ", PREFIX/lib of an installation with MPI, to LD_LIBRARY_PATH or to the program's rpath"),
       ", or use --backend native");
}

template <class F>
F find_symbol(void* handle, const char* name) {
  void* address = ::dlsym(handle, name);
  require(address != nullptr, Errc::unsupported, RZ_MPI_PLUGIN_FILE,
          " is no MPI backend of ringzero: it has no ", name,
          "; install the one of this version, or use --backend native");
  return reinterpret_cast<F>(address);
}

MpiPluginConnect load_plugin() {
  void* handle = open_plugin();
  const std::string version = find_symbol<MpiPluginVersion>(handle, mpi_plugin_version_symbol)();
  require(version == RZ_VERSION, Errc::unsupported, RZ_MPI_PLUGIN_FILE, " is of ringzero ", version,
          ", but this program of ", RZ_VERSION, "; install the one of this version, or use --backend native");
  return find_symbol<MpiPluginConnect>(handle, mpi_plugin_connect_symbol);
}

}  // namespace

std::unique_ptr<Backend> load_mpi_backend(int rank, int size, Store& store, const CommOptions& options) {
  static const MpiPluginConnect connect = load_plugin();
  const LaunchInfo launch_info = launch_info_from_environment();
  const MpiLaunchInfo plugin_info{.rank = rank,
                                  .size = size,
                                  .store = &store,
                                  .launched_size = launch_info.launcher == "none" ? 0 : launch_info.size,
                                  .launcher = launch_info.launcher.c_str()};
  return std::unique_ptr<Backend>(connect(plugin_info, options));
}

}  // namespace rz
