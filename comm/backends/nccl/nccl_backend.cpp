#include "comm/backends/nccl/nccl_backend.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "comm/backends/nccl/nccl_ops.h"
#include "comm/backends/nccl/rendezvous.h"
#include "comm/backends/nccl/watchdog.h"
#include "comm/backends/peer_cuda/kernels/peer_kernels.h"
#include "comm/core/error.h"
#include "comm/device/memory.h"
#include "comm/os/flight_recorder.h"
#include "comm/os/wait_policy.h"

namespace rz::nccl {

namespace {

using namespace std::chrono_literals;

/// Device workspace. Operations in the backend's stream run one after the other and share one block.
/// Operations in graphs share another, since a graph may run concurrently with the stream. Not thread-safe:
/// the backend serializes submissions.
class Workspace {
 public:
  explicit Workspace(Device device) : device_(device) {}

  /// A block of at least `bytes`, aligned to 256 bytes. During capture no memory can be allocated:
  /// Errc::unsupported if `captured` and no earlier reserve() outside of a capture was as large. Blocks have
  /// at least 1 MiB.
  std::byte* reserve(std::size_t bytes, bool captured) {
    if (!captured) {
      grow(eager_, bytes);
      grow(captured_, bytes);
      return eager_.memory.get();
    }
    require(bytes <= captured_.bytes, Errc::unsupported, "a collective in a CUDA graph needs ",
            human_bytes(bytes), " of memory on ", name(device_), ", but ", human_bytes(captured_.bytes),
            " are allocated, and none can be allocated during the capture; run the same call once before it");
    return captured_.memory.get();
  }

 private:
  struct Block {
    std::shared_ptr<std::byte> memory;
    std::size_t bytes = 0;
  };
  void grow(Block& block, std::size_t bytes) {
    if (bytes <= block.bytes) return;
    const std::size_t size = std::max(min_block_bytes, std::bit_ceil(bytes));
    auto memory = allocate_on(device_, size);
    outgrown_.push_back(std::move(block));
    block = {std::move(memory), size};
  }

  static constexpr std::size_t min_block_bytes = std::size_t{1} << 20;
  const Device device_;
  Block eager_, captured_;
  std::vector<Block> outgrown_;  // streams and graphs may still use them; freeing would block
};

/// Streams and memory of the operations. NCCL may use them longer than the backend exists.
struct BackendResources {
  explicit BackendResources(Device device)
      : stream(Stream::create(device, Stream::Priority::high)),
        capture_stream(Stream::create(device, Stream::Priority::high)),
        workspace(device) {
    workspace.reserve(1, false);  // the minimum, for graphs captured before any other call
  }
  /// Separate streams, so that eager operations do not enter another thread's capture.
  const Stream stream, capture_stream;
  Workspace workspace;
};

/// Creates the communicator. On failure, aborts it and throws.
std::shared_ptr<NcclComm> connect_comm(const NcclApi& api, Store& store, const NcclOptions& options,
                                       const std::shared_ptr<BackendResources>& resources) {
  const Deadline deadline = Deadline::after(options.rendezvous_timeout);
  const RankInfo own{options.rank,         options.size,    options.device,
                     require_version(api), options.host_id, options.shares_gpus};
  const UniqueId id = exchange_unique_id(api, own, store, deadline);
  auto comm = std::make_shared<NcclComm>(api, options.device);
  const auto end = [&](Errc code, const std::string& reason) {
    const bool ended = comm->abort(options.abort_limit, resources);
    fail(code, "rank ", options.rank, " of ", options.size, ": ", reason,
         ended ? "" : "; ncclCommAbort did not return either and was left behind");
  };
  try {
    mark_joining(own, store);
    comm->init(options.rank, options.size, id);
  } catch (const NcclError& failed) {
    end(Errc::system, failed.text() + "; NCCL_DEBUG=WARN prints more");
  }
  std::string message;
  unsigned polls = 0;
  for (Result state = in_progress; (state = comm->async_state(&message)) != success;
       nccl_backoff.wait(polls++)) {
    if (state != in_progress) end(Errc::system, "NCCL could not connect the ranks: " + message);
    if (!deadline.expired()) continue;
    const std::string missing = ranks_not_joined(own, store);
    end(Errc::timeout,
        concat("NCCL did not connect the ranks within ", options.rendezvous_timeout.count(), " ms: ",
               missing.empty() ? std::string("all of them called ncclCommInitRankConfig, so look at "
                                             "the network (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)")
                               : concat("these did not call ncclCommInitRankConfig:", missing)));
  }
  return comm;
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
                                   .inquiry_limit = options.inquiry_limit,
                                   .waits = options.waits};
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
    const auto request = watchdog_->begin(group);
    record(group);
    try {
      issue(request, group, captured ? resources_->capture_stream : resources_->stream, scratch, captured);
    } catch (const NcclError& failed) {
      watchdog_->fail_submission(failed);
    } catch (const Error& e) {
      watchdog_->fail_submission({options_.rank, e.code(), e.what()});
    }
    return Work(request);
  }

  void abort(const std::string& reason) noexcept override {
    watchdog_->abort({options_.rank, Errc::aborted, concat("rank ", options_.rank, " aborted: ", reason)});
  }
  void cancel(const Error& cause) override {
    watchdog_->abort({cause.culprit(), cause.code(), cause.what()});
  }

  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    auto memory = zeroed_memory(bytes);
    void* handle = nullptr;
    run_registration("ncclCommRegister", bytes, [&] {
      handle = nccl_comm_->register_memory(memory.get(), std::max<std::size_t>(bytes, 1));
    });
    std::byte* const at = memory.get();
    return {at, [comm = nccl_comm_, handle, memory = std::move(memory)](std::byte*) mutable {
              comm->deregister_memory(handle);
              memory.reset();
            }};
  }

  std::shared_ptr<std::byte> allocate_symmetric(std::size_t bytes) override {
    const auto memory = zeroed_memory(bytes);
    bool done = false;
    run_registration("ncclCommWindowRegister", bytes,
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
  /// The collectives of a group have one number, as in Watchdog.
  void record(std::span<const CollectiveCall> group) {
    bool collectives = false;
    for (const CollectiveCall& op : group)
      if (traits(op.kind).point_to_point)
        flight_.begin_message(op);
      else
        flight_.begin(recorded_, op), collectives = true;
    recorded_ += collectives;
  }

  static bool has_f8(const NcclApi& api, Device device) {
    cuda::DeviceProperties properties;
    cuda::check(cuda::runtime().get_properties(&properties, device.index), "cudaGetDeviceProperties", device);
    return require_version(api) >= 22400 && properties.major >= 9;
  }

  static bool is_captured(std::span<const CollectiveCall> group) {
    const bool captured = group.front().stream.stream().capturing();
    for (const CollectiveCall& op : group)
      require(op.stream.stream().capturing() == captured, Errc::invalid_argument,
              "a group has operations in a stream that is being captured and in one that is not");
    return captured;
  }

  void issue(const std::shared_ptr<NcclRequest>& request, std::span<const CollectiveCall> group,
             const Stream& stream, std::byte* scratch, bool captured) {
    void* last = nullptr;
    for (const CollectiveCall& op : group) {
      if (&op != group.data() && op.stream.native == last) continue;
      last = op.stream.native;
      stream.wait(op.stream.stream().record());
    }
    Event ready = stream.record();
    ops_.issue(group, stream, scratch);
    watchdog_->mark_issued(request, std::move(ready), stream.record(), captured);
  }

  /// Waits until NCCL has enqueued all calls made so far; it may do so in the background. The watchdog ends
  /// operations that are late, and `call`, which is none, ends here after the timeout of one.
  void wait_issued(const char* call = nullptr) const {
    const Deadline deadline = Deadline::after(options_.timeout);
    std::string message;
    unsigned polls = 0;
    for (Result state = in_progress; (state = nccl_comm_->async_state(&message)) != success;
         nccl_backoff.wait(polls++)) {
      if (watchdog_->group_status()->failed()) watchdog_->group_status()->rethrow();
      if (state != in_progress) throw NcclError{"NCCL", state, message};
      if (call && deadline.expired())
        watchdog_->fail_submission(
            {-1, Errc::timeout,
             concat(call, " did not end within ", std::chrono::duration<double>(options_.timeout).count(),
                    " s on rank ", options_.rank, "; does every rank call it?")});
    }
  }

  std::shared_ptr<std::byte> zeroed_memory(std::size_t bytes) const {
    auto memory = plain_memory(std::max<std::size_t>(bytes, 1));
    const Stream zeroing = Stream::create(options_.device);
    memset_async(memory.get(), 0, bytes, zeroing);
    zeroing.synchronize();
    return memory;
  }

  /// Runs f(), a collective or local registration call, and waits until NCCL has completed it.
  template <class F>
  void run_registration(const char* call, std::size_t bytes, const F& f) {
    const std::lock_guard order(submitting_);  // NCCL rejects calls while another is in progress
    try {
      f();
      wait_issued(call);
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

  /// Waits up to 1 s until the stream is empty.
  static void drain(const Stream& stream) noexcept {
    try {
      const Event end = stream.record();
      const Deadline limit = Deadline::after(1s);
      for (unsigned polls = 0; !end.done() && !limit.expired(); ++polls) nccl_backoff.wait(polls);
    } catch (const Error&) {  // already reported by the operation that failed
    }
  }

  const NcclOptions options_;
  const std::shared_ptr<BackendResources> resources_;
  const std::shared_ptr<NcclComm> nccl_comm_;
  const NcclOps ops_;
  std::unique_ptr<Watchdog> watchdog_;
  std::mutex submitting_;
  flight::Recorder flight_{options_.waits.communicator, options_.rank, options_.size,
                           flight::Recorder::Ends::in_streams};
  std::uint32_t recorded_ = 0;
};

}  // namespace

std::unique_ptr<Backend> nccl_backend(const NcclApi& api, std::shared_ptr<Store> store,
                                      std::shared_ptr<Backend> host, const NcclOptions& options) {
  require(!options.deterministic || static_cast<std::size_t>(options.size) <= PeerKernels::max_sources,
          Errc::unsupported, "sums in rank order over NCCL serve up to ", PeerKernels::max_sources,
          " ranks, not ", options.size,
          "; set RZ_DETERMINISTIC=0 (or options.deterministic), or use RZ_BACKEND=native (--backend native)");
  require_version(api);
  return std::make_unique<NcclBackend>(api, std::move(store), std::move(host), options);
}

}  // namespace rz::nccl
