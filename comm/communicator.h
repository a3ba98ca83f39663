#pragma once
/// A group of ranks and the collectives among them: the public face of ringzero::comm. Raw pointers in; no
/// global state.
///
/// Every collective is called by every rank of the group, in the same order, with matching arguments; a rank
/// that calls something else is named on every rank (Errc::mismatch). Operations are asynchronous: memory
/// passed in must stay alive and untouched until Work::wait(). Any count is fine, 0 too. In place means the
/// same pointer where a collective has one buffer a rank; for all_gather `in` is the rank's own part of
/// `out`, for reduce_scatter `out` its own part of `in`, for gather and scatter likewise at the root;
/// all_to_all may have in == out. Other overlaps are refused.
///
/// A communicator on a CUDA device moves memory of that device and of the host. On device memory an operation
/// runs after everything that was put into `stream` before it (a host stream stands for the device's null
/// stream), and Work::wait_on() orders other streams after it. All buffers of a call lie on one device.
///
/// Thread safety: several threads may call one communicator; their calls are put into one order, which must
/// be the same on every rank. Errors are rz::Error; the first failure poisons the communicator, whose later
/// calls throw it again.
///
/// A communicator belongs to the process that connected it. In a child of fork() "native" on host memory
/// refuses calls (Errc::invalid_argument), and its abort() does nothing; the child may connect communicators
/// of its own.

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/collective.h"
#include "comm/core/environment.h"
#include "comm/core/types.h"
#include "comm/explain.h"
#include "comm/registration.h"
#include "comm/store.h"
#include "comm/work.h"

namespace rz {

class Backend;
class Group;

struct CommOptions {
  Device device{};
  std::chrono::milliseconds rendezvous_timeout{static_cast<long>(environment().rendezvous_timeout_s * 1e3)};
  /// Of one operation. milliseconds::max(), here and above: a wait without end.
  std::chrono::milliseconds timeout{static_cast<long>(environment().timeout_s * 1e3)};
  /// What performs the collectives: "native" (ours), "mpi" (docs/decisions/0011), "nccl" or "peer_cuda".
  /// "auto" is "native" on host memory; on devices the ranks agree on "nccl", "peer_cuda" or "native",
  /// whichever of them in this order can serve them all (comm/backends/auto_backend.h), and describe() says
  /// which, and why.
  std::string backend = environment().backend;
  std::string transport = environment().transport;    ///< of "native": "auto", "shm", "tcp"
  std::string interface = environment().interface;    ///< of TCP; empty: by the route
  int sockets = environment().sockets;                ///< TCP, from a host to another
  std::string congestion = environment().congestion;  ///< control of TCP: "system" or a name
  std::string host_id = environment().host_id;        ///< what counts as one host; empty: this machine
  /// Forces algorithms, of "native" (host memory, with "auto" too): "two_shot", which is all_reduce's, or
  /// "all_reduce=ring,broadcast=tree"; comm/tuning/overrides.h has the names. Of "peer_cuda" all_reduce's
  /// alone. Empty: the tuning table. Errc::config lists the choices.
  std::string algorithm = environment().algorithm;
  /// A file with a tuning table (comm/tuning/tuning.h) for calls of "native", which comes before the built-in
  /// one. Rank 0's counts for the whole group; a rank that names another one is named (Errc::mismatch).
  std::string tuning = environment().tuning;
  /// Sums in rank order, so that results do not depend on how gradients are cut into buckets, nor on the
  /// strategy.
  bool deterministic = environment().deterministic;
};

class Communicator {
 public:
  /// Joins a group of `size` ranks that meet in `store`. Every rank calls it, with the same options; the
  /// store may be used for other groups under other prefixes (prefix_store). Errc::rendezvous or timeout
  /// names who is missing.
  static Communicator connect(int rank, int size, std::shared_ptr<Store> store, CommOptions options = {});

  /// A group that a backend has brought together already, e.g. of an MPI communicator (connect_mpi). Without
  /// a store, split() works where the backend can split.
  static Communicator from_backend(int rank, int size, std::unique_ptr<Backend> backend,
                                   CommOptions options = {});

  Communicator(Communicator&&) noexcept;
  Communicator& operator=(Communicator&&) noexcept;
  /// Waits for nothing: operations still in flight end with peer_lost on the other ranks. In a child of
  /// fork() it closes the child's copies of what the group holds, and the group goes on.
  ~Communicator();

  int rank() const;
  int size() const;
  const CommOptions& options() const;

  Work all_reduce(const Buffer& in_out, ReduceOp op = ReduceOp::sum, const Stream& = {});
  Work all_reduce(const ConstBuffer& in, const Buffer& out, ReduceOp op, const Stream& = {});
  /// in.count = size · out.count; rank r gets part r.
  Work reduce_scatter(const ConstBuffer& in, const Buffer& out, ReduceOp op = ReduceOp::sum,
                      const Stream& = {});
  /// out.count = size · in.count; part r comes from rank r.
  Work all_gather(const ConstBuffer& in, const Buffer& out, const Stream& = {});
  Work broadcast(const Buffer& in_out, int root, const Stream& = {});
  /// The root reads `in`, every rank (the root too) gets `out`; elsewhere `in` is not looked at.
  Work broadcast(const ConstBuffer& in, const Buffer& out, int root, const Stream& = {});
  /// `out` is written at the root only; elsewhere it may be empty.
  Work reduce(const ConstBuffer& in, const Buffer& out, int root, ReduceOp op = ReduceOp::sum,
              const Stream& = {});
  /// out.count = size · in.count at the root; elsewhere `out` may be empty.
  Work gather(const ConstBuffer& in, const Buffer& out, int root, const Stream& = {});
  /// in.count = size · out.count at the root; elsewhere `in` may be empty.
  Work scatter(const ConstBuffer& in, const Buffer& out, int root, const Stream& = {});
  /// Both counts are size · n; part d of `in` goes to rank d, part s of `out` comes from rank s.
  Work all_to_all(const ConstBuffer& in, const Buffer& out, const Stream& = {});
  /// Counts and offsets in elements, one a rank; send_counts[d] here equals recv_counts[this rank] on d.
  Work all_to_all_v(const ConstBuffer& in, std::span<const std::size_t> send_counts,
                    std::span<const std::size_t> send_offsets, const Buffer& out,
                    std::span<const std::size_t> recv_counts, std::span<const std::size_t> recv_offsets,
                    const Stream& = {});
  /// Messages between two ranks arrive in the order they were sent. A send may wait for its receive.
  Work send(const ConstBuffer&, int to, const Stream& = {});
  Work recv(const Buffer&, int from, const Stream& = {});
  Work barrier();

  /// Collects calls and starts them as one, e.g. a send to and a receive from every neighbour.
  Group group();

  /// Ranks that pass the same color form a new group, ordered by key, then by rank. Every rank calls it; with
  /// no color (nullopt) a rank takes part in the call and gets nothing.
  std::optional<Communicator> split(std::optional<int> color, int key);

  /// Memory that peers on this host read where it lies, so that collectives on it copy nothing; aligned to
  /// 256 bytes, zeroed. It may outlive the communicator. Device memory must not be given back (its last copy
  /// end) while work in a stream still uses it. Errc::system states need and have.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);
  /// As allocate(), called by every rank together with as many bytes. What it is beyond that is the
  /// backend's: with NCCL 2.27 or newer a symmetric window, which its fastest kernels need, and which is
  /// given back when the communicator ends too; with "peer_cuda" among processes memory that their kernels
  /// read where it lies, which that of allocate() is among threads of one process alone
  /// (comm/backends/peer_cuda/peer_cuda_backend.h). A group that split() makes does not know the memory of
  /// the group it was made from. What ranks differ in is an error or a timeout of NCCL's, and Errc::mismatch
  /// with "peer_cuda".
  std::shared_ptr<std::byte> allocate_symmetric(std::size_t bytes);
  /// Memory of the caller's own (malloc, new, mmap, a std::vector), to be used like that of allocate() from
  /// now until the registration ends. Each rank registers for itself; a collective copies nothing if every
  /// rank's memory is of either kind. Not for memory of a device.
  ///
  /// The whole pages that hold the range are replaced by shared ones with their contents, at the same
  /// addresses; pointers stay valid, and other threads may read meanwhile. So
  ///   - nobody may write to the range, nor read() or DMA into it, until the call returns, nor while the
  ///     registration ends; what pinned its pages before (cudaHostRegister, RDMA) goes on with the old ones;
  ///   - the pages must be private, anonymous, readable and writable memory, and hold nothing else: arrays
  ///     of malloc and std::vector do from 128 KiB on, where malloc takes them from mmap. Registered memory
  ///     that overlaps is refused. What cannot be registered is used all the same, by copying:
  ///     Registration::zero_copy() is false, and why() says why;
  ///   - a process that fork()s shares the memory with its child, as it does that of allocate(), and ends the
  ///     registration alone: a child that ends its copy only closes a descriptor;
  ///   - end the registration before the memory is freed, unmapped or resized (realloc, a vector that grows).
  /// Takes as long as copying the range twice, and as much memory again for that time: Errc::system states
  /// need and have, and the memory is then as it was. Thread-safe.
  Registration register_buffer(void* data, std::size_t bytes);
  template <class T>
  std::shared_ptr<T> allocate_array(std::size_t count) {
    constexpr std::size_t all = ~std::size_t{0};
    return std::reinterpret_pointer_cast<T>(allocate(count > all / sizeof(T) ? all : count * sizeof(T)));
  }
  /// allocate() as a value, for floors that know no communicator. Holds the backend alive.
  Allocator allocator();

  /// Ends every operation in flight on every rank with Errc::aborted and this rank as culprit. Any thread;
  /// idempotent; returns within a second.
  void abort(const std::string& reason = "abort() was called") noexcept;

  /// Whether operations on device memory may be put into a stream while it is captured (comm/device/graph.h),
  /// and so be repeated by a graph. Every rank then runs its graph as often. What is captured has no end of
  /// its own: its Work serves for wait_on() alone; synchronize() waits for runs.
  bool capturable() const;
  /// Waits for all that was put into a stream, graphs too: before the communicator ends, for it may not while
  /// they run. Throws what breaks the group meanwhile, once the stream has ended too, or a second later;
  /// after twice the operations' timeout it ends the group: Errc::timeout, which names who did not run its
  /// graph.
  void synchronize(const Stream&);

  /// What carries this group, e.g. "native over shm+tcp"; where "auto" chose it, also why.
  std::string describe() const;
  /// Which algorithm, transport and chunk a call of so many bytes takes, and why. Bytes are of the whole
  /// buffer, the larger of a rank's input and output (of all_to_all_v and barrier they count nothing);
  /// `allocated`: every rank's buffers are from allocate(). With `deterministic`, a sum of small floats takes
  /// no algorithm that rounds it on the way, so type and operation of a reduction count. The answer is the
  /// same on every rank and runs through what the call itself runs through; nobody is asked. Any thread.
  AlgorithmChoice explain(Collective, std::size_t bytes, bool allocated = false, DType = DType::f32,
                          ReduceOp = ReduceOp::sum) const;

 private:
  friend class Group;
  struct State;
  explicit Communicator(std::unique_ptr<State>);
  Work submit(std::span<const struct CollectiveCall>);
  Work submit_one(const struct CollectiveCall&);
  template <Collective kind>
  Work start(const ConstBuffer& in, const Buffer& out, int root, ReduceOp, const Stream&);
  std::unique_ptr<State> state_;
};

/// Calls that start together, each as Communicator's of that name and checked like it. Not thread-safe;
/// launch() once.
///
/// Every rank launches the same collectives in a group, in the same order; Errc::mismatch else. No call may
/// read or write what another call of the group writes: backends may run them at once or in any order. In
/// host memory, small all_reduces of one type and operation that follow each other run as one call: up to
/// 16 KiB together. launch() refuses a dependence between those (Errc::invalid_argument). Small calls that
/// are not in a group are not coalesced, even if none is waited for; over a network each then costs messages
/// of its own.
class Group {
 public:
  Group& all_reduce(const Buffer& in_out, ReduceOp op = ReduceOp::sum, const Stream& = {});
  Group& all_reduce(const ConstBuffer& in, const Buffer& out, ReduceOp op, const Stream& = {});
  Group& reduce_scatter(const ConstBuffer& in, const Buffer& out, ReduceOp op = ReduceOp::sum,
                        const Stream& = {});
  Group& all_gather(const ConstBuffer& in, const Buffer& out, const Stream& = {});
  Group& broadcast(const Buffer& in_out, int root, const Stream& = {});
  Group& broadcast(const ConstBuffer& in, const Buffer& out, int root, const Stream& = {});
  Group& reduce(const ConstBuffer& in, const Buffer& out, int root, ReduceOp op = ReduceOp::sum,
                const Stream& = {});
  Group& gather(const ConstBuffer& in, const Buffer& out, int root, const Stream& = {});
  Group& scatter(const ConstBuffer& in, const Buffer& out, int root, const Stream& = {});
  Group& all_to_all(const ConstBuffer& in, const Buffer& out, const Stream& = {});
  Group& all_to_all_v(const ConstBuffer& in, std::span<const std::size_t> send_counts,
                      std::span<const std::size_t> send_offsets, const Buffer& out,
                      std::span<const std::size_t> recv_counts, std::span<const std::size_t> recv_offsets,
                      const Stream& = {});
  Group& send(const ConstBuffer&, int to, const Stream& = {});
  Group& recv(const Buffer&, int from, const Stream& = {});
  /// The Work ends when all of the group's operations have.
  Work launch();

  Group(Group&&) noexcept;
  ~Group();

 private:
  friend class Communicator;
  explicit Group(Communicator&);
  Group& add(const struct CollectiveCall&);
  struct Caller caller() const;
  Communicator* communicator_;
  std::unique_ptr<class CallList> calls_;
};

}  // namespace rz
