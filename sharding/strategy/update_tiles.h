#pragma once
/// The elements that a rank updates: tile by tile, and as spans for calls of an optimizer.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "comm/bucket_scheduler.h"
#include "comm/device/stream.h"
#include "sharding/model/flat_layout.h"
#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"
#include "sharding/optim/optimizer.h"
#include "sharding/strategy/optimizer_state.h"
#include "tensor/tensor.h"

namespace rz {

/// A part of a bucket that is updated at once.
struct Tile {
  int bucket = 0;
  Range range;  ///< in the bucket, within FlatLayout::updated(); multiples of norm_block
};

/// Where an update reads and writes the elements of a tile: in place, or in copies.
struct TileMemory {
  float* value = nullptr;        ///< of the first element
  std::byte* working = nullptr;  ///< of the first element; null unless precision is mixed
  /// Where a state of the optimizer is: OptimizerState::at() - stored + used. Null: in place.
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

/// How an update treats one member.
struct MemberUpdate {
  bool skip = false;        ///< the member keeps its values
  int group = 0;            ///< parameter group of the optimizer
  bool alone = false;       ///< no run joins the member with others
  std::int64_t missed = 0;  ///< earlier updates that skipped the member
  bool operator==(const MemberUpdate&) const = default;
};

/// A run of consecutive members with equal MemberUpdate.
struct MemberRun {
  Range range;  ///< in the bucket
  int first;    ///< index of its first member
  MemberUpdate update;
  bool operator==(const MemberRun&) const = default;
};
/// Splits a range of a bucket where `updates` (one per member) change, and leaves out skipped members.
/// Padding belongs to the member before it. The result uses the storage of `reused`.
std::vector<MemberRun> member_runs(const BucketLayout&, int bucket, Range range,
                                   std::span<const MemberUpdate> updates, std::vector<MemberRun> reused = {});

/// Describes the elements that this rank updates.
class UpdateSpans {
 public:
  /// Both must outlive the object.
  UpdateSpans(const ShardedModel& model, const OptimizerState& state) : model_(model), state_(state) {}

  /// Some of the elements of a tile. Members that missed the same number of updates are one call.
  struct Call {
    std::span<const UpdateSpan> spans;
    std::int64_t missed;
    int first;  ///< the first member
  };
  /// The calls of a tile for the members that the filter accepts, if there is one. `directions`: those of the
  /// whole bucket, or null. Valid until the next call.
  std::span<const Call> calls(const Tile&, const TileMemory&, std::span<const MemberUpdate>,
                              float* directions = nullptr,
                              const std::function<bool(int member)>& filter = {});

 private:
  UpdateSpan span(const MemberRun&, const Tile&, const TileMemory&, float* directions) const;

  const ShardedModel& model_;
  const OptimizerState& state_;
  // Kept so that an update allocates nothing.
  std::vector<MemberRun> runs_;
  std::vector<UpdateSpan> spans_;
  std::vector<Call> calls_;
};

/// An optimizer's constants in device memory, where updates in a graph find them: those for members that
/// missed no update, then a slot for each member. A member that missed updates has constants of its own, at
/// an address that stays the same.
class DeviceConstants {
 public:
  /// Writes the constants of the update that the optimizer has begun; `missed` by member.
  void write(const Optimizer&, std::span<const std::int64_t> missed, const Stream&);
  /// Whether write() was called since the last call of this function.
  bool take_written();
  /// The constants for members that missed no update.
  const void* get() const { return memory_.raw(); }
  /// `scale` for a call. If it has constants, they become those of the call.
  UpdateScale scale_of(const UpdateSpans::Call&, UpdateScale scale) const;

 private:
  std::size_t slot(std::int64_t missed, int first) const;

  Tensor memory_;
  std::size_t stride_ = 0;
  bool written_ = false;
};

}  // namespace rz
