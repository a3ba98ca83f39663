#include "comm/communicator.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "comm/backend.h"
#include "comm/backends/make.h"
#include "comm/collective.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/core/process.h"

namespace rz {

struct Communicator::State {
  int rank, size;
  CommOptions options;
  std::shared_ptr<Store> store;
  std::shared_ptr<Backend> backend;
  int splits = 0;
};

namespace {

// Checks of one call, each a line that names the call and the rank.
class Checks {
 public:
  Checks(Collective kind, int rank, int size, Device device)
      : kind_(kind), rank_(rank), size_(size), device_(device) {}

  template <class... T>
  void that(bool ok, const T&... parts) const {
    if (!ok) fail(Errc::invalid_argument, name(kind_), " on rank ", rank_, ": ", parts...);
  }
  void buffer(const char* which, const ConstBuffer& b) const {
    that(b.data != nullptr || b.count == 0, "'", which, "' is null but has ", b.count, " elements");
    if (b.device.kind == Device::host || b.device == device_) return;
    that(false, "'", which, "' is on ", name(b.device), ", but this communicator moves ",
         device_.kind == Device::host ? std::string("host memory")
                                      : str("memory of ", name(device_), " and the host"));
  }
  void buffers(const ConstBuffer& in, const ConstBuffer& out) const {
    buffer("in", in);
    buffer("out", out);
    that(in.dtype == out.dtype, "'in' holds ", name(in.dtype), " and 'out' ", name(out.dtype));
    if (in.device == out.device) return;
    that(false, "'in' is on ", name(in.device), " and 'out' on ", name(out.device));
  }
  /// A device's memory is reached in a stream of that device, for which a host stream stands for the null
  /// stream; the host's in the caller's order.
  Stream stream(const Stream& given, Device memory) const {
    if (memory.kind == Device::host) return {};
    if (given.device() == memory) return given;
    if (given.device().kind != Device::host)
      that(false, "the memory is on ", name(memory), ", but the stream is of ", name(given.device()));
    return Stream::borrow(memory, nullptr);
  }
  void root(int root) const {
    that(root >= 0 && root < size_, "root ", root, " is not a rank of 0 to ", size_ - 1);
  }
  void peer(int peer) const {
    that(peer >= 0 && peer < size_, "peer ", peer, " is not a rank of 0 to ", size_ - 1);
  }
  /// `whole` has `size` times as many elements as `part`.
  void parts(const char* whole_name, std::size_t whole, const char* part_name, std::size_t part) const {
    that(whole == part * static_cast<std::size_t>(size_), "'", whole_name, "' must have ", size_, " x ", part,
         " elements, as many parts as ranks of '", part_name, "', but has ", whole);
  }
  /// Buffers may be the same from `offset` bytes on, or apart.
  void overlap(const void* in, std::size_t in_bytes, const void* out, std::size_t out_bytes,
               const void* allowed_in, const void* allowed_out) const {
    const auto* a = static_cast<const std::byte*>(in);
    const auto* b = static_cast<const std::byte*>(out);
    if (in_bytes == 0 || out_bytes == 0 || a + in_bytes <= b || b + out_bytes <= a) return;
    that(allowed_in == allowed_out,
         "'in' and 'out' overlap, but are not the in-place form of this collective");
  }
  /// No two ranks' parts of 'out' share an element.
  void apart(std::span<const std::size_t> counts, std::span<const std::size_t> offsets) const {
    std::vector<std::size_t> order;
    for (std::size_t r = 0; r < counts.size(); ++r)
      if (counts[r] > 0) order.push_back(r);
    std::sort(order.begin(), order.end(), [&](auto a, auto b) { return offsets[a] < offsets[b]; });
    for (std::size_t i = 1; i < order.size(); ++i) {
      const std::size_t a = order[i - 1], b = order[i];
      that(offsets[b] - offsets[a] >= counts[a], "the parts of rank ", a, " and rank ", b,
           " overlap in 'out'");
    }
  }

 private:
  Collective kind_;
  int rank_, size_;
  Device device_;
};

const std::byte* at(const void* base, std::size_t bytes) {
  return static_cast<const std::byte*>(base) + bytes;
}

/// What nearly every call is: host memory of one type, apart or the in-place form, whose `in_here` and
/// `out_here` are the same. It passes all Checks of buffers, which take longer than a tiny call does.
bool is_plain(const ConstBuffer& in, const Buffer& out, const void* in_here, const void* out_here) {
  const bool typed = in.data && out.data && in.dtype == out.dtype && in.device.kind == Device::host &&
                     out.device.kind == Device::host;
  return typed &&
         (in_here == out_here || at(in.data, in.bytes()) <= out.data || at(out.data, out.bytes()) <= in.data);
}

bool is_plain(const ConstBuffer& b) { return b.data && b.device.kind == Device::host; }
bool is_plain(const Buffer& b) { return b.data && b.device.kind == Device::host; }

}  // namespace

namespace {

/// A child of fork() has a copy of a backend without its threads, with locks that may be held for ever.
std::shared_ptr<Backend> by_creator(std::unique_ptr<Backend> backend) {
  return {backend.release(), [creator = Creator()](Backend* b) {
            if (creator.here()) return delete b;
            b->abandon();
            keep_for_ever(b);
          }};
}

}  // namespace

Communicator::Communicator(std::unique_ptr<State> state) : state_(std::move(state)) {}
Communicator::Communicator(Communicator&&) noexcept = default;
Communicator& Communicator::operator=(Communicator&&) noexcept = default;
Communicator::~Communicator() = default;

Communicator Communicator::connect(int rank, int size, std::shared_ptr<Store> store, CommOptions options) {
  require(size >= 1, Errc::invalid_argument, "a group needs at least 1 rank, got ", size);
  require(rank >= 0 && rank < size, Errc::invalid_argument, "rank ", rank, " is not within 0 to ", size - 1);
  require(store != nullptr || size == 1, Errc::invalid_argument, "rank ", rank, " of ", size,
          " has no store");
  if (!store) store = memory_store();
  auto backend = make_backend(rank, size, store, options);
  return Communicator(
      std::make_unique<State>(State{rank, size, options, store, by_creator(std::move(backend))}));
}

Communicator Communicator::over(int rank, int size, std::unique_ptr<Backend> backend, CommOptions options) {
  require(backend != nullptr && rank >= 0 && rank < size, Errc::invalid_argument, "rank ", rank, " of ", size,
          " has no backend or no place in the group");
  return Communicator(std::make_unique<State>(
      State{rank, size, std::move(options), nullptr, by_creator(std::move(backend))}));
}

int Communicator::rank() const { return state_->rank; }
int Communicator::size() const { return state_->size; }
const CommOptions& Communicator::options() const { return state_->options; }
bool Communicator::capturable() const { return state_->backend->capturable(); }

namespace {

void rest(unsigned polls) {
  if (polls < 4000)
    std::this_thread::yield();
  else
    std::this_thread::sleep_for(std::chrono::microseconds(20));
}

// What has failed leaves the stream soon, and until then uses memory of the group: who is told of it may end
// the communicator next.
void check_while_running(Backend& backend, const Event& end) {
  try {
    backend.check();
  } catch (const Error&) {
    const Deadline deadline = Deadline::after(std::chrono::seconds(1));
    for (unsigned polls = 0; !end.done() && !deadline.expired(); ++polls) rest(polls);
    throw;
  }
}

}  // namespace

void Communicator::synchronize(const Stream& stream) {
  const auto limit = 2 * bounded(state_->options.timeout);
  if (const auto followed = state_->backend->follow(stream, limit)) return followed->wait();
  const Event end = stream.record();
  const Deadline deadline = Deadline::after(limit);
  for (unsigned polls = 0; !end.done(); ++polls) {
    if (polls % 64 == 63) check_while_running(*state_->backend, end);
    if (deadline.expired()) {
      const std::string what =
          str("a stream of ", name(stream.device()), " on rank ", state_->rank, " did not end within ",
              std::chrono::duration<double>(limit).count(), " s: another rank's may be stuck");
      abort(what);
      fail(Errc::timeout, what);
    }
    rest(polls);
  }
  state_->backend->check();
}

std::string Communicator::describe() const { return state_->backend->describe(); }
CallChoice Communicator::explain(Collective kind, std::size_t bytes, bool allocated, DType dtype,
                                 ReduceOp op) const {
  return state_->backend->explain(kind, bytes, allocated, dtype, op);
}
Work Communicator::submit(std::span<const Operation> group) { return state_->backend->submit(group); }
Work Communicator::submit_one(const Operation& operation) { return submit({&operation, 1}); }
void Communicator::abort(const std::string& reason) noexcept { state_->backend->abort(reason); }

namespace {

/// Backends round up, which must not begin at 0 again.
std::size_t addressable(std::size_t bytes) {
  require(bytes <= static_cast<std::size_t>(PTRDIFF_MAX), Errc::system, "cannot allocate ",
          human_bytes(bytes), ": no process can address so much; is the count right?");
  return bytes;
}

}  // namespace

std::shared_ptr<std::byte> Communicator::allocate(std::size_t bytes) {
  return state_->backend->allocate(addressable(bytes));
}

std::shared_ptr<std::byte> Communicator::allocate_symmetric(std::size_t bytes) {
  return state_->backend->allocate_symmetric(addressable(bytes));
}

Registration Communicator::register_buffer(void* data, std::size_t bytes) {
  require(data != nullptr || bytes == 0, Errc::invalid_argument, "register_buffer on rank ", state_->rank,
          ": the memory is null but has ", bytes, " bytes");
  Registration made = state_->backend->register_buffer({static_cast<std::byte*>(data), bytes});
  return made.zero_copy()
             ? std::move(made)
             : Registration(str("the memory of ", human_bytes(bytes), " is not shared: ", made.why()));
}

Allocator Communicator::allocator() {
  return {[backend = state_->backend](std::size_t bytes) { return backend->allocate(addressable(bytes)); },
          state_->options.device};
}

namespace {

// One checked operation each: what Communicator and Group share.

Operation checked_all_reduce(const Checks& check, const ConstBuffer& in, const Buffer& out, ReduceOp op,
                             const Stream& stream) {
  check.buffers(in, out);
  check.that(in.count == out.count, "'in' has ", in.count, " elements and 'out' ", out.count);
  check.overlap(in.data, in.bytes(), out.data, out.bytes(), in.data, out.data);
  return {.kind = Collective::all_reduce,
          .in = in,
          .out = out,
          .op = op,
          .stream = check.stream(stream, out.device)};
}

Operation checked_reduce_scatter(const Checks& check, int rank, const ConstBuffer& in, const Buffer& out,
                                 ReduceOp op, const Stream& stream) {
  check.buffers(in, out);
  check.parts("in", in.count, "out", out.count);
  check.overlap(in.data, in.bytes(), out.data, out.bytes(),
                at(in.data, out.bytes() * static_cast<std::size_t>(rank)), out.data);
  return {.kind = Collective::reduce_scatter,
          .in = in,
          .out = out,
          .op = op,
          .stream = check.stream(stream, out.device)};
}

Operation checked_all_gather(const Checks& check, int rank, const ConstBuffer& in, const Buffer& out,
                             const Stream& stream) {
  check.buffers(in, out);
  check.parts("out", out.count, "in", in.count);
  check.overlap(in.data, in.bytes(), out.data, out.bytes(), in.data,
                at(out.data, in.bytes() * static_cast<std::size_t>(rank)));
  return {.kind = Collective::all_gather, .in = in, .out = out, .stream = check.stream(stream, out.device)};
}

Operation checked_broadcast(const Checks& check, bool is_root, const ConstBuffer& in, const Buffer& out,
                            int root, const Stream& stream) {
  check.root(root);
  check.buffer("out", out);
  if (is_root) {
    check.buffers(in, out);
    check.that(in.count == out.count, "'in' has ", in.count, " elements and 'out' ", out.count);
    check.overlap(in.data, in.bytes(), out.data, out.bytes(), in.data, out.data);
  }
  return {.kind = Collective::broadcast,
          .in = is_root ? in : ConstBuffer(out),
          .out = out,
          .root = root,
          .stream = check.stream(stream, out.device)};
}

/// Where a rank has nothing to give or to get.
Buffer nowhere(const ConstBuffer& like) { return {nullptr, 0, like.dtype, like.device}; }

Operation checked_reduce(const Checks& check, bool is_root, const ConstBuffer& in, const Buffer& out,
                         int root, ReduceOp op, const Stream& stream) {
  check.root(root);
  check.buffer("in", in);
  if (is_root) {
    check.buffers(in, out);
    check.that(in.count == out.count, "'in' has ", in.count, " elements and 'out' ", out.count);
    check.overlap(in.data, in.bytes(), out.data, out.bytes(), in.data, out.data);
  }
  return {.kind = Collective::reduce,
          .in = in,
          .out = is_root ? out : nowhere(in),
          .op = op,
          .root = root,
          .stream = check.stream(stream, in.device)};
}

Operation checked_gather(const Checks& check, bool is_root, const ConstBuffer& in, const Buffer& out,
                         int root, const Stream& stream) {
  check.root(root);
  check.buffer("in", in);
  if (is_root) {
    check.buffers(in, out);
    check.parts("out", out.count, "in", in.count);
    check.overlap(in.data, in.bytes(), out.data, out.bytes(), in.data,
                  at(out.data, in.bytes() * static_cast<std::size_t>(root)));
  }
  return {.kind = Collective::gather,
          .in = in,
          .out = is_root ? out : nowhere(in),
          .root = root,
          .stream = check.stream(stream, in.device)};
}

Operation checked_scatter(const Checks& check, bool is_root, const ConstBuffer& in, const Buffer& out,
                          int root, const Stream& stream) {
  check.root(root);
  check.buffer("out", out);
  if (is_root) {
    check.buffers(in, out);
    check.parts("in", in.count, "out", out.count);
    check.overlap(in.data, in.bytes(), out.data, out.bytes(),
                  at(in.data, out.bytes() * static_cast<std::size_t>(root)), out.data);
  }
  return {.kind = Collective::scatter,
          .in = is_root ? in : ConstBuffer(nowhere(out)),
          .out = out,
          .root = root,
          .stream = check.stream(stream, out.device)};
}

Operation checked_all_to_all(const Checks& check, int size, const ConstBuffer& in, const Buffer& out,
                             const Stream& stream) {
  check.buffers(in, out);
  check.that(in.count == out.count && in.count % static_cast<std::size_t>(size) == 0,
             "'in' and 'out' must have as many elements, a multiple of ", size, ", but have ", in.count,
             " and ", out.count);
  check.overlap(in.data, in.bytes(), out.data, out.bytes(), in.data, out.data);
  return {.kind = Collective::all_to_all, .in = in, .out = out, .stream = check.stream(stream, out.device)};
}

using Counts = std::span<const std::size_t>;

Operation checked_all_to_all_v(const Checks& check, int rank, int size, const ConstBuffer& in,
                               Counts send_counts, Counts send_offsets, const Buffer& out, Counts recv_counts,
                               Counts recv_offsets, const Stream& stream) {
  check.buffers(in, out);
  check.overlap(in.data, in.bytes(), out.data, out.bytes(), nullptr, &check);
  const auto ranks = static_cast<std::size_t>(size);
  for (const auto& list : {send_counts, send_offsets, recv_counts, recv_offsets})
    check.that(list.size() == ranks, "counts and offsets need ", ranks, " entries, one a rank, got ",
               list.size());
  const auto inside = [](std::size_t offset, std::size_t count, std::size_t whole) {
    return offset <= whole && count <= whole - offset;
  };
  for (std::size_t r = 0; r < ranks; ++r) {
    check.that(inside(send_offsets[r], send_counts[r], in.count), "the part for rank ", r,
               " ends beyond 'in'");
    check.that(inside(recv_offsets[r], recv_counts[r], out.count), "the part of rank ", r,
               " ends beyond 'out'");
  }
  check.apart(recv_counts, recv_offsets);
  const auto own = static_cast<std::size_t>(rank);
  check.that(send_counts[own] == recv_counts[own], "it sends ", send_counts[own],
             " elements to itself but receives ", recv_counts[own]);
  const auto list = [](Counts s) { return std::vector(s.begin(), s.end()); };
  return {.kind = Collective::all_to_all_v,
          .in = in,
          .out = out,
          .pairs = std::make_shared<PairCounts>(
              PairCounts{list(send_counts), list(send_offsets), list(recv_counts), list(recv_offsets)}),
          .stream = check.stream(stream, out.device)};
}

Operation checked_message(const Checks& check, Collective kind, const Buffer& buffer, int peer,
                          const Stream& stream) {
  check.peer(peer);
  check.buffer("buffer", buffer);
  Operation op{.kind = kind, .root = peer, .stream = check.stream(stream, buffer.device)};
  (kind == Collective::send ? op.in = ConstBuffer(buffer), void() : void(op.out = buffer));
  return op;
}

Buffer without_const(const ConstBuffer& b) { return {const_cast<void*>(b.data), b.count, b.dtype, b.device}; }

}  // namespace

// What is plain and like the last call needs neither Checks nor an Operation.

Work Communicator::all_reduce(const Buffer& b, ReduceOp op, const Stream& stream) {
  const std::uint64_t what = brief(Collective::all_reduce, b.dtype, op.kind, 0);
  Work work;
  if (is_plain(b) && state_->backend->repeat({what, b.count, b.data, b.data}, work)) return work;
  return submit_one(
      checked_all_reduce({Collective::all_reduce, rank(), size(), options().device}, b, b, op, stream));
}

Work Communicator::all_reduce(const ConstBuffer& in, const Buffer& out, ReduceOp op, const Stream& stream) {
  const std::uint64_t what = brief(Collective::all_reduce, out.dtype, op.kind, 0);
  Work work;
  if (in.count == out.count && is_plain(in, out, in.data, out.data) &&
      state_->backend->repeat({what, in.count, in.data, out.data}, work))
    return work;
  return submit_one(
      checked_all_reduce({Collective::all_reduce, rank(), size(), options().device}, in, out, op, stream));
}

Work Communicator::reduce_scatter(const ConstBuffer& in, const Buffer& out, ReduceOp op,
                                  const Stream& stream) {
  const auto n = static_cast<std::size_t>(size()), r = static_cast<std::size_t>(rank());
  const std::uint64_t what = brief(Collective::reduce_scatter, out.dtype, op.kind, 0);
  Work work;
  if (in.count == n * out.count && is_plain(in, out, at(in.data, r * out.bytes()), out.data) &&
      state_->backend->repeat({what, out.count, in.data, out.data}, work))
    return work;
  return submit_one(checked_reduce_scatter({Collective::reduce_scatter, rank(), size(), options().device},
                                           rank(), in, out, op, stream));
}

Work Communicator::all_gather(const ConstBuffer& in, const Buffer& out, const Stream& stream) {
  const auto n = static_cast<std::size_t>(size()), r = static_cast<std::size_t>(rank());
  const std::uint64_t what = brief(Collective::all_gather, out.dtype, ReduceOp::sum, 0);
  Work work;
  if (out.count == n * in.count && is_plain(in, out, in.data, at(out.data, r * in.bytes())) &&
      state_->backend->repeat({what, in.count, in.data, out.data}, work))
    return work;
  return submit_one(checked_all_gather({Collective::all_gather, rank(), size(), options().device}, rank(), in,
                                       out, stream));
}

Work Communicator::broadcast(const Buffer& b, int root, const Stream& stream) {
  const std::uint64_t what = brief(Collective::broadcast, b.dtype, ReduceOp::sum, root);
  Work work;
  if (is_plain(b) && state_->backend->repeat({what, b.count, b.data, b.data}, work)) return work;
  return submit_one(checked_broadcast({Collective::broadcast, rank(), size(), options().device},
                                      rank() == root, b, b, root, stream));
}

Work Communicator::broadcast(const ConstBuffer& in, const Buffer& out, int root, const Stream& stream) {
  if (rank() != root) return broadcast(out, root, stream);
  const std::uint64_t what = brief(Collective::broadcast, out.dtype, ReduceOp::sum, root);
  Work work;
  if (in.count == out.count && is_plain(in, out, in.data, out.data) &&
      state_->backend->repeat({what, in.count, in.data, out.data}, work))
    return work;
  return submit_one(checked_broadcast({Collective::broadcast, rank(), size(), options().device}, true, in,
                                      out, root, stream));
}

Work Communicator::reduce(const ConstBuffer& in, const Buffer& out, int root, ReduceOp op,
                          const Stream& stream) {
  const bool is_root = rank() == root;
  const std::uint64_t what = brief(Collective::reduce, in.dtype, op.kind, root);
  const bool plain = is_root ? in.count == out.count && is_plain(in, out, in.data, out.data) : is_plain(in);
  Work work;
  if (plain && state_->backend->repeat({what, in.count, in.data, is_root ? out.data : nullptr}, work))
    return work;
  return submit_one(checked_reduce({Collective::reduce, rank(), size(), options().device}, is_root, in, out,
                                   root, op, stream));
}

Work Communicator::gather(const ConstBuffer& in, const Buffer& out, int root, const Stream& stream) {
  const bool is_root = rank() == root;
  const auto n = static_cast<std::size_t>(size()), r = static_cast<std::size_t>(rank());
  const std::uint64_t what = brief(Collective::gather, in.dtype, ReduceOp::sum, root);
  const bool plain =
      is_root ? out.count == n * in.count && is_plain(in, out, in.data, at(out.data, r * in.bytes()))
              : is_plain(in);
  Work work;
  if (plain && state_->backend->repeat({what, in.count, in.data, is_root ? out.data : nullptr}, work))
    return work;
  return submit_one(
      checked_gather({Collective::gather, rank(), size(), options().device}, is_root, in, out, root, stream));
}

Work Communicator::scatter(const ConstBuffer& in, const Buffer& out, int root, const Stream& stream) {
  const bool is_root = rank() == root;
  const auto n = static_cast<std::size_t>(size()), r = static_cast<std::size_t>(rank());
  const std::uint64_t what = brief(Collective::scatter, out.dtype, ReduceOp::sum, root);
  const bool plain =
      is_root ? in.count == n * out.count && is_plain(in, out, at(in.data, r * out.bytes()), out.data)
              : is_plain(out);
  Work work;
  if (plain && state_->backend->repeat({what, out.count, is_root ? in.data : nullptr, out.data}, work))
    return work;
  return submit_one(checked_scatter({Collective::scatter, rank(), size(), options().device}, is_root, in, out,
                                    root, stream));
}

Work Communicator::all_to_all(const ConstBuffer& in, const Buffer& out, const Stream& stream) {
  const auto n = static_cast<std::size_t>(size());
  const std::size_t part = in.count / n;
  const std::uint64_t what = brief(Collective::all_to_all, in.dtype, ReduceOp::sum, 0);
  Work work;
  if (in.count == out.count && in.count == n * part && is_plain(in, out, in.data, out.data) &&
      state_->backend->repeat({what, part, in.data, out.data}, work))
    return work;
  return submit_one(checked_all_to_all({Collective::all_to_all, rank(), size(), options().device}, size(), in,
                                       out, stream));
}

Work Communicator::all_to_all_v(const ConstBuffer& in, Counts send_counts, Counts send_offsets,
                                const Buffer& out, Counts recv_counts, Counts recv_offsets,
                                const Stream& stream) {
  return submit_one(checked_all_to_all_v({Collective::all_to_all_v, rank(), size(), options().device}, rank(),
                                         size(), in, send_counts, send_offsets, out, recv_counts,
                                         recv_offsets, stream));
}

Work Communicator::send(const ConstBuffer& buffer, int to, const Stream& stream) {
  return submit_one(checked_message({Collective::send, rank(), size(), options().device}, Collective::send,
                                    without_const(buffer), to, stream));
}

Work Communicator::recv(const Buffer& buffer, int from, const Stream& stream) {
  return submit_one(checked_message({Collective::recv, rank(), size(), options().device}, Collective::recv,
                                    buffer, from, stream));
}

Work Communicator::barrier() { return submit_one(Operation{.kind = Collective::barrier}); }

std::optional<Communicator> Communicator::split(std::optional<int> color, int key) {
  struct Choice {
    std::int64_t has_color, color, key;
  };
  const Choice mine{color.has_value(), color.value_or(0), key};
  std::vector<Choice> all(static_cast<std::size_t>(size()));
  all_gather(ConstBuffer(&mine.has_color, 3), Buffer(&all.data()->has_color, 3 * all.size())).wait();
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
  auto store = state_->store ? prefix_store(state_->store, str("split/", number, "/", *color, "/")) : nullptr;
  auto backend = state_->backend->split(members);
  if (!backend) return connect(new_rank, new_size, std::move(store), state_->options);
  return Communicator(std::make_unique<State>(
      State{new_rank, new_size, state_->options, std::move(store), std::move(backend)}));
}

Group Communicator::group() { return Group(*this); }

Group::Group(Communicator& communicator) : communicator_(&communicator) {}
Group::Group(Group&&) noexcept = default;
Group::~Group() = default;

template <class F>
Group& Group::add(Collective kind, const F& checked) {
  const Communicator& c = *communicator_;
  operations_.push_back(checked(Checks(kind, c.rank(), c.size(), c.options().device), c.rank(), c.size()));
  return *this;
}

Group& Group::all_reduce(const Buffer& in_out, ReduceOp op, const Stream& stream) {
  return all_reduce(in_out, in_out, op, stream);
}

Group& Group::all_reduce(const ConstBuffer& in, const Buffer& out, ReduceOp op, const Stream& stream) {
  return add(Collective::all_reduce,
             [&](const Checks& check, int, int) { return checked_all_reduce(check, in, out, op, stream); });
}

Group& Group::reduce_scatter(const ConstBuffer& in, const Buffer& out, ReduceOp op, const Stream& stream) {
  return add(Collective::reduce_scatter, [&](const Checks& check, int rank, int) {
    return checked_reduce_scatter(check, rank, in, out, op, stream);
  });
}

Group& Group::all_gather(const ConstBuffer& in, const Buffer& out, const Stream& stream) {
  return add(Collective::all_gather, [&](const Checks& check, int rank, int) {
    return checked_all_gather(check, rank, in, out, stream);
  });
}

Group& Group::broadcast(const Buffer& in_out, int root, const Stream& stream) {
  return broadcast(in_out, in_out, root, stream);
}

Group& Group::broadcast(const ConstBuffer& in, const Buffer& out, int root, const Stream& stream) {
  return add(Collective::broadcast, [&](const Checks& check, int rank, int) {
    return checked_broadcast(check, rank == root, in, out, root, stream);
  });
}

Group& Group::reduce(const ConstBuffer& in, const Buffer& out, int root, ReduceOp op, const Stream& stream) {
  return add(Collective::reduce, [&](const Checks& check, int rank, int) {
    return checked_reduce(check, rank == root, in, out, root, op, stream);
  });
}

Group& Group::gather(const ConstBuffer& in, const Buffer& out, int root, const Stream& stream) {
  return add(Collective::gather, [&](const Checks& check, int rank, int) {
    return checked_gather(check, rank == root, in, out, root, stream);
  });
}

Group& Group::scatter(const ConstBuffer& in, const Buffer& out, int root, const Stream& stream) {
  return add(Collective::scatter, [&](const Checks& check, int rank, int) {
    return checked_scatter(check, rank == root, in, out, root, stream);
  });
}

Group& Group::all_to_all(const ConstBuffer& in, const Buffer& out, const Stream& stream) {
  return add(Collective::all_to_all, [&](const Checks& check, int, int size) {
    return checked_all_to_all(check, size, in, out, stream);
  });
}

Group& Group::all_to_all_v(const ConstBuffer& in, Counts send_counts, Counts send_offsets, const Buffer& out,
                           Counts recv_counts, Counts recv_offsets, const Stream& stream) {
  return add(Collective::all_to_all_v, [&](const Checks& check, int rank, int size) {
    return checked_all_to_all_v(check, rank, size, in, send_counts, send_offsets, out, recv_counts,
                                recv_offsets, stream);
  });
}

Group& Group::send(const ConstBuffer& buffer, int to, const Stream& stream) {
  return add(Collective::send, [&](const Checks& check, int, int) {
    return checked_message(check, Collective::send, without_const(buffer), to, stream);
  });
}

Group& Group::recv(const Buffer& buffer, int from, const Stream& stream) {
  return add(Collective::recv, [&](const Checks& check, int, int) {
    return checked_message(check, Collective::recv, buffer, from, stream);
  });
}

Work Group::launch() { return communicator_->submit(operations_); }

}  // namespace rz
