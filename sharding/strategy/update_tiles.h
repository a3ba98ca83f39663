#pragma once
/// The elements that a rank updates, tile by tile.

#include <algorithm>
#include <array>
#include <vector>

#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"
#include "sharding/strategy/optimizer_state.h"
#include "sharding/strategy/tile.h"

namespace rz {

/// Copies offloaded parts of a tile to the device before its update, and back after it. There are two
/// buffers, so that one tile is copied while another is updated; the host waits for nothing if the memory is
/// pinned. The same copies can be captured in a graph. Not thread-safe.
class UpdateTiles {
 public:
  /// `sub_group_size`: maximum of elements in a tile, rounded down to a multiple of norm_block, but at least
  /// that. All references must outlive this object.
  UpdateTiles(const ShardedModel&, const OptimizerState&, std::size_t sub_group_size, Runtime&);

  /// Calls f(tile, memory) for the tiles of a bucket; f enqueues work on the memory in the stream. Call
  /// finish() after the last bucket.
  template <class F>
  void each(int bucket, const Stream& stream, const F& f) {
    const Range all = model_.layout().updated(bucket);
    for (std::size_t begin = all.begin; begin < all.end;) {
      const std::size_t end = begin + std::min(max_count_, all.end - begin);
      const Tile tile{bucket, {begin, end}};
      if (is_offloaded(bucket)) {
        f(tile, fetch(tile, stream));
        store(stream);
      } else {
        f(tile, in_place(model_, tile));
      }
      begin = end;
    }
  }
  /// Later work in the stream finds the results in their place.
  void finish(const Stream&);

 private:
  /// Offloaded elements of a tile, and their copy.
  struct Copy {
    Tensor stored;
    std::byte* used;
  };
  struct Buffer {
    Tensor memory;
    Event stored;  // it may be used again
    std::vector<Copy> copies;
  };

  bool is_offloaded(int bucket) const;
  bool is_offloaded(const Tensor&) const;
  /// What a tile updates: values, working copies, states. Undefined where there is none.
  struct Parts {
    Tensor value, working;
    std::array<Tensor, max_states> states;
  };
  Parts parts(const Tile&) const;
  std::size_t buffer_bytes() const;
  void begin(const Stream&);
  TileMemory fetch(const Tile&, const Stream&);
  std::byte* fetch(const Tensor& stored, std::size_t& offset);
  void store(const Stream&);

  const ShardedModel& model_;
  const OptimizerState& state_;
  std::size_t max_count_;
  Runtime& runtime_;
  bool begun_ = false;
  std::array<Buffer, 2> buffers_;
  int current_ = 0;  // index of the buffer of the last tile
};

}  // namespace rz
