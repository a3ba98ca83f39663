#include "sharding/stores/whole_gradients.h"

#include "sharding/stores/gradient_buckets.h"

namespace rz {

WholeGradients::WholeGradients(const ModelParameters& parameters, const FlatLayout& layout, DType dtype,
                               const Runtime& runtime)
    : communicator_(runtime.communicator),
      buckets_(allocate_gradient_buckets(parameters, layout, dtype, runtime)) {}

Work WholeGradients::reduce(int bucket, const Stream& stream) {
  return communicator_.all_reduce(mean(bucket).buffer(), ReduceOp::avg, stream);
}

std::size_t WholeGradients::bytes() const {
  std::size_t total = 0;
  for (const Tensor& b : buckets_) total += b.bytes();
  return total;
}

}  // namespace rz
