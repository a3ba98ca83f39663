#include "sharding/model/flat_layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"

namespace rz {

// ---- ranges

Range shard_range(std::size_t count, int rank, int size) {
  require(size > 0 && count % static_cast<std::size_t>(size) == 0, Errc::invalid_argument, count,
          " elements cannot be shared out evenly over ", size, " ranks");
  const std::size_t each = count / static_cast<std::size_t>(size);
  return {each * static_cast<std::size_t>(rank), each * (static_cast<std::size_t>(rank) + 1)};
}

std::vector<ParameterSlice> parameter_slices(const BucketLayout& layout, std::span<Parameter* const> members,
                                             int bucket, Range range) {
  std::vector<ParameterSlice> out;
  for (const int m : layout.buckets[static_cast<std::size_t>(bucket)].members) {
    const std::size_t offset = layout.offsets[static_cast<std::size_t>(m)].offset;
    const Range here = intersect({offset, offset + members[static_cast<std::size_t>(m)]->count()}, range);
    if (here.count()) out.push_back({m, {here.begin - offset, here.end - offset}, here.begin});
  }
  return out;
}

Range padded_extent(const BucketLayout& layout, int bucket, std::size_t i) {
  const auto& b = layout.buckets[static_cast<std::size_t>(bucket)];
  const auto begin = [&](std::size_t k) {
    return layout.offsets[static_cast<std::size_t>(b.members[k])].offset;
  };
  return {begin(i), i + 1 < b.members.size() ? begin(i + 1) : b.count};
}

// ---- members

ModelParameters::ModelParameters(std::span<Parameter* const> parameters) {
  for (Parameter* p : parameters) {
    had_values_ |= p->value.defined();
    if (p->requires_grad) member_of_[p] = static_cast<int>(members_.size());
    (p->requires_grad ? members_ : frozen_).push_back(p);
  }
}

int ModelParameters::member_of(const Parameter& p) const {
  const auto found = member_of_.find(&p);
  return found == member_of_.end() ? -1 : found->second;
}

void ModelParameters::require_trainable(const char* call) const {
  for (const Parameter* p : members_)
    require(p->requires_grad, Errc::invalid_argument, call, ": ", p->name,
            " was frozen after the strategy was made, which still has its gradient and state; make a new "
            "strategy");
}

// ---- buckets

FlatLayout::FlatLayout(const ModelParameters& parameters, BucketLayout buckets, Placement state,
                       MeshCoordinates place)
    : parameters_(parameters), buckets_(std::move(buckets)), state_(state), place_(place) {}

Range FlatLayout::shard(int b) const {
  return shard_range(bucket(b).count, place_.shard.rank, place_.shard.ranks);
}

Range FlatLayout::owned(int b) const {
  const Range all = shard(b);
  const Range part = shard_range(all.count(), place_.replica.rank, place_.replica.ranks);
  return {all.begin + part.begin, all.begin + part.end};
}

Range FlatLayout::updated(int b) const {
  return state_ == Placement::replicated ? Range{0, bucket(b).count} : shard(b);
}

std::vector<ParameterSlice> FlatLayout::slices(int b, Range range) const {
  return parameter_slices(buckets_, parameters_.members(), b, range);
}

BucketLayout plan_member_buckets(const ModelParameters& parameters, DType dtype,
                                 const BucketOptions& options) {
  std::vector<BucketMember> counts;
  for (const Parameter* p : parameters.members()) counts.push_back({p->count(), dtype});
  return plan_buckets(counts, options);
}

BucketLayout plan_member_buckets(const ModelParameters& parameters, DType dtype, const BucketOptions& options,
                                 std::span<const int> order, std::size_t split) {
  BucketLayout out;
  out.offsets.resize(order.size());
  for (const auto part : {order.first(split), order.subspan(split)}) {
    std::vector<BucketMember> counts;
    for (const int m : part) counts.push_back({parameters.member(m).count(), dtype});
    std::vector<int> sequence(part.size());
    std::iota(sequence.begin(), sequence.end(), 0);
    BucketLayout buckets = plan_buckets(counts, options, sequence);
    const int before = static_cast<int>(out.buckets.size());
    for (std::size_t i = 0; i < part.size(); ++i) {
      const auto [bucket, offset] = buckets.offsets[i];
      out.offsets[static_cast<std::size_t>(part[i])] = {before + bucket, offset};
    }
    for (auto& bucket : buckets.buckets) {
      for (int& member : bucket.members) member = part[static_cast<std::size_t>(member)];
      out.buckets.push_back(std::move(bucket));
    }
  }
  return out;
}

// ---- units of gathers

namespace {

using ScopeSet = std::vector<std::size_t>;
/// Flat parameters by trainable, persistent, scopes.
using ByScopes = std::map<std::tuple<bool, bool, ScopeSet>, std::vector<FlatParameter>>;

std::map<const Parameter*, ScopeSet> scopes_by_parameter(const std::vector<const Scope*>& scopes) {
  std::map<const Parameter*, ScopeSet> out;
  for (std::size_t s = 0; s < scopes.size(); ++s)
    for (const Parameter* p : scopes[s]->parameters) out[p].push_back(s);
  return out;
}

void append(std::vector<FlatParameter>& list, Parameter* p, const FlatParameterLimits& limits) {
  const std::size_t count = round_up(p->count(), limits.align);
  if (list.empty() || (list.back().count > 0 && list.back().count + count > limits.count))
    list.emplace_back();
  FlatParameter& u = list.back();
  u.parameters.push_back(p);
  u.offsets.push_back(u.count);
  u.count += count;
}

ByScopes grouped(const std::vector<const Scope*>& scopes, const ModelParameters& parameters,
                 const FlatParameterLimits& limits) {
  std::size_t persistent = 0;  // elements
  const auto is_persistent = [&](const Parameter& p) {
    const bool fits = p.count() <= limits.persistent && p.count() <= limits.all_persistent - persistent;
    if (fits) persistent += p.count();
    return fits;
  };
  auto used_by = scopes_by_parameter(scopes);
  ByScopes out;
  for (const auto* list : {&parameters.members(), &parameters.frozen()})
    for (Parameter* p : *list) {
      const ScopeSet& where = used_by[p];
      require(!where.empty(), Errc::invalid_argument, "zero3: parameter ", p->name,
              " stands in no scope; list it in the scope that uses it");
      append(out[{p->requires_grad, is_persistent(*p), where}], p, limits);
    }
  return out;
}

bool contains(const FlatParameters::Indices& list, int u) {
  return std::find(list.begin(), list.end(), u) != list.end();
}

}  // namespace

FlatParameters::FlatParameters(const std::vector<const Scope*>& scopes, const ModelParameters& parameters,
                               const FlatParameterLimits& limits, MeshCoordinates place)
    : parameters_(parameters), rank_(place.shard) {
  for (const auto& [key, flat] : grouped(scopes, parameters, limits))
    for (const FlatParameter& u : flat) {
      FlatParameter& added = list_.emplace_back(u);
      added.count = round_up(u.count, limits.align * static_cast<std::size_t>(place.data().ranks));
      added.trainable = std::get<0>(key);
      added.persistent = std::get<1>(key);
      added.first_scope = std::get<2>(key).front();
    }
  std::ranges::stable_sort(list_, [](const FlatParameter& a, const FlatParameter& b) {
    return std::pair(!a.trainable, b.first_scope) < std::pair(!b.trainable, a.first_scope);
  });
  for (int u = 0; u < size(); ++u)
    for (const Parameter* p : (*this)[u].parameters) containing_[p] = u;
}

Range FlatParameters::shard(int u) const { return shard_range((*this)[u].count, rank_.rank, rank_.ranks); }

BucketLayout FlatParameters::buckets(DType dtype) const {
  BucketLayout out;
  out.offsets.resize(parameters_.members().size());
  for (const FlatParameter& u : list_) {
    if (!u.trainable) continue;
    auto& bucket = out.buckets.emplace_back(BucketLayout::Bucket{dtype, u.count, {}});
    for (std::size_t i = 0; i < u.parameters.size(); ++i) {
      const int member = parameters_.member_of(*u.parameters[i]);
      bucket.members.push_back(member);
      out.offsets[static_cast<std::size_t>(member)] = {static_cast<int>(out.buckets.size()) - 1,
                                                       u.offsets[i]};
    }
  }
  return out;
}

const FlatParameters::Indices& FlatParameters::of(const Scope& scope) {
  const auto [at, is_new] = of_.try_emplace(&scope);
  if (is_new)
    for (const Parameter* p : scope.parameters) {
      const auto found = containing_.find(p);
      require(found != containing_.end(), Errc::invalid_argument, "scope ", scope.name, " uses ", p->name,
              ", which is not a parameter of the model");
      if (!contains(at->second, found->second)) at->second.push_back(found->second);
    }
  return at->second;
}

}  // namespace rz
