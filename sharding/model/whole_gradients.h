#pragma once
/// Gradients that every rank holds whole, as means over the ranks.

#include <vector>

#include "sharding/model/communication_hook.h"
#include "sharding/model/flat_layout.h"
#include "sharding/model/gradient_store.h"
#include "sharding/model/gradient_wire.h"
#include "sharding/model/runtime.h"

namespace rz {

/// Each bucket is reduced in place. Means of earlier passes are kept apart: adding a pass to them before it
/// is reduced would round otherwise than the other stores do.
class WholeGradients final : public GradientStore {
 public:
  /// `hook` forms the means instead of the wire, unless it is null.
  WholeGradients(const ModelParameters&, const FlatLayout&, DType, GradientWire&, CommunicationHook* hook,
                 Runtime&);

  void provide(int, const Stream&) override {}
  Work reduce(int bucket, const Stream&) override;
  void settle(const Stream&) override;
  void reopen(const Stream&) override;
  void forget() override;
  const Tensor& mean(int bucket) const override { return buckets_[static_cast<std::size_t>(bucket)]; }
  const Tensor& whole(int bucket) const override { return buckets_[static_cast<std::size_t>(bucket)]; }
  std::size_t bytes() const override;

 private:
  std::vector<HookBucket> hook_buckets(const ModelParameters&, const FlatLayout&) const;
  void advance_hook(const Stream&);

  const ModelParameters& parameters_;
  GradientWire& wire_;
  CommunicationHook* hook_;
  Runtime& runtime_;
  std::vector<Tensor> buckets_;
  std::vector<HookBucket> hook_buckets_;
  std::vector<GradientWire::Reduction> reductions_;  // by bucket, in flight
  std::vector<int> in_flight_;
  std::vector<int> advancing_;       // buckets in flight whose hook has further calls
  std::vector<Tensor> accumulated_;  // sums of the means of earlier passes, by bucket; none: empty
};

}  // namespace rz
