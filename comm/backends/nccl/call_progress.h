#pragma once
/// Position of a rank in its group's sequence of calls. Ranks exchange it after a deadline; find_culprit()
/// derives the rank that blocks the others. Pure functions.

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/collective.h"
#include "comm/transport/transport.h"

namespace rz::nccl {

/// Text of the arguments that all ranks must agree on, e.g. "all_reduce sum of 1000 f32".
std::string describe(const CollectiveCall&);

struct CallProgress {
  /// Collectives that this rank has called, that NCCL has enqueued, and that the device has reached.
  std::uint64_t called = 0, issued = 0, started = 0;
  /// Streams it has waited for (Communicator::synchronize).
  std::uint64_t waited_streams = 0;
  /// Descriptions of the latest collectives, oldest first.
  std::deque<std::string> descriptions;
  /// Number of messages to and from each rank.
  std::vector<std::uint64_t> sent, received;

  static constexpr std::size_t max_descriptions = 32;
  void add(std::string call);
  /// Description of collective `number`; null if it is no longer stored.
  const std::string* description_of(std::uint64_t number) const;

  std::string serialize() const;
  /// nullopt if the text is malformed.
  static std::optional<CallProgress> parse(const std::string& text);
};

/// The calls that a rank waits for: a collective by its number, messages by theirs, or the stream with this
/// number.
struct PendingWait {
  struct Message {
    int peer;
    bool is_send;
    std::uint64_t number;
  };
  std::optional<std::uint64_t> collective;
  std::vector<Message> messages;
  std::optional<std::uint64_t> stream;
};

/// Finds the rank that blocks `rank`, given the progress of all ranks (nullopt: no reply). Errc::mismatch if
/// ranks called different collectives; otherwise `code`, with the rank furthest behind as culprit (the lowest
/// among equals), or -1 if no rank is behind.
Failure find_culprit(int rank, const PendingWait&, std::span<const std::optional<CallProgress>> all,
                     Errc code);

}  // namespace rz::nccl
