#pragma once
/// Updates as a CUDA graph.

#include <functional>

#include "comm/device/graph.h"
#include "comm/device/stream.h"

namespace rz {

/// Captures updates once they are identical, and replays them.
class UpdateGraph {
 public:
  /// Runs `update`, or replays it if `may_capture` and the updates before it have settled. Returns whether it
  /// was replayed.
  bool run(const Stream&, bool may_capture, const std::function<void()>& update);
  /// True if the last update was replayed.
  bool defined() const { return graph_.defined(); }
  /// Call before operations that may free memory used by the graph.
  void drop();

 private:
  Graph graph_;
  int uncaptured_updates_ = 0;  // updates without a graph since the last change
};

}  // namespace rz
