#include "sharding/engine/update/update_losses.h"

#include <array>
#include <cstdint>

#include "sharding/optim/grad_norm.h"

namespace rz {

double exact_mean(std::span<const Mean> micro_batches, Communicator& communicator) {
  std::array<ExactSum, 2> sums;
  for (const Mean& part : micro_batches) {
    sums[0].add(part.sum);
    sums[1].add(part.count);
  }
  std::vector<std::int64_t> words;
  ExactSum::all_reduce(sums, words, communicator);
  return sums[0].value() / sums[1].value();
}

double UpdateLosses::mean(Communicator& communicator, const Stream& stream) const {
  std::vector<Mean> parts;
  for (const nn::Loss& loss : losses_) {
    const ops::LossSum part = loss.read(stream);
    parts.push_back({part.sum, static_cast<double>(part.count)});
  }
  return exact_mean(parts, communicator);
}

}  // namespace rz
