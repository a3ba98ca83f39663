#include "sharding/engine/update_graph.h"

namespace rz {

namespace {
constexpr int warmup_updates = 3;  // memory settles in the second update after buckets were rebuilt
}

bool UpdateGraph::replays(bool may_capture) const {
  return may_capture && uncaptured_updates_ >= warmup_updates;
}

bool UpdateGraph::run(const Stream& stream, bool may_capture, const std::function<void()>& update,
                      const std::function<void()>& before_launch) {
  if (!replays(may_capture)) {
    update();
    ++uncaptured_updates_;
    return false;
  }
  if (!graph_.defined()) graph_ = capture(stream, update);
  before_launch();
  graph_.launch(stream);
  return true;
}

void UpdateGraph::drop() {
  graph_ = {};
  uncaptured_updates_ = 0;
}

}  // namespace rz
