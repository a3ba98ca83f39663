#pragma once
/// Parameters grouped by the scopes that use them: the units in which sharded values are gathered.

#include <cstddef>
#include <limits>
#include <unordered_map>
#include <vector>

#include "autograd_lite/tape.h"
#include "comm/bucket_scheduler.h"
#include "sharding/model/flat_layout.h"

namespace rz {

/// Parameters of the same scopes in one buffer: trainable and frozen ones, persistent and other ones apart.
/// If they exceed a limit, there are several such buffers.
struct FlatParameter {
  std::vector<Parameter*> parameters;
  std::vector<std::size_t> offsets;  ///< of the parameters, in elements
  std::size_t count = 0;             ///< elements, including padding
  std::size_t first_scope = 0;       ///< index of the earliest scope
  bool trainable = false;
  bool persistent = false;  ///< every rank holds the values whole
};

/// In elements.
struct FlatParameterLimits {
  std::size_t align = 1;  ///< parameters start at multiples of it, shards too
  /// Of one flat parameter, with the padding between its parameters. A larger parameter has its own.
  std::size_t count = std::numeric_limits<std::size_t>::max();
  /// Parameters of up to `persistent` elements are persistent, while all of them together have no more than
  /// `all_persistent`.
  std::size_t persistent = 0, all_persistent = std::numeric_limits<std::size_t>::max();
};

/// The flat parameters of a model, trainable ones first, in the order of reduction. A trainable one has the
/// number of its bucket.
class FlatParameters {
 public:
  using Indices = std::vector<int>;
  /// `scopes`, preferably in the order of use in forward, which is the order of reduction reversed.
  /// Errc::invalid_argument names a parameter that belongs to no scope.
  FlatParameters(const std::vector<const Scope*>& scopes, const ModelParameters&, const FlatParameterLimits&,
                 RankOf);

  int size() const { return static_cast<int>(list_.size()); }
  const FlatParameter& operator[](int u) const { return list_[static_cast<std::size_t>(u)]; }
  /// The flat parameter that contains a parameter of the model.
  int containing(const Parameter& p) const { return containing_.at(&p); }
  /// Shard of this rank.
  Range shard(int u) const;
  /// The trainable ones as buckets.
  BucketLayout buckets(DType) const;

  /// The flat parameters that a scope uses. Errc::invalid_argument if it uses a parameter of another model.
  const Indices& of(const Scope&);

 private:
  const ModelParameters& parameters_;
  RankOf rank_;
  std::unordered_map<const Scope*, Indices> of_;
  std::unordered_map<const Parameter*, int> containing_;
  std::vector<FlatParameter> list_;
};

/// Calls f(parameter, elements, offset in the range) for each piece of a parameter in a range of a flat
/// parameter.
template <class F>
void for_each_piece(const FlatParameter& u, Range range, const F& f) {
  for (std::size_t i = 0; i < u.parameters.size(); ++i) {
    const std::size_t offset = u.offsets[i];
    const Range here = intersect({offset, offset + u.parameters[i]->count()}, range);
    if (here.count())
      f(*u.parameters[i], Range{here.begin - offset, here.end - offset}, here.begin - range.begin);
  }
}

}  // namespace rz
