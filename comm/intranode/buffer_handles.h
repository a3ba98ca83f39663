#pragma once
/// Where the memory of a call lies, as the ranks of one host tell each other in one letter each: in a segment
/// that peers map, in the rank's own process, where the kernel reads it, or where nobody else reaches it.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "comm/intranode/single_copy_tuner.h"
#include "comm/shared_memory/allocator.h"
#include "comm/transport/mailbox.h"
#include "comm/transport/transport.h"

namespace rz {

/// What a letter says.
struct BufferHandle {
  static constexpr std::uint32_t none = 0xffffffff, cma = 0xfffffffe;  ///< for a segment's number
  SharedMemoryHandle in{none, 0};   ///< what peers read; in its own process: the address there
  SharedMemoryHandle out{none, 0};  ///< what peers write
  bool has_cma = false;             ///< this rank, what lies in others' processes
  SingleCopyTuner::Times times;     ///< its calls, if all choose by it
  bool operator==(const BufferHandle&) const = default;
};
static_assert(sizeof(BufferHandle) <= inline_bytes);

/// A rank's own memory of a call; null where peers need nothing of it.
struct LocalBuffers {
  std::span<const std::byte> in, out;
};

class BufferHandles {
 public:
  BufferHandles(Transport&, int rank, int size);

  /// This rank's. `by_kernel`: what lies in no segment may be read through the kernel.
  void publish_local(const LocalBuffers&, bool by_kernel, SingleCopyTuner::Times took);
  /// That memory lies where it did. What was freed or is shared since then, at the same addresses, has
  /// changed the arena's version.
  bool is_unchanged(const LocalBuffers& m) const {
    return m.in.data() == local_.in.data() && m.out.data() == local_.out.data() &&
           arena_->version() == version_;
  }
  void write_to(std::byte* payload) const {
    std::memcpy(payload, &handles_[index(rank_)], sizeof(BufferHandle));
  }
  /// A peer's; whether it is another than the last.
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
  /// Of all ranks together.
  void sum_times(std::uint64_t& single_copy_ns, std::uint64_t& staged_ns) const;

  /// Finds what that peer shares, so many bytes of it, for in() and out(). Errc::system if it lies nowhere.
  void map_in(int peer, std::size_t bytes) { ins_[index(peer)] = map_handle(peer, handle_in(peer), bytes); }
  void map_out(int peer, std::size_t bytes) {
    outs_[index(peer)] = map_handle(peer, handle_out(peer), bytes);
  }
  const std::byte* in(int peer) const { return ins_[index(peer)]; }
  std::byte* out(int peer) const { return outs_[index(peer)]; }
  /// Where a part of what a peer shares lies here; null: it lies in its own process, for read().
  const std::byte* mapped_in(int peer, std::size_t at, std::size_t bytes);
  /// That, through the kernel.
  CmaResult cma_read(int peer, std::size_t at, std::span<std::byte> into);

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  static bool is_mapped(const SharedMemoryHandle& s) { return s.segment < BufferHandle::cma; }
  const SharedMemoryHandle& handle_in(int rank) const { return handles_[index(rank)].in; }
  const SharedMemoryHandle& handle_out(int rank) const { return handles_[index(rank)].out; }
  SharedMemoryHandle make_handle(std::span<const std::byte>, bool by_kernel) const;
  std::byte* map_handle(int peer, const SharedMemoryHandle&, std::size_t bytes);

  Transport& transport_;
  const std::shared_ptr<SharedMemoryAllocator> arena_;
  const int rank_;
  std::vector<BufferHandle> handles_;  // of every rank, as last made or heard
  LocalBuffers local_;                 // of which this rank's is
  std::uint64_t version_ = 0;          // the arena's then
  std::vector<std::byte*> ins_, outs_;
};

}  // namespace rz
