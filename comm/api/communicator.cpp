#include "comm/communicator.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "comm/api/arguments.h"
#include "comm/backend.h"
#include "comm/backends/backend_factory.h"
#include "comm/collective.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/core/long_wait.h"
#include "comm/os/flight_recorder.h"
#include "comm/os/process.h"
#include "comm/os/wait_policy.h"

namespace rz {

void print_wait(const std::string& line) { std::fputs((line + '\n').c_str(), stderr); }

WaitReportOptions CommOptions::waits() const {
  return {name.empty() ? WaitReportOptions().communicator : name, on_wait, wait_report};
}

namespace {

/// Destroys the backend in its creator process. A child of fork() has no threads of the backend, and locks in
/// its copy may be held forever: there it is abandoned and leaked.
std::shared_ptr<Backend> in_creator_process(std::unique_ptr<Backend> backend) {
  return {backend.release(), [creator = Creator()](Backend* b) {
            if (creator.is_this_process()) return delete b;
            b->abandon();
            leak_reachable(b);
          }};
}

/// The backend of a group's present generation, for those that outlive it. Thread-safe.
class Present {
 public:
  explicit Present(std::shared_ptr<Backend> backend) : backend_(std::move(backend)) {}
  std::shared_ptr<Backend> get() const {
    const std::lock_guard lock(mutex_);
    return backend_;
  }
  void set(std::shared_ptr<Backend> next) {
    const std::lock_guard lock(mutex_);
    backend_.swap(next);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Backend> backend_;
};

}  // namespace

struct Communicator::State {
  State(int of_rank, int of_size, CommOptions o, std::shared_ptr<Store> s, std::unique_ptr<Backend> b)
      : rank(of_rank), size(of_size), options(std::move(o)), store(std::move(s)) {
    begin(std::move(b));
  }
  /// A generation begins with this backend.
  void begin(std::unique_ptr<Backend> next) {
    auto shared = in_creator_process(std::move(next));
    backend = shared.get();
    present ? present->set(std::move(shared)) : void(present = std::make_shared<Present>(std::move(shared)));
  }
  void reconnect();

  const int rank, size;
  const CommOptions options;
  const std::shared_ptr<Store> store;  // null: of from_backend()
  Backend* backend = nullptr;          // that of `present`
  std::shared_ptr<Present> present;
  int splits = 0, renewals = 0;
  std::vector<std::weak_ptr<State>> groups;  // split from this one
  std::weak_ptr<State> parent;               // that this one was split from
  std::vector<int> ranks;                    // there
  bool shares_failures = false;              // with it
  std::vector<int> ranks_of_job;             // of a group that split() made
};

Communicator::Communicator(std::shared_ptr<State> state) : state_(std::move(state)) {}
Communicator::Communicator(Communicator&&) noexcept = default;
Communicator& Communicator::operator=(Communicator&&) noexcept = default;
Communicator::~Communicator() = default;

Communicator Communicator::connect(int rank, int size, std::shared_ptr<Store> store, CommOptions options) {
  if (store) store = Store::of_next_group(std::move(store), rank);
  return connect_from({}, rank, size, std::move(store), std::move(options));
}

Communicator Communicator::connect_from(const Inherited& from, int rank, int size,
                                        std::shared_ptr<Store> store, CommOptions options) {
  require(size >= 1, Errc::invalid_argument, "a group needs at least 1 rank, got ", size);
  require(rank >= 0 && rank < size, Errc::invalid_argument, "rank ", rank, " is not within 0 to ", size - 1);
  require(store != nullptr || size == 1, Errc::invalid_argument, "rank ", rank, " of ", size,
          " has no store");
  if (!store) store = memory_store();
  auto backend = make_backend(rank, size, store, options, from);
  return Communicator(std::make_shared<State>(rank, size, std::move(options), store, std::move(backend)));
}

Communicator Communicator::from_backend(int rank, int size, std::unique_ptr<Backend> backend,
                                        CommOptions options) {
  require(backend != nullptr && rank >= 0 && rank < size, Errc::invalid_argument, "rank ", rank, " of ", size,
          " has no backend or no place in the group");
  return Communicator(std::make_shared<State>(rank, size, std::move(options), nullptr, std::move(backend)));
}

int Communicator::rank() const { return state_->rank; }
int Communicator::size() const { return state_->size; }
const CommOptions& Communicator::options() const { return state_->options; }
bool Communicator::capturable() const { return state_->backend->capturable(); }
std::string Communicator::reason_against_copies_in_graphs() const {
  return state_->backend->reason_against_copies_in_graphs();
}

namespace {

/// Throws the group's failure, up to 1 s later, once the stream has drained: its work still uses memory of
/// the group, and the caller may destroy the communicator next. Work that has ended is not cancelled.
void check_while_running(Backend& backend, const Event& end) {
  try {
    backend.check();
  } catch (const Error& e) {
    const Deadline deadline = Deadline::after(std::chrono::seconds(1));
    for (unsigned polls = 0; !end.done() && !deadline.expired(); ++polls) short_backoff.wait(polls);
    if (e.code() != Errc::cancelled || !end.done()) throw;
  }
}

}  // namespace

void Communicator::synchronize(const Stream& stream) {
  const auto limit = 2 * bounded(state_->options.timeout);
  if (const auto followed = state_->backend->watch_stream(stream, limit)) return followed->wait();
  const Event end = stream.record();
  const Deadline deadline = Deadline::after(limit);
  for (unsigned polls = 0; !end.done(); ++polls) {
    if (polls % 64 == 63) check_while_running(*state_->backend, end);
    if (deadline.expired()) {
      const std::string what =
          concat("a stream of ", name(stream.device()), " on rank ", state_->rank, " did not end within ",
                 std::chrono::duration<double>(limit).count(), " s: another rank's may be stuck");
      abort(what);
      fail(Errc::timeout, what);
    }
    short_backoff.wait(polls);
  }
  check_while_running(*state_->backend, end);
}

std::string Communicator::describe() const { return state_->backend->describe(); }
AlgorithmChoice Communicator::explain(Collective kind, std::size_t bytes, bool allocated, DType dtype,
                                      ReduceOp op) const {
  return state_->backend->explain(kind, bytes, allocated, dtype, op);
}
Work Communicator::submit(std::span<const CollectiveCall> group) { return state_->backend->submit(group); }
Work Communicator::submit_one(CollectiveCall operation, const CallSite& site) {
  operation.origin = CallOrigin::of(site);
  return submit({&operation, 1});
}
void Communicator::abort(const std::string& reason) noexcept { state_->present->get()->abort(reason); }

// ---- generations

/// Waits for the others, which may compute for as long as an operation may take. A rank that dies meanwhile
/// is found by the connections of the generation before.
void Communicator::State::reconnect() {
  const std::shared_ptr<Backend> before = present->get();
  Inherited from{.memory = before->shared_memory(), .check_peers = [lost = std::weak_ptr(before)] {
                   if (const auto backend = lost.lock()) backend->check_peers();
                 }};
  if (const auto above = parent.lock(); above && shares_failures)
    from.failures = above->backend->link_monitor(), from.ranks = ranks;
  CommOptions waiting = options;
  waiting.rendezvous_timeout = std::max(options.rendezvous_timeout, options.timeout);
  const flight::Members recorded(ranks_of_job);
  try {
    begin(make_backend(rank, size, prefix_store(store, concat("renewal/", ++renewals, '/')), waiting, from));
  } catch (const Error& e) {
    throw Error(e.code(), concat("renew() on rank ", rank, ": ", e.what()), e.culprit());
  }
}

/// A group and those that live of the ones split from it, each before its own.
struct Communicator::Family {
  struct Member {
    std::shared_ptr<State> state;
    std::vector<int> named;  ///< the ranks of the first group that errors of this one number from 0
  };
  explicit Family(const std::shared_ptr<State>& first) {
    std::vector<int> all(static_cast<std::size_t>(first->size));
    std::iota(all.begin(), all.end(), 0);
    add(first, all, all);
  }
  /// `ranks`: of the group, in the first one.
  void add(const std::shared_ptr<State>& group, const std::vector<int>& ranks,
           const std::vector<int>& named) {
    members.push_back({group, named});
    for (const auto& split : group->groups)
      if (const auto living = split.lock()) {
        std::vector<int> own;
        for (const int r : living->ranks) own.push_back(ranks[static_cast<std::size_t>(r)]);
        add(living, own, living->shares_failures ? named : own);
      }
  }
  /// With which another rank has cancelled one of the groups, in numbers of the first.
  std::optional<Error> cancelled_by_another() const {
    for (const Member& m : members) try {
        m.state->backend->check();
      } catch (const Error& e) {
        if (e.code() == Errc::cancelled && e.culprit() >= 0)
          return Error(e.code(), e.what(), m.named[static_cast<std::size_t>(e.culprit())]);
      }
    return std::nullopt;
  }
  void cancel(const Error& cause) const {
    for (const Member& m : members) {
      const auto at = std::ranges::find(m.named, cause.culprit());
      const auto culprit = at == m.named.end() ? -1 : static_cast<int>(at - m.named.begin());
      m.state->backend->cancel(Error(cause.code(), cause.what(), culprit));
    }
  }

  std::vector<Member> members;
};

void Communicator::renew(const std::string& reason) {
  require(!state_->shares_failures || state_->parent.expired(), Errc::invalid_argument, "renew() on rank ",
          rank(),
          " of a group that shares the failures of the one that it was split from: renew that one, which "
          "renews both");
  require(state_->store != nullptr, Errc::unsupported, describe(),
          ": a communicator of from_backend() or connect_mpi() has no store by which it could connect again; "
          "connect a new one");
  const Family family(state_);
  const auto cause = family.cancelled_by_another();
  family.cancel(cause ? *cause
                      : Error(Errc::cancelled,
                              reason.empty() ? concat("rank ", rank(), " called renew()") : reason, rank()));
  for (const auto& member : family.members) member.state->reconnect();
}

namespace {

/// Rejects sizes that would overflow when a backend rounds them up.
std::size_t require_addressable(std::size_t bytes) {
  require(bytes <= static_cast<std::size_t>(PTRDIFF_MAX), Errc::system, "cannot allocate ",
          human_bytes(bytes), ": no process can address so much; is the count right?");
  return bytes;
}

}  // namespace

std::shared_ptr<std::byte> Communicator::allocate(std::size_t bytes) {
  return state_->backend->allocate(require_addressable(bytes));
}

std::shared_ptr<std::byte> Communicator::allocate_symmetric(std::size_t bytes) {
  return state_->backend->allocate_symmetric(require_addressable(bytes));
}

Registration Communicator::register_buffer(void* data, std::size_t bytes) {
  require(data != nullptr || bytes == 0, Errc::invalid_argument, "register_buffer on rank ", state_->rank,
          ": the memory is null but has ", bytes, " bytes");
  Registration made = state_->backend->register_buffer({static_cast<std::byte*>(data), bytes});
  return made.zero_copy()
             ? std::move(made)
             : Registration(concat("the memory of ", human_bytes(bytes), " is not shared: ", made.reason()));
}

Allocator Communicator::allocator() {
  return {[present = state_->present](std::size_t bytes) {
            return present->get()->allocate(require_addressable(bytes));
          },
          state_->options.device};
}

template <Collective kind>
Work Communicator::start(const ConstBuffer& in, const Buffer& out, int root, ReduceOp op,
                         const Stream& stream, const CallSite& site) {
  const Caller caller{rank(), size(), options().device};
  CollectiveCall call = is_plain(caller, traits(kind), in, out, root)
                            ? plain_call(caller, traits(kind), in, out, root, op)
                            : make_call(caller, kind, in, out, root, op, stream);
  call.origin = CallOrigin::of(site);
  return state_->backend->submit({&call, 1});
}

Work Communicator::all_reduce(const Buffer& b, ReduceOp op, const Stream& stream, CallSite site) {
  return start<Collective::all_reduce>(b, b, 0, op, stream, site);
}
Work Communicator::all_reduce(const ConstBuffer& in, const Buffer& out, ReduceOp op, const Stream& stream,
                              CallSite site) {
  return start<Collective::all_reduce>(in, out, 0, op, stream, site);
}
Work Communicator::reduce_scatter(const ConstBuffer& in, const Buffer& out, ReduceOp op, const Stream& stream,
                                  CallSite site) {
  return start<Collective::reduce_scatter>(in, out, 0, op, stream, site);
}
Work Communicator::all_gather(const ConstBuffer& in, const Buffer& out, const Stream& stream, CallSite site) {
  return start<Collective::all_gather>(in, out, 0, ReduceOp::sum, stream, site);
}
Work Communicator::broadcast(const Buffer& b, int root, const Stream& stream, CallSite site) {
  return start<Collective::broadcast>(b, b, root, ReduceOp::sum, stream, site);
}
Work Communicator::broadcast(const ConstBuffer& in, const Buffer& out, int root, const Stream& stream,
                             CallSite site) {
  return start<Collective::broadcast>(in, out, root, ReduceOp::sum, stream, site);
}
Work Communicator::reduce(const ConstBuffer& in, const Buffer& out, int root, ReduceOp op,
                          const Stream& stream, CallSite site) {
  return start<Collective::reduce>(in, out, root, op, stream, site);
}
Work Communicator::gather(const ConstBuffer& in, const Buffer& out, int root, const Stream& stream,
                          CallSite site) {
  return start<Collective::gather>(in, out, root, ReduceOp::sum, stream, site);
}
Work Communicator::scatter(const ConstBuffer& in, const Buffer& out, int root, const Stream& stream,
                           CallSite site) {
  return start<Collective::scatter>(in, out, root, ReduceOp::sum, stream, site);
}
Work Communicator::all_to_all(const ConstBuffer& in, const Buffer& out, const Stream& stream, CallSite site) {
  return start<Collective::all_to_all>(in, out, 0, ReduceOp::sum, stream, site);
}

Work Communicator::all_to_all_v(const ConstBuffer& in, const Counts& send_counts, const Counts& send_offsets,
                                const Buffer& out, const Counts& recv_counts, const Counts& recv_offsets,
                                const Stream& stream, CallSite site) {
  CallList calls = make_all_to_all_v({rank(), size(), options().device}, in, send_counts, send_offsets, out,
                                     recv_counts, recv_offsets, stream);
  calls[0].origin = CallOrigin::of(site);
  return submit(calls);
}
Work Communicator::send(const ConstBuffer& buffer, int to, const Stream& stream, CallSite site) {
  return submit_one(make_send({rank(), size(), options().device}, buffer, to, stream), site);
}
Work Communicator::recv(const Buffer& buffer, int from, const Stream& stream, CallSite site) {
  return submit_one(make_recv({rank(), size(), options().device}, buffer, from, stream), site);
}
Work Communicator::barrier(CallSite site) {
  return submit_one(CollectiveCall{.kind = Collective::barrier}, site);
}

namespace {

/// "0 (new rank 0), 5 (1)".
std::string new_group_of(const std::vector<int>& members) {
  std::string text;
  for (std::size_t i = 0; i < members.size(); ++i)
    text += concat(i ? ", " : "", members[i], i ? " (" : " (new rank ", i, ")");
  return text;
}

}  // namespace

std::optional<Communicator> Communicator::split(std::optional<int> color, int key,
                                                std::optional<ReductionOrder> order, bool shares_failures,
                                                CallSite site) {
  struct Choice {
    std::int64_t has_color, color, key;
  };
  const Choice mine{color.has_value(), color.value_or(0), key};
  std::vector<Choice> all(static_cast<std::size_t>(size()));
  all_gather(ConstBuffer(&mine.has_color, 3), Buffer(&all.data()->has_color, 3 * all.size()), {}, site)
      .wait();
  const int number = state_->splits++;
  if (!color) return std::nullopt;
  std::vector<int> members;
  for (int r = 0; r < size(); ++r) {
    const Choice& c = all[static_cast<std::size_t>(r)];
    if (c.has_color && c.color == mine.color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return all[static_cast<std::size_t>(a)].key < all[static_cast<std::size_t>(b)].key;
  });
  const auto place = std::find(members.begin(), members.end(), rank()) - members.begin();
  const int new_rank = static_cast<int>(place), new_size = static_cast<int>(members.size());
  auto store =
      state_->store ? prefix_store(state_->store, concat("split/", number, "/", *color, "/")) : nullptr;
  CommOptions options = state_->options;
  options.reduction_order = order.value_or(options.reduction_order);
  if (!options.name.empty()) options.name += concat("/split ", number);
  const bool same_order = new_size <= 3 || options.reduction_order == state_->options.reduction_order;
  std::vector<int> of_job = members;
  if (const auto& known = state_->ranks_of_job; !known.empty())
    for (int& m : of_job) m = known[static_cast<std::size_t>(m)];
  const flight::Members recorded(of_job);
  std::optional<Communicator> made;
  if (auto backend = same_order ? state_->backend->split(members, number) : nullptr)
    made = Communicator(
        std::make_shared<State>(new_rank, new_size, options, std::move(store), std::move(backend)));
  else
    try {
      made = connect_from({state_->backend->shared_memory(),
                           shares_failures ? state_->backend->link_monitor() : nullptr, members},
                          new_rank, new_size, std::move(store), options);
    } catch (const Error& e) {  // in numbers of the new group
      const int culprit = e.culprit() < 0 ? -1 : members[static_cast<std::size_t>(e.culprit())];
      throw Error(e.code(),
                  concat("split() on rank ", rank(), ": ranks ", new_group_of(members),
                         " could not connect; in numbers of the new group: ", e.what()),
                  culprit);
    }
  std::erase_if(state_->groups, [](const auto& group) { return group.expired(); });
  state_->groups.push_back(made->state_);
  made->state_->parent = state_;
  made->state_->ranks = members;
  made->state_->shares_failures = shares_failures;
  made->state_->ranks_of_job = std::move(of_job);
  return made;
}

Group Communicator::group() { return Group(*this); }

}  // namespace rz
