#pragma once
/// Where the chunks of a call lie in its buffers: the table of comm/schedule.h in bytes.

#include <cstddef>

#include "comm/schedule.h"

namespace rz {

class Layout {
 public:
  /// `op` outlives the layout. `chunks` is the schedule's.
  Layout(const Operation& op, int rank, int size, int chunks);

  std::size_t bytes(int chunk) const;
  const std::byte* input(int chunk) const;
  std::byte* output(int chunk) const;
  /// The largest chunk: what a cell of scratch has to hold.
  std::size_t largest() const;

  /// The call is in place where `input` and `output` of the same chunk are the same memory.
  static bool in_place(const Operation&, int rank, int size);
  /// Elements that every rank must agree on; of all_to_all_v there are none.
  static std::size_t common_count(const Operation&, int size);

 private:
  struct Extent {
    std::size_t begin, end;  // bytes
  };
  Extent even_cut(int chunk) const;
  const Operation* op_;
  std::size_t rank_, size_, chunks_, element_, each_;  // each_: bytes of a chunk where all are equal
};

}  // namespace rz
