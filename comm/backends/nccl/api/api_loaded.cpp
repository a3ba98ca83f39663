// In its own file, so that tests can link another nccl_api() instead.

#include "comm/backends/nccl/api/api.h"

namespace rz::nccl {

const NcclApi& nccl_api() {
  static const NcclApi api = load_nccl();
  return api;
}

}  // namespace rz::nccl
