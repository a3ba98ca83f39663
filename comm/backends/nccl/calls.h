#pragma once
/// Operations as calls of NCCL in a stream.
///
/// Bytes are moved by NCCL. Sums that have to be in rank order (and reductions that NCCL does not have) are
/// made of an exchange of parts, the kernel that combines them as the host does, and an all_gather: as many
/// bytes on the wire as a ring has. Large operations go in slices, so that memory on the way is bounded; how
/// they are cut depends on the call alone, and is the same on every rank.

#include <functional>
#include <span>

#include "comm/backends/nccl/link.h"
#include "comm/collective.h"

namespace rz::nccl {

struct Slice;

struct CallsOptions {
  int rank = 0, size = 1;
  bool deterministic = true;  ///< sums in rank order
  bool has_f8 = false;        ///< NCCL 2.24 on compute capability 9.0
  /// Of scratch memory, for one operation; the same on every rank.
  std::size_t scratch_limit = std::size_t{64} << 20;
};

class Calls {
 public:
  /// `settle` returns once NCCL has put what it was given into the stream, and throws if it cannot.
  Calls(Link& link, const CallsOptions& options, std::function<void()> settle)
      : link_(link), options_(options), settle_(std::move(settle)) {}

  /// Errc::invalid_argument for a group that cannot be: then nothing has been done.
  void check(std::span<const Operation>) const;
  /// Bytes of scratch memory that the operations need.
  std::size_t scratch_bytes(std::span<const Operation>) const;
  void issue(std::span<const Operation>, const Stream&, std::byte* scratch) const;

 private:
  class Grouped;
  /// f(group) between ncclGroupStart and ncclGroupEnd.
  template <class F>
  void grouped(const Stream&, const F& f) const;
  bool simple(const Operation&) const;
  bool native(const Operation&) const;
  void issue_simple(Grouped&, const Operation&, RedOp) const;
  void issue_messages(Grouped&, const Operation&) const;
  void copy_own(std::span<const Operation>, const Stream&) const;
  void issue_staged(const Operation&, const Stream&, std::byte* scratch) const;
  void alone(const Operation&, const Stream&) const;
  void fold(std::byte* dst, const std::byte* own, const std::byte* gathered, std::size_t stride,
            std::size_t count, const Operation&, const Stream&) const;
  void combine(const Operation&, const Slice&, const Stream&, std::byte* scratch) const;
  void reduce_scatter(const Operation&, const Stream&, std::byte* scratch) const;
  void all_to_all_in_place(const Operation&, const Stream&, std::byte* scratch) const;

  Link& link_;
  const CallsOptions options_;
  const std::function<void()> settle_;
};

}  // namespace rz::nccl
