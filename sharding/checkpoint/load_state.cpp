#include "sharding/checkpoint/load_state.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/module.h"
#include "comm/core/error.h"
#include "sharding/checkpoint/model_tensors.h"
#include "sharding/io/text.h"
#include "sharding/strategy/optimizer_state.h"

namespace rz {
namespace {

std::map<const Parameter*, std::string> by_parameter(
    const std::vector<std::pair<std::string, Parameter*>>& parameters) {
  std::map<const Parameter*, std::string> names;
  for (const auto& [name, p] : parameters) names[p] = name;
  return names;
}

StateSpec spec_of(const Optimizer& optimizer, const Parameter& p, const std::string& state) {
  for (const StateSpec& s : optimizer.states(optimizer.group_of(p)))
    if (s.name == state) return s;
  return {.name = state};
}

}  // namespace

StateLoader::StateLoader(TensorSource tensors, Module& module, const Optimizer* optimizer,
                         const StateLoaderOptions& options)
    : tensors_(std::move(tensors)),
      optimizer_(optimizer),
      options_(options),
      parameters_(module.named_parameters()),
      buffers_(persistent_buffers(module)) {
  std::erase_if(buffers_, [](const auto& b) { return b.second->shape.count() == 0; });
  Problems problems;
  match_model(problems);
  if (optimizer_) match_optimizer(problems);
  if (options_.strict) match_names(problems);
  require(problems.empty(), Errc::config, escaped(tensors_.path()),
          ": does not fit the model: ", escaped(listed(problems)));
  require_some();
}

// ---- comparison

template <class T>
void StateLoader::match(const std::string& tensor, const T& expected, Problems& problems) const {
  if (const TensorInfo* t = tensors_.find(tensor)) {
    if (const std::string why = mismatch(*t, expected); !why.empty()) problems.push_back(why);
  } else if (options_.strict) {
    problems.push_back(concat(tensor, " is missing"));
  }
}

bool StateLoader::is_left_out(const std::string& name, const Parameter& p) const {
  return options_.without_frozen && !p.requires_grad && !tensors_.find(model_tensor(name));
}

void StateLoader::match_model(Problems& problems) const {
  for (const auto& [name, p] : parameters_)
    if (!is_left_out(name, *p)) match(model_tensor(name), p->global_shape(), problems);
  for (const auto& [name, b] : buffers_) match(buffer_tensor(name), *b, problems);
}

bool StateLoader::has_optimizer() const {
  return std::ranges::any_of(tensors_.tensors(),
                             [](const TensorInfo& t) { return t.name.starts_with("optimizer/"); });
}

void StateLoader::match_optimizer(Problems& problems) const {
  if (!has_optimizer()) return;
  for (const auto& [name, p] : parameters_) {
    if (!p->requires_grad) continue;
    for (const StateSpec& s : optimizer_->states(optimizer_->group_of(*p)))
      match(stored_state(s, name), p->global_shape(), problems);
  }
}

/// Where a state is read from.
std::string StateLoader::stored_state(const StateSpec& s, const std::string& name) const {
  const std::string own = optimizer_tensor(s.name, name);
  return s.substitute.empty() || tensors_.find(own) ? own : optimizer_tensor(s.substitute, name);
}

bool StateLoader::has_states(const std::string& name, const Parameter& p) const {
  return std::ranges::all_of(optimizer_->states(optimizer_->group_of(p)), [&](const StateSpec& s) {
    return tensors_.find(stored_state(s, name)) != nullptr;
  });
}

std::vector<std::string> StateLoader::without_states() const {
  std::vector<std::string> names;
  for (const auto& [name, p] : parameters_)
    if (optimizer_ && p->requires_grad && !has_states(name, *p)) names.push_back(name);
  return names;
}

std::set<std::string> StateLoader::known_states() const {
  std::set<std::string> known;
  for (const auto& [name, p] : parameters_) {
    if (!optimizer_ || !p->requires_grad) continue;
    for (const StateSpec& s : optimizer_->states(optimizer_->group_of(*p)))
      known.insert(optimizer_tensor(s.name, name));
  }
  return known;
}

/// The state of a trainable parameter that a tensor is; empty if it is none.
std::string StateLoader::state_in(const std::string& tensor) const {
  constexpr std::string_view folder = "optimizer/";
  const std::size_t begin = folder.size(), end = tensor.find('/', begin);
  if (!tensor.starts_with(folder) || end == std::string::npos) return "";
  const std::string parameter = tensor.substr(end + 1);
  const bool trained = std::ranges::any_of(
      parameters_, [&](const auto& p) { return p.first == parameter && p.second->requires_grad; });
  return trained ? tensor.substr(begin, end - begin) : "";
}

std::string StateLoader::changed_states() const {
  if (!optimizer_) return "";
  std::map<std::string, std::string> changes;
  for (const auto& [name, p] : parameters_) {
    if (!p->requires_grad) continue;
    for (const StateSpec& s : optimizer_->states(optimizer_->group_of(*p)))
      if (!tensors_.find(optimizer_tensor(s.name, name)) && tensors_.find(stored_state(s, name)))
        changes[s.name] = concat("absent, now starts from ", s.substitute);
  }
  const std::set<std::string> known = known_states();
  for (const TensorInfo& t : tensors_.tensors())
    if (!known.contains(t.name))
      if (const std::string state = state_in(t.name); !state.empty())
        changes.emplace(state, "saved, now absent");
  std::string text;
  for (const auto& [state, change] : changes)
    text += concat(text.empty() ? "" : "; ", "optimizer/", escaped(state), ": ", change);
  return text;
}

/// What the checkpoint has and the model has not.
void StateLoader::match_names(Problems& problems) const {
  std::set<std::string> known = known_states();
  for (const auto& [name, b] : buffers_) known.insert(buffer_tensor(name));
  for (const auto& [name, p] : parameters_) known.insert(model_tensor(name));
  for (const TensorInfo& t : tensors_.tensors()) {
    const bool of_optimizer = t.name.starts_with("optimizer/");
    if (known.contains(t.name) || (of_optimizer && (!optimizer_ || !state_in(t.name).empty()))) continue;
    problems.push_back(concat(t.name, " is not in the model"));
  }
}

std::vector<std::string> StateLoader::missing() const {
  std::vector<std::string> names;
  for (const auto& [name, p] : parameters_)
    if (!tensors_.find(model_tensor(name)) && !is_left_out(name, *p)) names.push_back(name);
  for (const auto& [name, b] : buffers_)
    if (!tensors_.find(buffer_tensor(name))) names.push_back(name);
  return names;
}

std::vector<std::string> StateLoader::unexpected() const {
  std::set<std::string> known;
  for (const auto& [name, p] : parameters_) known.insert(model_tensor(name));
  for (const auto& [name, b] : buffers_) known.insert(buffer_tensor(name));
  std::vector<std::string> names;
  for (const TensorInfo& t : tensors_.tensors())
    if (!known.contains(t.name) && !t.name.starts_with("optimizer/"))
      names.push_back(t.name.substr(t.name.find('/') + 1));
  return names;
}

/// Refuses a checkpoint without one of the model's names: nothing would be loaded.
void StateLoader::require_some() const {
  const std::vector<std::string> without = missing();
  if (without.empty() || without.size() < parameters_.size() + buffers_.size()) return;
  const std::vector<std::string> others = unexpected();
  fail(Errc::config, escaped(tensors_.path()), ": nothing of it is in the model, which begins with '",
       escaped(without[0]), "', and the checkpoint with '", escaped(others.empty() ? "" : others[0]),
       "'; give a checkpoint of this model");
}

// ---- reading

void StateLoader::load_values(Strategy& strategy) {
  const auto names = by_parameter(parameters_);
  const auto read = [&](const Parameter& p, Range elements, float* out) {
    if (const TensorInfo* t = tensors_.find(model_tensor(names.at(&p))))
      return read_parameter(tensors_, *t, p, elements, out);
    init_slice(p, {out, elements.count()}, elements.begin, options_.seed);
  };
  strategy.values().fill(read, [&](const Parameter& p) { return !is_left_out(names.at(&p), p); });
}

void StateLoader::load_optimizer(Strategy& strategy) {
  const auto names = by_parameter(parameters_);
  strategy.optimizer_state().fill(
      *optimizer_, [&](const std::string& state, const Parameter& p, Range elements, float* out) {
        const std::string& name = names.at(&p);
        const StateSpec spec = spec_of(*optimizer_, p, state);
        if (has_states(name, p))
          return read_parameter(tensors_, *tensors_.find(stored_state(spec, name)), p, elements, out);
        std::fill_n(out, elements.count(), spec.initial);
      });
}

void StateLoader::load_buffers(const Stream& stream) {
  for (const auto& [name, b] : buffers_)
    if (const TensorInfo* t = tensors_.find(buffer_tensor(name))) read_buffer(tensors_, *t, *b, stream);
}

void StateLoader::load(Strategy& strategy, const Stream& stream) {
  load_values(strategy);
  if (optimizer_) load_optimizer(strategy);
  load_buffers(stream);
}

}  // namespace rz
