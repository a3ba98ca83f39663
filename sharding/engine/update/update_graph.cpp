#include "sharding/engine/update/update_graph.h"

namespace rz {

namespace {
constexpr int warmup_updates = 3;  // memory settles in the second update after buckets were rebuilt
}

bool UpdateGraph::run(const Stream& stream, bool may_capture, const std::function<void()>& update) {
  if (!may_capture || uncaptured_updates_ < warmup_updates) {
    update();
    ++uncaptured_updates_;
    return false;
  }
  if (!graph_.defined()) graph_ = capture(stream, update);
  graph_.launch(stream);
  return true;
}

void UpdateGraph::drop() {
  graph_ = {};
  uncaptured_updates_ = 0;
}

}  // namespace rz
