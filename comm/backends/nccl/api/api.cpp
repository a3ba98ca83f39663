#include "comm/backends/nccl/api/api.h"

#include <dlfcn.h>

#include "comm/core/error.h"

namespace rz::nccl {

namespace {

constexpr int min_version = 21800;
constexpr const char* remedy =
    "; install NCCL 2.18 or newer (NVIDIA's package libnccl2), or use RZ_BACKEND="
    "peer_cuda or native (--backend)";

/// Symbol lookup in a loaded library.
class Library {
 public:
  explicit Library(const std::string& file)
      : file_(file), handle_(::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_) return;
    const char* reason = ::dlerror();
    fail(Errc::unsupported, "the NCCL backend could not load ", reason ? std::string(reason) : file, remedy);
  }

  template <class F>
  void require_symbol(F*& function, const char* name) const {
    find_symbol(function, name);
    require(function != nullptr, Errc::unsupported, file_, " has no ", name, remedy);
  }
  template <class F>
  void find_symbol(F*& function, const char* name) const {
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
  library.require_symbol(api.get_version, "ncclGetVersion");
  require_version(api);  // first, since an old library lacks some of the following symbols
  library.require_symbol(api.get_unique_id, "ncclGetUniqueId");
  library.require_symbol(api.comm_init_rank_config, "ncclCommInitRankConfig");
  library.require_symbol(api.comm_get_async_error, "ncclCommGetAsyncError");
  library.require_symbol(api.comm_abort, "ncclCommAbort");
  library.require_symbol(api.comm_finalize, "ncclCommFinalize");
  library.require_symbol(api.comm_destroy, "ncclCommDestroy");
  library.require_symbol(api.group_start, "ncclGroupStart");
  library.require_symbol(api.group_end, "ncclGroupEnd");
  library.require_symbol(api.all_reduce, "ncclAllReduce");
  library.require_symbol(api.reduce_scatter, "ncclReduceScatter");
  library.require_symbol(api.all_gather, "ncclAllGather");
  library.require_symbol(api.broadcast, "ncclBroadcast");
  library.require_symbol(api.reduce, "ncclReduce");
  library.require_symbol(api.send, "ncclSend");
  library.require_symbol(api.recv, "ncclRecv");
  library.require_symbol(api.red_op_create_pre_mul_sum, "ncclRedOpCreatePreMulSum");
  library.require_symbol(api.red_op_destroy, "ncclRedOpDestroy");
  library.require_symbol(api.get_error_string, "ncclGetErrorString");
  library.find_symbol(api.get_last_error, "ncclGetLastError");
  library.find_symbol(api.comm_register, "ncclCommRegister");
  library.find_symbol(api.comm_deregister, "ncclCommDeregister");
  library.find_symbol(api.comm_window_register, "ncclCommWindowRegister");
  library.find_symbol(api.comm_window_deregister, "ncclCommWindowDeregister");
  library.find_symbol(api.mem_alloc, "ncclMemAlloc");
  library.find_symbol(api.mem_free, "ncclMemFree");
  return api;
}

int require_version(const NcclApi& api) {
  int version = 0;
  const Result result = api.get_version(&version);
  require(result == success, Errc::unsupported, "ncclGetVersion failed with code ", result, remedy);
  require(version >= min_version && version < 30000, Errc::unsupported, "this machine has NCCL ",
          version_text(version), ", but ringzero supports 2.18 and later versions below 3", remedy);
  return version;
}

std::string version_text(int version) {
  if (version < 10000) return concat(version / 1000, '.', version % 1000 / 100, '.', version % 100);
  return concat(version / 10000, '.', version % 10000 / 100, '.', version % 100);
}

}  // namespace rz::nccl
