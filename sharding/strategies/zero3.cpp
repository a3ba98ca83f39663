#include "sharding/strategies/zero3.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/core/integer_math.h"
#include "sharding/memory/host_staging.h"
#include "sharding/optim/grad_norm.h"
#include "sharding/strategies/replicated_values.h"
#include "tensor/ops.h"

namespace rz {

namespace {

constexpr auto destructor_timeout =
    std::chrono::seconds(5);  // limit of the wait for prefetches in the destructor

bool contains(const std::vector<int>& list, int x) {
  return std::find(list.begin(), list.end(), x) != list.end();
}

}  // namespace

Zero3::Zero3(Module& module, Communicator& communicator, StrategyOptions options)
    : Strategy(StrategyKind::zero3, module, communicator, std::move(options)), scopes_(module.scopes()) {
  make_flat_parameters(scopes_);
  set_layout(gradient_layout());
  for (FlatParameter& u : flat_parameters_) make_shard(u);
  stream().synchronize();  // the sources of the copies are freed now
  for (FlatParameter& u : flat_parameters_)
    for (Parameter* p : u.parameters) p->value = {};
  gradients_ = std::make_unique<ShardedGradients>(ShardedGradients::FullGradients::transient, communicator,
                                                  transient(), layout(), members(),
                                                  [this](const Work& work) { wait_exposed(work, stream()); });
  progress_.resize(members().size());
  queued_.resize(layout().buckets.size());
}

// A prefetch may be in flight although no scope will use it. The other ranks have started it too, or will, so
// it completes. An immediate abort would break gathers that they still wait for.
Zero3::~Zero3() {
  abort_in_flight();
  const Deadline deadline = Deadline::after(destructor_timeout);
  for (FlatParameter& u : flat_parameters_) {
    while (!u.gather.done() && !deadline.expired())
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (u.gather.done()) continue;
    communicator().abort(
        "a strategy was destroyed while it gathered parameters, and the other ranks did not");
    try {
      u.gather.wait();
    } catch (const std::exception&) {  // as in abort_in_flight()
    }
  }
}

/// Groups parameters by the set of scopes that use them.
void Zero3::make_flat_parameters(const std::vector<const Scope*>& scopes) {
  std::map<const Parameter*, std::vector<std::size_t>> stands_in;
  for (std::size_t s = 0; s < scopes.size(); ++s) {
    scope_index_.emplace(scopes[s], s);
    for (const Parameter* p : scopes[s]->parameters) stands_in[p].push_back(s);
  }
  std::map<std::pair<bool, std::vector<std::size_t>>, FlatParameter> by_scopes;
  for (const auto* list : {&members(), &frozen()})
    for (Parameter* p : *list) {
      const auto& where = stands_in[p];
      require(!where.empty(), Errc::invalid_argument, "zero3: parameter ", p->name,
              " stands in no scope; list it in the scope that uses it");
      FlatParameter& u = by_scopes[{p->requires_grad, where}];
      u.trainable = p->requires_grad;
      u.first_scope = where.front();
      u.parameters.push_back(p);
      u.offsets.push_back(u.count);
      u.count += round_up(p->count(), norm_block);
    }
  for (auto& [key, u] : by_scopes) {
    u.count = round_up(u.count, norm_block * static_cast<std::size_t>(communicator().size()));
    flat_parameters_.push_back(std::move(u));
  }
  std::stable_sort(flat_parameters_.begin(), flat_parameters_.end(),
                   [](const FlatParameter& a, const FlatParameter& b) {
                     return std::pair(!a.trainable, b.first_scope) < std::pair(!b.trainable, a.first_scope);
                   });
  for (std::size_t u = 0; u < flat_parameters_.size(); ++u)
    for (const Parameter* p : flat_parameters_[u].parameters) flat_parameter_of_[p] = static_cast<int>(u);
}

/// Copies this rank's part of the values of a flat parameter into its shard.
void Zero3::make_shard(FlatParameter& u) {
  const Range mine = own_range(u);
  u.shard = allocate_flat(communicator(), mine.count(), precision().parameters);
  for_each_parameter(u, mine, [&](const Parameter& p, Range elements, std::size_t offset) {
    const Shape count{elements.count()};
    if (p.value.defined())
      ops::copy(u.shard.view(offset, count), p.value.view(elements.begin, count), stream());
  });
}

BucketLayout Zero3::gradient_layout() const {
  BucketLayout out;
  out.offsets.resize(members().size());
  for (const FlatParameter& u : flat_parameters_) {
    if (!u.trainable) continue;
    auto& bucket = out.buckets.emplace_back(BucketLayout::Bucket{precision().gradients, u.count, {}});
    for (std::size_t i = 0; i < u.parameters.size(); ++i) {
      const int member = member_of(*u.parameters[i]);
      bucket.members.push_back(member);
      out.offsets[static_cast<std::size_t>(member)] = {static_cast<int>(out.buckets.size()) - 1,
                                                       u.offsets[i]};
    }
  }
  return out;
}

Range Zero3::own_range(const FlatParameter& u) const {
  return shard_range(u.count, communicator().rank(), communicator().size());
}

// ---- gathering

const Zero3::FlatParameterIndices& Zero3::flat_parameters_of(const Scope& scope) {
  const auto [at, is_new] = scope_flat_parameters_.try_emplace(&scope);
  if (is_new)
    for (const Parameter* p : scope.parameters) {
      const auto found = flat_parameter_of_.find(p);
      require(found != flat_parameter_of_.end(), Errc::invalid_argument, "scope ", scope.name, " uses ",
              p->name, ", which is not a parameter of the model");
      if (!contains(at->second, found->second)) at->second.push_back(found->second);
    }
  return at->second;
}

const Zero3::FlatParameterIndices& Zero3::prefetch_set(const Scope& scope, Pass pass) {
  const auto [at, is_new] = ahead_[static_cast<std::size_t>(pass)].try_emplace(&scope);
  if (is_new) at->second = find_ahead(scope, pass);
  return at->second;
}

/// The flat parameters that the next scopes will use. The last scope of forward is the first of backward.
Zero3::FlatParameterIndices Zero3::find_ahead(const Scope& scope, Pass pass) const {
  FlatParameterIndices out;
  const auto found = scope_index_.find(&scope);
  if (found == scope_index_.end() || !options().overlap) return out;
  const auto here = static_cast<std::ptrdiff_t>(found->second);
  const auto last = static_cast<std::ptrdiff_t>(scopes_.size()) - 1;
  for (std::ptrdiff_t i = 1; i <= options().prefetch_scopes; ++i) {
    const std::ptrdiff_t next = pass == Pass::forward ? std::min(here + i, last) : here - i;
    if (next < 0) break;
    for (const Parameter* p : scopes_[static_cast<std::size_t>(next)]->parameters)
      if (const int u = flat_parameter_of_.at(p); !contains(out, u)) out.push_back(u);
  }
  return out;
}

void Zero3::all_gather_async(FlatParameter& u) {
  if (u.unsharded.defined()) return;
  u.unsharded = transient().allocate({u.count}, u.shard.dtype());
  u.gather = communicator().all_gather(u.shard.buffer(), u.unsharded.buffer(), stream());
}

void Zero3::wait_gathered(FlatParameter& u) { wait_exposed(std::exchange(u.gather, {}), stream()); }

void Zero3::reshard(FlatParameter& u) {
  wait_gathered(u);
  u.unsharded = {};
}

void Zero3::reshard_all_but(const FlatParameterIndices& keep, const FlatParameterIndices& also) {
  for (int i = 0; i < static_cast<int>(flat_parameters_.size()); ++i)
    if (flat_parameter(i).active_scopes == 0 && flat_parameter(i).unsharded.defined() && !contains(keep, i) &&
        !contains(also, i))
      reshard(flat_parameter(i));
}

void Zero3::enter(const Scope& scope, Pass pass) {
  const FlatParameterIndices& now = flat_parameters_of(scope);
  const FlatParameterIndices& next = prefetch_set(scope, pass);
  reshard_all_but(now, next);
  for (const int u : now) all_gather_async(flat_parameter(u));
  for (const int u : next) all_gather_async(flat_parameter(u));
  for (const int i : now) {
    FlatParameter& u = flat_parameter(i);
    wait_gathered(u);
    if (u.active_scopes++) continue;
    for (std::size_t k = 0; k < u.parameters.size(); ++k)
      u.parameters[k]->value = u.unsharded.view(u.offsets[k], u.parameters[k]->shape);
  }
}

void Zero3::leave(const Scope& scope, Pass pass) {
  for (const int i : flat_parameters_of(scope)) {
    FlatParameter& u = flat_parameter(i);
    if (--u.active_scopes == 0)
      for (Parameter* p : u.parameters) p->value = {};
  }
  reshard_all_but(prefetch_set(scope, pass), {});
  if (pass == Pass::backward && synchronising()) reduce_complete(scope);
}

Tensor Zero3::unsharded_value(const Parameter& p) {
  const int index = flat_parameter_of_.at(&p);
  reshard_all_but({index}, {});
  FlatParameter& u = flat_parameter(index);
  all_gather_async(u);
  wait_gathered(u);
  const auto i = std::find(u.parameters.begin(), u.parameters.end(), &p) - u.parameters.begin();
  return u.unsharded.view(u.offsets[static_cast<std::size_t>(i)], p.shape);
}

// ---- gradients

void Zero3::on_backward_begin() {
  std::fill(progress_.begin(), progress_.end(), Progress::untouched);
  std::fill(queued_.begin(), queued_.end(), 0);
}

void Zero3::on_gradient_begin(int member) {
  const int bucket = layout().offsets[static_cast<std::size_t>(member)].bucket;
  require(!queued_[static_cast<std::size_t>(bucket)], Errc::unsupported, "zero3: a gradient for ",
          members()[static_cast<std::size_t>(member)]->name,
          " came after the first scope that lists it had left backward; list it in every scope that uses it");
  progress_[static_cast<std::size_t>(member)] = Progress::touched;
  ensure_gradient_storage(bucket);
}

void Zero3::on_gradient_ready(int member, const Stream&) {
  progress_[static_cast<std::size_t>(member)] = Progress::ready;
}

/// Members that backward has not touched by now will not be touched: no scope that uses them is left. A scope
/// that runs several times leaves several times; its flat parameters are reduced at the last.
void Zero3::reduce_complete(const Scope& scope) {
  const auto index = scope_index_.find(&scope);
  if (index == scope_index_.end()) return;
  for (const int u : flat_parameters_of(scope)) {
    if (!flat_parameter(u).trainable || flat_parameter(u).first_scope != index->second ||
        queued_[static_cast<std::size_t>(u)])
      continue;
    const auto& bucket_members = layout().buckets[static_cast<std::size_t>(u)].members;
    const auto incomplete = [&](int m) {
      return progress_[static_cast<std::size_t>(m)] == Progress::touched;
    };
    if (std::any_of(bucket_members.begin(), bucket_members.end(), incomplete)) continue;
    queued_[static_cast<std::size_t>(u)] = 1;
    for (const int m : bucket_members) scheduler().ready(m, stream());
  }
}

Strategy::Updated Zero3::updated(int bucket) const {
  return {flat_parameters_[static_cast<std::size_t>(bucket)].shard, gradients_->shard(bucket)};
}

/// The gathered values are stale after the update.
void Zero3::after_step(const Stream&) { close_scopes(); }

void Zero3::drop_gradients() {
  gradients_->drop();
  close_scopes();
}

/// No pass runs now; a pass that failed may have left scopes open.
void Zero3::close_scopes() {
  for (FlatParameter& u : flat_parameters_) {
    u.active_scopes = 0;
    for (Parameter* p : u.parameters) p->value = {};
  }
  reshard_all_but({}, {});
}

// ---- import and export

/// Calls f(parameter, elements, offset in the range) for each piece of a parameter in a range of a flat
/// parameter.
template <class F>
void Zero3::for_each_parameter(const FlatParameter& u, Range range, const F& f) {
  for (std::size_t i = 0; i < u.parameters.size(); ++i) {
    const std::size_t offset = u.offsets[i];
    const Range here = intersect({offset, offset + u.parameters[i]->count()}, range);
    if (here.count())
      f(*u.parameters[i], Range{here.begin - offset, here.end - offset}, here.begin - range.begin);
  }
}

void Zero3::fill_values(const Fill& fill) {
  reshard_all_but({}, {});
  for (const FlatParameter& u : flat_parameters_)
    for_each_parameter(u, own_range(u), [&](const Parameter& p, Range elements, std::size_t offset) {
      write_via_host(u.shard.view(offset, {elements.count()}), stream(),
                     [&](float* out) { fill(p, elements, out); });
    });
}

void Zero3::visit_frozen(const Visit& visit) const {
  for (const FlatParameter& u : flat_parameters_) {
    if (u.trainable) continue;
    for_each_parameter(u, own_range(u), [&](const Parameter& p, Range elements, std::size_t offset) {
      read_via_host(u.shard.view(offset, {elements.count()}), stream(),
                    [&](const float* value) { visit(p, elements, value); });
    });
  }
}

void Zero3::count_memory(MemoryReport& report) const {
  for (const FlatParameter& u : flat_parameters_) report.parameters += u.shard.bytes();
  report.gradients = gradients_->bytes();
}

}  // namespace rz
