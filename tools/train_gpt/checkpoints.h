#pragma once
/// Checkpoints of a run of train_gpt.

#include <cstdint>
#include <optional>
#include <string>

#include "sharding/engine/engine.h"
#include "sharding/signals/save_requests.h"
#include "sharding/signals/signal_handler.h"

namespace rz::train_gpt {

struct CheckpointFlags {
  std::string resume;  ///< folder; empty: the run starts afresh
  std::string dir;     ///< folder of checkpoints; empty: that of `resume`
  std::int64_t save_steps = 0;
  std::int64_t save_minutes = 0;
  std::int64_t save_total_limit = 0;
  bool async = false;

  /// Empty: none are saved.
  const std::string& folder() const { return dir.empty() ? resume : dir; }
};

/// Saves a run when its flags, a signal, or the end of its allocation request it. Its functions are
/// collective. The engine must outlive it.
class Checkpoints {
 public:
  Checkpoints(Engine&, const CheckpointFlags&);

  /// Loads the last checkpoint of --resume; if there is none, the run starts afresh.
  void resume();
  /// Call after each update. Returns whether the run is to stop.
  bool after_update();
  /// Call at the end of the run: saves what was not saved.
  void finish();

 private:
  void save(bool async);

  Engine& engine_;
  CheckpointFlags flags_;
  std::optional<SignalHandler> handler_;
  std::optional<SaveRequests> requests_;
  std::int64_t saved_ = 0;  // updates in the last checkpoint
};

}  // namespace rz::train_gpt
