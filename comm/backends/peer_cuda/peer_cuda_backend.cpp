#include "comm/backends/peer_cuda/peer_cuda_backend.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "comm/backends/peer_cuda/build_kernel_args.h"
#include "comm/backends/peer_cuda/device_watchdog.h"
#include "comm/backends/peer_cuda/kernels/peer_kernels.h"
#include "comm/backends/peer_cuda/peer_allocator.h"
#include "comm/backends/peer_cuda/peer_arenas.h"
#include "comm/backends/peer_cuda/symmetric_windows.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/os/flight_recorder.h"
#include "comm/os/wait_policy.h"

namespace rz {

namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

/// State shared by the backend and its Works, which may outlive it.
struct PeerCudaState {
  PeerCudaState(const std::shared_ptr<Backend>& host, const PeerCudaOptions& o)
      : options(o), group(*host, o.rank, o.size, o.device, o.slot_bytes), watchdog(host, group.status(), o) {}

  const PeerCudaOptions options;
  PeerArenas group;
  DeviceWatchdog watchdog;
};

class PeerWork final : public WorkState {
 public:
  /// `captured`: the end events are nodes of a graph.
  PeerWork(std::shared_ptr<PeerCudaState> shared, std::vector<Event> end_events, int channel, bool captured)
      : shared_(std::move(shared)),
        end_events_(std::move(end_events)),
        channel_(channel),
        captured_(captured),
        deadline_(Clock::now() + 2 * shared_->options.timeout) {}

  bool done() const noexcept override {
    try {
      return succeeded_ || captured_ ||
             std::all_of(end_events_.begin(), end_events_.end(), [](const Event& e) { return e.done(); });
    } catch (...) {
      return true;
    }
  }

  void wait() override {
    if (succeeded_) return;
    require(
        !captured_, Errc::invalid_argument,
        "an operation that is captured in a graph has no end of its own; use wait_on(stream), and wait for "
        "the stream that the graph runs in");
    std::optional<Clock::time_point> failed_at;
    for (unsigned polls = 0; !all_reached(); ++polls) {
      if (polls % 64 == 63) poll_failure(failed_at);
      short_backoff.wait(polls);
    }
    shared_->watchdog.check();
    succeeded_ = true;
  }

  void wait_on(const Stream& stream) override {
    for (const Event& e : end_events_) stream.wait(e);
  }

 private:
  bool all_reached() const {
    return std::all_of(end_events_.begin(), end_events_.end(), [](const Event& e) { return e.done(); });
  }
  /// After a failure the kernels exit. Kernels queued behind other work get 1 s to do so.
  void poll_failure(std::optional<Clock::time_point>& failed_at) const {
    if (!failed_at) {
      if (shared_->watchdog.failed()) failed_at = Clock::now();
      // The watchdog enforces the deadline of started calls. Twice the timeout covers work queued before the
      // call.
      else if (Clock::now() > deadline_)
        shared_->watchdog.fail_timeout(channel_);
    } else if (Clock::now() - *failed_at > 1s) {
      shared_->watchdog.check();
    }
  }

  const std::shared_ptr<PeerCudaState> shared_;
  const std::vector<Event> end_events_;
  const int channel_;
  const bool captured_;
  const Clock::time_point deadline_;
  std::atomic<bool> succeeded_{false};
};

class PeerCudaBackend final : public Backend {
 public:
  PeerCudaBackend(std::shared_ptr<Backend> host, const PeerCudaOptions& options)
      : host_(std::move(host)),
        options_(options),
        kernels_(peer_kernels()),
        shared_(std::make_shared<PeerCudaState>(host_, options)),
        allocator_(std::make_shared<PeerAllocator>(shared_->group.control_stream())),
        symmetric_windows_(shared_->group),
        stream_(Stream::create(options.device, Stream::Priority::high)),
        message_stream_(Stream::create(options.device, Stream::Priority::high)) {
    tuning::select_cuda_launch({.collective = Collective::all_reduce,
                                .override_name = options.algorithm});  // throws for an unknown name
  }
  ~PeerCudaBackend() override;

  Work submit(std::span<const CollectiveCall> group) override {
    const std::lock_guard order(submitting_);
    shared_->watchdog.check();
    bool collectives = false;
    std::vector<CollectiveCall> messages;
    for (const CollectiveCall& op : group) {
      if (traits(op.kind).point_to_point)
        messages.push_back(op);
      else
        flight_.begin(recorded_++, op), start(op), collectives = true;
    }
    std::vector<Event> end_events;
    if (collectives) end_events.push_back(stream_.record());
    const bool any_message = !messages.empty();
    start_messages(std::move(messages));
    if (any_message) end_events.push_back(message_stream_.record());
    return Work(std::make_shared<PeerWork>(shared_, std::move(end_events),
                                           collectives ? peer::collective_channel : peer::message_channel,
                                           !group.empty() && group.front().stream.stream().capturing()));
  }

  void abort(const std::string& reason) noexcept override {
    host_->abort(reason);
    shared_->watchdog.fail_with(Error(Errc::aborted, reason, options_.rank));
    if (!departure_signalled_.exchange(true)) shared_->group.signal_departure(peer::aborted_group);
  }

  void cancel(const Error& cause) override {
    host_->cancel(cause);
    shared_->watchdog.fail_with(cause);
    if (!departure_signalled_.exchange(true)) shared_->group.signal_departure(peer::aborted_group);
    wait_kernels_ended();
  }

  void check() override { shared_->watchdog.check(); }
  bool capturable() const override { return true; }
  std::string reason_against_copies_in_graphs() const override {
    const auto& pair = shared_->group.threads_on_one_gpu();
    if (!pair) return "";
    return concat(
        "ranks ", pair->first, " and ", pair->second,
        " are threads that share a GPU, where a graph that copies between host and device memory may "
        "wait for ever; use a process for each rank");
  }

  std::unique_ptr<Backend> split(std::span<const int> members, int number) override {
    std::shared_ptr<Backend> host = host_->split(members, number);
    if (!host) return nullptr;
    PeerCudaOptions options = options_;
    options.size = static_cast<int>(members.size());
    options.rank =
        static_cast<int>(std::find(members.begin(), members.end(), options_.rank) - members.begin());
    options.waits.communicator += "/split";
    return peer_cuda_backend(std::move(host), options);
  }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return allocator_->allocate(bytes); }
  std::shared_ptr<std::byte> allocate_symmetric(std::size_t bytes) override {
    if (shared_->group.one_process()) return allocate(bytes);  // peers access it by plain pointers
    shared_->watchdog.check();
    auto memory = symmetric_windows_.allocate(*host_, bytes);
    return memory ? memory : allocate(bytes);
  }
  std::string describe() const override {
    return concat("peer_cuda on ", name(options_.device), ", ", device_comm().layout.blocks, " blocks");
  }

 private:
  const peer::DeviceComm& device_comm() const { return shared_->group.device_comm(); }
  bool wait_kernels_ended() const noexcept;
  bool wait_all_unmapped() const noexcept;
  PeerHandles peer_handles(const CollectiveCall& op) const {
    return {handle_of(op.in.data, op.in.bytes()), handle_of(op.out.data, op.out.bytes())};
  }
  /// In other processes only window handles are valid, not addresses.
  std::uint64_t handle_of(const void* at, std::size_t bytes) const {
    if (!shared_->group.one_process()) return symmetric_windows_.handle_of(at, bytes);
    return allocator_->contains(at, bytes) ? reinterpret_cast<std::uint64_t>(at) : 0;
  }

  /// Group of one rank: the result is the input. False: a kernel must compute it.
  bool start_single_rank(const CollectiveCall& op) {
    const bool unchanged = op.kind != Collective::all_to_all_v && op.op.kind != ReduceOp::premul_sum;
    if (device_comm().size > 1 || !unchanged) return false;
    if (op.in.data != op.out.data) memcpy_async(op.out.data, op.in.data, op.in.bytes(), stream_);
    return true;
  }

  void start(const CollectiveCall& op) {
    stream_.wait(op.stream.stream().record());
    if (start_single_rank(op)) return;
    shared_->watchdog.launched(packed_signature(op), count_per_rank(op, options_.size),
                               op.stream.stream().capturing());
    const tuning::CudaLaunchPlan plan = plan_launch(op, device_comm(), options_.algorithm);
    if (traits(op.kind).reduces)
      kernels_.collective_reduce(device_comm(), reduce_args(op, device_comm(), plan, peer_handles(op)),
                                 op.in.dtype, op.op.kind, plan.blocks, plan.threads, stream_);
    else
      kernels_.collective_copy(device_comm(), copy_args(op, device_comm(), plan, peer_handles(op)),
                               plan.blocks, plan.threads, stream_);
  }

  /// Batches messages: the first message to and from every peer in one kernel, then the second ones, and so
  /// on.
  void start_messages(std::vector<CollectiveCall> waiting) {
    std::size_t max_bytes = 0;
    for (const CollectiveCall& op : waiting) {
      message_stream_.wait(op.stream.stream().record());
      max_bytes = std::max({max_bytes, op.in.bytes(), op.out.bytes()});
    }
    while (!waiting.empty()) {
      peer::SendRecvArgs call{};
      std::erase_if(waiting, [&](const CollectiveCall& op) { return add_message(call, op); });
      kernels_.send_recv(device_comm(), call, max_bytes < 8 << 10 ? 128 : 512, message_stream_);
    }
  }
  static bool add_message(peer::SendRecvArgs& call, const CollectiveCall& op) {
    const int peer = op.root;
    bool& taken = op.kind == Collective::send ? call.sends[peer] : call.recvs[peer];
    if (taken) return false;
    taken = true;
    // The signature of a message is that of its receive, on both sides.
    const std::uint64_t what =
        static_cast<std::uint64_t>(Collective::recv) |
        static_cast<std::uint64_t>((op.kind == Collective::send ? op.in.dtype : op.out.dtype)) << 8;
    if (op.kind == Collective::send) {
      call.signature_to[peer] = what;
      call.send[peer] = static_cast<const std::byte*>(op.in.data);
      call.send_bytes[peer] = op.in.bytes();
    } else {
      call.signature_from[peer] = what;
      call.recv[peer] = static_cast<std::byte*>(op.out.data);
      call.recv_bytes[peer] = op.out.bytes();
    }
    return true;
  }

  const std::shared_ptr<Backend> host_;
  const PeerCudaOptions options_;
  const PeerKernels& kernels_;
  const std::shared_ptr<PeerCudaState> shared_;
  const std::shared_ptr<PeerAllocator> allocator_;
  SymmetricWindows symmetric_windows_;
  const Stream stream_, message_stream_;
  std::mutex submitting_;
  flight::Recorder flight_{options_.waits.communicator, options_.rank, options_.size,
                           flight::Recorder::Ends::in_streams};
  std::uint32_t recorded_ = 0;  // collectives
  std::atomic<bool> departure_signalled_{false};
};

// Kernels in flight exit at once, and those of the peers see the departure. Memory mapped by other processes
// may be freed once they have unmapped it; if they do not confirm this in time, it is leaked.
PeerCudaBackend::~PeerCudaBackend() {
  PeerArenas& group = shared_->group;
  shared_->watchdog.fail_with(Error(
      Errc::aborted, concat("the communicator of rank ", options_.rank, " was destroyed"), options_.rank));
  if (!departure_signalled_.exchange(true)) group.signal_departure(peer::left_group);
  const bool ended = wait_kernels_ended();
  if (ended && group.one_process()) return;
  if (ended && group.drain()) {
    symmetric_windows_.unmap_peers();
    group.unmap_peers();
    if (wait_all_unmapped()) return;
  }
  symmetric_windows_.leak();
  group.leak();
}

// Kernels of captured graphs run in the caller's streams, so their end is seen only in DeviceStatus.
bool PeerCudaBackend::wait_kernels_ended() const noexcept {
  const peer::DeviceStatus& status = shared_->group.status();
  const auto none_runs = [&](int channel) {
    return load_acquire(status.finished[channel]) == load_acquire(status.started[channel]);
  };
  try {
    const Event end_events[] = {stream_.record(), message_stream_.record()};
    const Deadline deadline = Deadline::after(5s);
    for (const Event& e : end_events)
      while (!e.done() && !deadline.expired()) std::this_thread::sleep_for(poll_period::device_drain);
    while (!(none_runs(peer::collective_channel) && none_runs(peer::message_channel)) &&
           !deadline.expired()) {
      static_cast<void>(stream_.record().done());  // a query makes the driver submit pending work
      std::this_thread::sleep_for(poll_period::device_drain);
    }
    return !deadline.expired();
  } catch (const Error&) {  // already reported by the operation that failed
    return false;
  }
}

bool PeerCudaBackend::wait_all_unmapped() const noexcept {
  try {
    const CollectiveCall op{.kind = Collective::barrier};
    const Work all = host_->submit({&op, 1});
    const Deadline deadline = Deadline::after(std::min<Clock::duration>(options_.timeout, 2s));
    while (!all.done() && !deadline.expired()) std::this_thread::sleep_for(poll_period::group_teardown);
    if (!all.done()) return false;
    all.wait();  // throws if it failed
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::unique_ptr<Backend> peer_cuda_backend(std::shared_ptr<Backend> host, const PeerCudaOptions& options) {
  PeerCudaOptions own = options;
  own.timeout = bounded(own.timeout);
  return std::make_unique<PeerCudaBackend>(std::move(host), own);
}

}  // namespace rz
