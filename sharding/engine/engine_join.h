#pragma once
/// Uneven inputs of an engine: ranks that run out of batches at different times.

#include <cstdint>
#include <deque>
#include <vector>

#include "sharding/engine/engine.h"
#include "sharding/strategy/join.h"

namespace rz {

/// Finds out which ranks still have data; a rank without takes part in the updates of the others:
///
///     rz::Engine::Join join(engine);
///     for (auto b = batches.begin(); join.next(b != batches.end());) {
///       if (join.active()) {
///         engine.backward(loss_of(*b++));
///       } else {
///         join.backward_without_data();
///       }
///       engine.step();
///     }
///
/// As PyTorch's join(), with the options of the section "ringzero.join". Every rank has at least one batch
/// before the first update. One thread per rank. In stage 3 passes gather values on all ranks: run a rank
/// without data on a batch of which all targets are ignored (-100) instead. After an error call
/// Engine::cancel_update() while this object lives: it takes part in the calls of next() that the other ranks
/// still make in the update.
class Engine::Join {
 public:
  /// The engine must outlive this object. Errc::unsupported in stage 3, and Errc::invalid_argument without an
  /// optimizer, unless the configuration disables join.
  explicit Join(Engine&);
  ~Join();
  Join(const Join&) = delete;

  /// Call before each micro-batch. Returns whether any rank has data; whether this one has if the
  /// configuration disables join. Errc::mismatch on all ranks if one has no batch before the first update,
  /// or, with throw_on_early_termination, later. Collective.
  bool next(bool has_data);
  /// Whether this rank has data, as passed to next().
  bool active() const { return active_; }
  /// In place of Engine::backward() where active() is false.
  void backward_without_data() { engine_.updates().backward_without_data(); }
  /// What multiplies a loss without terms, before backward().
  float loss_factor() const { return ranks_.loss_factor(); }

 private:
  Engine& engine_;
  bool enabled_, active_ = false;
  rz::Join ranks_;
  UpdateLoop::Rounds rounds_;
  std::deque<std::vector<std::int32_t>> words_;  // of rounds of cancel_update()
};

}  // namespace rz
