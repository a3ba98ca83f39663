// Alone in its file: tests link another nccl_api() before this one.

#include "comm/backends/nccl/api/api.h"

namespace rz::nccl {

const NcclApi& nccl_api() {
  static const NcclApi api = load_nccl();
  return api;
}

}  // namespace rz::nccl
