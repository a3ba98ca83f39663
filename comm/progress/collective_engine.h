#pragma once
/// Interface of an engine that runs one collective at a time: the intra-node engine
/// (comm/intranode/engine.h) and the schedule engine (comm/backends/native/schedule_engine.h).

#include <cstdint>

#include "comm/collective.h"
#include "comm/transport/wait_for_graph.h"

namespace rz {

/// Not thread safe: one thread at a time drives an engine.
class CollectiveEngine {
 public:
  virtual ~CollectiveEngine() = default;
  /// Begins the call with that sequence number; requires complete(). The call must outlive its completion.
  virtual void start(const CollectiveCall&, std::uint32_t sequence) = 0;
  /// Moves data without blocking; true on any progress. Errc::mismatch if a peer made another call.
  virtual bool advance() = 0;
  virtual bool complete() const = 0;
  /// The peers that the current call waits for.
  virtual WaitState waiting_on() const = 0;
};

}  // namespace rz
