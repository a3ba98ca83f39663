#pragma once
/// Interface of the memory that holds the values used by a model.

#include <span>
#include <vector>

#include "autograd_lite/tape.h"
#include "comm/work.h"
#include "sharding/model/flat_layout.h"
#include "sharding/model/offload.h"
#include "tensor/tensor.h"

namespace rz {

/// Elements of a parameter in the memory of this rank.
struct StoredValue {
  Parameter* parameter;
  Range elements;  ///< in the flat parameter
  Tensor values;
  bool exported;  ///< true on one of the ranks that hold the elements
};

/// A scope that runs.
struct ScopeUse {
  const Scope& scope;
  Pass pass;
  std::span<const int> flat;  ///< its flat parameters; none unless values are sharded
};

/// Defines Parameter::value while a scope runs. Not thread-safe.
class ValueStore {
 public:
  virtual ~ValueStore() = default;

  // ---- a pass
  /// Called before a scope runs in forward or backward. Parameter::value is then defined.
  virtual void enter(const ScopeUse&) {}
  /// Called after a scope has run.
  virtual void leave(const ScopeUse&) {}
  /// Drops gathered values, which are stale after an update. No scope is open then, or a pass has failed.
  virtual void release() {}

  // ---- an update
  /// The values of FlatLayout::updated() of a bucket; in host memory if they are offloaded.
  virtual Tensor updated(int bucket) const = 0;
  /// Sends new values of updated() to the ranks that hold them, too.
  virtual Work publish(int bucket, const Stream&) = 0;

  // ---- import and export
  /// All elements that this rank holds.
  virtual std::vector<StoredValue> stored() const = 0;
  /// A whole parameter. Collective.
  virtual Tensor whole(const Parameter&) = 0;
  /// Bytes that this rank holds, padding included.
  virtual HeldBytes bytes() const = 0;
};

}  // namespace rz
