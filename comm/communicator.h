#pragma once
/// Communicator: a group of ranks and the collectives among them; the public interface of ringzero::comm.
/// Buffers are pointer and count, a std::span, a std::vector or an array. No global state.
///
/// Every rank of the group calls the same collectives in the same order with matching arguments. Otherwise
/// every rank gets Errc::mismatch with two calls that differ, and their ranks. Its culprit is the first rank
/// whose call differs from that of more than half of the ranks. There is none among two ranks, if there is no
/// such majority, or if a rank's call is not known. Operations are asynchronous: buffers must stay alive and
/// unmodified until Work::wait(). Any count is valid, including 0. In place means:
///   - one buffer per rank (all_reduce, broadcast, reduce): in == out;
///   - all_gather, and gather at the root: `in` is the rank's own part of `out`;
///   - reduce_scatter, and scatter at the root: `out` is the rank's own part of `in`;
///   - all_to_all: in == out.
///
/// Any other overlap of buffers is Errc::invalid_argument.
///
/// A communicator on a CUDA device accepts memory of that device and of the host. An operation on device
/// memory runs after all work that is in `stream` at the call; a host stream stands for the device's null
/// stream. Work::wait_on() orders other streams after the operation. All buffers of a call lie on one device.
///
/// Thread safety: several threads may use one communicator; their calls are serialized in an order that must
/// be the same on every rank. Errors are rz::Error. The first failure poisons the communicator: later calls
/// throw it again, until renew().
///
/// The last parameter of calls is the line that makes them (core/call_site.h), which messages and the flight
/// recorder name. Leave it out.
///
/// A communicator belongs to the process that connected it. In a child of fork(), "native" on host memory
/// throws Errc::invalid_argument, and its abort() has no effect. The child may connect communicators of its
/// own, whatever threads of the parent did at the fork().

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collective.h"
#include "core/call_site.h"
#include "core/error.h"
#include "core/types.h"
#include "options.h"
#include "registration.h"
#include "store.h"
#include "work.h"

namespace rz {

class Backend;
class Group;

class Communicator {
 public:
  /// Connects a group of `size` ranks through `store`. Every rank calls it with the same options. The same
  /// ranks may connect further groups through the same store, beside the first or after it has ended or
  /// failed, also to connect: all in the same order. Groups of other ranks need other prefixes
  /// (prefix_store). Returns once all ranks have connected. Errc::rendezvous or timeout names the missing
  /// ranks; the error of a rank that cannot connect is thrown on all of them.
  static Communicator connect(int rank, int size, std::shared_ptr<Store> store, CommOptions options = {});

  /// Wraps a connected backend, e.g. of an MPI communicator (connect_mpi). There is no store, so split()
  /// works only if the backend implements it.
  static Communicator from_backend(int rank, int size, std::unique_ptr<Backend> backend,
                                   CommOptions options = {});

  Communicator(Communicator&&) noexcept;
  Communicator& operator=(Communicator&&) noexcept;
  /// Does not wait. Operations in flight end with Errc::peer_lost on the other ranks. In a child of fork() it
  /// only closes the child's copies of the group's resources; the group is not affected.
  ~Communicator();

  int rank() const;
  int size() const;
  /// The options passed to connect() or from_backend().
  const CommOptions& options() const;

  /// Reduces all ranks' buffers; every rank gets the result. The same count on every rank.
  Work all_reduce(const Buffer& in_out, ReduceOp op = ReduceOp::sum, const Stream& = {},
                  CallSite = CallSite::current());
  Work all_reduce(const ConstBuffer& in, const Buffer& out, ReduceOp op, const Stream& = {},
                  CallSite = CallSite::current());
  /// Reduces all ranks' `in`; rank r receives part r of the result. in.count = size · out.count.
  Work reduce_scatter(const ConstBuffer& in, const Buffer& out, ReduceOp op = ReduceOp::sum,
                      const Stream& = {}, CallSite = CallSite::current());
  /// Concatenates all ranks' `in` in rank order on every rank. out.count = size · in.count.
  Work all_gather(const ConstBuffer& in, const Buffer& out, const Stream& = {},
                  CallSite = CallSite::current());
  /// Copies the root's buffer to every rank's. The same count on every rank.
  Work broadcast(const Buffer& in_out, int root, const Stream& = {}, CallSite = CallSite::current());
  /// As above; `in` is read at the root only, `out` is written on every rank, including the root.
  Work broadcast(const ConstBuffer& in, const Buffer& out, int root, const Stream& = {},
                 CallSite = CallSite::current());
  /// Reduces all ranks' `in` to the root's `out`, which may be empty elsewhere. Equal counts.
  Work reduce(const ConstBuffer& in, const Buffer& out, int root, ReduceOp op = ReduceOp::sum,
              const Stream& = {}, CallSite = CallSite::current());
  /// Concatenates all ranks' `in` in rank order at the root. out.count = size · in.count there; `out` may be
  /// empty elsewhere.
  Work gather(const ConstBuffer& in, const Buffer& out, int root, const Stream& = {},
              CallSite = CallSite::current());
  /// Sends part r of the root's `in` to rank r. in.count = size · out.count at the root; `in` may be empty
  /// elsewhere.
  Work scatter(const ConstBuffer& in, const Buffer& out, int root, const Stream& = {},
               CallSite = CallSite::current());
  /// Both counts are size · n. Part d of `in` is sent to rank d; part s of `out` comes from rank s.
  Work all_to_all(const ConstBuffer& in, const Buffer& out, const Stream& = {},
                  CallSite = CallSite::current());
  /// Counts and offsets are in elements, one entry per rank, of any integer type. send_counts[d] on this rank
  /// must equal recv_counts[this rank] on rank d.
  Work all_to_all_v(const ConstBuffer& in, const Counts& send_counts, const Counts& send_offsets,
                    const Buffer& out, const Counts& recv_counts, const Counts& recv_offsets,
                    const Stream& = {}, CallSite = CallSite::current());
  /// Messages between two ranks are received in the order in which they were sent. A send may block until its
  /// receive is posted.
  Work send(const ConstBuffer&, int to, const Stream& = {}, CallSite = CallSite::current());
  Work recv(const Buffer&, int from, const Stream& = {}, CallSite = CallSite::current());
  /// The Work ends once every rank has called barrier().
  Work barrier(CallSite = CallSite::current());

  /// Collects calls to start them as one group, e.g. a send to and a receive from each neighbour.
  Group group();

  /// Collective. Ranks with the same color form a new group, ordered by key, then by rank. A rank without a
  /// color takes part in the call and gets nullopt. `order`: of reductions in the new group, the same on all
  /// ranks; default: that of this group. The culprit of an error is a rank of the new group, which fails
  /// alone.
  ///
  /// `shares_failures`, the same on all ranks: a failure of this group or of the new one ends both, on all
  /// ranks of this group, and names them by their numbers here. A lost rank is named in about a second, even
  /// where it is not a member of the group that waits. With the backend "native", also beneath a device
  /// backend; others fail alone.
  std::optional<Communicator> split(std::optional<int> color, int key,
                                    std::optional<ReductionOrder> order = {}, bool shares_failures = false,
                                    CallSite = CallSite::current());

  /// Allocates memory that local peers access in place, so that collectives on it are zero-copy. Aligned to
  /// 256 bytes, zeroed. It may outlive the communicator. Do not release device memory while work in a stream
  /// uses it. Errc::system reports the bytes required and available.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);
  /// Collective form of allocate(): every rank calls it with the same size. The result depends on the
  /// backend:
  ///   - NCCL 2.27 or newer: a symmetric window, which its fastest kernels require. It is released when the
  ///     communicator ends, too. If the ranks' sizes differ, NCCL reports an error or a timeout.
  ///   - "peer_cuda": memory that the kernels of all ranks access in place, also between processes; memory of
  ///     allocate() has this property between threads of one process only
  ///     (comm/backends/peer_cuda/peer_cuda_backend.h). If the ranks' sizes differ: Errc::mismatch.
  ///
  /// A group made by split() recognizes host memory that its parent allocated or registered, and the reverse,
  /// but neither a symmetric window nor device memory of its parent.
  std::shared_ptr<std::byte> allocate_symmetric(std::size_t bytes);
  /// Makes the caller's host memory (malloc, new, mmap, std::vector) zero-copy, like that of allocate(),
  /// until the registration ends. Each rank registers independently. A collective is zero-copy if every
  /// rank's memory was allocated here or registered.
  ///
  /// The whole pages that contain the range are replaced by shared pages with the same contents at the same
  /// addresses. Pointers stay valid, and other threads may read meanwhile. Requirements:
  ///   - No thread writes to the range, and no read() or DMA targets it, during this call or while the
  ///     registration ends. Earlier page pins (cudaHostRegister, RDMA) keep referring to the old pages.
  ///   - The pages are private, anonymous, readable and writable, and contain no other data. This holds for
  ///     arrays of malloc and std::vector from 128 KiB, if malloc uses mmap for them. The range does not
  ///     overlap another registration. Otherwise the registration fails: Registration::zero_copy() is false,
  ///     reason() has the cause, and collectives copy the memory.
  ///   - A child of fork() shares the memory, as it does that of allocate(). Only the parent ends the
  ///     registration; in the child, ending its copy closes a descriptor.
  ///   - The registration ends before the memory is freed, unmapped or resized (realloc, a growing vector).
  ///
  /// The call takes the time of two copies of the range and temporarily needs as much memory again.
  /// Errc::system reports the bytes required and available; the memory is then unchanged. Thread-safe.
  Registration register_buffer(void* data, std::size_t bytes);
  /// allocate() for `count` elements of type T.
  template <class T>
  std::shared_ptr<T> allocate_array(std::size_t count) {
    constexpr std::size_t all = ~std::size_t{0};
    return std::reinterpret_pointer_cast<T>(allocate(count > all / sizeof(T) ? all : count * sizeof(T)));
  }
  /// allocate() as an Allocator, for layers that do not include comm. Keeps the backend alive.
  Allocator allocator();

  /// Ends every operation in flight on every rank with Errc::aborted and this rank as culprit. Any thread;
  /// idempotent; returns within one second.
  void abort(const std::string& reason = "abort() was called") noexcept;

  /// The way back after a failure: begins a new generation of this group, and of all that were split from it
  /// and live. Every rank calls it, after an error or without one; it returns once all have. A rank that
  /// waits in a call gets Errc::cancelled with the first rank that called renew() as culprit, and `reason`;
  /// "rank N called renew()" if that is empty. A collective that has completed on a rank which every rank
  /// takes part in, all but broadcast, reduce, gather, scatter and messages, completes on all ("native",
  /// "mpi"). Nothing of the generation before arrives in the new one: it has connections of its own.
  ///
  /// Memory, registrations and options stay; graphs with operations of this group must be captured again, and
  /// memory of allocate_symmetric() is like that of allocate() then. No other thread may use these groups
  /// meanwhile, except by abort(). Errc::peer_lost if a rank was lost, which nobody can wait for.
  /// Errc::timeout names ranks that have not called it within the time of an operation; these groups are then
  /// unusable. Errc::invalid_argument for a group that shares the failures of the one that it was split from,
  /// while that lives: renew that one. Collective.
  void renew(const std::string& reason = {});

  /// True if operations on device memory may be captured in a CUDA graph (comm/device/graph.h) and replayed.
  /// All ranks must launch their graphs equally often. The Work of a captured operation supports wait_on()
  /// only; use synchronize() to wait for graph runs.
  bool capturable() const;
  /// Why a graph with operations of this group must not copy between host and device memory besides: ranks
  /// are threads that share a GPU (comm/backends/peer_cuda/peer_cuda_backend.h). Empty: it may. Equal on all
  /// ranks.
  std::string reason_against_copies_in_graphs() const;
  /// Waits for all work in `stream`, including graph runs. Call it before the communicator ends, which must
  /// not happen while a graph of it runs. Throws the group's failure after the stream has drained, or one
  /// second later; Errc::cancelled only if it has not drained by then. After twice the operation timeout it
  /// aborts the group with Errc::timeout, which names the ranks that did not run their graphs if the backend
  /// can determine them.
  void synchronize(const Stream&);

  /// Backend and transports, e.g. "native over shm+tcp"; with "auto" also the reason for the choice.
  std::string describe() const;
  /// Algorithm, transport and chunk size of a call, and the reason. `bytes` is the size of the larger of a
  /// rank's input and output; it has no effect for all_to_all_v and barrier. `allocated`: every rank's
  /// buffers come from allocate(). `dtype` and `op` matter for reductions: with `deterministic`, sums of 8-
  /// and 16-bit floats exclude algorithms that round partial sums. Uses the same selection code as the calls
  /// themselves, so the result is the same on every rank. No communication; any thread.
  AlgorithmChoice explain(Collective, std::size_t bytes, bool allocated = false, DType = DType::f32,
                          ReduceOp = ReduceOp::sum) const;

 private:
  friend class Group;
  struct State;
  struct Family;
  explicit Communicator(std::shared_ptr<State>);
  static Communicator connect_from(const struct Inherited&, int rank, int size, std::shared_ptr<Store>,
                                   CommOptions);
  Work submit(std::span<const struct CollectiveCall>);
  Work submit_one(struct CollectiveCall, const CallSite&);
  template <Collective kind>
  Work start(const ConstBuffer& in, const Buffer& out, int root, ReduceOp, const Stream&, const CallSite&);
  std::shared_ptr<State> state_;
};

/// Calls that start as one group; the functions correspond to those of Communicator and validate their
/// arguments in the same way. Not thread-safe. Call launch() once; buffers and streams live until the Work
/// has ended.
///
/// Every rank launches the same collectives in the same order; otherwise Errc::mismatch. Calls of a group may
/// run concurrently in any order, so no call may read or write memory that another call writes. On host
/// memory, consecutive small all_reduces with the same dtype and operation are coalesced into one call of up
/// to 16 KiB; launch() throws Errc::invalid_argument if these depend on each other. Small calls outside
/// groups are not coalesced, even if several are in flight; over a network each then costs its own messages.
class Group {
 public:
  Group& all_reduce(const Buffer& in_out, ReduceOp op = ReduceOp::sum, const Stream& = {},
                    CallSite = CallSite::current());
  Group& all_reduce(const ConstBuffer& in, const Buffer& out, ReduceOp op, const Stream& = {},
                    CallSite = CallSite::current());
  Group& reduce_scatter(const ConstBuffer& in, const Buffer& out, ReduceOp op = ReduceOp::sum,
                        const Stream& = {}, CallSite = CallSite::current());
  Group& all_gather(const ConstBuffer& in, const Buffer& out, const Stream& = {},
                    CallSite = CallSite::current());
  Group& broadcast(const Buffer& in_out, int root, const Stream& = {}, CallSite = CallSite::current());
  Group& broadcast(const ConstBuffer& in, const Buffer& out, int root, const Stream& = {},
                   CallSite = CallSite::current());
  Group& reduce(const ConstBuffer& in, const Buffer& out, int root, ReduceOp op = ReduceOp::sum,
                const Stream& = {}, CallSite = CallSite::current());
  Group& gather(const ConstBuffer& in, const Buffer& out, int root, const Stream& = {},
                CallSite = CallSite::current());
  Group& scatter(const ConstBuffer& in, const Buffer& out, int root, const Stream& = {},
                 CallSite = CallSite::current());
  Group& all_to_all(const ConstBuffer& in, const Buffer& out, const Stream& = {},
                    CallSite = CallSite::current());
  Group& all_to_all_v(const ConstBuffer& in, const Counts& send_counts, const Counts& send_offsets,
                      const Buffer& out, const Counts& recv_counts, const Counts& recv_offsets,
                      const Stream& = {}, CallSite = CallSite::current());
  Group& send(const ConstBuffer&, int to, const Stream& = {}, CallSite = CallSite::current());
  Group& recv(const Buffer&, int from, const Stream& = {}, CallSite = CallSite::current());
  /// Starts the calls. The Work ends when all of them have ended.
  Work launch();

  Group(Group&&) noexcept;
  ~Group();

 private:
  friend class Communicator;
  explicit Group(Communicator&);
  Group& add(struct CollectiveCall, const CallSite&);
  struct Caller caller() const;
  Communicator* communicator_;
  std::unique_ptr<class CallList> calls_;
};

}  // namespace rz
