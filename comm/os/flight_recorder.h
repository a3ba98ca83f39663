#pragma once
/// What a process was last doing: the last calls of each communicator with the lines that made them, the
/// update and the phase, and the stack of a crash. Written by plain stores, a few ns a call, into a memfd
/// that the launcher makes and RZ_FLIGHT_FD names, so that it can be read after the process has ended, in
/// whatever way; without one into memory of the process. comm/transport/flight_report.h reads it,
/// comm/transport/flight_dump.h writes it to a file.

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/core/call_site.h"
#include "comm/os/fd.h"

namespace rz::flight {

// ---- the file

inline constexpr std::uint32_t version = 2;
inline constexpr std::size_t row_count = 62, max_calls = 256, max_sites = 1024, max_members = 256;
inline constexpr std::size_t max_name = 47, max_phase = 31, max_site_file = 103, max_function = 71;
inline constexpr std::size_t stack_bytes = 8192;

/// One call of a communicator.
struct Call {
  /// From bit 0 on: 32 bits number; 4 Collective; 4 ReduceOp::Kind; 7 DType; 1, which is set; 16 its site, as
  /// an index into File::site and 1 more, or 0.
  std::atomic<std::uint64_t> what;
  std::atomic<std::uint64_t> in_count, out_count;  ///< elements of its buffers
  std::atomic<std::int32_t> root;
  std::atomic<std::uint32_t> order;  ///< among the calls of its thread (CallOrigin)
};
static_assert(sizeof(Call) == 32);

/// The calls of one channel of a communicator, the last max_calls of them. Of calls of one number, those of a
/// group on a device, it has the last.
struct Calls {
  std::atomic<std::uint32_t> begun,
      ended;  ///< numbers of the last call that began, and that ended, and 1 more
  char unused[56];
  Call call[max_calls];  ///< call n is at n % max_calls
};

struct Row {
  std::atomic<std::uint32_t> used;  ///< 0: free, 1: of a communicator that lives
  std::int32_t rank, size;
  std::uint32_t in_streams;  ///< 1: calls are issued to a device, and their ends are not recorded
  std::uint32_t made;        ///< number of the communicator among those of the process, from 1 on
  std::int32_t owner;        ///< the rank of the job that has this row
  std::int32_t members;      ///< how many `member` has; 0: rank r here is rank r of the job; -1: too many
  char name[max_name + 1];
  char unused[52];
  std::int32_t member[max_members];  ///< ranks of the job, in the order of this group's
  Calls collective, message;
};

/// A line of the program that makes calls.
struct Site {
  std::atomic<std::uint64_t> key;   ///< 0: free; 1: being written; else what identifies it in the process
  std::atomic<std::uint32_t> line;  ///< of `file`
  char unused[4];
  char function[max_function + 1];
  char file[max_site_file + 1];  ///< the end of its path
};
static_assert(sizeof(Site) == 192);

/// All that readers of another version check is in the first 16 bytes.
struct File {
  char magic[8];  ///< "rzflight"
  std::uint32_t version, rows;
  std::atomic<std::uint64_t> update;  ///< the update in progress, from 1 on; 0: none
  std::atomic<std::uint64_t> phase[(max_phase + 1) / 8];
  std::atomic<std::int32_t> signal;    ///< of a crash, once the stack is complete
  std::atomic<std::uint32_t> made;     ///< communicators so far
  std::atomic<std::uint64_t> address;  ///< that the crash is about
  char unused[184];
  Row row[row_count];
  Site site[max_sites];
  char stack[stack_bytes];  ///< lines of "FILE+0xADDRESS", ended by a 0
};
static_assert(offsetof(File, row) % 64 == 0 && sizeof(Row) % 64 == 0);

/// For a launcher: a new file that is closed by exec, of a fixed size. The child that becomes a rank clears
/// FD_CLOEXEC and sets RZ_FLIGHT_FD. Empty if the system has no memory for it: the job runs all the same.
UniqueFd make_file() noexcept;
/// The file of this process; null if there is no memory for it. A child of fork() has one of its own.
const File* file_of_process() noexcept;

/// While it exists, no row of the file of this process is taken or freed.
class SteadyRows {
 public:
  SteadyRows() noexcept;
  ~SteadyRows();
  SteadyRows(const SteadyRows&) = delete;
};

// ---- writing

/// Identifies the ranks of the groups that this thread connects, while it exists: members[r] is the rank of
/// the job that is rank r. Without one a group is all ranks of the job, or the first ones.
class Members {
 public:
  explicit Members(std::vector<int> ranks_of_job) noexcept;
  ~Members();
  Members(const Members&) = delete;

 private:
  const std::vector<int> ranks_, *const before_;
};

/// The row of a communicator, for one thread at a time. Without a free row in the file it has one of its own,
/// which nobody reads. Calls are those of comm/collective.h, which this floor does not know.
class Recorder {
 public:
  enum class Ends : bool { recorded, in_streams };
  /// `ends`: whether end() follows each begin().
  Recorder(std::string_view name, int rank, int size, Ends ends = Ends::recorded);
  ~Recorder();
  Recorder(const Recorder&) = delete;

  template <class CollectiveCall>
  [[gnu::always_inline]] void begin(std::uint32_t number, const CollectiveCall& c) noexcept {
    begin(row_->collective, number, c);
  }
  void end(std::uint32_t number) noexcept {
    row_->collective.ended.store(number + 1, std::memory_order_relaxed);
  }
  /// Number and kind of the last collective, if there was one.
  std::optional<std::pair<std::uint32_t, std::uint8_t>> last_collective() const noexcept;
  /// Messages have numbers of their own, from 0 on.
  template <class CollectiveCall>
  void begin_message(const CollectiveCall& c) noexcept {
    begin(row_->message, messages_++, c);
  }
  /// No message is in flight.
  void end_messages() noexcept { row_->message.ended.store(messages_, std::memory_order_relaxed); }

 private:
  /// Loads each field by itself: one load of two that were just stored would wait for all earlier stores.
  template <class CollectiveCall>
  [[gnu::always_inline]] void begin(Calls& calls, std::uint32_t number, const CollectiveCall& c) noexcept {
    constexpr auto relaxed = std::memory_order_relaxed;
    Call& call = calls.call[number % max_calls];
    call.in_count.store(c.in.count, relaxed);
    call.out_count.store(c.out.count, relaxed);
    call.root.store(c.root, relaxed);
    call.order.store(c.origin.order, relaxed);
    const auto bits = [](auto value, int first) { return static_cast<std::uint64_t>(value) << first; };
    call.what.store(number | bits(c.kind, 32) | bits(c.op.kind, 36) | bits(c.dtype(), 40) | bits(1, 47) |
                        bits(index_of(c.origin.site), 48),
                    relaxed);
    calls.begun.store(number + 1, std::memory_order_release);  // a dump may read meanwhile
  }
  /// Of the site of the call before at once.
  std::uint16_t index_of(const CallSite& site) noexcept {
    const auto id = std::bit_cast<std::uintptr_t>(site);
    if (id != last_site_) [[unlikely]]
      last_site_ = id, last_index_ = find_site(site);
    return last_index_;
  }
  std::uint16_t find_site(const CallSite&) noexcept;

  Row* row_;
  Site* sites_ = nullptr;  // null: the row is own_
  std::uintptr_t last_site_ = 0;
  std::uint16_t last_index_ = 0;
  std::uint32_t messages_ = 0;
  std::unique_ptr<Row> own_;
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
/// alone. RZ_CRASH_STACK=0, and a process without a launcher's file: does nothing.
void record_crashes();

}  // namespace rz::flight
