#include "sharding/model/sharded_model.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "comm/device/memory.h"
#include "sharding/optim/grad_norm.h"
#include "tensor/ops.h"

namespace rz {

namespace {

void check(const StorageOptions& options) {
  const ShardingPlan& plan = options.plan;
  require(
      !options.communication_hook || plan == ShardingPlan{}, Errc::unsupported, "the communication hook ",
      options.communication_hook ? options.communication_hook->describe() : "",
      " needs whole gradients on every rank, which only ddp has; communication_data_type compresses to 16 "
      "bits in every strategy");
  require(!options.communication_hook || options.wire == WireFormat{}, Errc::invalid_argument,
          "a communication hook forms the means itself: communication_data_type, prescale_gradients and "
          "gradient_predivide_factor must not be set with it");
  const bool shards = plan.values == Placement::sharded || plan.gradients == Placement::sharded;
  require(!shards || plan.state == Placement::sharded, Errc::invalid_argument,
          "a plan that shards values or gradients must shard the optimizer state too");
}

std::size_t bytes_of_elements(std::size_t elements, std::size_t element) {
  return elements > std::numeric_limits<std::size_t>::max() / element
             ? std::numeric_limits<std::size_t>::max()
             : elements * element;
}

std::size_t reduce_bucket_size(const StrategyOptions& options, const ShardingPlan& plan,
                               std::span<Parameter* const> parameters) {
  if (options.reduce_bucket_size) return *options.reduce_bucket_size;
  constexpr std::size_t max = 25 * (std::size_t{1} << 18), min = std::size_t{1} << 16;
  if (plan.gradients == Placement::replicated || plan.values == Placement::sharded) return max;
  std::size_t elements = 0;
  for (const Parameter* p : parameters) elements += p->requires_grad ? p->count() : 0;
  return std::clamp(elements / 8, min, max);
}

BucketOptions bucket_options(const StrategyOptions& options, const ShardingPlan& plan,
                             std::span<Parameter* const> parameters, int ranks) {
  BucketOptions o;
  const std::size_t element = size_of(options.precision.gradients);
  const bool gathers = plan.state == Placement::sharded;
  const std::size_t reduced = reduce_bucket_size(options, plan, parameters);
  const std::size_t cap = gathers ? std::min(reduced, options.allgather_bucket_size) : reduced;
  o.cap_bytes = bytes_of_elements(cap, element);
  o.first_bytes = bytes_of_elements(std::min(cap, options.first_bucket_size), element);
  o.align = norm_block;
  o.granularity = norm_block * static_cast<std::size_t>(ranks);
  o.overlap = options.overlap_comm;
  return o;
}

}  // namespace

StorageOptions storage_options(const StrategyOptions& options, const ShardingPlan& plan,
                               std::span<Parameter* const> parameters, int ranks, Device::Kind kind) {
  StorageOptions out{options, plan, bucket_options(options, plan, parameters, ranks)};
  if (kind == Device::host) out.offload_optimizer = out.offload_param = {};  // all is in host memory already
  if (!options.overlap_comm) out.gathers.prefetch_bucket_size = 0;
  return out;
}

ShardedModel::ShardedModel(Module& module, ModelParameters parameters, const StorageOptions& options,
                           Runtime& runtime)
    : options_(options),
      runtime_(runtime),
      parameters_(std::move(parameters)),
      layout_(parameters_, plan_buckets(module, runtime), options.plan.state, runtime.place),
      wire_(options.wire, options.pairwise_passes ? ReduceOp::sum : ReduceOp::avg, options.buckets.overlap,
            runtime) {
  state_offloaded_ = offloaded_buckets(layout_.buckets(), options_.offload_optimizer);
  for (int b = 0; options_.precision.mixed() && b < layout_.size(); ++b) masters_.push_back(make_master(b));
  make_values();
  make_gradients();
}

ShardedModel::~ShardedModel() = default;

PlannedLayout plan_layout(Module& module, const ModelParameters& parameters, const StorageOptions& options,
                          MeshCoordinates place) {
  check(options);
  const DType gradients = options.precision.gradients;
  if (options.plan.values == Placement::replicated)
    return {nullptr, plan_member_buckets(parameters, gradients, options.buckets)};
  const GatherLimits& limits = options.gathers;
  auto flat = std::make_unique<FlatParameters>(
      module.scopes(), parameters,
      FlatParameterLimits{.align = norm_block,
                          .count = options.buckets.cap_bytes / size_of(gradients),
                          .persistent = limits.param_persistence_threshold,
                          .all_persistent = limits.model_persistence_threshold},
      place);
  BucketLayout buckets = flat->buckets(gradients);
  return {std::move(flat), std::move(buckets)};
}

std::vector<char> offloaded_buckets(const BucketLayout& layout, const OffloadOptions& options) {
  std::vector<char> out;
  std::size_t all = 0, before = 0;
  for (const auto& bucket : layout.buckets) all += bucket.count;
  for (const auto& bucket : layout.buckets) {
    out.push_back(options.device == OffloadDevice::cpu &&
                  static_cast<double>(before) < options.ratio * static_cast<double>(all));
    before += bucket.count;
  }
  return out;
}

BucketLayout ShardedModel::plan_buckets(Module& module, Runtime& runtime) {
  PlannedLayout planned = plan_layout(module, parameters_, options_, runtime.place);
  flat_parameters_ = std::move(planned.flat_parameters);
  if (flat_parameters_) trace_ = std::make_unique<ScopeTrace>(module.scopes());
  return std::move(planned.buckets);
}

Allocator ShardedModel::state_allocator(int bucket) const {
  const Device device = runtime_.stream.device();
  return offloads_state(bucket) ? offload_allocator(options_.offload_optimizer, device)
                                : allocator_on(device);
}

void ShardedModel::wait_offloaded() const {
  if (offloads(options_)) runtime_.stream.synchronize();
}

/// From the values of the model, before they are rounded.
Tensor ShardedModel::make_master(int bucket) const {
  const Stream& stream = runtime_.stream;
  const Range range = layout_.updated(bucket);
  const Tensor made = Tensor::zeros({range.count()}, DType::f32, allocator_on(stream.device()));
  for (const ParameterSlice& slice : layout_.slices(bucket, range)) {
    const Shape count{slice.elements.count()};
    if (const Tensor& value = parameters_.member(slice.member).value; value.defined())
      ops::copy(made.view(slice.offset - range.begin, count), value.view(slice.elements.begin, count),
                stream);
  }
  if (!offloads_state(bucket)) return made;
  const Tensor moved = Tensor::empty(made.shape(), DType::f32, state_allocator(bucket));
  memcpy_async(moved.raw(), made.raw(), moved.bytes(), stream);
  stream.synchronize();  // one bucket at a time is on the device
  return moved;
}

void ShardedModel::make_values() {
  const DType dtype = options_.precision.parameters;
  if (!flat_parameters_) return void(values_ = make_replicated_values(parameters_, layout_, dtype, runtime_));
  values_ =
      make_sharded_values(*flat_parameters_, dtype, GatherPlan(*flat_parameters_, options_.gathers, *trace_),
                          options_.offload_param, runtime_);
}

void ShardedModel::make_gradients() {
  gradients_ = make_gradient_store(options_.plan, parameters_, layout_, options_.precision.gradients, wire_,
                                   options_.communication_hook.get(), runtime_);
}

Tensor ShardedModel::updated_f32(int bucket) const {
  return options_.precision.mixed() ? masters_[static_cast<std::size_t>(bucket)] : values_->updated(bucket);
}

void ShardedModel::rebucket(std::span<const int> order, std::size_t split) {
  require(options_.plan == ShardingPlan{}, Errc::invalid_argument,
          "rebucket(): the buckets of a sharded model decide which rank owns which elements");
  runtime_.stream.synchronize();  // the last update still reads the gradients
  gradients_ = nullptr;           // before new buckets are allocated
  const BucketLayout before = layout_.buckets();
  layout_.replace(
      plan_member_buckets(parameters_, options_.precision.gradients, options_.buckets, order, split));
  state_offloaded_ = offloaded_buckets(layout_.buckets(), options_.offload_optimizer);
  if (options_.precision.mixed())
    masters_ = moved_to(layout_, before, masters_, parameters_, runtime_.stream);
  make_values();
  make_gradients();
}

std::vector<Tensor> moved_to(const FlatLayout& layout, const BucketLayout& before,
                             std::span<const Tensor> buckets, const ModelParameters& parameters,
                             const Stream& stream) {
  std::vector<Tensor> out;
  for (int b = 0; b < layout.size(); ++b)
    out.push_back(Tensor::zeros({layout.bucket(b).count}, DType::f32, allocator_on(stream.device())));
  for (std::size_t m = 0; m < parameters.members().size(); ++m) {
    const auto from = before.offsets[m], to = layout.place(static_cast<int>(m));
    const Shape shape{parameters.members()[m]->count()};
    ops::copy(out[static_cast<std::size_t>(to.bucket)].view(to.offset, shape),
              buckets[static_cast<std::size_t>(from.bucket)].view(from.offset, shape), stream);
  }
  return out;
}

}  // namespace rz
