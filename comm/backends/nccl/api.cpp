#include "comm/backends/nccl/api.h"

#include <dlfcn.h>

#include "comm/core/error.h"

namespace rz::nccl {

namespace {

constexpr int oldest = 21800;
constexpr const char* remedy =
    "; install NCCL 2.18 or newer (NVIDIA's package libnccl2), or use --backend "
    "peer_cuda or ring";

/// Functions of a loaded library, by name.
class Library {
 public:
  explicit Library(const std::string& file)
      : file_(file), handle_(::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_) return;
    const char* reason = ::dlerror();
    fail(Errc::unsupported, "the NCCL backend could not load ", reason ? std::string(reason) : file, remedy);
  }

  template <class F>
  void find(F*& function, const char* name) const {
    find_if_there(function, name);
    require(function != nullptr, Errc::unsupported, file_, " has no ", name, remedy);
  }
  template <class F>
  void find_if_there(F*& function, const char* name) const {
    function = reinterpret_cast<F*>(::dlsym(handle_, name));
  }

 private:
  std::string file_;
  void* handle_;
};

}  // namespace

NcclApi load_nccl(const std::string& file) {
  const Library library(file);
  NcclApi api{};
  library.find(api.get_version, "ncclGetVersion");
  require_version(api);  // before the names that an old one lacks
  library.find(api.get_unique_id, "ncclGetUniqueId");
  library.find(api.comm_init_rank_config, "ncclCommInitRankConfig");
  library.find(api.comm_get_async_error, "ncclCommGetAsyncError");
  library.find(api.comm_abort, "ncclCommAbort");
  library.find(api.comm_finalize, "ncclCommFinalize");
  library.find(api.comm_destroy, "ncclCommDestroy");
  library.find(api.group_start, "ncclGroupStart");
  library.find(api.group_end, "ncclGroupEnd");
  library.find(api.all_reduce, "ncclAllReduce");
  library.find(api.reduce_scatter, "ncclReduceScatter");
  library.find(api.all_gather, "ncclAllGather");
  library.find(api.broadcast, "ncclBroadcast");
  library.find(api.reduce, "ncclReduce");
  library.find(api.send, "ncclSend");
  library.find(api.recv, "ncclRecv");
  library.find(api.red_op_create_pre_mul_sum, "ncclRedOpCreatePreMulSum");
  library.find(api.red_op_destroy, "ncclRedOpDestroy");
  library.find(api.get_error_string, "ncclGetErrorString");
  library.find_if_there(api.get_last_error, "ncclGetLastError");
  library.find_if_there(api.comm_register, "ncclCommRegister");
  library.find_if_there(api.comm_deregister, "ncclCommDeregister");
  library.find_if_there(api.comm_window_register, "ncclCommWindowRegister");
  library.find_if_there(api.comm_window_deregister, "ncclCommWindowDeregister");
  library.find_if_there(api.mem_alloc, "ncclMemAlloc");
  library.find_if_there(api.mem_free, "ncclMemFree");
  return api;
}

int require_version(const NcclApi& api) {
  int version = 0;
  const Result result = api.get_version(&version);
  require(result == success, Errc::unsupported, "ncclGetVersion failed with code ", result, remedy);
  require(version >= oldest && version < 30000, Errc::unsupported, "this machine has NCCL ",
          version_text(version), ", but ringzero knows 2.18 and newer ones below 3", remedy);
  return version;
}

std::string version_text(int version) {
  if (version < 10000) return str(version / 1000, '.', version % 1000 / 100, '.', version % 100);
  return str(version / 10000, '.', version % 10000 / 100, '.', version % 100);
}

}  // namespace rz::nccl
