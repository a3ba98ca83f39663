#pragma once
/// Where the ranks of one host meet: a part of every rank's shared memory that it alone writes and all its
/// peers read. Plain data.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/transports/call_signature.h"

namespace rz {

inline constexpr std::size_t meeting_letters = 256;

inline constexpr std::size_t letter_bytes = 56;

/// What a rank offers at one step: one cache line, so that a tiny message arrives with its own news.
struct alignas(64) Letter {
  std::atomic<std::uint64_t> tag;  ///< step + 1, and above it what comm/backends/letters.h says; written last
  std::byte payload[letter_bytes];
};
static_assert(sizeof(Letter) == 64 && std::atomic<std::uint64_t>::is_always_lock_free);

struct MeetingPlace {
  Letter letters[meeting_letters];   ///< of step s in letter s % meeting_letters
  Signature calls[meeting_letters];  ///< at the first of a call's steps; between its letter and `written`
  alignas(64) std::atomic<std::uint32_t> read;  ///< what peers offered at steps before this one is not needed
  alignas(64) std::atomic<std::uint32_t> written;  ///< letters of the steps before this one
};

/// A rank's place and its ring of bytes, for what letters do not hold, as this process has mapped them.
struct MeetingView {
  MeetingPlace* place = nullptr;
  std::byte* ring = nullptr;
  std::size_t ring_bytes = 0;
  std::atomic<std::uint32_t>* asleep = nullptr;  ///< it has to be woken: Transport::nudge()
  bool fences = false;                           ///< who writes must fence before it looks at `asleep`
};

/// A part of memory from allocate(), as peers find it.
struct SharedSpot {
  std::uint32_t segment;
  std::uint64_t offset;
  bool operator==(const SharedSpot&) const = default;
};

}  // namespace rz
