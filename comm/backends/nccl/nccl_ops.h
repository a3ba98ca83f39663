#pragma once
/// Operations as calls of NCCL in a stream.
///
/// Bytes are moved by NCCL. Sums that have to be in rank order (and reductions that NCCL does not have) are
/// made of an exchange of parts, the kernel that combines them as the host does, and an all_gather: as many
/// bytes on the wire as a ring has. Large operations go in slices, so that memory on the way is bounded; how
/// they are cut depends on the call alone, and is the same on every rank.

#include <functional>
#include <span>

#include "comm/backends/nccl/nccl_comm.h"
#include "comm/collective.h"

namespace rz::nccl {

struct Chunk;

struct NcclOpsOptions {
  int rank = 0, size = 1;
  bool deterministic = true;  ///< sums in rank order
  bool has_f8 = false;        ///< NCCL 2.24 on compute capability 9.0
  /// Of scratch memory, for one operation; the same on every rank.
  std::size_t workspace_limit = std::size_t{64} << 20;
};

class NcclOps {
 public:
  /// `settle` returns once NCCL has put what it was given into the stream, and throws if it cannot.
  NcclOps(NcclComm& link, const NcclOpsOptions& options, std::function<void()> settle)
      : nccl_comm_(link), options_(options), wait_issued_(std::move(settle)) {}

  /// Errc::invalid_argument for a group that cannot be: then nothing has been done.
  void check(std::span<const CollectiveCall>) const;
  /// Bytes of scratch memory that the operations need.
  std::size_t workspace_bytes(std::span<const CollectiveCall>) const;
  void issue(std::span<const CollectiveCall>, const Stream&, std::byte* scratch) const;

 private:
  class GroupCall;
  /// f(group) between ncclGroupStart and ncclGroupEnd.
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
