#pragma once
/// Parts of a bucket that are updated at once.

#include <array>
#include <cstddef>

#include "sharding/model/partition.h"
#include "sharding/model/sharded_model.h"
#include "sharding/optim/optimizer.h"

namespace rz {

struct Tile {
  int bucket = 0;
  Range range;  ///< in the bucket, within FlatLayout::updated(); multiples of norm_block
};

/// Where an update reads and writes the elements of a tile: in place, or in copies.
struct TileMemory {
  float* value = nullptr;        ///< of the first element
  std::byte* working = nullptr;  ///< of the first element; null unless precision is mixed
  /// A state of OptimizerState::at() is at `used` + (its address - `stored`). Null: in place.
  struct State {
    float *stored = nullptr, *used = nullptr;
  };
  std::array<State, max_states> states{};
};

/// All elements of a bucket that this rank updates.
inline Tile whole_tile(const ShardedModel& model, int bucket) {
  return {bucket, model.layout().updated(bucket)};
}

/// Memory on the device of the model, or on the host without a device.
inline TileMemory in_place(const ShardedModel& model, const Tile& tile) {
  const std::size_t at = tile.range.begin - model.layout().updated(tile.bucket).begin;
  TileMemory memory{.value = model.updated_f32(tile.bucket).data<float>() + at};
  if (!model.options().precision.mixed()) return memory;
  const Tensor working = model.values().updated(tile.bucket);
  memory.working = working.raw() + at * size_of(working.dtype());
  return memory;
}

}  // namespace rz
