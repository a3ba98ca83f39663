#pragma once
/// Input and output memory of a rank.

#include <cstddef>

#include "bench/harness/case.h"
#include "bench/harness/options.h"
#include "bench/support/memory.h"

namespace rz::bench {

/// The arguments of successive operations of a case. They rotate through the buffers, so that small messages
/// do not reuse one cache line. All ranks rotate through the same number of positions.
class BufferRotation {
 public:
  /// The arguments of operation `index`. The reference is valid until the next call of at().
  const Call& at(int index) {
    const auto i = static_cast<unsigned>(index);
    const bool follows = i == next_;  // avoids a division, which costs much relative to a small message
    call_.in = in_.position(i, follows), call_.out = out_.position(i, follows);
    next_ = i + 1;
    return call_;
  }

 private:
  friend class RankBuffers;
  /// The positions of one of the two buffers.
  struct Side {
    std::byte* base = nullptr;
    std::size_t extent = 0, positions = 1, offset = 0;

    std::byte* position(unsigned index, bool follows) {
      if (follows)
        offset = offset + extent < extent * positions ? offset + extent : 0;
      else
        offset = extent * (index % positions);
      return base + offset;
    }
  };
  BufferRotation(const Call& call, const Side& in, const Side& out) : call_(call), in_(in), out_(out) {}

  Call call_;
  Side in_, out_;
  unsigned next_ = ~0u;
};

/// The memory for all cases of a run on one rank. The constructor is collective.
class RankBuffers {
 public:
  RankBuffers(Communicator&, const Collective&, const Options&, const Stream&);

  BufferRotation rotation(const Case&) const;
  /// Operations of one iteration (-m) that have disjoint buffers.
  int disjoint_operations() const { return disjoint_operations_; }
  std::size_t bytes() const { return send_.bytes + recv_.bytes; }

 private:
  struct Allocation {
    Memory memory;
    std::size_t bytes = 0;

    BufferRotation::Side side(std::size_t offset, std::size_t extent) const;
  };
  Allocation allocate(std::size_t bytes, std::size_t misalignment) const;

  Communicator& comm_;
  const Collective& collective_;
  const Options& options_;
  const Stream stream_;
  int disjoint_operations_ = 1;
  Allocation send_, recv_;
};

}  // namespace rz::bench
