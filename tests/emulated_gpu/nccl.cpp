#include "tests/emulated_gpu/nccl.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "comm/core/math.h"
#include "comm/device/cuda_runtime.h"
#include "comm/reduce/reduce.h"
#include "tests/emulated_gpu/machine.h"

namespace rz::emulated {

namespace {

using nccl::Comm;
using nccl::DataType;
using nccl::RedOp;
using nccl::Result;

/// One call in a group.
struct Item {
  enum Kind { all_reduce, reduce_scatter, all_gather, broadcast, reduce, send, recv } kind;
  const void* in;
  void* out;
  std::size_t count;
  DataType type;
  ReduceOp op{};
  int root = 0;  // or peer
  std::uint64_t number = 0;
};

/// A collective, or a message (sender first), that ranks join.
struct PendingCall {
  std::vector<std::optional<Item>> places;
  bool held = false;
};

struct World {
  explicit World(int size) : size(size) {}
  std::vector<std::size_t> window_sizes;  // in the order in which the first rank registered them
  const int size;
  std::vector<int> devices;
  std::map<std::uint64_t, PendingCall> collectives;
  std::map<std::pair<int, int>, std::map<std::uint64_t, PendingCall>> messages;
};

struct Communicator {
  std::shared_ptr<World> world;
  int rank = 0;
  bool aborted = false, finalized = false;
  int polls_left = 0;
  std::vector<std::function<void()>> deferred;
  std::set<void*> registered, windows;
  std::vector<std::size_t> window_sizes;
  std::map<RedOp, double> factors;
  std::uint64_t collectives = 0;
  std::map<int, std::uint64_t> sent, received;
  int tasks = 0;  // enqueued in streams, not ended
};
using Handle = std::shared_ptr<Communicator>;

struct Fault {
  std::string call;
  int rank;
  bool stalls;
  Result result;
  int after;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  int version = 22809;
  std::map<std::string, std::shared_ptr<World>> worlds;
  std::map<Comm, Handle> communicators;
  std::vector<Fault> faults;
  std::map<int, Result> reported;
  bool never_connect = false;
  std::set<int> never_finalize, hang_in_abort;
  int in_progress = 0;
  std::uint64_t releases = 0, ids = 0;
  int calls = 0, aborts = 0, registrations = 0, windows = 0;
};

State& state() {
  static auto* const s = new State();
  return *s;
}

/// Null, and a test failure: it has ended.
Handle find(Comm comm, const char* call) {
  const auto it = state().communicators.find(comm);
  if (it != state().communicators.end()) return it->second;
  ADD_FAILURE() << "nccl " << call << " of a communicator that has ended";
  return nullptr;
}

/// Faults injected into a call before it does anything. May wait.
Result entry(const char* call, const Handle& comm, std::unique_lock<std::mutex>& lock) {
  auto& faults = state().faults;
  for (auto f = faults.begin(); f != faults.end(); ++f) {
    if (f->call != call || f->rank != comm->rank || f->after-- > 0) continue;
    const Fault fault = *f;
    faults.erase(f);
    if (!fault.stalls) return fault.result;
    const auto before = state().releases;
    state().changed.wait(lock, [&] { return state().releases != before || comm->aborted; });
    return comm->aborted ? nccl::internal_error : nccl::success;
  }
  return nccl::success;
}

/// Now, or after some polls. Without the lock: streams acquire it.
Result perform(const Handle& comm, std::unique_lock<std::mutex>& lock, std::function<void()> f) {
  if (state().in_progress > 0) {
    comm->polls_left = state().in_progress;
    comm->deferred.push_back(std::move(f));
    return nccl::in_progress;
  }
  lock.unlock();
  f();
  lock.lock();
  return nccl::success;
}

// ---- results of collectives

DType dtype_of_nccl(DataType t) {
  constexpr DType types[] = {DType::i8,  DType::u8,  DType::i32, DType::u32,  DType::i64,    DType::u64,
                             DType::f16, DType::f32, DType::f64, DType::bf16, DType::f8e4m3, DType::f8e5m2};
  return types[t];
}

/// From rank 1 on, with rank 0 last.
std::vector<std::byte> reduced(const std::vector<std::optional<Item>>& places) {
  const DType t = dtype_of_nccl(places[0]->type);
  const std::size_t ranks = places.size();
  const std::size_t count = places[0]->count * (places[0]->kind == Item::reduce_scatter ? ranks : 1);
  std::vector<std::vector<std::byte>> inputs;
  std::vector<const void*> sources;
  for (std::size_t i = 0; i < ranks; ++i) {
    const Item& item = *places[(i + 1) % ranks];
    inputs.emplace_back(count * size_of(t));
    if (item.op.kind == ReduceOp::premul_sum)
      scale(inputs.back().data(), item.in, count, t, item.op.factor);
    else
      std::memcpy(inputs.back().data(), item.in, count * size_of(t));
  }
  for (const auto& input : inputs) sources.push_back(input.data());
  std::vector<std::byte> result(count * size_of(t));
  rz::reduce(result.data(), sources, count, t, places[0]->op.kind, static_cast<int>(ranks));
  return result;
}

/// All ranks have called: moves all data at once, reading before it writes.
void hold(PendingCall& pending) {
  const auto& all = pending.places;
  const Item& first = *all[0];
  const std::size_t bytes = first.count * size_of(dtype_of_nccl(first.type));
  std::vector<std::byte> data;
  if (first.kind == Item::all_reduce || first.kind == Item::reduce_scatter || first.kind == Item::reduce) {
    data = reduced(all);
  } else if (first.kind == Item::all_gather) {
    for (const auto& item : all) {
      const auto* in = static_cast<const std::byte*>(item->in);
      data.insert(data.end(), in, in + bytes);
    }
  } else {
    const Item& source = first.kind == Item::send ? first : *all[static_cast<std::size_t>(first.root)];
    const auto* in = static_cast<const std::byte*>(source.in);
    data.assign(in, in + bytes);
  }
  for (std::size_t r = 0; r < all.size(); ++r) {
    const Item& item = *all[r];
    if (item.kind == Item::send || (item.kind == Item::reduce && static_cast<int>(r) != item.root)) continue;
    const std::size_t from = item.kind == Item::reduce_scatter ? r * bytes : 0;
    const std::size_t size = item.kind == Item::reduce_scatter ? bytes : data.size();
    std::memcpy(item.out, data.data() + from, size);
  }
  pending.held = true;
}

/// All ranks have made the same call. Otherwise NCCL hangs.
bool agree(const std::vector<std::optional<Item>>& places) {
  for (const auto& p : places) {
    if (!places[0] || !p) return false;
    const Item &a = *places[0], &b = *p;
    const bool message = a.kind == Item::send;
    if (!message && (a.kind != b.kind || a.root != b.root || a.op.kind != b.op.kind)) return false;
    if (a.count != b.count || a.type != b.type) return false;
  }
  return true;
}

/// A group of one rank in flight: a task of a stream.
class Running {
 public:
  Running(Handle comm, std::vector<Item> items, std::uint64_t random)
      : comm_(std::move(comm)), items_(std::move(items)), turns_(random % 3) {}

  Progress operator()() {
    const std::lock_guard lock(state().mutex);
    if (comm_->aborted) return end();
    if (turns_ > 0) return --turns_, Progress::more;
    if (!arrived_) arrive();
    bool all_held = true;
    for (const Item& item : items_) {
      PendingCall& pending = place_of(item);
      if (!pending.held && agree(pending.places)) hold(pending);
      all_held &= pending.held;
    }
    return all_held ? end() : Progress::waiting;
  }

 private:
  Progress end() {
    if (!over_) --comm_->tasks;
    over_ = true;
    return Progress::done;
  }
  bool is_message(const Item& item) const { return item.kind == Item::send || item.kind == Item::recv; }
  PendingCall& place_of(const Item& item) {
    World& w = *comm_->world;
    if (!is_message(item)) return w.collectives[item.number];
    const bool sends = item.kind == Item::send;
    return w
        .messages[sends ? std::pair(comm_->rank, item.root) : std::pair(item.root, comm_->rank)][item.number];
  }
  void arrive() {
    arrived_ = true;
    for (Item& item : items_) {
      if (item.kind == Item::send)
        item.number = comm_->sent[item.root]++;
      else if (item.kind == Item::recv)
        item.number = comm_->received[item.root]++;
      else
        item.number = comm_->collectives++;
      PendingCall& pending = place_of(item);
      pending.places.resize(is_message(item) ? 2 : static_cast<std::size_t>(comm_->world->size));
      pending.places[is_message(item) ? item.kind == Item::recv : static_cast<std::size_t>(comm_->rank)] =
          item;
    }
  }

  const Handle comm_;
  std::vector<Item> items_;
  std::uint64_t turns_;
  bool arrived_ = false, over_ = false;
};

// ---- groups

struct Group {
  int depth = 0;
  Comm comm = nullptr;
  void* stream = nullptr;
  std::vector<Item> items;
};
thread_local Group group;

void enqueue(const Handle& comm, void* stream, const std::vector<Item>& items) {
  {
    const std::lock_guard lock(state().mutex);
    ++comm->tasks;
  }
  Machine::instance().submit(static_cast<Stream*>(stream), [comm, items](std::uint64_t random) -> Work {
    return [run = std::make_shared<Running>(comm, items, random)] { return (*run)(); };
  });
}

Result add(const char* call, Comm c, void* stream, Item item) {
  std::unique_lock lock(state().mutex);
  const Handle comm = find(c, call);
  if (!comm) return nccl::invalid_argument;
  if (const Result result = entry(call, comm, lock)) return result;
  ++state().calls;
  if (item.op.kind == ReduceOp::premul_sum) {
    const auto made = comm->factors.find(static_cast<RedOp>(item.op.factor));
    if (made == comm->factors.end()) return nccl::invalid_argument;
    item.op.factor = made->second;
  }
  if (group.depth == 0) return perform(comm, lock, [=] { enqueue(comm, stream, {item}); });
  if (!group.items.empty() && (group.comm != c || group.stream != stream)) return nccl::invalid_usage;
  group.comm = c;
  group.stream = stream;
  group.items.push_back(item);
  return nccl::success;
}

Result group_start() {
  ++group.depth;
  return nccl::success;
}

Result group_end() {
  if (group.depth == 0) return nccl::invalid_usage;
  if (--group.depth > 0) return nccl::success;
  const Group mine = std::exchange(group, {});
  if (mine.items.empty()) return nccl::success;
  std::unique_lock lock(state().mutex);
  const Handle comm = find(mine.comm, "group_end");
  if (!comm) return nccl::invalid_argument;
  if (const Result result = entry("group_end", comm, lock)) return result;
  return perform(comm, lock, [=] { enqueue(comm, mine.stream, mine.items); });
}

/// An operator made by ncclRedOpCreatePreMulSum is looked up by its number.
ReduceOp op_of(RedOp op) {
  constexpr ReduceOp::Kind fixed[] = {ReduceOp::sum, ReduceOp::prod, ReduceOp::max, ReduceOp::min,
                                      ReduceOp::avg};
  return op < 5 ? ReduceOp(fixed[op]) : ReduceOp::premul(op);
}

// ---- communicators

Result get_unique_id(nccl::UniqueId* id) {
  const std::lock_guard lock(state().mutex);
  *id = {};
  const std::string text = concat("world ", ++state().ids);
  std::memcpy(id->bytes, text.data(), text.size());
  return nccl::success;
}

Result comm_init_rank_config(Comm* to, int size, nccl::UniqueId id, int rank, nccl::Config* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0 || rank < 0 || rank >= size)
    return nccl::invalid_argument;
  int device = 0;
  cuda::runtime().get_device(&device);
  std::unique_lock lock(state().mutex);
  const auto comm = std::make_shared<Communicator>();
  auto& world = state().worlds[id.bytes];
  if (!world) world = std::make_shared<World>(size);
  comm->world = world;
  comm->rank = rank;
  *to = reinterpret_cast<Comm>(comm.get());
  state().communicators[*to] = comm;
  if (const Result result = entry("comm_init_rank_config", comm, lock)) return result;
  world->devices.push_back(device);
  if (state().in_progress > 0) comm->polls_left = state().in_progress;
  return nccl::in_progress;
}

Result status(const Communicator& comm) {
  if (const auto it = state().reported.find(comm.rank); it != state().reported.end()) return it->second;
  const auto& devices = comm.world->devices;
  if (state().never_connect || static_cast<int>(devices.size()) < comm.world->size) return nccl::in_progress;
  if (std::set<int>(devices.begin(), devices.end()).size() < devices.size()) return nccl::invalid_usage;
  if (comm.polls_left > 0) return nccl::in_progress;
  if (comm.finalized && (comm.tasks > 0 || state().never_finalize.contains(comm.rank)))
    return nccl::in_progress;
  return nccl::success;
}

Result comm_get_async_error(Comm c, Result* result) {
  std::unique_lock lock(state().mutex);
  const Handle comm = find(c, "comm_get_async_error");
  if (!comm) return nccl::invalid_argument;
  *result = status(*comm);
  if (comm->polls_left > 0 && --comm->polls_left == 0) {
    const auto deferred = std::exchange(comm->deferred, {});
    lock.unlock();
    for (const auto& f : deferred) f();
  }
  return nccl::success;
}

Result comm_abort(Comm c) {
  std::unique_lock lock(state().mutex);
  const Handle comm = find(c, "comm_abort");
  if (!comm) return nccl::invalid_argument;
  if (state().hang_in_abort.contains(comm->rank)) {
    const auto before = state().releases;
    state().changed.wait(lock, [&] { return state().releases != before; });
  }
  comm->aborted = true;
  state().registrations -= static_cast<int>(comm->registered.size());
  state().communicators.erase(c);
  ++state().aborts;
  state().changed.notify_all();
  return nccl::success;
}

Result comm_finalize(Comm c) {
  std::unique_lock lock(state().mutex);
  const Handle comm = find(c, "comm_finalize");
  if (!comm || comm->finalized) return nccl::invalid_argument;
  if (const Result result = entry("comm_finalize", comm, lock)) return result;
  comm->finalized = true;
  return nccl::in_progress;
}

Result comm_destroy(Comm c) {
  const std::lock_guard lock(state().mutex);
  const Handle comm = find(c, "comm_destroy");
  if (!comm) return nccl::invalid_argument;
  EXPECT_TRUE(comm->finalized) << "a communicator was destroyed before it was finalized";
  EXPECT_TRUE(comm->registered.empty()) << "a communicator was destroyed with registered memory";
  EXPECT_TRUE(comm->windows.empty()) << "a communicator was destroyed with windows";
  state().communicators.erase(c);
  state().changed.notify_all();
  return nccl::success;
}

Result red_op_create_pre_mul_sum(RedOp* op, void* scalar, DataType type, int residence, Comm c) {
  const std::lock_guard lock(state().mutex);
  const Handle comm = find(c, "red_op_create_pre_mul_sum");
  if (!comm || residence != nccl::scalar_host_immediate) return nccl::invalid_argument;
  double factor = 0;
  if (type == nccl::float64) {
    std::memcpy(&factor, scalar, sizeof factor);
  } else if (type == nccl::float32) {
    float f = 0;
    std::memcpy(&f, scalar, sizeof f);
    factor = f;
  } else if (type == nccl::float16 || type == nccl::bfloat16) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, scalar, sizeof bits);
    factor = type == nccl::float16 ? to_f32(f16{bits}) : to_f32(bf16{bits});
  } else {
    return nccl::invalid_argument;
  }
  for (*op = 5; comm->factors.contains(*op);) ++*op;
  comm->factors[*op] = factor;
  return nccl::success;
}

Result red_op_destroy(RedOp op, Comm c) {
  const std::lock_guard lock(state().mutex);
  const Handle comm = find(c, "red_op_destroy");
  return comm && comm->factors.erase(op) ? nccl::success : nccl::invalid_argument;
}

Result comm_register(Comm c, void* memory, std::size_t, void** handle) {
  std::unique_lock lock(state().mutex);
  const Handle comm = find(c, "comm_register");
  if (!comm) return nccl::invalid_argument;
  if (const Result result = entry("comm_register", comm, lock)) return result;
  comm->registered.insert(*handle = memory);
  ++state().registrations;
  return nccl::success;
}

Result comm_deregister(Comm c, void* handle) {
  const std::lock_guard lock(state().mutex);
  const Handle comm = find(c, "comm_deregister");
  if (!comm || comm->registered.erase(handle) == 0) return nccl::invalid_argument;
  --state().registrations;
  return nccl::success;
}

/// Ranks register their windows in one order and with the same sizes. The handle is written when the call is
/// over.
Result comm_window_register(Comm c, void* memory, std::size_t bytes, void** window, int flags) {
  std::unique_lock lock(state().mutex);
  const Handle comm = find(c, "comm_window_register");
  if (!comm || flags != nccl::window_is_symmetric) return nccl::invalid_argument;
  if (const Result result = entry("comm_window_register", comm, lock)) return result;
  auto& sizes = comm->world->window_sizes;
  const std::size_t at = comm->window_sizes.size();
  if (at == sizes.size()) sizes.push_back(bytes);
  if (sizes[at] != bytes) return nccl::invalid_argument;
  comm->window_sizes.push_back(bytes);
  comm->windows.insert(memory);
  ++state().windows;
  return perform(comm, lock, [=] { *window = memory; });
}

Result comm_window_deregister(Comm c, void* window) {
  const std::lock_guard lock(state().mutex);
  const Handle comm = find(c, "comm_window_deregister");
  if (!comm || comm->windows.erase(window) == 0) return nccl::invalid_argument;
  return nccl::success;
}

const char* get_error_string(Result result) {
  constexpr const char* texts[] = {"no error",
                                   "unhandled cuda error",
                                   "unhandled system error",
                                   "internal error",
                                   "invalid argument",
                                   "invalid usage",
                                   "remote process exited or there was a network error",
                                   "in progress"};
  return result >= 0 && result < 8 ? texts[result] : "unknown result code";
}

const nccl::NcclApi everything{
    .get_version = [](int* version) -> Result {
      const std::lock_guard lock(state().mutex);
      return *version = state().version, nccl::success;
    },
    .get_unique_id = get_unique_id,
    .comm_init_rank_config = comm_init_rank_config,
    .comm_get_async_error = comm_get_async_error,
    .comm_abort = comm_abort,
    .comm_finalize = comm_finalize,
    .comm_destroy = comm_destroy,

    .group_start = group_start,
    .group_end = group_end,
    .all_reduce =
        [](const void* in, void* out, std::size_t n, DataType t, RedOp op, Comm c, void* s) {
          return add("all_reduce", c, s, {Item::all_reduce, in, out, n, t, op_of(op)});
        },
    .reduce_scatter =
        [](const void* in, void* out, std::size_t n, DataType t, RedOp op, Comm c, void* s) {
          return add("reduce_scatter", c, s, {Item::reduce_scatter, in, out, n, t, op_of(op)});
        },
    .all_gather =
        [](const void* in, void* out, std::size_t n, DataType t, Comm c, void* s) {
          return add("all_gather", c, s, {Item::all_gather, in, out, n, t});
        },
    .broadcast =
        [](const void* in, void* out, std::size_t n, DataType t, int root, Comm c, void* s) {
          return add("broadcast", c, s, {Item::broadcast, in, out, n, t, {}, root});
        },
    .reduce =
        [](const void* in, void* out, std::size_t n, DataType t, RedOp op, int root, Comm c, void* s) {
          return add("reduce", c, s, {Item::reduce, in, out, n, t, op_of(op), root});
        },
    .send =
        [](const void* data, std::size_t n, DataType t, int peer, Comm c, void* s) {
          return add("send", c, s, {Item::send, data, nullptr, n, t, {}, peer});
        },
    .recv =
        [](void* data, std::size_t n, DataType t, int peer, Comm c, void* s) {
          return add("recv", c, s, {Item::recv, nullptr, data, n, t, {}, peer});
        },
    .red_op_create_pre_mul_sum = red_op_create_pre_mul_sum,
    .red_op_destroy = red_op_destroy,
    .get_error_string = get_error_string,
    .get_last_error = [](Comm) { return "a failure that the test has set"; },
    .comm_register = comm_register,
    .comm_deregister = comm_deregister,
    .comm_window_register = comm_window_register,
    .comm_window_deregister = comm_window_deregister,
    .mem_alloc = [](void** memory, std::size_t bytes) -> Result {
      return cuda::runtime().malloc(memory, bytes) == cuda::success ? nccl::success
                                                                    : nccl::unhandled_cuda_error;
    },
    .mem_free = [](void* memory) -> Result {
      return cuda::runtime().free(memory) == cuda::success ? nccl::success : nccl::unhandled_cuda_error;
    },
};

template <class F>
void change(const F& f) {
  {
    const std::lock_guard lock(state().mutex);
    f(state());
  }
  state().changed.notify_all();
}

}  // namespace

Nccl::Nccl() = default;

Nccl::~Nccl() {
  release();
  std::unique_lock lock(state().mutex);
  const auto limit = std::chrono::system_clock::now() + std::chrono::seconds(10);
  state().changed.wait_until(lock, limit, [] { return state().communicators.empty(); });
  EXPECT_TRUE(state().communicators.empty()) << "NCCL communicators that were not destroyed";
  EXPECT_EQ(state().registrations, 0);
  state().communicators.clear();
  state().worlds.clear();
  state().faults.clear();
  state().reported.clear();
  state().never_connect = false;
  state().never_finalize.clear();
  state().hang_in_abort.clear();
  state().in_progress = 0;
  state().calls = state().aborts = state().registrations = state().windows = 0;
  state().version = 22809;
}

void Nccl::version(int version) {
  change([&](State& s) { s.version = version; });
}

nccl::NcclApi Nccl::table(int version) {
  nccl::NcclApi api = everything;
  if (version < 22700) {
    api.comm_window_register = nullptr;
    api.comm_window_deregister = nullptr;
  }
  if (version < 21900) {
    api.comm_register = nullptr;
    api.comm_deregister = nullptr;
    api.mem_alloc = nullptr;
    api.mem_free = nullptr;
  }
  return api;
}

void Nccl::stall(const std::string& call, int rank) {
  change([&](State& s) { s.faults.push_back({call, rank, true, nccl::success, 0}); });
}
void Nccl::fail(const std::string& call, int rank, Result result, int after) {
  change([&](State& s) { s.faults.push_back({call, rank, false, result, after}); });
}
void Nccl::report(int rank, Result result) {
  change([&](State& s) { s.reported[rank] = result; });
}
void Nccl::never_connect() {
  change([](State& s) { s.never_connect = true; });
}
void Nccl::never_finalize(int rank) {
  change([&](State& s) { s.never_finalize.insert(rank); });
}
void Nccl::hang_in_abort(int rank) {
  change([&](State& s) { s.hang_in_abort.insert(rank); });
}
void Nccl::in_progress(int polls) {
  change([&](State& s) { s.in_progress = polls; });
}
void Nccl::release() {
  change([](State& s) { ++s.releases; });
}

int Nccl::communicators() const {
  const std::lock_guard lock(state().mutex);
  return static_cast<int>(state().communicators.size());
}
int Nccl::calls() const {
  const std::lock_guard lock(state().mutex);
  return state().calls;
}
int Nccl::aborts() const {
  const std::lock_guard lock(state().mutex);
  return state().aborts;
}
int Nccl::windows() const {
  const std::lock_guard lock(state().mutex);
  return state().windows;
}

int Nccl::registrations() const {
  const std::lock_guard lock(state().mutex);
  return state().registrations;
}

}  // namespace rz::emulated

namespace rz::nccl {
const NcclApi& nccl_api() { return emulated::everything; }
}  // namespace rz::nccl
