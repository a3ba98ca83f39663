#include "sharding/strategies/passes/training_passes.h"

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
  if (!evaluates && follower_.enter(pass)) buffers_.broadcast();
}

void TrainingPasses::enter(const Scope& scope, Pass pass) {
  follow(pass);
  model_.values().enter(scope, pass);
  reduction_.enter(scope, pass);
}

void TrainingPasses::leave(const Scope& scope, Pass pass) {
  model_.values().leave(scope, pass);
  follower_.leave(pass);
  if (pass == Pass::backward) reduction_.leave(scope, state_.reducing());
}

void TrainingPasses::gradient_begins(const Parameter& p) {
  const int member = model_.parameters().member_of(p);
  require(member >= 0, Errc::invalid_argument, "a gradient for ", p.name,
          ", which was frozen or not part of the model when the strategy was made");
  state_.require_begun();
  reduction_.gradient_begins(member);
}

void TrainingPasses::gradient_ready(const Parameter& p, const Stream& stream) {
  if (state_.reducing()) reduction_.gradient_ready(model_.parameters().member_of(p), stream);
}

// ---- calls of an update

void TrainingPasses::begin_backward(bool synchronise) {
  state_.require_may_begin();
  model_.parameters().require_trainable("begin_backward()");
  const bool reopens = state_.reduced();
  state_.begin(synchronise);
  follower_.begin_backward();
  reduction_.begin_pass(state_.reducing());
  if (reopens) model_.gradients().reopen(runtime_.stream);
}

void TrainingPasses::begin_without_data(bool synchronise) {
  follow(Pass::forward);
  begin_backward(synchronise);
  reduction_.check().set_without_data();
}

void TrainingPasses::finish(const Stream& stream, bool terms_counted) {
  state_.require_may_finish();
  follower_.end_backward();
  reduction_.agreement().set_terms_counted(terms_counted);
  reduction_.finish(stream, false);
  state_.reset();
}

void TrainingPasses::cancel(const Stream& stream) {
  state_.require_may_cancel();
  reduction_.finish(stream, true);
  follower_.abandon();
}

void TrainingPasses::reset() {
  reduction_.reset();
  model_.values().release();  // a pass that failed may have left scopes open
  state_.reset();
}

void TrainingPasses::end_step() {
  runtime_.exposed.end_step();
  reduction_.end_step();
  follower_.end_step();
}

}  // namespace rz
