#include "autograd_lite/nn/module.h"

#include <algorithm>
#include <set>

namespace rz {

Module::Module(Module& parent, const std::string& name) : parent_(&parent), training_(parent.training_) {
  require(!name.empty(), Errc::invalid_argument, "a part of module \"", parent.path_,
          "\" has an empty name; give it the name of the member");
  path_ = parent.named(name);
  own_.name = path_;
  parent.entries_.push_back({this, nullptr});
}

/// Reads only the addresses of parameters, which may have ended.
Module::~Module() {
  for (const Entry& entry : entries_)
    if (entry.part) entry.part->parent_ = nullptr;
  if (parent_) parent_->forget(*this);
}

void Module::forget(const Module& part) {
  std::erase_if(entries_, [&](const Entry& entry) { return entry.part == &part; });
  remove_from_scopes(part.parameters_);
}

/// Removes them from the scopes of this module and of those above it.
void Module::remove_from_scopes(std::span<Parameter* const> parameters) {
  const auto is_one = [&](const Parameter* p) {
    return std::ranges::find(parameters, p) != parameters.end();
  };
  for (Module* m = this; m; m = m->parent_) {
    std::erase_if(m->own_.parameters, is_one);
    for (const auto& scope : m->declared_) std::erase_if(scope->parameters, is_one);
  }
}

std::string Module::named(const std::string& name) const {
  return path_.empty() ? name : concat(path_, '.', name);
}

// ---- registration

Parameter::Parameter(Module& module, const std::string& name, const Shape& shape, const Initial& initial) {
  module.register_parameter(*this, name, shape, initial);
}

void Module::register_parameter(Parameter& p, const std::string& name, const Shape& shape,
                                const Initial& initial) {
  p.name = named(name);
  p.shape = shape;
  p.initial = initial;
  parameters_.push_back(&p);
  unit().parameters.push_back(&p);
}

void Module::unregister_parameter(const Parameter& p) {
  const auto found = std::ranges::find(parameters_, &p);
  if (found == parameters_.end()) return;
  remove_from_scopes({&*found, 1});
  parameters_.erase(found);
}

void Module::register_buffer(ModuleBuffer& b, const std::string& name, const Shape& shape, DType dtype,
                             float initial) {
  require(initial == 0 || dtype == DType::f32, Errc::invalid_argument, "buffer ", named(name), " of ",
          rz::name(dtype), " starts at ", initial, ", but only f32 may start at another value than 0");
  b.name = named(name);
  b.shape = shape;
  b.dtype = dtype;
  b.initial = initial;
  buffers_.push_back(&b);
}

void Module::move_parameters_to(Scope& to) {
  for (Module* m : modules()) {
    if (&m->own_ == &to || m->assigned_) continue;
    to.parameters.insert(to.parameters.end(), m->own_.parameters.begin(), m->own_.parameters.end());
    m->own_.parameters.clear();
  }
}

void Module::one_scope() {
  is_block_ = true;
  move_parameters_to(own_);
  assigned_ = &own_;
}

Scope& Module::add_scope(const std::string& name, std::span<Module* const> members) {
  declared_.push_back(std::make_unique<Scope>(Scope{named(name), {}}));
  const auto first = std::ranges::find_if(entries_, [&](const Entry& entry) {
    return entry.part && std::ranges::find(members, entry.part) != members.end();
  });
  entries_.insert(first, {nullptr, declared_.back().get()});
  return *declared_.back();
}

Scope& Module::register_scope(const std::string& name, std::span<Module* const> members) {
  for (const Module* m : members)
    require(!m->assigned_, Errc::invalid_argument, "module ", m->path_, " cannot be in scope ", named(name),
            ": it is in scope ", m->assigned_ ? m->assigned_->name : "");
  Scope& scope = add_scope(name, members);
  for (Module* m : members) {
    m->move_parameters_to(scope);
    m->assigned_ = &scope;
  }
  return scope;
}

Scope& Module::register_scope(const std::string& name, std::vector<Parameter*> members) {
  for (Module* m : modules())
    std::erase_if(m->own_.parameters,
                  [&](const Parameter* p) { return std::ranges::find(members, p) != members.end(); });
  Scope& scope = add_scope(name, {});
  scope.parameters = std::move(members);
  return scope;
}

// ---- contents

std::vector<Module*> Module::modules() {
  std::vector<Module*> all{this};
  for (const Entry& entry : entries_) {
    if (!entry.part) continue;
    const auto below = entry.part->modules();
    all.insert(all.end(), below.begin(), below.end());
  }
  return all;
}

std::vector<Parameter*> Module::parameters() {
  std::vector<Parameter*> all;
  for (const Module* m : modules()) all.insert(all.end(), m->parameters_.begin(), m->parameters_.end());
  return all;
}

std::string_view Module::name_from_here(std::string_view full) const {
  return path_.empty() ? full : full.substr(std::min(full.size(), path_.size() + 1));
}

std::vector<std::pair<std::string, Parameter*>> Module::named_parameters() {
  std::vector<std::pair<std::string, Parameter*>> all;
  for (Parameter* p : parameters()) all.emplace_back(name_from_here(p->name), p);
  return all;
}

std::vector<ModuleBuffer*> Module::buffers() {
  std::vector<ModuleBuffer*> all;
  for (const Module* m : modules()) all.insert(all.end(), m->buffers_.begin(), m->buffers_.end());
  return all;
}

void Module::append_scopes(std::vector<const Scope*>& all) {
  if (!own_.parameters.empty()) all.push_back(&own_);
  for (const Entry& entry : entries_) {
    if (entry.part) entry.part->append_scopes(all);
    if (entry.scope && !entry.scope->parameters.empty()) all.push_back(entry.scope);
  }
}

std::vector<const Scope*> Module::scopes() {
  std::vector<const Scope*> all;
  append_scopes(all);
  return all;
}

Parameter* Module::find(std::string_view name) {
  for (Parameter* p : parameters())
    if (name_from_here(p->name) == name) return p;
  return nullptr;
}

Module* Module::find_module(std::string_view name) {
  for (Module* m : modules())
    if (m != this && name_from_here(m->path_) == name) return m;
  return nullptr;
}

// ---- modes

void Module::train(bool training) {
  for (Module* m : modules()) m->training_ = training;
}

void Module::checkpoint_activations(bool checkpoint) {
  for (Module* m : modules()) m->checkpoints_ = checkpoint;
}

void Module::requires_grad_(bool requires_grad) {
  for (Parameter* p : parameters()) p->requires_grad = requires_grad;
}

Scope& Module::unit() {
  for (Module* m = this; m; m = m->parent_)
    if (m->assigned_) return *m->assigned_;
  return own_;
}

std::vector<std::pair<std::string, ModuleBuffer*>> persistent_buffers(Module& module) {
  const std::size_t prefix = module.path().empty() ? 0 : module.path().size() + 1;  // and a dot
  std::vector<std::pair<std::string, ModuleBuffer*>> all;
  for (ModuleBuffer* b : module.buffers())
    if (b->persistent) all.emplace_back(b->name.substr(prefix), b);
  return all;
}

// ---- names

namespace {

bool matches_whole(std::string_view text, std::string_view pattern);

/// The pattern begins with "{a,b}".
bool matches_either(std::string_view text, std::string_view pattern) {
  const std::size_t end = pattern.find('}');
  require(end != pattern.npos, Errc::invalid_argument, "pattern ", pattern, ": { is without }");
  const std::string rest(pattern.substr(end + 1));
  for (std::size_t at = 1, next; at <= end; at = next + 1) {
    next = std::min(pattern.find(',', at), end);
    if (matches_whole(text, std::string(pattern.substr(at, next - at)) + rest)) return true;
  }
  return false;
}

/// `*` stands for any characters but dots.
bool matches_whole(std::string_view text, std::string_view pattern) {
  if (pattern.empty()) return text.empty();
  if (pattern.front() == '{') return matches_either(text, pattern);
  if (pattern.front() != '*')
    return !text.empty() && text.front() == pattern.front() &&
           matches_whole(text.substr(1), pattern.substr(1));
  for (std::size_t n = 0;; ++n) {
    if (matches_whole(text.substr(n), pattern.substr(1))) return true;
    if (n == text.size() || text[n] == '.') return false;
  }
}

}  // namespace

bool matches_name(std::string_view name, std::string_view pattern) {
  if (matches_whole(name, pattern)) return true;
  for (std::size_t dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1))
    if (matches_whole(name.substr(dot + 1), pattern)) return true;
  return false;
}

bool matches_part(std::string_view name, std::string_view pattern) {
  for (std::size_t dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1))
    if (matches_name(name.substr(0, dot), pattern)) return true;
  return matches_name(name, pattern);
}

EvalMode::EvalMode(Module& module) {
  for (Module* m : module.modules()) before_.emplace_back(m, m->training());
  module.eval();
}

EvalMode::~EvalMode() {
  // A module precedes its parts, which then get their own mode.
  for (const auto& [module, training] : before_) module->train(training);
}

void require_distinct_names(std::span<Parameter* const> parameters) {
  std::set<std::string_view> names;
  for (const Parameter* p : parameters)
    require(names.insert(p->name).second, Errc::invalid_argument, "two parameters are called ", p->name,
            "; give every layer a name of its own");
}

}  // namespace rz
