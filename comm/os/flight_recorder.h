#pragma once
/// What a process was last doing, for its launcher, which reads it after the process has ended, in whatever
/// way: a memfd that the launcher makes, and that RZ_FLIGHT_FD names. Each communicator writes its current
/// call into a row of its own, with plain stores, a few ns a call; a crash adds its stack. Without that
/// descriptor everything here does nothing.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "comm/os/fd.h"

namespace rz::flight {

// ---- the file

inline constexpr std::uint32_t version = 1;
inline constexpr std::size_t row_count = 62, max_name = 47, max_phase = 31, stack_bytes = 8192;

/// The last call of one channel of a communicator. It is running while `ended` is not its number + 1.
struct Call {
  /// Number of the call in bits 0 to 31, Collective, DType, ReduceOp::Kind in the next three bytes, and a
  /// last one that is 1 once there has been a call.
  std::atomic<std::uint64_t> what{0};
  std::atomic<std::uint64_t> in_count{0}, out_count{0};  ///< elements of its buffers
  std::atomic<std::int32_t> root{0};
  std::atomic<std::uint32_t> ended{0};
};
static_assert(sizeof(Call) == 32);

struct Row {
  std::atomic<std::uint32_t> used{0};  ///< 0: free, 1: of a communicator that lives
  std::int32_t rank = 0, size = 0;
  std::uint32_t in_streams = 0;  ///< 1: calls are issued to a device, and their ends are not recorded
  char name[max_name + 1] = {};
  Call collective, message;
};
static_assert(sizeof(Row) == 128);

/// All that readers of another version check is in the first 16 bytes.
struct File {
  char magic[8];  ///< "rzflight"
  std::uint32_t version, rows;
  std::atomic<std::uint64_t> update;  ///< the update in progress, from 1 on; 0: none
  std::atomic<std::uint64_t> phase[(max_phase + 1) / 8];
  std::atomic<std::int32_t> signal;  ///< of a crash, once the stack is complete
  std::uint32_t reserved;
  std::atomic<std::uint64_t> address;  ///< that the crash is about
  char unused[184];
  Row row[row_count];
  char stack[stack_bytes];  ///< lines of "FILE+0xADDRESS", ended by a 0
};
static_assert(sizeof(File) == 16384);

/// For a launcher: a new file that is closed by exec, of a fixed size. The child that becomes a rank clears
/// FD_CLOEXEC and sets RZ_FLIGHT_FD. Empty if the system has no memory for it: the job runs all the same.
UniqueFd make_file() noexcept;

// ---- writing

/// What is kept of a call (comm/collective.h).
struct Fields {
  std::uint8_t kind, dtype, op;
  std::int32_t root;
  std::uint64_t in_count, out_count;
};
template <class CollectiveCall>
Fields fields_of(const CollectiveCall& c) {
  return {static_cast<std::uint8_t>(c.kind),
          static_cast<std::uint8_t>(c.dtype()),
          static_cast<std::uint8_t>(c.op.kind),
          c.root,
          c.in.count,
          c.out.count};
}

/// The row of a communicator, for one thread at a time. Without a free row in the file it has one of its own,
/// which nobody reads.
class Recorder {
 public:
  enum class Ends : bool { recorded, in_streams };
  /// `ends`: whether end() follows each begin().
  Recorder(std::string_view name, int rank, int size, Ends ends = Ends::recorded);
  ~Recorder();
  Recorder(const Recorder&) = delete;

  void begin(std::uint32_t number, const Fields& f) noexcept { begin(row_->collective, number, f); }
  void end(std::uint32_t number) noexcept {
    row_->collective.ended.store(number + 1, std::memory_order_relaxed);
  }
  /// Number and kind of the last collective, if there was one.
  std::optional<std::pair<std::uint32_t, std::uint8_t>> last_collective() const noexcept {
    const std::uint64_t what = row_->collective.what.load(std::memory_order_relaxed);
    if (!(what >> 56)) return std::nullopt;
    return std::pair(static_cast<std::uint32_t>(what), static_cast<std::uint8_t>(what >> 32));
  }
  /// Messages have numbers of their own, from 0 on.
  void begin_message(const Fields& f) noexcept { begin(row_->message, messages_++, f); }
  /// No message is in flight.
  void end_messages() noexcept { row_->message.ended.store(messages_, std::memory_order_relaxed); }

 private:
  static void begin(Call& call, std::uint32_t number, const Fields& f) noexcept {
    constexpr auto relaxed = std::memory_order_relaxed;
    call.in_count.store(f.in_count, relaxed);
    call.out_count.store(f.out_count, relaxed);
    call.root.store(f.root, relaxed);
    call.what.store(number | std::uint64_t{f.kind} << 32 | std::uint64_t{f.dtype} << 40 |
                        std::uint64_t{f.op} << 48 | std::uint64_t{1} << 56,
                    relaxed);
  }

  Row* row_;
  std::uint32_t messages_ = 0;
  Row own_;
};

/// What the process does beside its calls, such as "backward", until the object ends. Objects nest.
class Phase {
 public:
  explicit Phase(std::string_view text) noexcept;
  ~Phase();
  Phase(const Phase&) = delete;

 private:
  std::uint64_t before_[(max_phase + 1) / 8];
};

/// The update in progress, from 1 on.
void set_update(std::uint64_t) noexcept;

/// From now on SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT write the stack of their thread into the file and
/// then take their default action, core dump included. Signals that have a handler, such as a sanitizer's, or
/// are ignored, keep that, and so does an alternative signal stack. For programs; libraries leave signals
/// alone. RZ_CRASH_STACK=0, and a process without the file: does nothing.
void record_crashes();

}  // namespace rz::flight
