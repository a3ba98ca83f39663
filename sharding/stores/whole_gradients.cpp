#include "sharding/stores/whole_gradients.h"

#include "sharding/stores/gradient_buckets.h"

namespace rz {

WholeGradients::WholeGradients(const ModelParameters& parameters, const FlatLayout& layout, DType dtype,
                               GradientWire& wire, Runtime& runtime)
    : wire_(wire),
      buckets_(allocate_gradient_buckets(parameters, layout, dtype, runtime)),
      reductions_(buckets_.size()) {}

Work WholeGradients::reduce(int bucket, const Stream& stream) {
  const auto b = static_cast<std::size_t>(bucket);
  reductions_[b] = wire_.all_reduce(buckets_[b], stream);
  in_flight_.push_back(bucket);
  return reductions_[b].work;
}

void WholeGradients::settle(const Stream& stream) {
  for (const int bucket : in_flight_) {
    const auto b = static_cast<std::size_t>(bucket);
    wire_.finish(reductions_[b], buckets_[b], stream);
  }
  in_flight_.clear();
}

std::size_t WholeGradients::bytes() const {
  std::size_t total = 0;
  for (const Tensor& b : buckets_) total += b.bytes();
  return total;
}

}  // namespace rz
