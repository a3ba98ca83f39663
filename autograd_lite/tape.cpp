#include "autograd_lite/tape.h"

#include <algorithm>
#include <chrono>
#include <unordered_map>

#include "autograd_lite/bump_allocator.h"
#include "comm/device/caching_allocator.h"
#include "tensor/ops.h"

namespace rz {
namespace {

/// Per-parameter state of one pass. Entries are kept between passes, so that the table stops growing.
struct Use {
  Parameter* parameter = nullptr;
  std::uint32_t pass = 0;
  int pending = 0;     ///< recorded uses that have not run backward
  bool begun = false;  ///< a gradient was written in this pass
};

enum class Kind : std::uint8_t { constant, variable, parameter, output };

struct Value {
  Kind kind = Kind::constant;
  bool needs_grad = false;
  Use* use = nullptr;
  Tensor tensor, grad;
  int view = -1;  ///< index in State::views, or -1
};

/// A parameter's memory in another shape, or a copy of it in another dtype. It holds no reference to that
/// memory outside the parameter's scopes.
struct View {
  int value;
  Var parameter;
  Shape shape;
  DType dtype;
};

/// Casts of parameters, each kept while the scope that made it is the innermost one.
class CastCache {
 public:
  void enter_scope() { outer_.push_back(std::exchange(begin_, casts_.size())); }
  void leave_scope() {
    forget();
    begin_ = outer_.back();
    outer_.pop_back();
  }
  /// Forgets those of the innermost scope.
  void forget() { casts_.resize(begin_); }
  void clear() {
    casts_.clear();
    outer_.clear();
    begin_ = 0;
  }
  void add(const Parameter& p, DType dtype, Var result) { casts_.push_back({&p, dtype, result}); }
  /// The cast of the innermost scope whose result is accepted; undefined if there is none.
  template <class F>
  Var find(const Parameter& p, DType dtype, const F& accepts) const {
    for (std::size_t i = begin_; i < casts_.size(); ++i)
      if (casts_[i].parameter == &p && casts_[i].dtype == dtype && accepts(casts_[i].result))
        return casts_[i].result;
    return {};
  }

 private:
  struct Cast {
    const Parameter* parameter;
    DType dtype;
    Var result;
  };
  std::vector<Cast> casts_;
  std::size_t begin_ = 0;           // the first cast of the innermost scope
  std::vector<std::size_t> outer_;  // those of the scopes around it
};

/// Calls f once for the hooks of each owner of parameters of the scope.
template <class F>
void for_each_hooks(const Scope& scope, const F& f) {
  const auto& parameters = scope.parameters;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ParameterHooks* const hooks = parameters[i]->hooks;
    const auto is_same = [&](const Parameter* p) { return p->hooks == hooks; };
    const auto here = parameters.begin() + static_cast<std::ptrdiff_t>(i);
    if (hooks && std::none_of(parameters.begin(), here, is_same)) f(*hooks);
  }
}

}  // namespace

struct Tape::State {
  State(Tape& tape, Stream s, BufferPool p) : tape(&tape), stream(std::move(s)), pool(std::move(p)) {}

  /// An operator, or the begin or end of a scope.
  struct Node {
    enum Type : std::uint8_t { op, scope_begin, scope_end } type = op;
    int output = -1;
    const Scope* scope = nullptr;
    Captured backward{};
    std::span<const Var> inputs;
    BumpAllocator::Position begin;  ///< of its memory in the arena
    bool overlaps = false;          ///< mark_overlaps()
  };

  Tape* tape;
  Stream stream;
  BufferPool pool;
  std::vector<Value> values;
  std::vector<View> views;
  std::vector<Node> nodes;
  BumpAllocator arena;
  BumpAllocator::Position recorded;  ///< end of the last node's memory
  std::unordered_map<const Parameter*, Use> uses;
  std::vector<const Scope*> open;  ///< innermost last
  /// Parameters used by the first runs of checkpoints in progress, and the nesting depth of these.
  std::vector<Parameter*> checkpointed_parameters;
  int checkpoint_depth = 0;
  std::vector<Var> checkpoint_inputs;
  std::optional<DType> autocast;
  CastCache casts;

  std::uint32_t pass = 1;
  bool no_grad = false;
  bool ran_backward = false;
  int loss = -1;
  Node* running = nullptr;
  Captured deferred{};      ///< of the operator that ran before
  std::size_t down_to = 0;  ///< of run_backward()
  std::uint64_t seed = 0, next_random = 0;
  const std::uint64_t* seed_at = nullptr;
  Profile* profile = nullptr;
  std::chrono::steady_clock::time_point charged;  ///< until when time is in the profile
  bool charges = false;                           ///< the pass has entered a scope

  bool profiles() const { return profile && !no_grad; }
  bool recording() const { return !no_grad && checkpoint_depth == 0; }

  const Value& at(Var v) const { return const_cast<State*>(this)->at(v); }
  Value& at(Var v) {
    require(v.defined(), Errc::invalid_argument, "an operator was given a Var that stands for no value");
    require(v.pass == pass && static_cast<std::size_t>(v.index) < values.size(), Errc::invalid_argument,
            "a Var of another pass or tape was used: handles end with Tape::reset()");
    return values[static_cast<std::size_t>(v.index)];
  }
  Var add(Value value) {
    values.push_back(std::move(value));
    return {static_cast<int>(values.size()) - 1, pass, tape};
  }

  Use& use_of(Parameter& p) {
    Use& use = uses[&p];
    if (use.pass != pass) use = {&p, pass, 0, false};
    return use;
  }

  void enter(const Scope& scope, Pass direction) {
    if (profiles()) charge_time();
    for_each_hooks(scope, [&](const ParameterHooks& hooks) {
      if (hooks.enter) hooks.enter(scope, direction);
    });
    open.push_back(&scope);
    casts.enter_scope();
  }
  void leave(const Scope& scope, Pass direction) {
    if (profiles()) charge_time();
    open.pop_back();
    casts.leave_scope();
    drop_views([](const Parameter& p, DType dtype) { return p.value.defined() && p.value.dtype() == dtype; });
    for_each_hooks(scope, [&](const ParameterHooks& hooks) {
      if (hooks.leave) hooks.leave(scope, direction);
    });
    drop_views([](const Parameter& p, DType) { return !p.value.defined(); });
  }

  /// The time since the last call is that of the innermost scope; before the first scope of a pass, of none.
  void charge_time() {
    stream.synchronize();
    const auto before = std::exchange(charged, std::chrono::steady_clock::now());
    if (!std::exchange(charges, true)) return;
    Cost& cost = (*profile)[open.empty() ? "" : open.back()->name];
    (ran_backward ? cost.backward_seconds : cost.forward_seconds) +=
        std::chrono::duration<double>(charged - before).count();
  }

  /// The module whose weight it is, if that is in the innermost scope; else the scope.
  std::string part_of_profile(Var weight) const {
    const std::string scope = open.empty() ? "" : open.back()->name;
    if (!weight.defined()) return scope;
    const Value* value = &at(weight);
    if (value->view >= 0) value = &at(views[static_cast<std::size_t>(value->view)].parameter);
    if (!value->use) return scope;
    const std::string& name = value->use->parameter->name;
    const std::size_t dot = name.rfind('.');
    if (dot == name.npos) return scope;
    const std::string module = name.substr(0, dot);
    return scope == "model" || module.starts_with(scope + ".") ? module : scope;
  }

  /// Forgets the tensors of views for which f(parameter, dtype of the view) holds.
  template <class F>
  void drop_views(const F& f) {
    for (const View& view : views)
      if (f(*at(view.parameter).use->parameter, view.dtype))
        values[static_cast<std::size_t>(view.value)].tensor = {};
  }

  void drop_values_from(std::size_t first) {
    values.resize(first);
    while (!views.empty() && static_cast<std::size_t>(views.back().value) >= first) views.pop_back();
  }

  /// Ends the node's uses of parameters. Parameters without pending uses have complete gradients.
  void finish_uses(Node& node) {
    for (Var v : std::exchange(node.inputs, {})) {
      if (!v.defined() || !at(v).use || !at(v).needs_grad) continue;
      Use& use = *at(v).use;
      if (--use.pending != 0 || !use.begun) continue;
      const ParameterHooks* const hooks = use.parameter->hooks;
      if (hooks && hooks->grad_ready) hooks->grad_ready(*use.parameter, stream);
    }
  }

  void destroy(const Node& node) {
    if (node.type == Node::op) node.backward.destroy(node.backward.object);
  }
  void release_memory(const Node& node) {
    arena.rewind(node.begin);
    recorded = node.begin;
  }
};

Tape::Tape(Stream stream, BufferPool pool)
    : state_(std::make_unique<State>(*this, std::move(stream), std::move(pool))) {
  // Starts at a different number in each tape, so that a handle of another tape is detected.
  state_->pass = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(state_.get()) >> 4) | 1u;
}

namespace {

BufferPool pool_on(const Stream& stream) {
  if (stream.device().kind == Device::host) return BufferPool();
  return BufferPool(CachingAllocator(allocator_on(stream.device())).on(stream));
}

}  // namespace

Tape::Tape(const Stream& stream) : Tape(stream, pool_on(stream)) {}

Tape::~Tape() {
  for (const auto& node : state_->nodes) state_->destroy(node);
}

const Stream& Tape::stream() const { return state_->stream; }
BufferPool& Tape::pool() { return state_->pool; }
Tensor Tape::empty(const Shape& shape, DType dtype) { return state_->pool.empty(shape, dtype); }

// ---- leaves

Var Tape::constant(Tensor t) { return state_->add({Kind::constant, false, nullptr, std::move(t), {}}); }

Var Tape::variable(Tensor t) {
  return state_->add({Kind::variable, state_->recording(), nullptr, std::move(t), {}});
}

Var Tape::parameter(Parameter& p) {
  Use& use = state_->use_of(p);
  if (state_->checkpoint_depth > 0 && p.requires_grad) state_->checkpointed_parameters.push_back(&p);
  return state_->add({Kind::parameter, p.requires_grad && state_->recording(), &use, {}, {}});
}

const Tensor& Tape::value(Var v) const {
  Value& value = state_->at(v);
  if (value.view >= 0 && !value.tensor.defined()) {
    const View& view = state_->views[static_cast<std::size_t>(value.view)];
    const Tensor now = this->value(view.parameter).reshape(view.shape);
    if (now.dtype() == view.dtype) {
      value.tensor = now;
    } else {
      value.tensor = state_->pool.empty(view.shape, view.dtype);
      ops::copy(value.tensor, now, state_->stream);
    }
  }
  if (value.kind != Kind::parameter) {
    require(value.tensor.defined(), Errc::invalid_argument, "a value was read after backward() had freed it");
    return value.tensor;
  }
  const Parameter& p = *value.use->parameter;
  if (p.value.defined()) return p.value;
  const Scope* scope = state_->open.empty() ? nullptr : state_->open.back();
  const bool listed =
      scope && std::find(scope->parameters.begin(), scope->parameters.end(), &p) != scope->parameters.end();
  fail(Errc::invalid_argument, "parameter ", p.name, " has no value ",
       scope ? concat("in scope ", scope->name) : "outside of any scope",
       listed ? ": its model was not prepared; call initialize() or make_strategy() for "
                "it, or allocate_parameters()"
              : ": use it in Module::in_scope(), or list it in the scope that uses it");
}

bool Tape::needs_grad(Var v) const { return v.defined() && state_->at(v).needs_grad; }

// ---- recording

void* Tape::allocate(std::size_t bytes, std::size_t alignment) {
  return state_->arena.allocate(bytes, alignment);
}

bool Tape::needs_node(std::span<const Var> inputs) const {
  return state_->recording() &&
         std::any_of(inputs.begin(), inputs.end(), [this](Var v) { return needs_grad(v); });
}

Var Tape::add_value(Tensor output) {
  return state_->add({Kind::output, false, nullptr, std::move(output), {}});
}

std::span<const Var> Tape::keep(std::span<const Var> vars) {
  auto* const kept = static_cast<Var*>(allocate(vars.size_bytes(), alignof(Var)));
  std::uninitialized_copy(vars.begin(), vars.end(), kept);
  return {kept, vars.size()};
}

Var Tape::add_node(Tensor output, std::span<const Var> inputs, const Captured& backward) {
  State& s = *state_;
  for (Var v : inputs) {
    if (needs_grad(v) && s.at(v).use) ++s.at(v).use->pending;
  }
  const Var result = s.add({Kind::output, true, nullptr, std::move(output), {}});
  s.nodes.push_back({State::Node::op, result.index, nullptr, backward, inputs, s.recorded});
  s.recorded = s.arena.position();
  return result;
}

// ---- gradients

Tape::GradTarget Tape::grad_target(Var v) {
  if (!needs_grad(v)) return {};
  State& s = *state_;
  if (Use* use = s.at(v).use) {
    Parameter& p = *use->parameter;
    if (!std::exchange(use->begun, true)) {
      const bool managed = p.hooks && p.hooks->before_grad;
      if (managed) p.hooks->before_grad(p);
      if (!p.grad.defined()) {
        require(!managed, Errc::invalid_argument, "parameter ", p.name,
                " has no gradient memory: before_grad must give it some");
        p.grad = empty(p.shape, value(v).dtype());
        p.grad_is_fresh = true;
      }
    }
    return {p.grad, !std::exchange(p.grad_is_fresh, false)};
  }
  Value& value = s.at(v);
  if (!value.grad.defined()) {
    const Tensor& like = this->value(v);
    value.grad = empty(like.shape(), like.dtype());
    return {value.grad, false};
  }
  if (value.grad.use_count() != 1) {
    // The memory is shared: accumulate_grad() kept a tensor that its operator passed elsewhere, too.
    Tensor own = empty(value.grad.shape(), value.grad.dtype());
    ops::copy(own, value.grad, s.stream);
    value.grad = std::move(own);
  }
  return {value.grad, true};
}

Tensor Tape::converted_for(const GradTarget& target, const Tensor& d) {
  if (!target.tensor.defined() || target.tensor.dtype() == d.dtype()) return d;
  const Tensor converted = empty(d.shape(), target.tensor.dtype());
  ops::copy(converted, d, state_->stream);
  return converted;
}

void Tape::write_grad(const GradTarget& target, const Tensor& d) {
  if (target.accumulate)
    ops::add_scaled(target.tensor, converted_for(target, d), 1, state_->stream);
  else
    ops::copy(target.tensor, d, state_->stream);
}

void Tape::accumulate_grad(Var v, Tensor d) {
  if (!needs_grad(v)) return;
  Value& value = state_->at(v);
  if (!value.use && !value.grad.defined()) {
    value.grad = std::move(d);
    return;
  }
  if (!value.use && value.grad.use_count() != 1) {
    Tensor sum = empty(d.shape(), d.dtype());
    ops::add(sum, value.grad, d, state_->stream);
    value.grad = std::move(sum);
    return;
  }
  write_grad(grad_target(v), d);
}

Tensor Tape::take_grad(Var output) { return std::exchange(state_->at(output).grad, {}); }

bool Tape::is_parameter_memory(Var v) const {
  const Value& value = state_->at(v);
  return value.kind == Kind::parameter || value.view >= 0;
}

void Tape::mark_view(Var output, Var input) {
  State& s = *state_;
  const int of = s.at(input).view;
  const Var parameter = of >= 0 ? s.views[static_cast<std::size_t>(of)].parameter : input;
  Value& value = s.at(output);
  value.view = static_cast<int>(s.views.size());
  s.views.push_back({output.index, parameter, value.tensor.shape(), value.tensor.dtype()});
}

bool Tape::can_reuse(Var v) const {
  const Value& value = state_->at(v);
  return value.kind == Kind::output && !is_parameter_memory(v) && value.tensor.use_count() == 2;
}

// ---- autocast

void Tape::set_autocast(std::optional<DType> dtype) {
  require(!dtype || *dtype == DType::f16 || *dtype == DType::bf16, Errc::invalid_argument, "autocast to ",
          dtype ? name(*dtype) : "", ", expected f16 or bf16");
  restore_autocast(dtype);
}

void Tape::restore_autocast(std::optional<DType> dtype) {
  state_->autocast = dtype;
  state_->casts.forget();
}

std::optional<DType> Tape::autocast() const { return state_->autocast; }

Var Tape::cached_cast(Var parameter, DType dtype) const {
  const State& s = *state_;
  const Value& value = s.at(parameter);
  if (!value.use) return {};
  return s.casts.find(*value.use->parameter, dtype,
                      [&](Var cast) { return s.at(cast).needs_grad == value.needs_grad; });
}

void Tape::cache_cast(Var parameter, Var cast) {
  const Value& value = state_->at(parameter);
  if (value.use) state_->casts.add(*value.use->parameter, this->value(cast).dtype(), cast);
}

// ---- structure

bool Tape::is_open(const Scope& scope) const {
  return std::ranges::find(state_->open, &scope) != state_->open.end();
}

void Tape::open_scope(const Scope& scope) {
  state_->enter(scope, Pass::forward);
  state_->nodes.push_back({State::Node::scope_begin, -1, &scope, {}, {}, state_->recorded});
}

void Tape::close_scope(const Scope& scope) {
  auto& nodes = state_->nodes;
  if (nodes.back().type == State::Node::scope_begin && nodes.back().scope == &scope) {
    nodes.pop_back();  // the scope recorded nothing
  } else {
    nodes.push_back({State::Node::scope_end, -1, &scope, {}, {}, state_->recorded});
  }
  state_->leave(scope, Pass::forward);
}

bool Tape::is_open(const Parameter& p) const {
  return std::ranges::any_of(state_->open, [&](const Scope* scope) {
    return std::ranges::find(scope->parameters, &p) != scope->parameters.end();
  });
}

bool Tape::is_grad_enabled() const { return !state_->no_grad; }

Tape::CheckpointForward Tape::begin_checkpoint_forward(const Scope& scope) {
  State& s = *state_;
  s.enter(scope, Pass::forward);
  ++s.checkpoint_depth;
  return {&scope, s.values.size(), s.next_random};
}

std::vector<Var>& Tape::checkpoint_inputs() { return state_->checkpoint_inputs; }

Tensor Tape::end_checkpoint_forward(const CheckpointForward& r, Var result, Var input,
                                    std::vector<Var>& inputs) {
  State& s = *state_;
  Tensor output = value(result);
  s.drop_values_from(r.values);
  --s.checkpoint_depth;
  s.leave(*r.scope, Pass::forward);

  inputs.assign(1, input);
  if (s.checkpoint_depth > 0) return output;  // the outer checkpoint collects its parameters
  for (Parameter* p : s.checkpointed_parameters) inputs.push_back(parameter(*p));
  s.checkpointed_parameters.clear();
  return output;
}

Tape::CheckpointBackward Tape::begin_checkpoint_backward(const Scope& scope, std::uint64_t random,
                                                         std::optional<DType> autocast) {
  State& s = *state_;
  s.enter(scope, Pass::backward);
  return {&scope, s.values.size(), s.nodes.size(), std::exchange(s.next_random, random),
          std::exchange(s.autocast, autocast)};
}

void Tape::end_checkpoint_backward(const CheckpointBackward& r, Var result, const Tensor& d_out) {
  State& s = *state_;
  s.next_random = r.random;
  s.autocast = r.autocast;
  s.finish_uses(*s.running);  // from here on, the operators of the second run count as uses
  accumulate_grad(result, d_out);
  run_backward(r.nodes);
  s.drop_values_from(r.values);
  s.leave(*r.scope, Pass::backward);
}

Tape::NoGrad::NoGrad(Tape& tape) : tape_(tape), before_(std::exchange(tape.state_->no_grad, true)) {}
Tape::NoGrad::~NoGrad() { tape_.state_->no_grad = before_; }

// ---- profiles

void Tape::set_profile(Profile* profile) {
  state_->profile = profile;
  state_->charges = false;
}

bool Tape::profiles() const { return state_->profiles(); }

void Tape::count_macs(std::uint64_t macs, Var weight) {
  State& s = *state_;
  if (!s.profiles()) return;
  Cost& cost = (*s.profile)[s.part_of_profile(weight)];
  (s.ran_backward ? cost.backward_macs : cost.forward_macs) += macs;
}

// ---- running

void Tape::mark_overlaps(Var output) {
  auto& nodes = state_->nodes;
  if (!nodes.empty() && nodes.back().output == output.index) nodes.back().overlaps = true;
}

bool Tape::can_defer(Var input) const {
  const auto& nodes = state_->nodes;
  return nodes.size() > state_->down_to && nodes.back().overlaps && nodes.back().output == input.index;
}

void Tape::set_deferred(const Captured& f) { state_->deferred = f; }

void Tape::run_deferred() {
  const Captured f = std::exchange(state_->deferred, {});
  if (!f.object) return;
  const std::unique_ptr<void, void (*)(void*)> captured(f.object, f.destroy);
  f.run(f.object, *this, {});
}

void Tape::run_backward(std::size_t down_to) {
  State& s = *state_;
  State::Node* const outer = s.running;
  const std::size_t outer_down_to = std::exchange(s.down_to, down_to);
  while (s.nodes.size() > down_to) {
    State::Node node = s.nodes.back();
    s.nodes.pop_back();
    if (node.type == State::Node::scope_end) {
      s.enter(*node.scope, Pass::backward);
    } else if (node.type == State::Node::scope_begin) {
      s.leave(*node.scope, Pass::backward);
    } else {
      s.running = &node;
      run_node(node.output, node.backward);
      if (s.deferred.object) {
        State::Node next = s.nodes.back();
        s.nodes.pop_back();
        s.running = &next;
        run_node(next.output, next.backward);
        run_deferred();
        s.running = &node;
        s.finish_uses(node);
        node = next;
      }
      s.finish_uses(node);
    }
    s.running = outer;
    s.release_memory(node);
  }
  s.down_to = outer_down_to;
}

void Tape::run_node(int output, const Captured& backward) {
  // Destroys the captured state in any case, before hooks send the gradients that become complete.
  const std::unique_ptr<void, void (*)(void*)> captured(backward.object, backward.destroy);
  Value& value = state_->values[static_cast<std::size_t>(output)];
  const Tensor d_out = std::exchange(value.grad, {});
  if (output != state_->loss) value.tensor = {};
  if (d_out.defined()) backward.run(backward.object, *this, d_out);
}

void Tape::backward(Var loss, float factor) {
  Tensor d_loss = empty({}, state_->at(loss).tensor.dtype());
  ops::fill(d_loss, factor, state_->stream);
  backward(loss, std::move(d_loss));
}

void Tape::backward(Var loss, Tensor d_loss) {
  State& s = *state_;
  require(!s.ran_backward, Errc::invalid_argument, "backward() ran twice on one recording: reset() the tape");
  const Value& value = s.at(loss);
  if (value.tensor.defined() && value.tensor.count() != 1)
    fail(Errc::invalid_argument, "backward() starts from a scalar, not from ", name(value.tensor.shape()),
         ": take its nn::mean() or nn::sum()");
  require(value.needs_grad && value.kind == Kind::output, Errc::invalid_argument,
          "backward() was given a loss that depends on nothing that requires a gradient");
  if (s.profiles()) s.charge_time();
  s.ran_backward = true;
  s.loss = loss.index;
  d_loss = converted_for({value.tensor, false}, d_loss);
  accumulate_grad(loss, std::exchange(d_loss, {}).reshape(value.tensor.shape()));
  const bool no_grad = std::exchange(s.no_grad, false);
  run_backward(0);
  s.no_grad = no_grad;
  if (s.profiles()) s.charge_time();
}

Tensor Tape::grad(Var v) const {
  const Value& value = state_->at(v);
  return value.kind == Kind::variable ? value.grad : Tensor();
}

void Tape::reset() {
  State& s = *state_;
  for (const auto& node : s.nodes) s.destroy(node);
  s.nodes.clear();
  s.values.clear();
  s.views.clear();
  s.arena.rewind({});
  s.recorded = {};
  s.open.clear();
  s.checkpointed_parameters.clear();
  s.checkpoint_depth = 0;
  s.casts.clear();
  s.running = nullptr;
  if (s.deferred.object) s.deferred.destroy(s.deferred.object);  // an operator has thrown
  s.deferred = {};
  s.down_to = 0;
  s.ran_backward = false;
  s.charges = false;
  s.loss = -1;
  s.next_random = 0;
  ++s.pass;
  s.pool.next_pass();
}

void Tape::seed(std::uint64_t seed) {
  state_->seed = seed;
  state_->seed_at = nullptr;
}
void Tape::seed_at(const std::uint64_t* seed) { state_->seed_at = seed; }
ops::DropoutMask Tape::next_dropout_mask(float p, std::uint64_t count, RankOf part, std::uint64_t run) {
  const auto ranks = static_cast<std::uint64_t>(part.ranks);
  const std::uint64_t begin = next_random_range(count * ranks);
  if (ranks == 1) return {p, state_->seed, begin, state_->seed_at};
  const std::uint64_t offset = begin + static_cast<std::uint64_t>(part.rank) * run;
  return {p, state_->seed, offset, state_->seed_at, run, run * ranks};
}
std::uint64_t Tape::next_random_range(std::uint64_t count) {
  return std::exchange(state_->next_random, state_->next_random + count);
}

}  // namespace rz
