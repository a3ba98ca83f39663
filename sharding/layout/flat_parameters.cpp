#include "sharding/layout/flat_parameters.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"

namespace rz {

namespace {

using ScopeSet = std::vector<std::size_t>;
/// Flat parameters by trainable, persistent, scopes.
using ByScopes = std::map<std::tuple<bool, bool, ScopeSet>, FlatParameter>;

std::map<const Parameter*, ScopeSet> scopes_by_parameter(const std::vector<const Scope*>& scopes) {
  std::map<const Parameter*, ScopeSet> out;
  for (std::size_t s = 0; s < scopes.size(); ++s)
    for (const Parameter* p : scopes[s]->parameters) out[p].push_back(s);
  return out;
}

/// Selects parameters one after the other.
class PersistentSelection {
 public:
  explicit PersistentSelection(PersistenceThresholds limits) : limits_(limits) {}
  bool take(const Parameter& p) {
    const bool fits = p.count() <= limits_.per_parameter && p.count() <= limits_.whole_model - elements_;
    if (fits) elements_ += p.count();
    return fits;
  }

 private:
  PersistenceThresholds limits_;
  std::size_t elements_ = 0;
};

void append(FlatParameter& u, Parameter* p, std::size_t align) {
  u.parameters.push_back(p);
  u.offsets.push_back(u.count);
  u.count += round_up(p->count(), align);
}

ByScopes grouped(const std::vector<const Scope*>& scopes, const ModelParameters& parameters,
                 std::size_t align, PersistenceThresholds thresholds) {
  PersistentSelection persistent(thresholds);
  auto used_by = scopes_by_parameter(scopes);
  ByScopes out;
  for (const auto* list : {&parameters.members(), &parameters.frozen()})
    for (Parameter* p : *list) {
      const ScopeSet& where = used_by[p];
      require(!where.empty(), Errc::invalid_argument, "zero3: parameter ", p->name,
              " stands in no scope; list it in the scope that uses it");
      const bool stays = persistent.take(*p);
      FlatParameter& u = out[{p->requires_grad, stays, where}];
      u.trainable = p->requires_grad;
      u.persistent = stays;
      u.first_scope = where.front();
      append(u, p, align);
    }
  return out;
}

bool contains(const FlatParameters::Indices& list, int u) {
  return std::find(list.begin(), list.end(), u) != list.end();
}

}  // namespace

FlatParameters::FlatParameters(const std::vector<const Scope*>& scopes, const ModelParameters& parameters,
                               std::size_t align, PersistenceThresholds thresholds,
                               const Communicator& communicator)
    : parameters_(parameters), rank_(communicator.rank()), ranks_(communicator.size()) {
  for (auto& [key, u] : grouped(scopes, parameters, align, thresholds)) {
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

}  // namespace rz
