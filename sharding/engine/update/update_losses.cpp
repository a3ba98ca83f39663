#include "sharding/engine/update/update_losses.h"

namespace rz {

Mean UpdateLosses::read(const Stream& stream) const {
  Mean mean;
  for (const nn::Loss& loss : losses_) {
    const ops::LossSum part = loss.read(stream);
    mean.add({part.sum, static_cast<double>(part.count)});
  }
  return mean;
}

}  // namespace rz
