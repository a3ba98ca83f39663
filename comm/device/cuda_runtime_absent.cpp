#include "comm/device/cuda_runtime.h"

namespace rz::cuda {

const Runtime& runtime() {
  fail(Errc::unsupported, "this build has no CUDA: configure it with -DRZ_CUDA=ON where nvcc is installed");
}

}  // namespace rz::cuda
