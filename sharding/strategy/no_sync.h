#pragma once
/// Passes that only add to this rank's own gradients.

namespace rz {

class Strategy;

/// While an object of this class lives, passes do not synchronise, whatever the argument of
/// Strategy::begin_backward(), and step() and train_batch() of an engine are errors.
class NoSync {
 public:
  explicit NoSync(Strategy&);
  /// Of the strategy of an engine.
  template <class Engine>
  requires requires(Engine& e) { e.strategy(); }
  explicit NoSync(Engine& engine) : NoSync(engine.strategy()) {}
  ~NoSync();
  NoSync(const NoSync&) = delete;

 private:
  Strategy& strategy_;
};

}  // namespace rz
