#include "sharding/model/gradient_store.h"

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "comm/core/error.h"
#include "comm/core/math.h"
#include "comm/device/allocate.h"
#include "comm/device/meta.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/ops.h"

namespace rz {

// ---- wire format

namespace {

/// out = factor · in, rounded once on the host.
void convert(const Tensor& out, const Tensor& in, float factor, const Stream& stream) {
  if (in.device().kind == Device::cuda) {
    if (factor != 1) ops::scale(in, in, factor, stream);
    if (out.raw() != in.raw()) ops::copy(out, in, stream);
    return;
  }
  if (is_meta(in.device())) return;
  ops::dispatch_dtype(in.dtype(), [&](auto from) {
    ops::dispatch_dtype(out.dtype(), [&](auto to) {
      const auto* x = in.data<decltype(from)>();
      auto* y = out.data<decltype(to)>();
      for (std::size_t i = 0; i < in.count(); ++i) y[i] = from_f32<decltype(to)>(factor * to_f32(x[i]));
    });
  });
}

}  // namespace

GradientWire::GradientWire(const WireFormat& format, ReduceOp result, bool overlap, Runtime& runtime)
    : format_(format), result_(result), overlap_(overlap), runtime_(runtime) {
  const int ranks = runtime.data.size();
  const double factor = format.gradient_predivide_factor;
  if (format.prescale_gradients) {
    before_ = 1 / static_cast<float>(ranks);
  } else if (factor != 1) {
    before_ = static_cast<float>(1 / factor);
    after_ = static_cast<float>(factor / ranks);
  }
}

ReduceOp GradientWire::op() const {
  const bool scaled = format_.prescale_gradients || format_.gradient_predivide_factor != 1;
  return scaled ? ReduceOp::sum : result_;
}

bool GradientWire::is_plain(DType gradients) const {
  const bool scaled = format_.prescale_gradients || format_.gradient_predivide_factor != 1;
  return format_.communication_data_type.value_or(gradients) == gradients && !scaled;
}

Tensor GradientWire::encoded(const Tensor& gradients, const Stream& stream) {
  const DType type = format_.communication_data_type.value_or(gradients.dtype());
  const Tensor out =
      type == gradients.dtype() ? gradients : runtime_.transient.allocate(gradients.shape(), type);
  convert(out, gradients, before_, stream);
  return out;
}

GradientWire::Reduction GradientWire::all_reduce(const Tensor& in_out, const Stream& stream) {
  if (is_plain(in_out.dtype()))
    return {runtime_.counted(runtime_.data).all_reduce(in_out, result_, stream), {}, {}};
  const Tensor sum = encoded(in_out, stream);
  return {runtime_.counted(runtime_.data).all_reduce(sum, op(), stream), sum, {}};
}

void GradientWire::reduce_scatter(Reduction& reduction, const Tensor& in, const Tensor& out,
                                  const Stream& stream) {
  advance(stream);
  if (is_plain(in.dtype())) {
    reduction = {runtime_.counted(runtime_.shard_group).reduce_scatter(in, out, result_, stream), {}, out};
  } else {
    const Tensor whole = encoded(in, stream);
    const Range own = shard_range(in.count(), runtime_.place.shard.rank, runtime_.place.shard.ranks);
    const Tensor sum = whole.view(own.begin, {own.count()});
    reduction = {runtime_.counted(runtime_.shard_group).reduce_scatter(whole, sum, op(), stream), sum, sum};
  }
  if (!runtime_.replicas) {
    reduction.part = {};
    return;
  }
  in_first_.push_back(&reduction);
  if (!overlap_ || stream.device().kind == Device::cuda) advance(stream, true);
}

/// On a device the stream between the two orders them, and the host does not wait.
void GradientWire::start_second_step(Reduction& reduction, const Stream& stream) {
  const bool on_device = stream.device().kind == Device::cuda;
  const Stream& order = on_device ? runtime_.between : stream;
  if (on_device) {
    std::exchange(reduction.work, {}).wait_on(order);
  } else {
    runtime_.exposed.wait(std::exchange(reduction.work, {}), stream);
    if (reduction.sum.defined()) {  // out of the memory of the whole, which ends here
      const Tensor own = runtime_.transient.allocate(reduction.sum.shape(), reduction.sum.dtype());
      ops::copy(own, reduction.sum, stream);
      reduction.sum = reduction.part = own;
    }
  }
  reduction.work =
      runtime_.counted(*runtime_.replicas).all_reduce(std::exchange(reduction.part, {}), op(), order);
}

void GradientWire::advance(const Stream& stream, bool wait) {
  std::size_t started = 0;
  while (started < in_first_.size() && (wait || in_first_[started]->work.done()))
    start_second_step(*in_first_[started++], stream);
  in_first_.erase(in_first_.begin(), in_first_.begin() + static_cast<std::ptrdiff_t>(started));
}

void GradientWire::enter_second_step(const Reduction& reduction, const Stream& stream) {
  while (reduction.part.defined()) {
    Reduction* const next = in_first_.front();
    in_first_.erase(in_first_.begin());
    start_second_step(*next, stream);
  }
}

void GradientWire::finish(Reduction& reduction, const Tensor& out, const Stream& stream) {
  enter_second_step(reduction, stream);
  runtime_.exposed.wait(std::exchange(reduction.work, {}), runtime_.stream);
  if (const Tensor sum = std::exchange(reduction.sum, {}); sum.defined()) convert(out, sum, after_, stream);
}

// ---- stores

namespace {

// ---- whole buckets

/// Allocates all buckets in communicator memory, and makes Parameter::grad of every member a view of its
/// bucket.
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

/// Gradients that every rank holds whole, as means over the ranks. Each bucket is reduced in place. Means of
/// earlier passes are kept apart: adding a pass to them before it is reduced would round otherwise than the
/// other stores do.
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
  Tensor shard(int bucket) const;
  void gather(const Stream&);

  const ModelParameters& parameters_;
  const FlatLayout& layout_;
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

WholeGradients::WholeGradients(const ModelParameters& parameters, const FlatLayout& layout, DType dtype,
                               GradientWire& wire, CommunicationHook* hook, Runtime& runtime)
    : parameters_(parameters),
      layout_(layout),
      wire_(wire),
      hook_(hook),
      runtime_(runtime),
      buckets_(allocate_gradient_buckets(parameters, layout, dtype, runtime)),
      reductions_(buckets_.size()) {
  if (!hook) return;
  hook->require_supported(dtype, runtime.stream.device());
  hook_buckets_ = hook_buckets(parameters, layout);
}

std::vector<HookBucket> WholeGradients::hook_buckets(const ModelParameters& parameters,
                                                     const FlatLayout& layout) const {
  std::vector<HookBucket> out;
  for (int b = 0; b < layout.size(); ++b) {
    out.push_back({b, buckets_[static_cast<std::size_t>(b)], {}});
    for (const int m : layout.bucket(b).members)
      out.back().parts.push_back({m, layout.place(m).offset, parameters.member(m).shape});
  }
  return out;
}

Work WholeGradients::reduce(int bucket, const Stream& stream) {
  const auto b = static_cast<std::size_t>(bucket);
  in_flight_.push_back(bucket);
  if (hook_) return hook_->start(hook_buckets_[b], runtime_, stream);
  if (runtime_.replicas)
    wire_.reduce_scatter(reductions_[b], buckets_[b], shard(bucket), stream);
  else
    reductions_[b] = wire_.all_reduce(buckets_[b], stream);
  return reductions_[b].work;
}

Tensor WholeGradients::shard(int bucket) const {
  const Range own = layout_.shard(bucket);
  return buckets_[static_cast<std::size_t>(bucket)].view(own.begin, {own.count()});
}

/// Gathers the sums of two steps. No call of a pass may start between them: it would start there on some
/// ranks only.
void WholeGradients::gather(const Stream& stream) {
  for (const int bucket : in_flight_) {
    const auto b = static_cast<std::size_t>(bucket);
    wire_.finish(reductions_[b], shard(bucket), stream);
    reductions_[b].work =
        runtime_.counted(runtime_.shard_group).all_gather(shard(bucket), buckets_[b], stream);
  }
}

/// A round for each call of the hook, so that the calls of different buckets overlap.
void WholeGradients::advance_hook(const Stream& stream) {
  advancing_ = in_flight_;
  while (!advancing_.empty())
    std::erase_if(advancing_, [&](int bucket) {
      return !hook_->advance(hook_buckets_[static_cast<std::size_t>(bucket)], runtime_, stream);
    });
}

void WholeGradients::settle(const Stream& stream) {
  if (hook_) advance_hook(stream);
  if (!hook_ && runtime_.replicas) gather(stream);
  for (const int bucket : in_flight_) {
    const auto b = static_cast<std::size_t>(bucket);
    if (!hook_) wire_.finish(reductions_[b], buckets_[b], stream);
    if (!accumulated_.empty()) ops::add(buckets_[b], buckets_[b], accumulated_[b], stream);
  }
  in_flight_.clear();
}

void WholeGradients::reopen(const Stream& stream) {
  accumulated_.resize(buckets_.size());
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    if (!accumulated_[b].defined())
      accumulated_[b] =
          Tensor::empty(buckets_[b].shape(), buckets_[b].dtype(), allocator_on(buckets_[b].device()));
    ops::copy(accumulated_[b], buckets_[b], stream);
  }
  for (Parameter* p : parameters_.members()) p->grad_is_fresh = true;
}

void WholeGradients::forget() {
  accumulated_.clear();
  in_flight_.clear();
  std::ranges::fill(reductions_, GradientWire::Reduction{});
}

std::size_t WholeGradients::bytes() const {
  std::size_t total = 0;
  for (const auto* list : {&buckets_, &accumulated_})
    for (const Tensor& b : *list) total += b.bytes();
  return total;
}

/// Whole gradients of which each rank reduces its shard. Whole buckets are kept; a reduce-scatter replaces
/// this rank's shard of a bucket by the mean. The rest of the bucket is then undefined.
class KeptGradients final : public GradientStore {
 public:
  KeptGradients(const ModelParameters&, const FlatLayout&, DType, GradientWire&, Runtime&);

  void provide(int, const Stream&) override {}
  Work reduce(int bucket, const Stream&) override;
  void settle(const Stream&) override;
  void reopen(const Stream&) override;
  void forget() override;
  const Tensor& mean(int bucket) const override { return buckets_[static_cast<std::size_t>(bucket)].shard; }
  const Tensor& whole(int bucket) const override { return buckets_[static_cast<std::size_t>(bucket)].whole; }
  std::size_t bytes() const override;

 private:
  struct Bucket {
    Tensor whole;
    Tensor shard;        // a view of `whole`
    Tensor accumulated;  // sum of the means of earlier passes, if there were any
    GradientWire::Reduction reduction;
  };

  const ModelParameters& parameters_;
  GradientWire& wire_;
  std::vector<Bucket> buckets_;
  std::vector<int> in_flight_;
};

KeptGradients::KeptGradients(const ModelParameters& parameters, const FlatLayout& layout, DType dtype,
                             GradientWire& wire, Runtime& runtime)
    : parameters_(parameters), wire_(wire) {
  for (const Tensor& whole : allocate_gradient_buckets(parameters, layout, dtype, runtime)) {
    const Range own = layout.shard(static_cast<int>(buckets_.size()));
    buckets_.push_back({whole, whole.view(own.begin, {own.count()}), {}, {}});
  }
}

Work KeptGradients::reduce(int bucket, const Stream& stream) {
  Bucket& b = buckets_[static_cast<std::size_t>(bucket)];
  wire_.reduce_scatter(b.reduction, b.whole, b.shard, stream);
  in_flight_.push_back(bucket);
  return b.reduction.work;
}

void KeptGradients::settle(const Stream& stream) {
  for (const int bucket : in_flight_) {
    Bucket& b = buckets_[static_cast<std::size_t>(bucket)];
    wire_.finish(b.reduction, b.shard, stream);
    if (b.accumulated.defined()) ops::add(b.shard, b.shard, b.accumulated, stream);
  }
  in_flight_.clear();
}

void KeptGradients::reopen(const Stream& stream) {
  for (Bucket& b : buckets_) {
    if (!b.accumulated.defined())
      b.accumulated = Tensor::empty(b.shard.shape(), b.shard.dtype(), allocator_on(b.shard.device()));
    ops::copy(b.accumulated, b.shard, stream);
  }
  for (Parameter* p : parameters_.members()) p->grad_is_fresh = true;
}

void KeptGradients::forget() {
  for (Bucket& b : buckets_) b.accumulated = {}, b.reduction = {};
  in_flight_.clear();
}

std::size_t KeptGradients::bytes() const {
  std::size_t total = 0;
  for (const Bucket& b : buckets_)
    total += b.whole.bytes() + (b.accumulated.defined() ? b.accumulated.bytes() : 0);
  return total;
}

// ---- shards

constexpr std::ptrdiff_t max_whole = 1;  // buckets being reduced while another one is filled

/// Sharded gradients: each rank keeps the mean over the data ranks for its own shard of every bucket.
/// Backward writes whole buckets; reduce-scatter turns them into shards. A whole bucket lives from its first
/// gradient to the end of the step that reads it: a sum of shards over the copies of the model, which may
/// take longer than backward, does not keep it.
class ShardedGradients final : public GradientStore {
 public:
  ShardedGradients(const ModelParameters&, const FlatLayout&, DType, GradientWire&, Runtime&);

  /// May wait for a reduction: one bucket is filled while another is reduced.
  void provide(int bucket, const Stream&) override;
  Work reduce(int bucket, const Stream&) override;
  void settle(const Stream&) override;
  void forget() override;
  const Tensor& mean(int bucket) const override { return buckets_[static_cast<std::size_t>(bucket)].shard; }
  const Tensor& whole(int bucket) const override { return buckets_[static_cast<std::size_t>(bucket)].whole; }
  std::size_t bytes() const override;

 private:
  struct Bucket {
    Tensor whole;  // undefined while it is not in use
    Tensor shard;
    bool has_mean = false;  // `shard` holds a mean
    Tensor result;          // of the reduction in flight
    GradientWire::Reduction reduction;
  };
  Bucket& at(int bucket) { return buckets_[static_cast<std::size_t>(bucket)]; }
  /// The part of this rank in a whole bucket.
  Tensor own_part(int bucket) const;
  Tensor destination(int bucket);
  void set_whole(int bucket, Tensor);
  void drop_whole(int bucket);
  bool has_ended(int bucket) const;
  bool outlives_whole() const;
  void complete_oldest(const Stream&);
  void limit_whole(const Stream&);

  const ModelParameters& parameters_;
  const FlatLayout& layout_;
  GradientWire& wire_;
  Runtime& runtime_;
  std::vector<Bucket> buckets_;
  std::deque<int> in_flight_;
};

ShardedGradients::ShardedGradients(const ModelParameters& parameters, const FlatLayout& layout, DType dtype,
                                   GradientWire& wire, Runtime& runtime)
    : parameters_(parameters), layout_(layout), wire_(wire), runtime_(runtime) {
  for (int b = 0; b < layout.size(); ++b) {
    buckets_.push_back({});
    drop_whole(b);
    at(b).shard = runtime.allocate_flat(layout.shard(b).count(), dtype);
  }
}

Tensor ShardedGradients::own_part(int bucket) const {
  const Range own = layout_.shard(bucket);
  return buckets_[static_cast<std::size_t>(bucket)].whole.view(own.begin, {own.count()});
}

/// The shard, or, if that holds a mean to which this one is added, memory for it: of the whole gradients, if
/// those live as long.
Tensor ShardedGradients::destination(int bucket) {
  const Bucket& b = at(bucket);
  if (!b.has_mean) return b.shard;
  return outlives_whole() ? runtime_.transient.allocate(b.shard.shape(), b.shard.dtype()) : own_part(bucket);
}

void ShardedGradients::set_whole(int bucket, Tensor whole) {
  for (const int m : layout_.bucket(bucket).members) {
    Parameter& p = parameters_.member(m);
    p.grad = whole.view(layout_.place(m).offset, p.shape);
    p.grad_is_fresh = true;
  }
  at(bucket).whole = std::move(whole);
}

void ShardedGradients::drop_whole(int bucket) {
  at(bucket).whole = {};
  for (const int m : layout_.bucket(bucket).members) {
    Parameter& p = parameters_.member(m);
    p.grad = {};
    p.grad_is_fresh = true;
  }
}

void ShardedGradients::provide(int bucket, const Stream& stream) {
  if (at(bucket).whole.defined()) return;
  // On a device the allocations must not depend on time: an update that is captured in a graph can only reuse
  // the memory of those before it.
  if (runtime_.stream.device().kind != Device::cuda) {
    wire_.advance(stream);
    while (!in_flight_.empty() && has_ended(in_flight_.front())) complete_oldest(stream);
    for (const int b : in_flight_)
      if (outlives_whole() && at(b).whole.defined() && !at(b).reduction.part.defined()) drop_whole(b);
  }
  limit_whole(stream);
  set_whole(bucket, runtime_.transient.allocate({layout_.bucket(bucket).count}, at(bucket).shard.dtype()));
}

/// Second steps need only shards. Of a device, memory may be used again only in the stream that waits for
/// both steps.
bool ShardedGradients::outlives_whole() const {
  return runtime_.replicas && runtime_.stream.device().kind != Device::cuda;
}

void ShardedGradients::limit_whole(const Stream& stream) {
  const auto is_whole = [this](int b) { return at(b).whole.defined(); };
  while (std::ranges::count_if(in_flight_, is_whole) > max_whole) {
    const int oldest = *std::ranges::find_if(in_flight_, is_whole);
    if (outlives_whole()) {
      wire_.enter_second_step(at(oldest).reduction, stream);
      drop_whole(oldest);
    } else {
      complete_oldest(stream);
    }
  }
}

bool ShardedGradients::has_ended(int bucket) const {
  const GradientWire::Reduction& reduction = buckets_[static_cast<std::size_t>(bucket)].reduction;
  return !reduction.part.defined() && reduction.work.done();
}

Work ShardedGradients::reduce(int bucket, const Stream& stream) {
  Bucket& b = at(bucket);
  b.result = destination(bucket);
  wire_.reduce_scatter(b.reduction, b.whole, b.result, stream);
  in_flight_.push_back(bucket);
  return b.reduction.work;
}

void ShardedGradients::complete_oldest(const Stream& stream) {
  const int bucket = in_flight_.front();
  Bucket& b = at(bucket);
  const Tensor result = std::exchange(b.result, {});
  wire_.finish(b.reduction, result, stream);
  in_flight_.pop_front();
  if (b.has_mean) ops::add(b.shard, b.shard, result, stream);
  b.has_mean = true;
  drop_whole(bucket);
}

void ShardedGradients::settle(const Stream& stream) {
  while (!in_flight_.empty()) complete_oldest(stream);
}

void ShardedGradients::forget() {
  for (int b = 0; b < layout_.size(); ++b) {
    at(b).has_mean = false;
    at(b).result = {};
    at(b).reduction = {};
    drop_whole(b);
  }
  in_flight_.clear();
}

std::size_t ShardedGradients::bytes() const {
  std::size_t total = 0;
  for (const Bucket& b : buckets_) total += b.shard.bytes();
  return total;
}

}  // namespace

/// A rank keeps means of the elements that it updates.
std::unique_ptr<GradientStore> make_gradient_store(const ShardingPlan& plan,
                                                   const ModelParameters& parameters,
                                                   const FlatLayout& layout, DType dtype, GradientWire& wire,
                                                   CommunicationHook* hook, Runtime& runtime) {
  if (plan.state == Placement::replicated)
    return std::make_unique<WholeGradients>(parameters, layout, dtype, wire, hook, runtime);
  if (plan.gradients == Placement::replicated)
    return std::make_unique<KeptGradients>(parameters, layout, dtype, wire, runtime);
  return std::make_unique<ShardedGradients>(parameters, layout, dtype, wire, runtime);
}

}  // namespace rz
