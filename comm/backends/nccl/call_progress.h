#pragma once
/// Where a rank stands among the calls of its group: what ranks tell each other once one waits too long, and
/// who is to blame then. Pure functions of the standings.

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/collective.h"
#include "comm/transport/transport.h"

namespace rz::nccl {

/// "all_reduce sum of 1000 f32"; what all ranks have to agree on, no more.
std::string describe(const CollectiveCall&);

struct CallProgress {
  /// How many collectives this rank has called, how many NCCL has taken, and at how many of those its device
  /// has arrived.
  std::uint64_t called = 0, issued = 0, started = 0;
  /// How many streams it has waited for (Communicator::synchronize).
  std::uint64_t waited_streams = 0;
  /// The latest of them in words, the last one last.
  std::deque<std::string> descriptions;
  /// Messages to and from each rank.
  std::vector<std::uint64_t> sent, received;

  static constexpr std::size_t max_descriptions = 32;
  void add(std::string call);
  /// Of the collective with this number, if it is remembered.
  const std::string* description_of(std::uint64_t number) const;

  std::string serialize() const;
  /// None: damaged.
  static std::optional<CallProgress> parse(const std::string& text);
};

/// What a rank waits for: a collective by its number, messages by theirs, or the stream with this number.
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

/// Who keeps `rank` waiting, given all standings (its own too; none: that rank did not answer).
/// Errc::mismatch if ranks called different collectives; else `code`, with the rank that is furthest behind
/// as culprit, the first of equals, or -1 if all came.
Failure find_culprit(int rank, const PendingWait&, std::span<const std::optional<CallProgress>> all,
                     Errc code);

}  // namespace rz::nccl
