#pragma once
/// Updates as a CUDA graph.

#include <functional>

#include "comm/device/graph.h"
#include "comm/device/stream.h"

namespace rz {

/// Captures updates once they are identical, and replays them.
class UpdateGraph {
 public:
  /// Runs `update`, or replays it if replays(may_capture), after before_launch(). Returns whether it was
  /// replayed.
  bool run(const Stream&, bool may_capture, const std::function<void()>& update,
           const std::function<void()>& before_launch);
  /// Whether the next run() replays the update: it may, and the updates before it have settled.
  bool replays(bool may_capture) const;
  /// True if the last update was replayed.
  bool defined() const { return graph_.defined(); }
  /// Call before operations that may free memory used by the graph.
  void drop();

 private:
  Graph graph_;
  int uncaptured_updates_ = 0;  // updates without a graph since the last change
};

}  // namespace rz
