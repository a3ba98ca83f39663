#include "sharding/model/gradient_buckets.h"

namespace rz {

std::vector<Tensor> allocate_gradient_buckets(const ModelParameters& parameters, const FlatLayout& layout,
                                              DType dtype, const Runtime& runtime) {
  for (Parameter* p : parameters.members()) p->grad = {};  // views of earlier buckets
  std::vector<Tensor> buckets;
  for (int b = 0; b < layout.size(); ++b)
    buckets.push_back(runtime.allocate_flat(layout.bucket(b).count, dtype));
  for (std::size_t m = 0; m < parameters.members().size(); ++m) {
    Parameter& p = *parameters.members()[m];
    const auto place = layout.place(static_cast<int>(m));
    p.grad = buckets[static_cast<std::size_t>(place.bucket)].view(place.offset, p.shape);
    p.grad_is_fresh = true;
  }
  return buckets;
}

}  // namespace rz
