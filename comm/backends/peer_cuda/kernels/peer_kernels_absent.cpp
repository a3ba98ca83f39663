#include "comm/backends/peer_cuda/kernels/peer_kernels.h"
#include "comm/core/error.h"

namespace rz {

const PeerKernels& peer_kernels() {
  fail(Errc::unsupported, "this build has no CUDA: configure it with -DRZ_CUDA=ON where nvcc is installed");
}

}  // namespace rz
