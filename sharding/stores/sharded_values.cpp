#include "sharding/stores/sharded_values.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "tensor/ops.h"

namespace rz {

namespace {

constexpr auto destructor_timeout = std::chrono::seconds(5);

void drop_values(const FlatParameter& u) {
  for (Parameter* p : u.parameters) p->value = {};
}

}  // namespace

ShardedValues::ShardedValues(FlatParameters& flat, DType dtype, int prefetch, Runtime& runtime)
    : flat_(flat), prefetch_(prefetch), runtime_(runtime) {
  values_.resize(static_cast<std::size_t>(flat.size()));
  for (int u = 0; u < flat.size(); ++u) at(u).shard = make_shard(u, dtype);
  runtime.stream.synchronize();  // the sources of the copies are freed now
  for (int u = 0; u < flat.size(); ++u) drop_values(flat[u]);
}

Tensor ShardedValues::make_shard(int u, DType dtype) const {
  const Range mine = flat_.shard(u);
  const Tensor shard = runtime_.allocate_flat(mine.count(), dtype);
  for_each_piece(flat_[u], mine, [&](const Parameter& p, Range elements, std::size_t offset) {
    const Shape count{elements.count()};
    if (p.value.defined())
      ops::copy(shard.view(offset, count), p.value.view(elements.begin, count), runtime_.stream);
  });
  return shard;
}

// A prefetch may be in flight although no scope will use it. The other ranks have started it too, or will, so
// it completes. An immediate abort would break gathers that they still wait for.
ShardedValues::~ShardedValues() {
  const Deadline deadline = Deadline::after(destructor_timeout);
  for (Values& u : values_) {
    while (!u.gather.done() && !deadline.expired())
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (u.gather.done()) continue;
    runtime_.communicator.abort(
        "a strategy was destroyed while it gathered parameters, and the other ranks did not");
    try {
      u.gather.wait();
    } catch (const std::exception&) {  // it fails because of the abort
    }
  }
}

// ---- gathering

const ShardedValues::Indices& ShardedValues::prefetch_set(const Scope& scope, Pass pass) {
  const auto [at, is_new] = ahead_[static_cast<std::size_t>(pass)].try_emplace(&scope);
  if (is_new) at->second = flat_.ahead(scope, pass, prefetch_);
  return at->second;
}

void ShardedValues::gather_async(int index) {
  Values& u = at(index);
  if (u.gathered.defined()) return;
  u.gathered = runtime_.transient.allocate({flat_[index].count}, u.shard.dtype());
  u.gather = runtime_.communicator.all_gather(u.shard.buffer(), u.gathered.buffer(), runtime_.stream);
}

void ShardedValues::wait_gathered(int u) {
  runtime_.exposed.wait(std::exchange(at(u).gather, {}), runtime_.stream);
}

void ShardedValues::reshard_all_but(const Indices& keep, const Indices& also) {
  const auto contains = [](const Indices& list, int u) { return std::ranges::find(list, u) != list.end(); };
  for (int u = 0; u < flat_.size(); ++u) {
    if (at(u).active_scopes != 0 || !at(u).gathered.defined() || contains(keep, u) || contains(also, u))
      continue;
    wait_gathered(u);
    at(u).gathered = {};
  }
}

void ShardedValues::enter(const Scope& scope, Pass pass) {
  const Indices& now = flat_.of(scope);
  const Indices& next = prefetch_set(scope, pass);
  reshard_all_but(now, next);
  for (const int u : now) gather_async(u);
  for (const int u : next) gather_async(u);
  for (const int u : now) {
    wait_gathered(u);
    if (at(u).active_scopes++) continue;
    for (std::size_t k = 0; k < flat_[u].parameters.size(); ++k) {
      Parameter& p = *flat_[u].parameters[k];
      p.value = at(u).gathered.view(flat_[u].offsets[k], p.shape);
    }
  }
}

void ShardedValues::leave(const Scope& scope, Pass pass) {
  for (const int u : flat_.of(scope))
    if (--at(u).active_scopes == 0) drop_values(flat_[u]);
  reshard_all_but(prefetch_set(scope, pass), {});
}

void ShardedValues::release() {
  for (int u = 0; u < flat_.size(); ++u) {
    at(u).active_scopes = 0;
    drop_values(flat_[u]);
  }
  reshard_all_but({}, {});
}

// ---- import and export

Tensor ShardedValues::whole(const Parameter& p) {
  const int u = flat_.containing(p);
  reshard_all_but({u}, {});
  gather_async(u);
  wait_gathered(u);
  const auto i = std::ranges::find(flat_[u].parameters, &p) - flat_[u].parameters.begin();
  return at(u).gathered.view(flat_[u].offsets[static_cast<std::size_t>(i)], p.shape);
}

std::vector<StoredValue> ShardedValues::stored() const {
  std::vector<StoredValue> out;
  for (int u = 0; u < flat_.size(); ++u)
    for_each_piece(flat_[u], flat_.shard(u), [&](Parameter& p, Range elements, std::size_t offset) {
      out.push_back({&p, elements, at(u).shard.view(offset, {elements.count()}), true});
    });
  return out;
}

std::size_t ShardedValues::bytes() const {
  std::size_t total = 0;
  for (const Values& u : values_) total += u.shard.bytes();
  return total;
}

}  // namespace rz
