#include "tests/support/toy_model.h"

#include <algorithm>

namespace rz::test {

namespace {

struct Layout {
  const char* name;
  Shape shape;
  bool requires_grad;
  int split = -1;  ///< dimension that a tp group divides; -1: none
};
const Layout layouts[] = {
    {"tied", {9, 7}, true},       {"position", {5}, true},           {"first.weight", {13, 10}, true, 1},
    {"first.bias", {10}, true},   {"frozen", {3, 3}, false, 0},      {"never", {21}, true},
    {"sometimes", {70}, true, 0}, {"second.weight", {129}, true, 0}, {"norm", {1}, true},
};

/// In consecutive parts that differ by an element at most.
Box part_of(const Layout& l, RankOf part) {
  Box box = Box::whole(extents(l.shape));
  if (l.split < 0) return box;
  const auto d = static_cast<std::size_t>(l.split);
  const auto n = static_cast<std::uint64_t>(part.ranks), r = static_cast<std::uint64_t>(part.rank);
  box.offset[d] = box.shape[d] * r / n;
  box.extent[d] = box.shape[d] * (r + 1) / n - box.offset[d];
  return box;
}

Shape shape_of(const Box& box) {
  return box.extent.size() == 1 ? Shape{box.extent[0]} : Shape{box.extent[0], box.extent[1]};
}
struct ScopeLayout {
  const char* name;
  std::vector<std::size_t> parameters;
};
const ScopeLayout scope_layouts[] = {
    {"embedding", {0, 1}}, {"first", {2, 3, 4, 5}}, {"second", {6, 7}}, {"head", {8, 0}}};

}  // namespace

ToyModel::ToyModel(const Initial& initial, RankOf part) {
  for (const Layout& l : layouts) {
    auto p = std::make_unique<Parameter>();
    const Box box = part_of(l, part);
    register_parameter(*p, l.name, shape_of(box));
    if (!box.is_whole()) p->set_part(box);
    p->requires_grad = l.requires_grad;
    if (initial) {
      p->value = Tensor::empty(p->shape);
      for (std::size_t i = 0; i < p->count(); ++i)
        p->value.data<float>()[i] = initial(parameters_.size(), box.index(i));
    }
    parameters_.push_back(std::move(p));
  }
  for (const ScopeLayout& l : scope_layouts) {
    std::vector<Parameter*> used;
    for (const std::size_t i : l.parameters) used.push_back(parameters_[i].get());
    scopes_.push_back(&register_scope(l.name, used));
  }
}

std::size_t ToyModel::index(const std::string& name) const {
  const auto at =
      std::find_if(parameters_.begin(), parameters_.end(), [&](const auto& p) { return p->name == name; });
  return static_cast<std::size_t>(at - parameters_.begin());
}

/// sum + ½ Σ factor x_i w_i²
Var ToyModel::term(Tape& tape, Var sum, std::size_t parameter, const Data& data, float factor) {
  Parameter& p = *parameters_[parameter];
  std::vector<float> x(p.count());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = factor * data(parameter, p.box().index(i));
  const Var w = tape.parameter(p);
  double total = sum.defined() ? *tape.value(sum).data<float>() : 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float value = tape.value(w).data<float>()[i];
    total += 0.5 * x[i] * value * value;
  }
  Tensor out = Tensor::empty({});
  *out.data<float>() = static_cast<float>(total);
  return tape.record(out, {sum, w}, [sum, w, x = std::move(x)](Tape& t, const Tensor& d_out) {
    const float d = *d_out.data<float>();
    if (const auto target = t.grad_target(w); target.tensor.defined())
      for (std::size_t i = 0; i < x.size(); ++i) {
        const float g = d * x[i] * t.value(w).data<float>()[i];
        float& place = target.tensor.data<float>()[i];
        place = target.accumulate ? place + g : g;
      }
    if (sum.defined()) t.accumulate_grad(sum, d_out);
  });
}

/// Passes a value and its gradient on.
Var ToyModel::watched(Tape& tape, Var sum) {
  if (!in_backward) return sum;
  return tape.record(tape.value(sum), {sum}, [sum, call = in_backward](Tape& t, const Tensor& d_out) {
    call();
    t.accumulate_grad(sum, d_out);
  });
}

Var ToyModel::loss(Tape& tape, const Data& data, bool use_sometimes) {
  Var sum;
  const auto run = [&](std::size_t scope, const std::vector<std::size_t>& used) {
    sum = tape.scope(*scopes_[scope], [&] {
      Var inner = sum;
      for (const std::size_t i : used)
        inner = term(tape, inner, i, data,
                     scope == 3 && i == 0 ? 2.0f : 1.0f);  // "tied" the second time: twice as strong
      return scope == 1 ? watched(tape, inner) : inner;
    });
  };
  run(0, {0, 1});
  run(1, {2, 3, 4});
  run(2, use_sometimes ? std::vector<std::size_t>{6, 7} : std::vector<std::size_t>{7});
  run(3, {8, 0});
  return sum;
}

}  // namespace rz::test
