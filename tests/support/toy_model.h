#pragma once
/// A model whose gradients and updates are exact in f32 on small dyadic numbers, with all difficulties of
/// sharding: sizes that no group size divides, a parameter that the first and the last scope share, a frozen
/// one, one that no loss ever reaches, and one that only some ranks use.
///
/// loss = ½ Σ x_i w_i², where x is data: the gradient of w_i is x_i w_i, averaged over samples.

#include <memory>
#include <string>
#include <vector>

#include "autograd_lite/nn/module.h"
#include "autograd_lite/tape.h"
#include "comm/core/range.h"

namespace rz::test {

class ToyModel final : public Module {
 public:
  /// `initial(parameter index, element)`; values are left undefined if it is empty.
  using Initial = std::function<float(std::size_t, std::size_t)>;
  /// `part`: of a tp group, whose ranks split some of the parameters; elements are those of the whole ones.
  explicit ToyModel(const Initial& initial, RankOf part = {});

  Parameter& operator[](std::size_t i) { return *parameters_[i]; }
  std::size_t index(const std::string& name) const;

  /// The data: x(parameter index, element), the mean over this rank's samples.
  using Data = std::function<float(std::size_t, std::size_t)>;
  /// Runs every scope. With `use_sometimes` false, "sometimes" gets no gradient.
  Var loss(Tape&, const Data&, bool use_sometimes = true);
  /// Called in backward within the second scope, when the last two are over; it may throw. loss() copies it.
  std::function<void()> in_backward;

 private:
  Var watched(Tape&, Var sum);
  Var term(Tape&, Var sum, std::size_t parameter, const Data&, float factor);
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<const Scope*> scopes_;
};

}  // namespace rz::test
