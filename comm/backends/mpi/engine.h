#pragma once
/// Moves a communicator's operations over MPI. At any time one thread drives, which alone calls MPI for it: a
/// progress thread, or whoever waits. Without MPI_THREAD_MULTIPLE there is no progress thread.
///
/// Before a collective begins, all ranks agree that it is the same one: a small reduction of what identifies
/// the call, run ahead for the calls that are queued. So MPI never sees collectives that do not match, and a
/// deadline that passes before can be told from one that passes within: those who did not come, or come to
/// something else, are asked for and named.

#include <mpi.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/backends/mpi/control.h"
#include "comm/backends/mpi/job.h"
#include "comm/backends/mpi/messages.h"
#include "comm/backends/mpi/mpi.h"
#include "comm/backends/mpi/session.h"
#include "comm/backends/mpi/stages.h"

namespace rz::mpi {

/// Two communicators of the same ranks, whose errors are returned: one for agreements and notes, one for
/// data.
struct Comms {
  MPI_Comm order = MPI_COMM_NULL, data = MPI_COMM_NULL;
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  /// The communicators become the engine's.
  Engine(Session&, Comms, int rank, int size, const MpiOptions&);

  void start();
  /// The communicator is destroyed: what is pending ends with an error. Bounded; the rest happens in the
  /// background.
  void stop() noexcept;

  /// Throws the failure that poisoned the group, if there is one.
  std::shared_ptr<Job> submit(std::span<const Operation> group);
  void wait(const Job&);
  /// Without a progress thread: moves what can be moved.
  void pump() noexcept;
  void abort(const std::string& reason) noexcept;
  /// Two communicators of some of the ranks; each of them calls it with the same list.
  Comms split(std::span<const int> members);

  bool threaded() const { return session_.any_thread(); }
  Session& session() const { return session_; }
  const MpiOptions& options() const { return options_; }

 private:
  /// A collective on its way.
  struct Call {
    std::shared_ptr<Job> job;
    std::size_t operation = 0;
    Signature signature;
    std::uint64_t mine[2], agreed[2];  // the largest of each: alike if all are
    MPI_Request agreement = MPI_REQUEST_NULL;
    bool proposed = false, begun = false;
    std::vector<Stage> stages;
    std::size_t stage = 0;
    Requests requests;
  };
  /// Another rank's failure: what its sender had ended, this rank ends first, within a bounded time. Notes
  /// are faster than collectives.
  struct Heard {
    Error error;
    std::uint64_t calls;
    std::chrono::steady_clock::time_point until;
  };
  /// Who is where, asked when a deadline has passed.
  struct Inquiry {
    std::uint32_t sequence;
    std::chrono::steady_clock::time_point until;
    std::vector<std::optional<Note>> answers;
    int open;
  };

  void progress_thread();
  bool take_over(std::unique_lock<std::mutex>&);
  void hand_back(std::unique_lock<std::mutex>&);

  // All of these are called by the one that drives.
  void drive(const Job* until);
  void step();
  void accept();
  void propose();
  bool advance_front();
  bool agreed(Call&);
  bool advance_stages(Call&);
  void operation_ended(Job&);
  void read_notes();
  void read(int peer, const Note&);
  void check_heard() const;
  Note answer_to(const Note& query) const;
  void check_left() const;
  void idle();
  void check_deadlines();
  void inquire(const Call&);
  void conclude();
  [[noreturn]] void fail_late(const std::string& who, int culprit, const std::string& what) const;
  void poison(std::exception_ptr) noexcept;
  void leave() noexcept;
  void free_comms();
  bool nothing_left() const {
    return queue_.empty() && messages_.idle() && !attention_.load(std::memory_order_acquire);
  }

  Session& session_;
  const Comms comms_;
  const int rank_, size_;
  const MpiOptions options_;
  const Wire wire_;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;       // for waiters: a job ended, or nobody drives any more
  std::condition_variable work_arrived_;  // for the progress thread
  std::deque<std::shared_ptr<Job>> incoming_;
  std::size_t unfinished_ = 0;
  bool driven_ = false, stopping_ = false, leaving_ = false, poisoned_ = false;
  std::exception_ptr failure_;
  std::chrono::steady_clock::time_point last_use_{};

  std::atomic<bool> attention_{false};  // incoming_, stopping_ or failure_ changed

  // Belongs to whoever drives.
  Control control_;
  Messages messages_;
  Operators operators_;
  std::deque<Call> queue_;
  std::deque<Signature> ended_;  // the last few
  std::uint32_t next_sequence_ = 0;
  std::optional<Inquiry> inquiry_;
  std::optional<Heard> heard_;
  std::vector<std::optional<Note>> left_;  // a rank's last note
  std::chrono::steady_clock::time_point next_look_{};
  unsigned idle_rounds_ = 0;
  bool learnt_ = false;  // the failure came from another rank
  int splits_ = 0;
};

/// Duplicates `comm` twice, by the deadline.
Comms duplicate(MPI_Comm comm, std::chrono::milliseconds timeout);
/// Takes `comm` over, and duplicates it.
Comms complete(MPI_Comm comm, std::chrono::milliseconds timeout);

}  // namespace rz::mpi
