#pragma once
/// A model's parameters in flat buckets, placed by a plan.

#include <memory>
#include <span>
#include <vector>

#include "autograd_lite/nn/module.h"
#include "comm/bucket_scheduler.h"
#include "sharding/model/communication_hook.h"
#include "sharding/model/flat_layout.h"
#include "sharding/model/gather_plan.h"
#include "sharding/model/gradient_store.h"
#include "sharding/model/host_memory.h"
#include "sharding/model/options.h"
#include "sharding/model/runtime.h"
#include "sharding/model/value_store.h"

namespace rz {

/// Where values and gradients lie, in which types: what the options of a strategy are for a model. On the
/// host nothing is offloaded.
struct StorageOptions : StrategyOptions {
  ShardingPlan plan;
  BucketOptions buckets;
};

/// What the options mean for the parameters of a model on `ranks` data ranks whose communicator is on a
/// device or on the host.
StorageOptions storage_options(const StrategyOptions&, const ShardingPlan&,
                               std::span<Parameter* const> parameters, int ranks, Device::Kind);

/// Buckets of the trainable parameters of a module, without memory.
struct PlannedLayout {
  std::unique_ptr<FlatParameters> flat_parameters;  ///< null unless values are sharded
  BucketLayout buckets;
};
/// Errc::invalid_argument if the plan is impossible. The parameters must outlive the result.
PlannedLayout plan_layout(Module&, const ModelParameters&, const StorageOptions&, MeshCoordinates);
/// The buckets whose optimizer state and masters are offloaded, on a device.
std::vector<char> offloaded_buckets(const BucketLayout&, const OffloadOptions&);

/// Layout and memory of the parameters of one model: values, masters and gradients.
class ShardedModel {
 public:
  /// Takes the f32 values of the parameters of the module. Module and runtime must outlive it.
  /// Errc::invalid_argument if the plan is impossible.
  ShardedModel(Module&, ModelParameters, const StorageOptions&, Runtime&);
  ShardedModel(const ShardedModel&) = delete;
  ~ShardedModel();

  const StorageOptions& options() const { return options_; }
  const ModelParameters& parameters() const { return parameters_; }
  const FlatLayout& layout() const { return layout_; }
  /// Null unless values are sharded.
  FlatParameters* flat_parameters() const { return flat_parameters_.get(); }
  /// The scopes that were gathered. Null unless values are sharded.
  const ScopeTrace* trace() const { return trace_.get(); }
  /// The format in which the gradients are reduced.
  GradientWire& wire() { return wire_; }
  ValueStore& values() const { return *values_; }
  GradientStore& gradients() const { return *gradients_; }

  /// Whether optimizer state and masters of a bucket are in host memory, and the model on a device.
  bool offloads_state(int bucket) const { return state_offloaded_[static_cast<std::size_t>(bucket)] != 0; }
  /// Allocates optimizer state and masters of a bucket.
  Allocator state_allocator(int bucket) const;
  /// Waits for copies to offloaded memory, before the host reads or writes it.
  void wait_offloaded() const;

  /// In mixed precision, the f32 copies of the values that this rank updates, by bucket; otherwise empty.
  const std::vector<Tensor>& masters() const { return masters_; }
  /// The f32 values of FlatLayout::updated() of a bucket: masters in mixed precision. In host memory if they
  /// are offloaded.
  Tensor updated_f32(int bucket) const;

  /// Forms new buckets over the members in this order, those of order[0, split) and the rest apart. Gradients
  /// are dropped. Nothing may be sharded.
  void rebucket(std::span<const int> order, std::size_t split);

 private:
  BucketLayout plan_buckets(Module&, Runtime&);
  Tensor make_master(int bucket) const;
  void make_values();
  void make_gradients();

  StorageOptions options_;
  Runtime& runtime_;
  ModelParameters parameters_;
  std::unique_ptr<FlatParameters> flat_parameters_;
  std::unique_ptr<ScopeTrace> trace_;
  FlatLayout layout_;
  std::vector<char> state_offloaded_;  // by bucket
  std::vector<Tensor> masters_;
  GradientWire wire_;
  std::unique_ptr<ValueStore> values_;
  std::unique_ptr<GradientStore> gradients_;
};

/// Moves f32 buckets of whole members from one layout to another.
std::vector<Tensor> moved_to(const FlatLayout&, const BucketLayout& before, std::span<const Tensor> buckets,
                             const ModelParameters&, const Stream&);

}  // namespace rz
