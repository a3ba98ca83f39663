#include "comm/backends/nccl/backend.h"

#include <algorithm>
#include <thread>

#include "comm/backends/nccl/calls.h"
#include "comm/backends/nccl/rendezvous.h"
#include "comm/backends/nccl/scratch.h"
#include "comm/backends/nccl/watchdog.h"
#include "comm/core/error.h"
#include "comm/kernels/peer_kernels.h"

namespace rz::nccl {

namespace {

using namespace std::chrono_literals;

/// Polls at a pace that costs little: at once for a while, then with naps.
class Poll {
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
struct Room {
  explicit Room(Device device)
      : stream(Stream::create(device, Stream::Priority::high)),
        captured(Stream::create(device, Stream::Priority::high)),
        scratch(device) {
    scratch.reserve(1, false);  // what a graph may need without a run before
  }
  const Stream stream, captured;  ///< apart, so that no thread's operation gets into another's graph
  Scratch scratch;
};

/// Makes the communicator; throws with nothing left behind.
std::shared_ptr<Link> connect(const NcclApi& api, Store& store, const NcclOptions& options,
                              const std::shared_ptr<Room>& room) {
  const Deadline deadline = Deadline::after(options.rendezvous_timeout);
  const Member me{options.rank,         options.size,    options.device,
                  require_version(api), options.host_id, options.shares_gpus};
  const UniqueId id = meet(api, me, store, deadline);
  auto link = std::make_shared<Link>(api, options.device);
  const auto end = [&](Errc code, const std::string& reason) {
    const bool ended = link->abort(options.abort_limit, room);
    fail(code, "rank ", options.rank, " of ", options.size, ": ", reason,
         ended ? "" : "; ncclCommAbort did not return either and was left behind");
  };
  try {
    note_joining(me, store);
    link->begin(options.rank, options.size, id);
  } catch (const CallFailed& failed) {
    end(Errc::system, failed.text() + "; NCCL_DEBUG=WARN says more");
  }
  std::string words;
  const Poll poll;
  for (Result state = in_progress; (state = link->state(&words)) != success; poll.pause()) {
    if (state != in_progress) end(Errc::system, "NCCL could not connect the ranks: " + words);
    if (!deadline.expired()) continue;
    const std::string missing = not_joining(me, store);
    end(Errc::timeout,
        str("NCCL did not connect the ranks within ", options.rendezvous_timeout.count(), " ms: ",
            missing.empty() ? std::string("all of them called ncclCommInitRankConfig, so look at "
                                          "the network (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)")
                            : str("these did not call ncclCommInitRankConfig:", missing)));
  }
  return link;
}

class Nccl final : public Backend {
 public:
  Nccl(const NcclApi& api, std::shared_ptr<Store> store, std::shared_ptr<Backend> host,
       const NcclOptions& options)
      : options_(options),
        room_(std::make_shared<Room>(options.device)),
        link_(connect(api, *store, options, room_)),
        calls_(*link_,
               {.rank = options.rank,
                .size = options.size,
                .deterministic = options.deterministic,
                .has_f8 = has_f8(api, options.device),
                .scratch_limit = options.scratch_limit},
               [this] { settle(); }) {
    const WatchdogOptions watchdog{.rank = options.rank,
                                   .size = options.size,
                                   .timeout = options.timeout,
                                   .abort_limit = options.abort_limit,
                                   .inquiry_limit = options.inquiry_limit};
    watchdog_ = std::make_unique<Watchdog>(link_, std::move(store), std::move(host), room_, watchdog);
  }

  ~Nccl() override {
    if (watchdog_->leave() && !link_->finalize(options_.finalize_limit))
      link_->abort(options_.abort_limit, room_);
    watchdog_.reset();
    drain(room_->stream);
  }

  Work submit(std::span<const Operation> group) override {
    calls_.check(group);
    const std::lock_guard order(submitting_);
    const bool captured = is_captured(group);
    const std::size_t bytes = calls_.scratch_bytes(group);
    std::byte* const scratch = bytes ? room_->scratch.reserve(bytes, captured) : nullptr;
    const auto job = watchdog_->begin(group);
    try {
      issue(job, group, captured ? room_->captured : room_->stream, scratch, captured);
    } catch (const CallFailed& failed) {
      watchdog_->broken(failed);
    } catch (const Error& e) {
      watchdog_->broken({options_.rank, e.code(), e.what()});
    }
    return Work(job);
  }

  void abort(const std::string& reason) noexcept override { watchdog_->abort(reason); }

  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    auto memory = zeroed_memory(bytes);
    void* handle = nullptr;
    registering(bytes, [&] { handle = link_->add_memory(memory.get(), std::max<std::size_t>(bytes, 1)); });
    std::byte* const at = memory.get();
    return {at, [link = link_, handle, memory = std::move(memory)](std::byte*) mutable {
              link->remove_memory(handle);
              memory.reset();
            }};
  }

  std::shared_ptr<std::byte> allocate_symmetric(std::size_t bytes) override {
    const auto memory = zeroed_memory(bytes);
    bool done = false;
    registering(bytes, [&] { done = link_->add_window(memory, std::max<std::size_t>(bytes, 1)); });
    return done ? memory : allocate(bytes);
  }

  void check() override {
    if (watchdog_->fate()->failed()) watchdog_->fate()->raise();
  }
  std::shared_ptr<WorkState> follow(const Stream& stream, std::chrono::milliseconds limit) override {
    return watchdog_->follow(stream, limit);
  }
  bool capturable() const override { return true; }
  std::string describe() const override {
    int version = 0;
    link_->api().get_version(&version);
    return str("NCCL ", version_text(version), " on ", name(options_.device),
               options_.deterministic ? ", sums in rank order" : "");
  }

 private:
  static bool has_f8(const NcclApi& api, Device device) {
    cuda::DeviceProperties card;
    cuda::check(cuda::runtime().get_properties(&card, device.index), "cudaGetDeviceProperties", device);
    return require_version(api) >= 22400 && card.major >= 9;
  }

  static bool is_captured(std::span<const Operation> group) {
    const bool captured = group.front().stream.capturing();
    for (const Operation& op : group)
      require(op.stream.capturing() == captured, Errc::invalid_argument,
              "a group has operations in a stream that is being captured and in one that is not");
    return captured;
  }

  void issue(const std::shared_ptr<Job>& job, std::span<const Operation> group, const Stream& stream,
             std::byte* scratch, bool captured) {
    void* last = nullptr;
    for (const Operation& op : group) {
      if (&op != group.data() && op.stream.native() == last) continue;
      last = op.stream.native();
      stream.wait(op.stream.record());
    }
    Event ready = stream.record();
    calls_.issue(group, stream, scratch);
    watchdog_->issued(job, std::move(ready), stream.record(), captured);
  }

  /// Until NCCL has done what it was asked for, which it may do in the background.
  void settle() const {
    std::string words;
    const Poll poll;
    for (Result state = in_progress; (state = link_->state(&words)) != success; poll.pause()) {
      if (watchdog_->fate()->failed()) watchdog_->fate()->raise();
      if (state != in_progress) throw CallFailed{"NCCL", state, words};
    }
  }

  std::shared_ptr<std::byte> zeroed_memory(std::size_t bytes) const {
    auto memory = plain_memory(std::max<std::size_t>(bytes, 1));
    const Stream zeroing = Stream::create(options_.device);
    set_bytes(memory.get(), 0, bytes, zeroing);
    zeroing.synchronize();
    return memory;
  }

  /// f() makes a call for new memory, which is over when this returns.
  template <class F>
  void registering(std::size_t bytes, const F& f) {
    const std::lock_guard order(submitting_);  // NCCL refuses calls while another is in progress
    try {
      f();
      settle();
    } catch (const CallFailed& failed) {
      if (watchdog_->fate()->failed()) watchdog_->fate()->raise();
      fail(Errc::system, "rank ", options_.rank, ": ", human_bytes(bytes), " on ", name(options_.device),
           ": ", failed.text());
    }
  }

  std::shared_ptr<std::byte> plain_memory(std::size_t bytes) const {
    const NcclApi& api = link_->api();
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
      const Poll poll;
      for (const Deadline limit = Deadline::after(1s); !end.done() && !limit.expired();) poll.pause();
    } catch (const Error&) {  // a device that has failed was told of by the operation that met it
    }
  }

  const NcclOptions options_;
  const std::shared_ptr<Room> room_;
  const std::shared_ptr<Link> link_;
  const Calls calls_;
  std::unique_ptr<Watchdog> watchdog_;
  std::mutex submitting_;
};

}  // namespace

std::unique_ptr<Backend> nccl_backend(const NcclApi& api, std::shared_ptr<Store> store,
                                      std::shared_ptr<Backend> host, const NcclOptions& options) {
  require(!options.deterministic || static_cast<std::size_t>(options.size) <= PeerKernels::most_sources,
          Errc::unsupported, "sums in rank order over NCCL serve up to ", PeerKernels::most_sources,
          " ranks, not ", options.size,
          "; set RZ_DETERMINISTIC=0 (or options.deterministic), or use --backend ring");
  require_version(api);
  return std::make_unique<Nccl>(api, std::move(store), std::move(host), options);
}

}  // namespace rz::nccl
