#include "sharding/layout/flat_parameters.h"

#include <algorithm>
#include <map>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"

namespace rz {

namespace {

using ScopeSet = std::vector<std::size_t>;
/// Flat parameters by trainable, scopes.
using ByScopes = std::map<std::pair<bool, ScopeSet>, FlatParameter>;

std::map<const Parameter*, ScopeSet> scopes_by_parameter(const std::vector<const Scope*>& scopes) {
  std::map<const Parameter*, ScopeSet> out;
  for (std::size_t s = 0; s < scopes.size(); ++s)
    for (const Parameter* p : scopes[s]->parameters) out[p].push_back(s);
  return out;
}

void append(FlatParameter& u, Parameter* p, std::size_t align) {
  u.parameters.push_back(p);
  u.offsets.push_back(u.count);
  u.count += round_up(p->count(), align);
}

ByScopes grouped(const std::vector<const Scope*>& scopes, const ModelParameters& parameters,
                 std::size_t align) {
  auto used_by = scopes_by_parameter(scopes);
  ByScopes out;
  for (const auto* list : {&parameters.members(), &parameters.frozen()})
    for (Parameter* p : *list) {
      const ScopeSet& where = used_by[p];
      require(!where.empty(), Errc::invalid_argument, "zero3: parameter ", p->name,
              " stands in no scope; list it in the scope that uses it");
      FlatParameter& u = out[{p->requires_grad, where}];
      u.trainable = p->requires_grad;
      u.first_scope = where.front();
      append(u, p, align);
    }
  return out;
}

bool contains(const FlatParameters::Indices& list, int u) {
  return std::find(list.begin(), list.end(), u) != list.end();
}

}  // namespace

FlatParameters::FlatParameters(std::vector<const Scope*> scopes, const ModelParameters& parameters,
                               std::size_t align, const Communicator& communicator)
    : parameters_(parameters),
      rank_(communicator.rank()),
      ranks_(communicator.size()),
      scopes_(std::move(scopes)) {
  for (std::size_t s = 0; s < scopes_.size(); ++s)
    position_.emplace(scopes_[s], static_cast<std::ptrdiff_t>(s));
  for (auto& [key, u] : grouped(scopes_, parameters, align)) {
    list_.push_back(u);
    list_.back().count = round_up(u.count, align * static_cast<std::size_t>(ranks_));
  }
  std::ranges::stable_sort(list_, [](const FlatParameter& a, const FlatParameter& b) {
    return std::pair(!a.trainable, b.first_scope) < std::pair(!b.trainable, a.first_scope);
  });
  for (int u = 0; u < size(); ++u)
    for (const Parameter* p : (*this)[u].parameters) containing_[p] = u;
}

Range FlatParameters::shard(int u) const { return shard_range((*this)[u].count, rank_, ranks_); }

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

std::ptrdiff_t FlatParameters::position(const Scope& scope) const {
  const auto found = position_.find(&scope);
  return found == position_.end() ? unknown : found->second;
}

FlatParameters::Indices FlatParameters::ahead(const Scope& scope, Pass pass, int count) const {
  Indices out;
  const std::ptrdiff_t here = position(scope);
  if (here == unknown) return out;
  const auto last = static_cast<std::ptrdiff_t>(scopes_.size()) - 1;
  for (std::ptrdiff_t i = 1; i <= count; ++i) {
    const std::ptrdiff_t next = pass == Pass::forward ? std::min(here + i, last) : here - i;
    if (next < 0) break;
    for (const Parameter* p : scopes_[static_cast<std::size_t>(next)]->parameters)
      if (const int u = containing(*p); !contains(out, u)) out.push_back(u);
  }
  return out;
}

}  // namespace rz
