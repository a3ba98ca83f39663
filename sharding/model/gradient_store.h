#pragma once
/// Interface of the memory that holds gradients.

#include <cstddef>
#include <memory>

#include "comm/work.h"
#include "sharding/model/communication_hook.h"
#include "sharding/model/flat_layout.h"
#include "sharding/model/gradient_wire.h"
#include "sharding/model/runtime.h"
#include "tensor/tensor.h"

namespace rz {

/// Defines Parameter::grad while backward writes it, and holds the means over the ranks. Not thread-safe.
class GradientStore {
 public:
  virtual ~GradientStore() = default;

  /// Defines Parameter::grad of the members of a bucket. Called before one is written or reduced.
  virtual void provide(int bucket, const Stream&) = 0;
  /// Starts the mean over the ranks. The gradients of the bucket are complete, and its padding is zero.
  virtual Work reduce(int bucket, const Stream&) = 0;
  /// Waits for all reductions that were started. Afterwards the means are added to those that were kept.
  virtual void settle(const Stream&) {}
  /// Prepares another pass after settle(), and keeps the means.
  virtual void reopen(const Stream&) {}
  /// Drops gradients and means.
  virtual void forget() {}

  /// The means of FlatLayout::updated() of a bucket; valid after settle().
  virtual const Tensor& mean(int bucket) const = 0;
  /// The gradients of this rank; defined between provide() and the end of the reduction.
  virtual const Tensor& whole(int bucket) const = 0;
  /// Bytes kept between passes.
  virtual std::size_t bytes() const = 0;
};

/// The store of a plan. `hook` forms the means of whole gradients instead of the wire, unless it is null. All
/// references must outlive the store.
std::unique_ptr<GradientStore> make_gradient_store(const ShardingPlan&, const ModelParameters&,
                                                   const FlatLayout&, DType, GradientWire&,
                                                   CommunicationHook* hook, Runtime&);

}  // namespace rz
