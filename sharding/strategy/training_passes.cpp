#include "sharding/strategy/training_passes.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"
#include "sharding/parallel/rank_consistency.h"

namespace rz {

// ---- the record

namespace {

using Step = UpdateRecord::Step;

void add_visit(std::vector<Step>& to, const Scope& scope, Pass pass) {
  to.push_back({.kind = Step::enter, .pass = pass, .scope = &scope});
  to.push_back({.kind = Step::leave, .pass = pass, .scope = &scope});
}

bool is_gradient(const Step& s) { return s.kind == Step::touch || s.kind == Step::ready; }

}  // namespace

void UpdateRecord::expect(std::span<const Scope* const> scopes, int passes) {
  if (!before_.empty()) return;
  for (int p = 1; p <= passes; ++p) {
    if (scopes.empty()) before_.push_back(forward_begins());
    for (const Scope* s : scopes) add_visit(before_, *s, Pass::forward);
    before_.push_back({.kind = Step::begin, .synchronises = p == passes});
    for (auto s = scopes.rbegin(); s != scopes.rend(); ++s) add_visit(before_, **s, Pass::backward);
  }
  before_.push_back({});
}

std::vector<UpdateRecord::Step> UpdateRecord::rest() const {
  auto from = before_.begin();
  for (const Step& step : now_) {
    if (is_gradient(step)) continue;
    from = std::find_if_not(from, before_.end(), is_gradient);
    if (from == before_.end() || *from != step) return {};
    ++from;
  }
  return {from, std::find_if(from, before_.end(), [](const Step& s) { return s.kind == Step::finish; })};
}

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
  if (!model_.flat_parameters()) record(UpdateRecord::forward_begins());
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

/// Reductions need no record: a rank makes the rest of them in any case.
bool TrainingPasses::scopes_communicate() const { return model_.flat_parameters() || !buffers_.empty(); }

/// Passes in evaluation mode belong to no update, unless the model trains in it.
void TrainingPasses::record(const Step& step) {
  if (scopes_communicate() && (module_.training() || trains_in_evaluation_)) record_.add(step);
}

/// Unless values are gathered, only the broadcast of buffers, once per forward pass, communicates.
void TrainingPasses::record_scope(const Step& step) {
  if (model_.flat_parameters()) record(step);
}

ScopeUse TrainingPasses::use_of(const Scope& scope, Pass pass) {
  FlatParameters* const flat = model_.flat_parameters();
  return {scope, pass, flat ? std::span<const int>(flat->of(scope)) : std::span<const int>()};
}

void TrainingPasses::enter(const Scope& scope, Pass pass) {
  record_scope({.kind = Step::enter, .pass = pass, .scope = &scope});
  follow(pass);
  const ScopeUse use = use_of(scope, pass);
  model_.values().enter(use);
  reduction_.enter(use);
}

void TrainingPasses::leave(const Scope& scope, Pass pass) {
  record_scope({.kind = Step::leave, .pass = pass, .scope = &scope});
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
  record({.kind = Step::touch, .member = member});
  state_.mark_used(member);
  reduction_.gradient_begins(member);
}

void TrainingPasses::gradient_ready(const Parameter& p, const Stream& stream) {
  if (!state_.reducing()) return;
  const int member = model_.parameters().member_of(p);
  if (model_.flat_parameters()) record({.kind = Step::ready, .member = member});
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
  trains_in_evaluation_ = !module_.training();
  record({.kind = Step::begin, .synchronises = state_.reducing()});
  if (reopens) model_.gradients().reopen(runtime_.stream);
}

void TrainingPasses::begin_without_data(bool synchronise) {
  follow(Pass::forward);
  begin_backward(synchronise);
  state_.set_without_data();
}

void TrainingPasses::finish(const Stream& stream, int counted) {
  state_.require_may_finish();
  record({.kind = Step::finish});
  state_.end_backward();
  rules_.set_counted(counted);
  reduction_.finish(stream, false);
  state_.end_reductions();
}

/// Makes the step's collectives as a rank that computes nothing.
void TrainingPasses::take_part(const Step& step) {
  switch (step.kind) {
    case Step::enter:
      return step.scope ? enter(*step.scope, step.pass) : follow(step.pass);
    case Step::leave:
      return leave(*step.scope, step.pass);
    case Step::begin:
      state_.begin_recorded(step.synchronises);
      reduction_.begin_scopes();
      return;
    case Step::touch:
      return reduction_.touch(step.member);
    case Step::ready:
      return reduction_.gradient_ready(step.member, runtime_.stream);
    case Step::finish:
      return;
  }
}

void TrainingPasses::take_part(int passes) {
  if (!scopes_communicate()) return;
  const std::vector<const Scope*> scopes = module_.scopes();
  record_.expect(model_.flat_parameters() ? scopes : std::vector<const Scope*>{}, passes);
  for (const Step& step : record_.rest()) take_part(step);
}

/// Ranks that share layers meet in a barrier: of a rank that does not reach the end of the update, because it
/// waits in a layer for this one, it ends the wait.
void TrainingPasses::cancel(const Stream& stream, int passes) {
  state_.require_may_cancel();
  try {
    const Work all_cancel = meet();
    take_part(passes);
    reduction_.finish(stream, true);
    all_cancel.wait();
  } catch (const Error& e) {
    if (e.code() != Errc::mismatch || !runtime_.mesh.tp()) throw;
    throw Error(e.code(),
                concat("cancel_update(): ranks that share layers (tp ", runtime_.mesh.sizes().tp,
                       ") have passed other layers than this one, and cannot drop the update: ", e.what(),
                       "; start again from the last checkpoint"),
                e.culprit());
  }
  state_.abandon();
}

Work TrainingPasses::meet() { return runtime_.mesh.tp() ? runtime_.mesh.tp()->barrier() : Work(); }

void TrainingPasses::abandon() {
  reduction_.abandon();
  state_.abandon();
}

void TrainingPasses::reset() {
  reduction_.reset();
  model_.values().release();  // a pass that failed may have left scopes open
  state_.reset();
  record_.clear();
}

void TrainingPasses::end_step() {
  record_.end_update();
  runtime_.exposed.end_step();
  reduction_.end_step();
  state_.end_step();
}

}  // namespace rz
