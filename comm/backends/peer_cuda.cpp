#include "comm/backends/peer_cuda.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "comm/backends/peer_calls.h"
#include "comm/backends/peer_group.h"
#include "comm/backends/peer_memory.h"
#include "comm/backends/peer_windows.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/core/helper_thread.h"
#include "comm/kernels/peer_kernels.h"

namespace rz {

namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

/// Reads and writes of memory that kernels write and read.
template <class T>
T seen(const T& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}
template <class T>
void put(T& word, T value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

/// Why a group can go no further, and the thread that finds out. The first reason wins; from then on no
/// kernel of this rank waits for anything.
class Watch {
 public:
  Watch(const std::shared_ptr<Backend>& host, const PeerGroup& group, const PeerCudaOptions& options)
      : options_(options), host_(host), status_(group.status()), thread_(helper_thread([this] { run(); })) {}
  ~Watch() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void check() {
    look();
    std::unique_lock lock(mutex_);
    decided_.wait_for(lock, 2s, [&] { return !deciding_; });
    if (failure_) std::rethrow_exception(failure_);
  }
  bool failed() noexcept {
    try {
      check();
    } catch (...) {
      return true;
    }
    return false;
  }
  void fail_with(const Error& error) noexcept {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::make_exception_ptr(error);
    put(status_.stop, std::uint32_t{1});
  }
  /// Stops the kernels, which then say for whom they wait, and blames that rank.
  void time_out(int lane) noexcept {
    {
      const std::lock_guard lock(mutex_);
      if (failure_ || deciding_) return;
      deciding_ = true;
      put(status_.stop, std::uint32_t{1});
    }
    const Deadline deadline = Deadline::after(1s);
    while (seen(status_.left[lane]) != seen(status_.entered[lane]) && !deadline.expired())
      std::this_thread::sleep_for(100us);
    look();  // it may have been something else
    fail_with(overdue(lane));
    {
      const std::lock_guard lock(mutex_);
      deciding_ = false;
    }
    decided_.notify_all();
  }

 private:
  struct Lane {
    std::uint64_t call = 0;
    Clock::time_point since;
  };

  void run() {
    const auto pause = std::clamp<Clock::duration>(options_.timeout / 20, 1ms, 20ms);
    Lane lanes[peer::lanes];
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, pause, [&] { return stopping_; })) {
      lock.unlock();
      look();
      for (int i = 0; i < peer::lanes; ++i) follow(i, lanes[i]);
      lock.lock();
    }
  }

  /// A call that has begun has to end.
  void follow(int i, Lane& lane) {
    const std::uint64_t left = seen(status_.left[i]), entered = seen(status_.entered[i]);
    if (entered == left || entered != lane.call) {
      lane = {entered, Clock::now()};
      return;
    }
    ask_host();
    if (Clock::now() - lane.since >= options_.timeout && !seen(status_.stop)) time_out(i);
  }

  /// Names the rank that a kernel waits for.
  Error overdue(int lane) const {
    int culprit = -1;
    for (int r = options_.size - 1; r >= 0; --r)
      if (r != options_.rank && seen(status_.waits_for[lane][r])) culprit = r;
    return Error(Errc::timeout,
                 str(lane == peer::messages ? "a message" : "a collective", " on ", name(options_.device),
                     " did not end within ", seconds(options_.timeout), " s on rank ", options_.rank, ": ",
                     culprit < 0 ? std::string("no rank is missing, so work before it in the stream is late")
                                 : str("rank ", culprit, " did not come to it"),
                     "; a rank may be stuck, or slower than the timeout allows"),
                 culprit);
  }

  /// A rank that has died or aborted is known to the backend of host memory.
  void ask_host() noexcept {
    try {
      if (const auto host = host_.lock()) host->check();
    } catch (const Error& e) {
      fail_with(e);
    }
  }

  /// What the kernels have found.
  void look() {
    const std::uint32_t trouble = seen(status_.trouble);
    if (trouble == peer::none) return;
    const int culprit = static_cast<int>(status_.culprit);
    switch (trouble) {
      case peer::mismatch:
        return fail_with(
            Error(Errc::mismatch,
                  str("rank ", options_.rank, " called ", in_words(status_.own[0], status_.own[1]),
                      ", but rank ", culprit, " called ", in_words(status_.theirs[0], status_.theirs[1])),
                  culprit));
      case peer::peer_aborted:
        return fail_with(Error(Errc::aborted, str("rank ", culprit, " called abort()"), culprit));
      default:
        return fail_with(Error(Errc::peer_lost,
                               str("rank ", culprit, " has left the group, and rank ", options_.rank,
                                   " waits for it on ", name(options_.device)),
                               culprit));
    }
  }

  const PeerCudaOptions options_;
  const std::weak_ptr<Backend> host_;  // Works keep this alive, but no host backend
  peer::Status& status_;
  std::mutex mutex_;
  std::condition_variable changed_, decided_;
  bool stopping_ = false, deciding_ = false;
  std::exception_ptr failure_;
  std::thread thread_;
};

/// What Works share with their backend; they may outlive it.
struct Shared {
  Shared(const std::shared_ptr<Backend>& host, const PeerCudaOptions& o)
      : options(o), group(*host, o.rank, o.size, o.device, o.slot_bytes), watch(host, group, o) {}

  const PeerCudaOptions options;
  PeerGroup group;
  Watch watch;
};

class PeerWork final : public WorkState {
 public:
  /// `captured`: the ends are nodes of a graph.
  PeerWork(std::shared_ptr<Shared> shared, std::vector<Event> ends, int lane, bool captured)
      : shared_(std::move(shared)),
        ends_(std::move(ends)),
        lane_(lane),
        captured_(captured),
        latest_(Clock::now() + 2 * shared_->options.timeout) {}

  bool done() const noexcept override {
    try {
      return well_ || captured_ ||
             std::all_of(ends_.begin(), ends_.end(), [](const Event& e) { return e.done(); });
    } catch (...) {
      return true;
    }
  }

  void wait() override {
    if (well_) return;
    require(
        !captured_, Errc::invalid_argument,
        "an operation that is captured in a graph has no end of its own; use wait_on(stream), and wait for "
        "the stream that the graph runs in");
    std::optional<Clock::time_point> failed_at;
    for (unsigned polls = 0; !reached(); ++polls) {
      if (polls % 64 == 63) look_for_trouble(failed_at);
      if (polls < 4000)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(20us);
    }
    shared_->watch.check();
    well_ = true;
  }

  void wait_on(const Stream& stream) override {
    for (const Event& e : ends_) stream.wait(e);
  }

 private:
  bool reached() const {
    return std::all_of(ends_.begin(), ends_.end(), [](const Event& e) { return e.done(); });
  }
  /// After a failure the kernels leave; those behind somebody else's may take their time.
  void look_for_trouble(std::optional<Clock::time_point>& failed_at) const {
    if (!failed_at) {
      if (shared_->watch.failed()) failed_at = Clock::now();
      // What has begun has its own deadline; twice the time is for what waits before it.
      else if (Clock::now() > latest_)
        shared_->watch.time_out(lane_);
    } else if (Clock::now() - *failed_at > 1s) {
      shared_->watch.check();
    }
  }

  const std::shared_ptr<Shared> shared_;
  const std::vector<Event> ends_;
  const int lane_;
  const bool captured_;
  const Clock::time_point latest_;
  std::atomic<bool> well_{false};
};

class PeerCuda final : public Backend {
 public:
  PeerCuda(std::shared_ptr<Backend> host, const PeerCudaOptions& options)
      : host_(std::move(host)),
        options_(options),
        kernels_(peer_kernels()),
        shared_(std::make_shared<Shared>(host_, options)),
        memory_(std::make_shared<PeerMemory>(shared_->group.control())),
        windows_(shared_->group),
        stream_(Stream::create(options.device, Stream::Priority::high)),
        message_stream_(Stream::create(options.device, Stream::Priority::high)) {
    select_peer(
        {.collective = Collective::all_reduce, .forced = options.algorithm});  // refuses an unknown one
  }
  ~PeerCuda() override;

  Work submit(std::span<const Operation> group) override {
    const std::lock_guard order(submitting_);
    shared_->watch.check();
    bool collectives = false;
    std::vector<Operation> messages;
    for (const Operation& op : group) {
      if (traits(op.kind).point_to_point)
        messages.push_back(op);
      else
        start(op), collectives = true;
    }
    std::vector<Event> ends;
    if (collectives) ends.push_back(stream_.record());
    const bool any_message = !messages.empty();
    start_messages(std::move(messages));
    if (any_message) ends.push_back(message_stream_.record());
    return Work(std::make_shared<PeerWork>(shared_, std::move(ends),
                                           collectives ? peer::collectives : peer::messages,
                                           !group.empty() && group.front().stream.capturing()));
  }

  void abort(const std::string& reason) noexcept override {
    host_->abort(reason);
    shared_->watch.fail_with(Error(Errc::aborted, reason, options_.rank));
    if (!said_.exchange(true)) shared_->group.leave(peer::aborted);
  }

  void check() override { shared_->watch.check(); }
  bool capturable() const override { return true; }

  std::unique_ptr<Backend> split(std::span<const int> members) override {
    std::shared_ptr<Backend> host = host_->split(members);
    if (!host) return nullptr;
    PeerCudaOptions options = options_;
    options.size = static_cast<int>(members.size());
    options.rank =
        static_cast<int>(std::find(members.begin(), members.end(), options_.rank) - members.begin());
    return peer_cuda_backend(std::move(host), options);
  }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return memory_->allocate(bytes); }
  std::shared_ptr<std::byte> allocate_symmetric(std::size_t bytes) override {
    if (shared_->group.one_process()) return allocate(bytes);  // which peers reach as it is
    shared_->watch.check();
    auto memory = windows_.allocate(*host_, bytes);
    return memory ? memory : allocate(bytes);
  }
  std::string describe() const override {
    return str("peer_cuda on ", name(options_.device), ", ", seat().layout.blocks, " blocks");
  }

 private:
  const peer::Seat& seat() const { return shared_->group.seat(); }
  bool kernels_have_ended() const noexcept;
  bool all_have_let_go() const noexcept;
  PeerReach reach(const Operation& op) const {
    return {source_of(op.in.data, op.in.bytes()), source_of(op.out.data, op.out.bytes())};
  }
  /// Plain addresses mean nothing in another process.
  std::uint64_t source_of(const void* at, std::size_t bytes) const {
    if (!shared_->group.one_process()) return windows_.source_of(at, bytes);
    return memory_->holds(at, bytes) ? reinterpret_cast<std::uint64_t>(at) : 0;
  }

  /// Nobody to meet: what a rank alone gets is what it has. False: a kernel has to look at it.
  bool start_alone(const Operation& op) {
    const bool unchanged = op.kind != Collective::all_to_all_v && op.op.kind != ReduceOp::premul_sum;
    if (seat().size > 1 || !unchanged) return false;
    if (op.in.data != op.out.data) copy_bytes(op.out.data, op.in.data, op.in.bytes(), stream_);
    return true;
  }

  void start(const Operation& op) {
    stream_.wait(op.stream.record());
    if (start_alone(op)) return;
    const PeerChoice choice = choose(op, seat(), options_.algorithm);
    if (traits(op.kind).reduces)
      kernels_.fold_together(seat(), fold_call(op, seat(), choice, reach(op)), op.in.dtype, op.op.kind,
                             choice.blocks, choice.threads, stream_);
    else
      kernels_.move_together(seat(), move_call(op, seat(), choice, reach(op)), choice.blocks, choice.threads,
                             stream_);
  }

  /// The first message to and from every peer in one kernel, then the second ones, and so on.
  void start_messages(std::vector<Operation> waiting) {
    std::size_t most = 0;
    for (const Operation& op : waiting) {
      message_stream_.wait(op.stream.record());
      most = std::max({most, op.in.bytes(), op.out.bytes()});
    }
    while (!waiting.empty()) {
      peer::MessagesCall call{};
      std::erase_if(waiting, [&](const Operation& op) { return put_in(call, op); });
      kernels_.messages_together(seat(), call, most < 8 << 10 ? 128 : 512, message_stream_);
    }
  }
  static bool put_in(peer::MessagesCall& call, const Operation& op) {
    const int peer = op.root;
    bool& taken = op.kind == Collective::send ? call.sends[peer] : call.recvs[peer];
    if (taken) return false;
    taken = true;
    // Both sides know it as a receive.
    const std::uint64_t what =
        static_cast<std::uint64_t>(Collective::recv) |
        static_cast<std::uint64_t>((op.kind == Collective::send ? op.in.dtype : op.out.dtype)) << 8;
    if (op.kind == Collective::send) {
      call.what_to[peer] = what;
      call.send[peer] = static_cast<const std::byte*>(op.in.data);
      call.send_bytes[peer] = op.in.bytes();
    } else {
      call.what_from[peer] = what;
      call.recv[peer] = static_cast<std::byte*>(op.out.data);
      call.recv_bytes[peer] = op.out.bytes();
    }
    return true;
  }

  const std::shared_ptr<Backend> host_;
  const PeerCudaOptions options_;
  const PeerKernels& kernels_;
  const std::shared_ptr<Shared> shared_;
  const std::shared_ptr<PeerMemory> memory_;
  PeerWindows windows_;
  const Stream stream_, message_stream_;
  std::mutex submitting_;
  std::atomic<bool> said_{false};
};

// Kernels still in flight leave at once; the peers' learn that nobody will come. Memory that other processes
// have mapped may be given back when they have closed it: if they do not come here to say so, it is kept.
PeerCuda::~PeerCuda() {
  PeerGroup& group = shared_->group;
  shared_->watch.fail_with(
      Error(Errc::aborted, str("the communicator of rank ", options_.rank, " was destroyed"), options_.rank));
  if (!said_.exchange(true)) group.leave(peer::left);
  const bool ended = kernels_have_ended();
  if (ended && group.one_process()) return;
  if (ended && group.quiet()) {
    windows_.let_go();
    group.let_go();
    if (all_have_let_go()) return;
  }
  windows_.keep();
  group.keep();
}

// A graph's kernels run in streams of the caller's, and are known by what they say of themselves.
bool PeerCuda::kernels_have_ended() const noexcept {
  const peer::Status& status = shared_->group.status();
  const auto none_runs = [&](int lane) { return seen(status.left[lane]) == seen(status.entered[lane]); };
  try {
    const Event ends[] = {stream_.record(), message_stream_.record()};
    const Deadline deadline = Deadline::after(5s);
    for (const Event& e : ends)
      while (!e.done() && !deadline.expired()) std::this_thread::sleep_for(20us);
    while (!(none_runs(peer::collectives) && none_runs(peer::messages)) && !deadline.expired()) {
      static_cast<void>(stream_.record().done());  // asking keeps a device at work
      std::this_thread::sleep_for(20us);
    }
    return !deadline.expired();
  } catch (const Error&) {  // said by the operation that failed
    return false;
  }
}

bool PeerCuda::all_have_let_go() const noexcept {
  try {
    const Operation op{.kind = Collective::barrier};
    const Work all = host_->submit({&op, 1});
    const Deadline deadline = Deadline::after(std::min<Clock::duration>(options_.timeout, 2s));
    while (!all.done() && !deadline.expired()) std::this_thread::sleep_for(100us);
    if (!all.done()) return false;
    all.wait();  // it may have ended badly
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::unique_ptr<Backend> peer_cuda_backend(std::shared_ptr<Backend> host, const PeerCudaOptions& options) {
  PeerCudaOptions own = options;
  own.timeout = bounded(own.timeout);
  return std::make_unique<PeerCuda>(std::move(host), own);
}

}  // namespace rz
