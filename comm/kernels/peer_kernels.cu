#include "comm/kernels/peer_kernels.h"

namespace rz {

const PeerKernels& peer_kernels() {
  static constexpr PeerKernels table{.reduce = peer::reduce,
                                     .scale = peer::scale,
                                     .fold_together = peer::fold_together,
                                     .move_together = peer::move_together,
                                     .messages_together = peer::messages_together};
  return table;
}

}  // namespace rz
