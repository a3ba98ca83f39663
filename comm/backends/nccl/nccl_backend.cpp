#include "comm/backends/nccl/nccl_backend.h"

#include <algorithm>
#include <thread>

#include "comm/backends/nccl/nccl_ops.h"
#include "comm/backends/nccl/rendezvous.h"
#include "comm/backends/nccl/watchdog.h"
#include "comm/backends/nccl/workspace.h"
#include "comm/backends/peer_cuda/kernels/peer_kernels.h"
#include "comm/core/error.h"

namespace rz::nccl {

namespace {

using namespace std::chrono_literals;

/// Polls at a pace that costs little: at once for a while, then with naps.
class PollBackoff {
 public:
  void pause() const {
    if (spinning_until_.expired())
      std::this_thread::sleep_for(50us);
    else
      std::this_thread::yield();
  }

 private:
  const Deadline spinning_until_ = Deadline::after(1ms);
};

/// What operations run in and on. NCCL may hold on to it longer than the backend lives.
struct BackendResources {
  explicit BackendResources(Device device)
      : stream(Stream::create(device, Stream::Priority::high)),
        capture_stream(Stream::create(device, Stream::Priority::high)),
        workspace(device) {
    workspace.reserve(1, false);  // what a graph may need without a run before
  }
  const Stream stream, capture_stream;  ///< apart, so that no thread's operation gets into another's graph
  Workspace workspace;
};

/// Makes the communicator; throws with nothing left behind.
std::shared_ptr<NcclComm> connect_comm(const NcclApi& api, Store& store, const NcclOptions& options,
                                       const std::shared_ptr<BackendResources>& room) {
  const Deadline deadline = Deadline::after(options.rendezvous_timeout);
  const RankInfo me{options.rank,         options.size,    options.device,
                    require_version(api), options.host_id, options.shares_gpus};
  const UniqueId id = exchange_unique_id(api, me, store, deadline);
  auto link = std::make_shared<NcclComm>(api, options.device);
  const auto end = [&](Errc code, const std::string& reason) {
    const bool ended = link->abort(options.abort_limit, room);
    fail(code, "rank ", options.rank, " of ", options.size, ": ", reason,
         ended ? "" : "; ncclCommAbort did not return either and was left behind");
  };
  try {
    mark_joining(me, store);
    link->init(options.rank, options.size, id);
  } catch (const NcclError& failed) {
    end(Errc::system, failed.text() + "; NCCL_DEBUG=WARN says more");
  }
  std::string words;
  const PollBackoff poll;
  for (Result state = in_progress; (state = link->async_state(&words)) != success; poll.pause()) {
    if (state != in_progress) end(Errc::system, "NCCL could not connect the ranks: " + words);
    if (!deadline.expired()) continue;
    const std::string missing = ranks_not_joined(me, store);
    end(Errc::timeout,
        concat("NCCL did not connect the ranks within ", options.rendezvous_timeout.count(), " ms: ",
               missing.empty() ? std::string("all of them called ncclCommInitRankConfig, so look at "
                                             "the network (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)")
                               : concat("these did not call ncclCommInitRankConfig:", missing)));
  }
  return link;
}

class NcclBackend final : public Backend {
 public:
  NcclBackend(const NcclApi& api, std::shared_ptr<Store> store, std::shared_ptr<Backend> host,
              const NcclOptions& options)
      : options_(options),
        resources_(std::make_shared<BackendResources>(options.device)),
        nccl_comm_(connect_comm(api, *store, options, resources_)),
        ops_(*nccl_comm_,
             {.rank = options.rank,
              .size = options.size,
              .deterministic = options.deterministic,
              .has_f8 = has_f8(api, options.device),
              .workspace_limit = options.workspace_limit},
             [this] { wait_issued(); }) {
    const WatchdogOptions watchdog{.rank = options.rank,
                                   .size = options.size,
                                   .timeout = options.timeout,
                                   .abort_limit = options.abort_limit,
                                   .inquiry_limit = options.inquiry_limit};
    watchdog_ =
        std::make_unique<Watchdog>(nccl_comm_, std::move(store), std::move(host), resources_, watchdog);
  }

  ~NcclBackend() override {
    if (watchdog_->depart() && !nccl_comm_->finalize(options_.finalize_limit))
      nccl_comm_->abort(options_.abort_limit, resources_);
    watchdog_.reset();
    drain(resources_->stream);
  }

  Work submit(std::span<const CollectiveCall> group) override {
    ops_.check(group);
    const std::lock_guard order(submitting_);
    const bool captured = is_captured(group);
    const std::size_t bytes = ops_.workspace_bytes(group);
    std::byte* const scratch = bytes ? resources_->workspace.reserve(bytes, captured) : nullptr;
    const auto job = watchdog_->begin(group);
    try {
      issue(job, group, captured ? resources_->capture_stream : resources_->stream, scratch, captured);
    } catch (const NcclError& failed) {
      watchdog_->fail_submission(failed);
    } catch (const Error& e) {
      watchdog_->fail_submission({options_.rank, e.code(), e.what()});
    }
    return Work(job);
  }

  void abort(const std::string& reason) noexcept override { watchdog_->abort(reason); }

  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    auto memory = zeroed_memory(bytes);
    void* handle = nullptr;
    run_registration(
        bytes, [&] { handle = nccl_comm_->register_memory(memory.get(), std::max<std::size_t>(bytes, 1)); });
    std::byte* const at = memory.get();
    return {at, [link = nccl_comm_, handle, memory = std::move(memory)](std::byte*) mutable {
              link->deregister_memory(handle);
              memory.reset();
            }};
  }

  std::shared_ptr<std::byte> allocate_symmetric(std::size_t bytes) override {
    const auto memory = zeroed_memory(bytes);
    bool done = false;
    run_registration(bytes,
                     [&] { done = nccl_comm_->register_window(memory, std::max<std::size_t>(bytes, 1)); });
    return done ? memory : allocate(bytes);
  }

  void check() override {
    if (watchdog_->group_status()->failed()) watchdog_->group_status()->rethrow();
  }
  std::shared_ptr<WorkState> watch_stream(const Stream& stream, std::chrono::milliseconds limit) override {
    return watchdog_->watch_stream(stream, limit);
  }
  bool capturable() const override { return true; }
  std::string describe() const override {
    int version = 0;
    nccl_comm_->api().get_version(&version);
    return concat("NCCL ", version_text(version), " on ", name(options_.device),
                  options_.deterministic ? ", sums in rank order" : "");
  }

 private:
  static bool has_f8(const NcclApi& api, Device device) {
    cuda::DeviceProperties card;
    cuda::check(cuda::runtime().get_properties(&card, device.index), "cudaGetDeviceProperties", device);
    return require_version(api) >= 22400 && card.major >= 9;
  }

  static bool is_captured(std::span<const CollectiveCall> group) {
    const bool captured = group.front().stream.stream().capturing();
    for (const CollectiveCall& op : group)
      require(op.stream.stream().capturing() == captured, Errc::invalid_argument,
              "a group has operations in a stream that is being captured and in one that is not");
    return captured;
  }

  void issue(const std::shared_ptr<NcclRequest>& job, std::span<const CollectiveCall> group,
             const Stream& stream, std::byte* scratch, bool captured) {
    void* last = nullptr;
    for (const CollectiveCall& op : group) {
      if (&op != group.data() && op.stream.native == last) continue;
      last = op.stream.native;
      stream.wait(op.stream.stream().record());
    }
    Event ready = stream.record();
    ops_.issue(group, stream, scratch);
    watchdog_->mark_issued(job, std::move(ready), stream.record(), captured);
  }

  /// Until NCCL has done what it was asked for, which it may do in the background.
  void wait_issued() const {
    std::string words;
    const PollBackoff poll;
    for (Result state = in_progress; (state = nccl_comm_->async_state(&words)) != success; poll.pause()) {
      if (watchdog_->group_status()->failed()) watchdog_->group_status()->rethrow();
      if (state != in_progress) throw NcclError{"NCCL", state, words};
    }
  }

  std::shared_ptr<std::byte> zeroed_memory(std::size_t bytes) const {
    auto memory = plain_memory(std::max<std::size_t>(bytes, 1));
    const Stream zeroing = Stream::create(options_.device);
    memset_async(memory.get(), 0, bytes, zeroing);
    zeroing.synchronize();
    return memory;
  }

  /// f() makes a call for new memory, which is over when this returns.
  template <class F>
  void run_registration(std::size_t bytes, const F& f) {
    const std::lock_guard order(submitting_);  // NCCL refuses calls while another is in progress
    try {
      f();
      wait_issued();
    } catch (const NcclError& failed) {
      if (watchdog_->group_status()->failed()) watchdog_->group_status()->rethrow();
      fail(Errc::system, "rank ", options_.rank, ": ", human_bytes(bytes), " on ", name(options_.device),
           ": ", failed.text());
    }
  }

  std::shared_ptr<std::byte> plain_memory(std::size_t bytes) const {
    const NcclApi& api = nccl_comm_->api();
    if (!api.mem_alloc || !api.mem_free) return allocate_on(options_.device, bytes);
    const cuda::DeviceGuard guard(options_.device);
    void* memory = nullptr;
    const Result result = api.mem_alloc(&memory, bytes);
    require(result == success, Errc::system, "ncclMemAlloc of ", human_bytes(bytes), " on ",
            name(options_.device), ": ", api.get_error_string(result));
    return {static_cast<std::byte*>(memory), [&api, device = options_.device](std::byte* p) {
              const cuda::DeviceGuard current(device, std::nothrow);
              api.mem_free(p);
            }};
  }

  /// Lets a stream become empty, for as long as may be expected.
  static void drain(const Stream& stream) noexcept {
    try {
      const Event end = stream.record();
      const PollBackoff poll;
      for (const Deadline limit = Deadline::after(1s); !end.done() && !limit.expired();) poll.pause();
    } catch (const Error&) {  // a device that has failed was told of by the operation that met it
    }
  }

  const NcclOptions options_;
  const std::shared_ptr<BackendResources> resources_;
  const std::shared_ptr<NcclComm> nccl_comm_;
  const NcclOps ops_;
  std::unique_ptr<Watchdog> watchdog_;
  std::mutex submitting_;
};

}  // namespace

std::unique_ptr<Backend> nccl_backend(const NcclApi& api, std::shared_ptr<Store> store,
                                      std::shared_ptr<Backend> host, const NcclOptions& options) {
  require(!options.deterministic || static_cast<std::size_t>(options.size) <= PeerKernels::max_sources,
          Errc::unsupported, "sums in rank order over NCCL serve up to ", PeerKernels::max_sources,
          " ranks, not ", options.size,
          "; set RZ_DETERMINISTIC=0 (or options.deterministic), or use --backend native");
  require_version(api);
  return std::make_unique<NcclBackend>(api, std::move(store), std::move(host), options);
}

}  // namespace rz::nccl
