#include "sharding/strategy/optimizer_state.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"
#include "sharding/model/host_memory.h"
#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"
#include "tensor/ops.h"

namespace rz {

OptimizerState::OptimizerState(const ShardedModel& model, const Runtime& runtime)
    : model_(model), runtime_(runtime), missed_(model.parameters().members().size()) {}

std::size_t OptimizerState::trained_member(const Parameter& p) const {
  const int member = model_.parameters().member_of(p);
  require(member >= 0, Errc::invalid_argument, p.name,
          " has no optimizer state: it was frozen or not part of the model when the strategy was made");
  return static_cast<std::size_t>(member);
}

void OptimizerState::prepare(const Optimizer& optimizer) {
  if (prepared_for_ == optimizer.serial()) return;
  std::vector<int> groups;
  for (const Parameter* p : model_.parameters().members()) {
    const int group = groups.emplace_back(optimizer.group_of(*p));
    require(optimizer.grain(group) != Grain::matrix || p->shape.dims() == 2, Errc::invalid_argument,
            "parameter ", p->name, " of shape ", rz::name(p->shape),
            " is in a group of matrices; put it into a group of another rule");
  }
  std::vector<std::vector<StateSpec>> states;
  for (int g = 0; g < optimizer.groups(); ++g) states.push_back(optimizer.states(g));
  if (states_.empty()) {
    states_ = std::move(states);
    groups_ = std::move(groups);
    allocate();
    prepared_for_ = optimizer.serial();
    return;
  }
  require(states == states_ && groups == groups_, Errc::invalid_argument, "step(): ", optimizer.name(),
          " needs other states than the optimizer of earlier steps; use one optimizer with a strategy");
  prepared_for_ = optimizer.serial();
}

const std::vector<StateSpec>& OptimizerState::states_of(int member) const {
  return states_[static_cast<std::size_t>(groups_[static_cast<std::size_t>(member)])];
}

std::vector<OptimizerState::Extent> OptimizerState::extents(int bucket) const {
  const FlatLayout& layout = model_.layout();
  const auto& members = layout.bucket(bucket).members;
  std::vector<Extent> out;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const Range here = intersect(padded_extent(layout.buckets(), bucket, i), layout.updated(bucket));
    if (here.count()) out.push_back({members[i], here});
  }
  return out;
}

void OptimizerState::allocate() {
  std::size_t max_count = 0;
  for (const auto& list : states_) max_count = std::max(max_count, list.size());
  memory_.assign(max_count, {}), shift_.assign(max_count, std::vector<std::ptrdiff_t>(groups_.size()));
  for (std::size_t s = 0; s < max_count; ++s)
    for (int b = 0; b < model_.layout().size(); ++b) {
      std::size_t count = 0;
      for (const Extent& e : extents(b)) {
        if (states_of(e.member).size() <= s) continue;
        shift_[s][static_cast<std::size_t>(e.member)] =
            static_cast<std::ptrdiff_t>(count) - static_cast<std::ptrdiff_t>(e.range.begin);
        count += e.range.count();
      }
      memory_[s].push_back(count ? Tensor::zeros({count}, DType::f32, model_.state_allocator(b)) : Tensor());
    }
  each(false, [&](const StateSpec& state, const Parameter&, Range, const Tensor& values) {
    if (state.initial != 0)
      ops::fill(values, state.initial, values.device() == Device{} ? Stream() : runtime_.stream);
  });
}

float* OptimizerState::at(std::size_t s, int member, std::size_t offset) const {
  if (states_of(member).size() <= s) return nullptr;
  const auto bucket = static_cast<std::size_t>(model_.layout().place(member).bucket);
  const std::ptrdiff_t shift = shift_[s][static_cast<std::size_t>(member)];
  return memory_[s][bucket].data<float>() + (static_cast<std::ptrdiff_t>(offset) + shift);
}

Tensor OptimizerState::tensor(std::size_t s, int member, std::size_t offset, std::size_t count) const {
  const auto bucket = static_cast<std::size_t>(model_.layout().place(member).bucket);
  return Tensor::borrow(at(s, member, offset), {count}, DType::f32, memory_[s][bucket].device());
}

Tensor OptimizerState::part(std::size_t s, int bucket, Range range) const {
  const float* begin = nullptr;
  std::size_t count = 0;
  for (const Extent& e : extents(bucket)) {
    const Range here = intersect(e.range, range);
    if (!here.count() || states_of(e.member).size() <= s) continue;
    if (!begin) begin = at(s, e.member, here.begin);
    count += here.count();
  }
  if (!begin) return {};
  const Tensor& all = memory_[s][static_cast<std::size_t>(bucket)];
  return all.view(static_cast<std::size_t>(begin - all.data<float>()), {count});
}

template <class F>
void OptimizerState::each(bool owned, const F& f) const {
  const FlatLayout& layout = model_.layout();
  for (int b = 0; !states_.empty() && b < layout.size(); ++b)
    for (const ParameterSlice& slice : layout.slices(b, owned ? layout.owned(b) : layout.updated(b))) {
      if (owned && !runtime_.counts(model_.parameters().member(slice.member))) continue;
      const auto& states = states_of(slice.member);
      for (std::size_t s = 0; s < states.size(); ++s)
        f(states[s], model_.parameters().member(slice.member), slice.elements,
          tensor(s, slice.member, slice.offset, slice.elements.count()));
    }
}

void OptimizerState::move(const BucketLayout& before) {
  if (states_.empty()) return;
  const auto memory = std::move(memory_);
  const auto shift = std::move(shift_);
  allocate();
  for (std::size_t m = 0; m < groups_.size(); ++m)
    for (std::size_t s = 0; s < states_of(static_cast<int>(m)).size(); ++s) {
      const auto from = before.offsets[m];
      const std::size_t count = model_.parameters().members()[m]->count();
      const auto at = static_cast<std::size_t>(static_cast<std::ptrdiff_t>(from.offset) + shift[s][m]);
      ops::copy(tensor(s, static_cast<int>(m), model_.layout().place(static_cast<int>(m)).offset, count),
                memory[s][static_cast<std::size_t>(from.bucket)].view(at, {count}), runtime_.stream);
    }
}

void OptimizerState::fill(const Optimizer& optimizer, const Fill& fill) {
  prepare(optimizer);
  model_.wait_offloaded();
  each(false, [&](const StateSpec& state, const Parameter& p, Range elements, const Tensor& values) {
    write_via_host(values, runtime_.stream, [&](float* out) { fill(state.name, p, elements, out); });
  });
}

void OptimizerState::visit(const Visit& visit) const {
  model_.wait_offloaded();
  each(true, [&](const StateSpec& state, const Parameter& p, Range elements, const Tensor& values) {
    read_via_host(values, runtime_.stream,
                  [&](const float* value) { visit(state.name, p, elements, value); });
  });
}

std::vector<OptimizerState::Elements> OptimizerState::owned() const {
  std::vector<Elements> all;
  each(true, [&](const StateSpec& state, const Parameter& p, Range elements, const Tensor&) {
    all.push_back({state.name, {&p, elements}});
  });
  return all;
}

HeldBytes OptimizerState::bytes() const {
  HeldBytes held;
  for (const Buckets& buckets : memory_)
    for (const Tensor& t : buckets) held.add(t, runtime_.stream.device());
  return held;
}

}  // namespace rz
