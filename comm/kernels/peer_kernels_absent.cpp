#include "comm/core/error.h"
#include "comm/kernels/peer_kernels.h"

namespace rz {

const PeerKernels& peer_kernels() {
  fail(Errc::unsupported, "this build has no CUDA: configure it with -DRZ_CUDA=ON where nvcc is installed");
}

}  // namespace rz
