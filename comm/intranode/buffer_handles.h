#pragma once
/// Exchange of buffer handles among the ranks of a node, one slot payload each. A buffer lies in a shared
/// segment that peers map (zero-copy), in private memory that peers read by CMA (process_vm_readv), or where
/// peers have no access. Not thread safe, like the engine.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "comm/intranode/single_copy_tuner.h"
#include "comm/shared_memory/allocator.h"
#include "comm/transport/mailbox.h"
#include "comm/transport/shared_memory_group.h"

namespace rz::intranode {

/// A rank's handles of one call, as a slot payload.
struct BufferHandle {
  /// Special segment numbers: no access; private memory, with its address as offset.
  static constexpr std::uint32_t none = 0xffffffff, cma = 0xfffffffe;
  SharedMemoryHandle in{none, 0};   ///< memory that peers read
  SharedMemoryHandle out{none, 0};  ///< memory that peers write; never private
  bool has_cma = false;             ///< this rank can read other processes' memory
  SingleCopyTuner::Times times;     ///< of this rank's samples; zero unless this call decides
  bool operator==(const BufferHandle&) const = default;
};
static_assert(sizeof(BufferHandle) <= inline_bytes);

/// This rank's buffers of a call; empty where peers need no access.
struct LocalBuffers {
  std::span<const std::byte> in, out;
};

class BufferHandles {
 public:
  BufferHandles(SharedMemoryGroup&, int rank, int size);

  /// Sets this rank's handle. `allow_cma`: memory outside all segments is published for CMA reads.
  void publish_local(const LocalBuffers&, bool allow_cma, SingleCopyTuner::Times times);
  /// True if the handle of these buffers is the published one. Memory that was freed or registered since then
  /// at the same addresses has changed the allocator's version.
  bool is_unchanged(const LocalBuffers& m) const {
    return m.in.data() == local_.in.data() && m.out.data() == local_.out.data() &&
           arena_->version() == version_;
  }
  void write_to(std::byte* payload) const {
    std::memcpy(payload, &handles_[index(rank_)], sizeof(BufferHandle));
  }
  /// Stores a peer's handle; true if it differs from the last one.
  bool receive(int peer, const std::byte* payload) {
    BufferHandle now;
    std::memcpy(&now, payload, sizeof now);
    if (now == handles_[index(peer)]) return false;
    handles_[index(peer)] = now;
    return true;
  }

  bool is_mapped_in(int rank) const { return is_mapped(handles_[index(rank)].in); }
  bool is_mapped_out(int rank) const { return is_mapped(handles_[index(rank)].out); }
  bool is_cma_readable_in(int rank) const { return handles_[index(rank)].in.segment != BufferHandle::none; }
  bool has_cma(int rank) const { return handles_[index(rank)].has_cma; }
  /// Sums of all ranks' times.
  void sum_times(std::uint64_t& single_copy_ns, std::uint64_t& staged_ns) const;

  /// Maps that many bytes of the peer's buffer, for in() and out(). Errc::system if the segment lacks them.
  void map_in(int peer, std::size_t bytes) { ins_[index(peer)] = map_handle(peer, handle_in(peer), bytes); }
  void map_out(int peer, std::size_t bytes) {
    outs_[index(peer)] = map_handle(peer, handle_out(peer), bytes);
  }
  const std::byte* in(int peer) const { return ins_[index(peer)]; }
  std::byte* out(int peer) const { return outs_[index(peer)]; }
  /// Address in this process of a part of the peer's input; null if it is private memory, for cma_read().
  const std::byte* mapped_in(int peer, std::size_t at, std::size_t bytes);
  /// Reads a part of the peer's private input by CMA.
  CmaResult cma_read(int peer, std::size_t at, std::span<std::byte> into);

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  static bool is_mapped(const SharedMemoryHandle& s) { return s.segment < BufferHandle::cma; }
  const SharedMemoryHandle& handle_in(int rank) const { return handles_[index(rank)].in; }
  const SharedMemoryHandle& handle_out(int rank) const { return handles_[index(rank)].out; }
  SharedMemoryHandle make_handle(std::span<const std::byte>, bool allow_cma) const;
  std::byte* map_handle(int peer, const SharedMemoryHandle&, std::size_t bytes);

  SharedMemoryGroup& shared_memory_;
  const std::shared_ptr<SharedMemoryAllocator> arena_;
  const int rank_;
  std::vector<BufferHandle> handles_;  // of every rank, as last published or received
  LocalBuffers local_;                 // buffers of handles_[rank_]
  std::uint64_t version_ = 0;          // of the allocator, when they were published
  std::vector<std::byte*> ins_, outs_;
};

}  // namespace rz::intranode
