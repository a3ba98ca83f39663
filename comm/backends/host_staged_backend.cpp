#include "comm/backends/host_staged_backend.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "comm/device/drain.h"
#include "comm/device/memory.h"
#include "comm/os/helper_thread.h"
#include "comm/os/wait_policy.h"

namespace rz {

namespace {

/// Cache of pinned blocks; pinning takes milliseconds.
class PinnedPool {
 public:
  explicit PinnedPool(Device device) : device_(device) {}
  std::shared_ptr<std::byte> acquire(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto it = free_.lower_bound(bytes);
    if (it == free_.end() || it->first > 4 * bytes + 4096) return allocate_pinned(device_, bytes);
    auto memory = std::move(it->second);
    free_.erase(it);
    return memory;
  }
  void release(std::size_t bytes, std::shared_ptr<std::byte> memory) {
    const std::lock_guard lock(mutex_);
    free_.emplace(bytes, std::move(memory));
  }

 private:
  const Device device_;
  std::mutex mutex_;
  std::multimap<std::size_t, std::shared_ptr<std::byte>> free_;
};

/// A result to copy from pinned memory back to the device.
struct StagedCopy {
  std::byte* device;
  std::byte* host;
  std::size_t bytes;
};

class StagedRequest final : public WorkState {
 public:
  StagedRequest(Device device, Deadline deadline) : deadline(deadline), device_(device) {}

  bool done() const noexcept override {
    const std::lock_guard lock(mutex_);
    try {
      return ended_ && (error_ || returned_.done());
    } catch (...) {
      return true;
    }
  }
  void wait() override { returned().synchronize(); }
  void wait_on(const Stream& stream) override { stream.wait(returned()); }

  void end(std::exception_ptr error, Event returned) {
    {
      const std::lock_guard lock(mutex_);
      error_ = std::move(error);
      returned_ = std::move(returned);
      ended_ = true;
    }
    changed_.notify_all();
  }

  CallList operations;  // on the pinned copies
  std::vector<StagedCopy> back;
  std::vector<std::pair<std::size_t, std::shared_ptr<std::byte>>> pinned;
  Event fetched;
  const Deadline deadline;

 private:
  /// Blocks until the worker has ended this request, at the latest at the host backend's deadline.
  Event returned() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_; });
    if (error_) std::rethrow_exception(error_);
    return returned_;
  }

  const Device device_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::exception_ptr error_;
  Event returned_;
};

class HostStagedBackend final : public Backend {
 public:
  HostStagedBackend(std::shared_ptr<Backend> host, const HostStagedOptions& options)
      : host_(std::move(host)),
        options_(options),
        stream_(Stream::create(options.device, Stream::Priority::high)),
        worker_(helper_thread([this] { worker_loop(); })) {}

  ~HostStagedBackend() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    worker_.join();
    try {
      stream_.synchronize();
    } catch (const Error&) {  // already reported by the operation that failed
    }
  }

  Work submit(std::span<const CollectiveCall> group) override {
    reject_capture(group);
    const std::lock_guard order(submitting_);  // copies and requests in one order
    auto request = std::make_shared<StagedRequest>(options_.device, Deadline::after(options_.timeout));
    for (const CollectiveCall& op : group) {
      stream_.wait(op.stream.stream().record());
      if (options_.pass_device_memory && !traits(op.kind).reduces)
        submit_direct(*request, op);
      else
        stage_input(*request, op);
    }
    request->fetched = stream_.record();
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(request);
    }
    changed_.notify_all();
    return Work(request);
  }

  void abort(const std::string& reason) noexcept override { host_->abort(reason); }
  void cancel(const Error& cause) override {
    host_->cancel(cause);
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, drain_timeout, [this] { return queue_.empty() && !running_; });
    }
    const Event copied = stream_.record();
    drain([&] { return copied.done(); }, Deadline::after(drain_timeout));
  }
  std::unique_ptr<Backend> split(std::span<const int> members, int number) override {
    std::shared_ptr<Backend> host = host_->split(members, number);
    if (!host) return nullptr;
    HostStagedOptions options = options_;
    options.rank =
        static_cast<int>(std::find(members.begin(), members.end(), options_.rank) - members.begin());
    return host_staged_backend(std::move(host), options);
  }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    auto memory = allocate_on(options_.device, bytes);
    memset_async(memory.get(), 0, bytes, stream_);
    stream_.synchronize();
    return memory;
  }
  std::string describe() const override {
    return concat(name(options_.device), options_.pass_device_memory ? ", what is combined" : "",
                  " staged through pinned memory over ", host_->describe());
  }

 private:
  /// The host's part of a staged call cannot be recorded in a CUDA graph.
  void reject_capture(std::span<const CollectiveCall> group) const {
    for (const CollectiveCall& op : group) {
      if (op.stream.device.kind == Device::host) continue;
      bool captured = false;
      cuda::check(cuda::runtime().is_capturing(op.stream.native, &captured), "cudaStreamIsCapturing",
                  op.stream.device);
      require(!captured, Errc::unsupported, "rank ", options_.rank, ": ", name(op.kind), " of memory on ",
              name(options_.device),
              " goes through the host, which a CUDA graph cannot hold; capture it "
              "with the backend 'nccl' or 'peer_cuda'");
    }
  }

  std::byte* pinned(StagedRequest& request, std::size_t bytes) {
    request.pinned.emplace_back(bytes, pool_.acquire(bytes));
    return request.pinned.back().second.get();
  }

  /// Passes the device pointers on. An in-place all_to_all sends a copy, since a rank does not see whether
  /// its peers are in place, too.
  void submit_direct(StagedRequest& request, const CollectiveCall& op) {
    CollectiveCall& direct = request.operations.add(op);
    direct.stream = {};
    if (op.kind != Collective::all_to_all || op.in.data != op.out.data || op.in.count == 0) return;
    std::byte* const copy = pinned(request, op.in.bytes());
    memcpy_async(copy, op.in.data, op.in.bytes(), stream_);
    direct.in = ConstBuffer(copy, op.in.count, op.in.dtype);
  }

  /// Copies this rank's input to pinned memory and records the outputs to copy back. Overlapping operands
  /// overlap there, too.
  void stage_input(StagedRequest& request, const CollectiveCall& op) {
    CollectiveCall on_host = op;
    on_host.stream = {};
    auto* const out = static_cast<std::byte*>(op.out.data);
    const auto* const in = static_cast<const std::byte*>(op.in.data);
    const bool reads = op.kind != Collective::recv && op.kind != Collective::barrier &&
                       (op.kind != Collective::broadcast || op.root == options_.rank) && op.in.bytes() > 0;
    const auto holds = [](const std::byte* outer, std::size_t bytes, const std::byte* inner,
                          std::size_t part) {
      return outer && inner && inner >= outer && inner + part <= outer + bytes;
    };
    const bool inside = holds(out, op.out.bytes(), in, op.in.bytes());
    const bool around = !inside && holds(in, op.in.bytes(), out, op.out.bytes());
    std::byte* const host_out = op.out.bytes() && !around ? pinned(request, op.out.bytes()) : nullptr;
    std::byte* host_in = nullptr;
    if (inside)
      host_in = host_out + (in - out);
    else if (op.in.bytes())
      host_in = pinned(request, op.in.bytes());
    if (reads) memcpy_async(host_in, in, op.in.bytes(), stream_);
    on_host.in = ConstBuffer(host_in, op.in.count, op.in.dtype);
    on_host.out = Buffer(around ? host_in + (out - in) : host_out, op.out.count, op.out.dtype);
    record_outputs(request, op, static_cast<std::byte*>(on_host.out.data));
    request.operations.add(on_host);
  }

  void record_outputs(StagedRequest& request, const CollectiveCall& op, std::byte* host_out) const {
    auto* const out = static_cast<std::byte*>(op.out.data);
    if (op.kind == Collective::all_to_all_v) {
      const std::size_t size = size_of(op.out.dtype);
      for (std::size_t r = 0; r < op.counts->recv_counts.size(); ++r)
        request.back.push_back({out + op.counts->recv_offsets[r] * size,
                                host_out + op.counts->recv_offsets[r] * size,
                                op.counts->recv_counts[r] * size});
    } else if (op.out.bytes() && op.kind != Collective::send) {
      request.back.push_back({out, host_out, op.out.bytes()});
    }
  }

  void worker_loop() {
    for (;;) {
      std::shared_ptr<StagedRequest> request;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
        if (queue_.empty()) return;
        request = std::move(queue_.front());
        queue_.pop_front();
        running_ = true;
      }
      run(*request);
      {
        const std::lock_guard lock(mutex_);
        running_ = false;
      }
      changed_.notify_all();
    }
  }

  void run(StagedRequest& request) {
    try {
      if (failure_) std::rethrow_exception(failure_);
      while (!request.fetched.done()) {
        require(!request.deadline.expired(), Errc::timeout, "rank ", options_.rank, ": ",
                name(options_.device),
                " did not reach a collective's input within its deadline; a kernel before it hangs");
        std::this_thread::sleep_for(poll_period::staged_input);
      }
      host_->submit(request.operations).wait();
      for (const StagedCopy& c : request.back) memcpy_async(c.device, c.host, c.bytes, stream_);
      const Event returned = stream_.record();
      request.end(nullptr, returned);
      recycle_after(returned, request);
    } catch (...) {
      if (!failure_) failure_ = std::current_exception();
      request.end(std::current_exception(), {});
    }
  }

  /// Returns pinned memory to the pool once the copies from it have ended.
  void recycle_after(const Event& returned, StagedRequest& request) {
    in_flight_.emplace_back(returned, std::move(request.pinned));
    while (!in_flight_.empty() && in_flight_.front().first.done()) {
      for (auto& [bytes, memory] : in_flight_.front().second) pool_.release(bytes, std::move(memory));
      in_flight_.pop_front();
    }
  }

  const std::shared_ptr<Backend> host_;
  const HostStagedOptions options_;
  PinnedPool pool_{options_.device};
  const Stream stream_;
  std::mutex submitting_;

  std::mutex mutex_;  // guards the rest of this group
  std::condition_variable changed_;
  std::deque<std::shared_ptr<StagedRequest>> queue_;
  bool running_ = false;  // a request that is not in the queue any more
  bool stopping_ = false;

  // Used by the worker only.
  std::exception_ptr failure_;
  std::deque<std::pair<Event, std::vector<std::pair<std::size_t, std::shared_ptr<std::byte>>>>> in_flight_;

  std::thread worker_;
};

}  // namespace

std::unique_ptr<Backend> host_staged_backend(std::shared_ptr<Backend> host,
                                             const HostStagedOptions& options) {
  return std::make_unique<HostStagedBackend>(std::move(host), options);
}

}  // namespace rz
