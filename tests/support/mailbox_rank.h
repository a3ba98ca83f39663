#pragma once
/// One rank of a group on one node, driven call by call through the intra-node engine.

#include <optional>

#include "comm/core/error.h"
#include "comm/intranode/engine.h"
#include "comm/schedule/chunk_layout.h"
#include "tests/support/ranks.h"
#include "tests/support/streams.h"

namespace rz::test {

inline constexpr std::uint32_t before_wrap = 0xfffffff0;
inline constexpr int fifo_depth = static_cast<int>(mailbox_depth);
inline constexpr int enough_spins = 1000;  // turns within which a rank does all that it can do alone

/// Numbers its calls.
class Rank {
 public:
  Rank(int rank, int size, Store& store, std::uint32_t first_step)
      : rank(rank), size(size), transport(connect(rank, size, store, {"shm"})) {
    engine.emplace(*transport, rank, size, first_step);
    sync_all(*transport, rank, size);
  }

  /// Uses the fast path for a call like the previous one.
  void start(const CollectiveCall& op) {
    if (engine->matches_last(op))
      engine->run_fast_path(op, sequence_++, turns), ++repeated;
    else
      engine->start(op, sequence_++);
  }
  void finish() {
    const auto deadline = Deadline::after(std::chrono::seconds(60));
    while (!engine->spin(20)) {
      require(!deadline.expired(), Errc::timeout, "rank ", rank, " waits for ", engine->waiting_on().text);
      if (engine->busy()) continue;
      transport->progress(0);
      transport->wait(std::chrono::milliseconds(5));
    }
  }
  void call(const CollectiveCall& op) { start(op), finish(); }

  const int rank, size;
  std::unique_ptr<Transport> transport;
  std::optional<intranode::Engine> engine;
  int turns = 0;     // spins of a repeated call before it continues as others
  int repeated = 0;  // calls on the fast path

 private:
  std::uint32_t sequence_ = 0;
};

template <class F>
void run(int size, std::uint32_t first_step, const F& body) {
  run_ranks(
      size,
      [&](int rank, std::shared_ptr<Store> store) {
        Rank me(rank, size, *store, first_step);
        body(me, *store);
        sync_all(*me.transport, rank, size);
      },
      std::chrono::seconds(200));
}

inline void signal_event(Store& store, const std::string& what) { store.set(what, "done"); }
inline void wait_event(Store& store, const std::string& what) {
  store.get(what, Deadline::after(std::chrono::seconds(60)));
}

}  // namespace rz::test
