#include "comm/backends/peer_cuda/kernels/peer_kernels.h"

namespace rz {

const PeerKernels& peer_kernels() {
  static constexpr PeerKernels table{.reduce = peer::reduce,
                                     .scale = peer::scale,
                                     .collective_reduce = peer::collective_reduce,
                                     .collective_copy = peer::collective_copy,
                                     .send_recv = peer::send_recv};
  return table;
}

}  // namespace rz
