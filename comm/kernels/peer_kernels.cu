#include "comm/kernels/peer_kernels.h"

namespace rz {

const PeerKernels& peer_kernels() {
  static constexpr PeerKernels table{.reduce = peer::reduce, .scale = peer::scale};
  return table;
}

}  // namespace rz
