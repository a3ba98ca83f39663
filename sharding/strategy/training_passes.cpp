#include "sharding/strategy/training_passes.h"

#include <utility>

#include "comm/core/error.h"

namespace rz {

TrainingPasses::TrainingPasses(Module& module, ShardedModel& model, const PassOptions& options,
                               Runtime& runtime)
    : module_(module),
      model_(model),
      runtime_(runtime),
      buffers_(module, options.broadcast_buffers, runtime),
      reduction_(model, options.rules, options.rebuild, runtime),
      follower_(runtime.exposed) {}

ParameterHooks hooks_of(TrainingPasses& passes, std::string owner) {
  ParameterHooks out;
  out.enter = [&passes](const Scope& scope, Pass pass) { passes.enter(scope, pass); };
  out.leave = [&passes](const Scope& scope, Pass pass) { passes.leave(scope, pass); };
  out.before_grad = [&passes](Parameter& p) { passes.gradient_begins(p); };
  out.grad_ready = [&passes](Parameter& p, const Stream& stream) { passes.gradient_ready(p, stream); };
  out.owner = std::move(owner);
  return out;
}

// ---- what runs in a pass

void TrainingPasses::follow(Pass pass) {
  const bool evaluates = pass == Pass::forward && !module_.training();
  if (evaluates || !follower_.enter(pass)) return;
  if (!model_.flat_parameters()) record(UpdateRecord::forward_begins());
  buffers_.broadcast();
}

/// Reductions need no record: a rank makes the rest of them in any case.
bool TrainingPasses::scopes_communicate() const { return model_.flat_parameters() || buffers_.enabled(); }

/// Passes in evaluation mode belong to no update, unless the model trains in it.
void TrainingPasses::record(const Step& step) {
  if (scopes_communicate() && (module_.training() || trains_in_evaluation_)) record_.add(step);
}

/// Unless values are gathered, only the broadcast of buffers, once a forward pass, communicates.
void TrainingPasses::record_scope(const Step& step) {
  if (model_.flat_parameters()) record(step);
}

void TrainingPasses::enter(const Scope& scope, Pass pass) {
  record_scope({.kind = Step::enter, .pass = pass, .scope = &scope});
  follow(pass);
  model_.values().enter(scope, pass);
  reduction_.enter(scope, pass);
}

void TrainingPasses::leave(const Scope& scope, Pass pass) {
  record_scope({.kind = Step::leave, .pass = pass, .scope = &scope});
  model_.values().leave(scope, pass);
  follower_.leave(pass);
  if (pass == Pass::backward) reduction_.leave(scope, state_.reducing());
}

void TrainingPasses::gradient_begins(const Parameter& p) {
  const int member = model_.parameters().member_of(p);
  require(member >= 0, Errc::invalid_argument, "a gradient for ", p.name,
          ", which was frozen or not part of the model when the strategy was made");
  state_.require_begun();
  record({.kind = Step::touch, .member = member});
  reduction_.gradient_begins(member);
}

void TrainingPasses::gradient_ready(const Parameter& p, const Stream& stream) {
  if (!state_.reducing()) return;
  const int member = model_.parameters().member_of(p);
  if (model_.flat_parameters()) record({.kind = Step::ready, .member = member});
  reduction_.gradient_ready(member, stream);
}

// ---- calls of an update

void TrainingPasses::begin_backward(bool synchronise) {
  state_.require_may_begin();
  model_.parameters().require_trainable("backward()");
  const bool reopens = state_.reduced();
  reduction_.begin_pass(state_.would_reduce(synchronise));
  trains_in_evaluation_ = !module_.training();
  record({.kind = Step::begin, .synchronises = state_.would_reduce(synchronise)});
  state_.begin(synchronise);
  follower_.begin_backward();
  if (reopens) model_.gradients().reopen(runtime_.stream);
}

void TrainingPasses::begin_without_data(bool synchronise) {
  follow(Pass::forward);
  begin_backward(synchronise);
  reduction_.check().set_without_data();
}

void TrainingPasses::finish(const Stream& stream, int counted) {
  state_.require_may_finish();
  record({.kind = Step::finish});
  follower_.end_backward();
  reduction_.agreement().set_counted(counted);
  reduction_.finish(stream, false);
  state_.reset();
}

/// As a rank that computes nothing.
void TrainingPasses::take_part(const Step& step) {
  switch (step.kind) {
    case Step::enter:
      return step.scope ? enter(*step.scope, step.pass) : follow(step.pass);
    case Step::leave:
      return leave(*step.scope, step.pass);
    case Step::begin:
      state_.begin(step.synchronises);
      follower_.begin_backward();
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

void TrainingPasses::cancel(const Stream& stream, int passes) {
  state_.require_may_cancel();
  take_part(passes);
  reduction_.finish(stream, true);
  follower_.abandon();
}

void TrainingPasses::abandon() {
  reduction_.abandon();
  follower_.abandon();
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
  follower_.end_step();
}

}  // namespace rz
