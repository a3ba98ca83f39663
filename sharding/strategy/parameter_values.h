#pragma once
/// The parameter values of a strategy.

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "../../autograd_lite/parameter.h"
#include "../../comm/device/stream.h"
#include "../../tensor/tensor.h"

namespace rz {

class PassRules;
class ShardedModel;
struct Runtime;

/// Imports, exports and compares values in f32, at most one scope or one bucket at a time: masters in mixed
/// precision, otherwise the values that the model uses. Strategy::values() returns it.
class ParameterValues {
 public:
  using Fill = FillParameter;
  using Selection = std::function<bool(const Parameter&)>;
  /// Reads `elements` of the flat parameter from value[0, elements.count()), in f32.
  using Visit = std::function<void(const Parameter&, Range elements, const float* value)>;

  /// All references must outlive this object.
  ParameterValues(ShardedModel&, PassRules&, Runtime&);
  ~ParameterValues();
  ParameterValues(const ParameterValues&) = delete;

  /// Calls fill for the elements that this rank stores, to load or initialise without holding the whole
  /// model. ddp, zero1 and zero2 store all elements. zero3 stores shards; fill is also called for the first
  /// 64 elements of each parameter, which the ranks compare. All ranks must write the same values. Parameters
  /// that are not `selected` keep their values; all are if it is empty. Not collective.
  void fill(const Fill&, const Selection& selected = {});
  /// Whether there are values besides zeros: the module had some when the strategy was made, or fill() has
  /// been called.
  bool filled() const;
  /// Visits the elements that this rank exports. Over all ranks, each element is visited exactly once; of a
  /// parameter that a tp group splits, each of each part.
  /// Parameters that are not `selected` are left out; all are visited if it is empty.
  void visit_owned(const Visit&, const Selection& selected = {}) const;
  /// What visit_owned() visits, in its order. No values are read.
  std::vector<ParameterElements> owned() const;
  /// Returns a whole parameter in f32, the parts of a tp group joined. Drop the tensor soon. Collective; not
  /// during a pass.
  /// Errc::invalid_argument unless it is one of the model.
  Tensor whole(const Parameter&, const Stream& = {});

  /// Compares the values that ranks hold alike. Errc::mismatch names the first that differs, and the rank.
  /// Collective.
  void compare();
  /// Drops what whole() has gathered. Called before values change.
  void release();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rz
