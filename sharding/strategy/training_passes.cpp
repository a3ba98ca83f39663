#include "sharding/strategy/training_passes.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"
#include "sharding/parallel/rank_consistency.h"

namespace rz {

// ---- hooks

InstalledHooks::InstalledHooks(std::span<Parameter* const> parameters, TrainingPasses& passes,
                               std::string owner)
    : parameters_(parameters.begin(), parameters.end()) {
  for (const Parameter* p : parameters_)
    require(!p->hooks, Errc::invalid_argument, "parameter ", p->name, " is managed by ",
            p->hooks ? p->hooks->owner : "", "; destroy that before ", owner, " is made for it");
  hooks_.enter = [&passes](const Scope& scope, Pass pass) { passes.enter(scope, pass); };
  hooks_.leave = [&passes](const Scope& scope, Pass pass) { passes.leave(scope, pass); };
  hooks_.before_grad = [&passes](Parameter& p) { passes.gradient_begins(p); };
  hooks_.grad_ready = [&passes](Parameter& p, const Stream& stream) { passes.gradient_ready(p, stream); };
  hooks_.owner = std::move(owner);
  for (Parameter* p : parameters_) p->hooks = &hooks_;
}

InstalledHooks::~InstalledHooks() {
  for (Parameter* p : parameters_) p->hooks = nullptr;
}

TrainingPasses::TrainingPasses(Module& module, ShardedModel& model, Runtime& runtime)
    : module_(module),
      model_(model),
      runtime_(runtime),
      state_(model.parameters().members().size(), runtime.exposed),
      rules_(model.options(), state_, model.parameters(), runtime.communicator),
      reduction_(model, state_, rules_, runtime) {
  if (model.options().broadcast_buffers) buffers_ = module.buffers();
}

// ---- what runs in a pass

void TrainingPasses::follow(Pass pass) {
  const bool evaluates = pass == Pass::forward && !module_.training();
  if (evaluates || !state_.enter(pass)) return;
  broadcast_buffers();
}

void TrainingPasses::broadcast_buffers() {
  if (buffers_.empty()) return;
  std::vector<Tensor> values;
  for (const ModuleBuffer* buffer : buffers_) {
    values.push_back(buffer->value);
    if (runtime_.data.size() > 1 && buffer->value.bytes() > 0)
      runtime_.traffic_of(runtime_.data).broadcast.add(buffer->value.bytes());
  }
  rz::broadcast_buffers(values, runtime_.data, runtime_.stream);
}

ScopeUse TrainingPasses::use_of(const Scope& scope, Pass pass) {
  FlatParameters* const flat = model_.flat_parameters();
  return {scope, pass, flat ? std::span<const int>(flat->of(scope)) : std::span<const int>()};
}

void TrainingPasses::enter(const Scope& scope, Pass pass) {
  follow(pass);
  const ScopeUse use = use_of(scope, pass);
  model_.values().enter(use);
  reduction_.enter(use);
}

void TrainingPasses::leave(const Scope& scope, Pass pass) {
  const ScopeUse use = use_of(scope, pass);
  model_.values().leave(use);
  state_.leave(pass);
  if (pass == Pass::backward) reduction_.leave(use);
}

void TrainingPasses::gradient_begins(const Parameter& p) {
  const int member = model_.parameters().member_of(p);
  require(member >= 0, Errc::invalid_argument, "a gradient for ", p.name,
          ", which was frozen or not part of the model when the strategy was made");
  state_.require_begun();
  state_.mark_used(member);
  reduction_.gradient_begins(member);
}

void TrainingPasses::gradient_ready(const Parameter& p, const Stream& stream) {
  if (!state_.reducing()) return;
  const int member = model_.parameters().member_of(p);
  state_.mark_ready(member);
  reduction_.gradient_ready(member, stream);
}

// ---- calls of an update

void TrainingPasses::begin_backward(bool synchronise) {
  state_.require_may_begin();
  model_.parameters().require_trainable("backward()");
  const bool reopens = state_.reduced();
  reduction_.begin_pass(synchronise && state_.synchronises());  // may refuse it
  state_.begin_backward(synchronise);
  if (reopens) model_.gradients().reopen(runtime_.stream);
}

void TrainingPasses::begin_without_data(bool synchronise) {
  follow(Pass::forward);
  begin_backward(synchronise);
  state_.set_without_data();
}

void TrainingPasses::finish(const Stream& stream, int counted) {
  state_.require_may_finish();
  state_.end_backward();
  rules_.set_counted(counted);
  reduction_.finish(stream);
  state_.end_reductions();
}

void TrainingPasses::drop() {
  reduction_.drop();
  rules_.restart();
  model_.values().restart();
  state_.abandon();
}

void TrainingPasses::reset() {
  reduction_.reset();
  model_.values().release();  // a pass that failed may have left scopes open
  state_.reset();
}

void TrainingPasses::end_step() {
  runtime_.exposed.end_step();
  reduction_.end_step();
  state_.end_step();
}

}  // namespace rz
