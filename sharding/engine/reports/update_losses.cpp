#include "sharding/engine/reports/update_losses.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "sharding/optim/grad_norm.h"
#include "tensor/ops.h"

namespace rz {

Mean exact_sums(std::span<const Mean> micro_batches, Communicator& communicator) {
  std::array<ExactSum, 2> sums;
  for (const Mean& part : micro_batches) {
    sums[0].add(part.sum);
    sums[1].add(part.count);
  }
  std::vector<std::int64_t> words;
  ExactSum::all_reduce(sums, words, communicator);
  return {sums[0].value(), sums[1].value()};
}

double exact_mean(std::span<const Mean> micro_batches, Communicator& communicator) {
  return exact_sums(micro_batches, communicator).value();
}

void UpdateLosses::add(const nn::Loss& loss, Tape& tape) {
  if (loss.has_terms()) return losses_.push_back(loss);
  const Tensor& value = tape.value(loss.sum);
  ops::copy(scalars_.emplace_back(tape.empty(value.shape())), value, tape.stream());
}

std::vector<Mean> UpdateLosses::read(const Stream& stream) const {
  std::vector<Mean> parts;
  for (const nn::Loss& loss : losses_) {
    const ops::LossSum part = loss.read(stream);
    parts.push_back({part.sum, static_cast<double>(part.count)});
  }
  for (const Tensor& scalar : scalars_) parts.push_back({*scalar.on_host(stream).data<float>(), 1});
  return parts;
}

Mean UpdateLosses::sums(Communicator& communicator, const Stream& stream) const {
  return exact_sums(read(stream), communicator);
}

std::vector<std::uint8_t> UpdateLosses::not_finite(Communicator& communicator, const Stream& stream) const {
  const std::vector<Mean> parts = read(stream);
  const std::uint8_t own = std::ranges::any_of(parts, [](const Mean& m) { return !std::isfinite(m.sum); });
  std::vector<std::uint8_t> all(static_cast<std::size_t>(communicator.size()));
  communicator.all_gather(ConstBuffer(&own, 1), Buffer(all.data(), all.size())).wait();
  return all;
}

}  // namespace rz
