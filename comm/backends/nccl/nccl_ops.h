#pragma once
/// Translates operations to NCCL calls in a stream.
///
/// Data movement uses NCCL's calls. Reductions in rank order (and reductions that NCCL lacks) are an exchange
/// of shards, a reduction kernel with the host's bits, and an all_gather; they move as many bytes as a ring.
/// Large operations are cut into chunks to bound the workspace. The chunks depend on the call alone, so they
/// are the same on every rank.

#include <functional>
#include <span>

#include "comm/backends/nccl/nccl_comm.h"
#include "comm/collective.h"

namespace rz::nccl {

struct Chunk;

struct NcclOpsOptions {
  int rank = 0, size = 1;
  bool deterministic = true;  ///< reduce in rank order
  bool has_f8 = false;        ///< NCCL 2.24 on compute capability 9.0
  /// Bytes of workspace for one operation; the same on every rank.
  std::size_t workspace_limit = std::size_t{64} << 20;
};

class NcclOps {
 public:
  /// `wait_issued` returns once NCCL has enqueued all calls made so far in the stream, and throws if it
  /// fails.
  NcclOps(NcclComm& comm, const NcclOpsOptions& options, std::function<void()> wait_issued)
      : nccl_comm_(comm), options_(options), wait_issued_(std::move(wait_issued)) {}

  /// Errc::invalid_argument for a barrier or for unmatched sends to self; nothing has been issued then.
  void check(std::span<const CollectiveCall>) const;
  /// Bytes of workspace that `group` needs.
  std::size_t workspace_bytes(std::span<const CollectiveCall>) const;
  void issue(std::span<const CollectiveCall>, const Stream&, std::byte* scratch) const;

 private:
  class GroupCall;
  /// Calls f(group_call) between ncclGroupStart and ncclGroupEnd, then waits until it is issued.
  template <class F>
  void in_group(const Stream&, const F& f) const;
  bool is_single_group(const CollectiveCall&) const;
  bool reduces_natively(const CollectiveCall&) const;
  void issue_native(GroupCall&, const CollectiveCall&, RedOp) const;
  void issue_point_to_point(GroupCall&, const CollectiveCall&) const;
  void copy_to_self(std::span<const CollectiveCall>, const Stream&) const;
  void issue_ordered(const CollectiveCall&, const Stream&, std::byte* scratch) const;
  void run_single_rank(const CollectiveCall&, const Stream&) const;
  void reduce_gathered(std::byte* dst, const std::byte* own, const std::byte* gathered, std::size_t stride,
                       std::size_t count, const CollectiveCall&, const Stream&) const;
  void reduce_chunk(const CollectiveCall&, const Chunk&, const Stream&, std::byte* scratch) const;
  void reduce_scatter(const CollectiveCall&, const Stream&, std::byte* scratch) const;
  void all_to_all_in_place(const CollectiveCall&, const Stream&, std::byte* scratch) const;

  NcclComm& nccl_comm_;
  const NcclOpsOptions options_;
  const std::function<void()> wait_issued_;
};

}  // namespace rz::nccl
