// In its own file, so that tests can link another nccl_api() instead.

#include "comm/backends/nccl/api/api.h"
#include "comm/core/lazy.h"

namespace rz::nccl {

const NcclApi& nccl_api() {
  static constinit Lazy<NcclApi> api;
  return api.get([] { return load_nccl(); });
}

}  // namespace rz::nccl
