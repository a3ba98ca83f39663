#pragma once
/// A module whose calls tell in which order scopes were gathered and reduced.

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "autograd_lite/nn/module.h"
#include "autograd_lite/tape.h"
#include "tests/support/mirrored_backend.h"

namespace rz::test {

constexpr int scope_count = 4;

/// Elements of parameter i: needs no padding, and identifies the parameter.
constexpr std::size_t elements_of(int i) { return 128u * static_cast<std::size_t>(i + 1); }

using Order = std::vector<int>;

/// Scopes s0 to s3 of one parameter each, which run in any order. The loss is the sum of the halved squares
/// of the parameters that were used.
class ScopeCourse final : public Module {
 public:
  using During = std::function<void(int scope, Pass)>;

  explicit ScopeCourse(
      During during = [](int, Pass) {}, bool equal_sizes = false, const Order& listed = {0, 1, 2, 3})
      : during_(std::move(during)), scopes_(scope_count) {
    for (int i = 0; i < scope_count; ++i) {
      auto& p = *parameters_.emplace_back(std::make_unique<Parameter>());
      register_parameter(p, concat("p", i), {elements_of(equal_sizes ? 0 : i)});
      p.value = Tensor::empty(p.shape);
      std::fill_n(p.value.data<float>(), p.count(), static_cast<float>(i + 1));
    }
    for (const int i : listed)
      scopes_[static_cast<std::size_t>(i)] =
          &register_scope(concat("s", i), std::vector<Parameter*>{&parameter(i)});
  }
  Scope& scope(int i) { return *scopes_[static_cast<std::size_t>(i)]; }
  Parameter& parameter(int i) { return *parameters_[static_cast<std::size_t>(i)]; }

  /// Runs scopes one after the other.
  Var loss(Tape& tape, const Order& order = {0, 1, 2, 3}) {
    Var sum = tape.variable(Tensor::zeros({}));
    for (const int i : order) sum = tape.scope(scope(i), [&] { return term(tape, sum, i); });
    return sum;
  }
  /// Runs s0, then s1 as a recomputed scope that contains s2 and s3.
  Var recomputed_loss(Tape& tape) {
    const Var first = tape.scope(scope(0), [&] { return term(tape, tape.variable(Tensor::zeros({})), 0); });
    return tape.checkpoint(scope(1), first, [this, &tape](Var in) {
      Var sum = term(tape, in, 1);
      for (const int i : {2, 3}) sum = tape.scope(scope(i), [&] { return term(tape, sum, i); });
      return sum;
    });
  }

  /// As loss() of all scopes, where s3 uses the parameter of s0, too.
  Var tied_loss(Tape& tape) {
    const Var sum = loss(tape, {0, 1, 2});
    return tape.scope(scope(3), [&] { return term(tape, term(tape, sum, 3), 0); });
  }

 private:
  Var term(Tape& tape, Var sum, int i) {
    Parameter& p = parameter(i);
    const Var w = tape.parameter(p);
    during_(i, Pass::forward);
    const Tensor out = Tensor::empty({});
    *out.data<float>() = *tape.value(sum).data<float>();
    for (std::size_t k = 0; k < p.count(); ++k) {
      const float x = tape.value(w).data<float>()[k];
      *out.data<float>() += x * x / 2;
    }
    return tape.record(out, {sum, w}, [this, sum, w, i](Tape& t, const Tensor& d_out) {
      during_(i, Pass::backward);
      const auto target = t.grad_target(w);
      for (std::size_t k = 0; k < target.tensor.count(); ++k) {
        float& place = target.tensor.data<float>()[k];
        place = (target.accumulate ? place : 0) + t.value(w).data<float>()[k];
      }
      t.accumulate_grad(sum, d_out);
    });
  }

  During during_;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<Scope*> scopes_;
};

/// Of calls on one parameter each.
inline Order scopes_of(const std::vector<CallRecord::Call>& calls) {
  Order out;
  for (const auto& c : calls) out.push_back(static_cast<int>(c.elements / elements_of(0)) - 1);
  return out;
}

}  // namespace rz::test
