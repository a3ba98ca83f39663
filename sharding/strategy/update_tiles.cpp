#include "sharding/strategy/update_tiles.h"

#include "comm/core/integer_math.h"
#include "comm/device/memory.h"
#include "sharding/optim/grad_norm.h"

namespace rz {

namespace {
constexpr std::size_t alignment = 256;  // of the copies, as of device memory
}

UpdateTiles::UpdateTiles(const ShardedModel& model, const OptimizerState& state, std::size_t sub_group_size,
                         Runtime& runtime)
    : model_(model),
      state_(state),
      max_count_(std::max(norm_block, sub_group_size / norm_block * norm_block)),
      runtime_(runtime) {}

bool UpdateTiles::is_offloaded(const Tensor& t) const {
  return t.defined() && t.device() != runtime_.stream.device();
}

bool UpdateTiles::is_offloaded(int bucket) const {
  return model_.offloads_state(bucket) || is_offloaded(model_.values().updated(bucket));
}

UpdateTiles::Parts UpdateTiles::parts(const Tile& tile) const {
  const std::size_t at = tile.range.begin - model_.layout().updated(tile.bucket).begin;
  const Shape count{tile.range.count()};
  Parts out{.value = model_.updated_f32(tile.bucket).view(at, count)};
  if (model_.options().precision.mixed()) out.working = model_.values().updated(tile.bucket).view(at, count);
  for (std::size_t s = 0; s < max_states; ++s) out.states[s] = state_.part(s, tile.bucket, tile.range);
  return out;
}

/// Of the largest tile: the first of a bucket is as large as any other.
std::size_t UpdateTiles::buffer_bytes() const {
  std::size_t most = 0;
  for (int b = 0; b < model_.layout().size(); ++b) {
    if (!is_offloaded(b)) continue;
    const std::size_t count = std::min(max_count_, model_.layout().updated(b).count());
    std::size_t bytes = 0;
    const auto add = [&](const Tensor& t) {
      if (is_offloaded(t)) bytes += round_up(count * size_of(t.dtype()), alignment);
    };
    const Parts all = parts(whole_tile(model_, b));
    add(all.value), add(all.working);
    for (const Tensor& state : all.states) add(state);
    most = std::max(most, bytes);
  }
  return most;
}

void UpdateTiles::begin(const Stream& stream) {
  begun_ = true;
  require_may_copy(model_.options().offload_state, stream);
  require_may_copy(model_.options().offload_values, stream);
  const std::size_t bytes = buffer_bytes();
  for (Buffer& b : buffers_) b = {runtime_.transient.allocate({bytes}, DType::u8), {}, {}};
  runtime_.to_device.wait(stream.record());
}

TileMemory UpdateTiles::fetch(const Tile& tile, const Stream& stream) {
  if (!begun_) begin(stream);
  current_ = 1 - current_;
  Buffer& buffer = buffers_[static_cast<std::size_t>(current_)];
  buffer.copies.clear();
  runtime_.to_device.wait(buffer.stored);
  const Parts stored = parts(tile);
  TileMemory memory;
  std::size_t offset = 0;
  memory.value = reinterpret_cast<float*>(fetch(stored.value, offset));
  if (stored.working.defined()) memory.working = fetch(stored.working, offset);
  for (std::size_t s = 0; s < max_states; ++s)
    if (const Tensor& state = stored.states[s]; is_offloaded(state))
      memory.states[s] = {state.data<float>(), reinterpret_cast<float*>(fetch(state, offset))};
  stream.wait(runtime_.to_device.record());
  return memory;
}

/// Memory that the update only writes is copied too: the update may be skipped, or leave a parameter out.
std::byte* UpdateTiles::fetch(const Tensor& stored, std::size_t& offset) {
  if (!is_offloaded(stored)) return stored.raw();
  Buffer& buffer = buffers_[static_cast<std::size_t>(current_)];
  std::byte* const used = buffer.memory.raw() + offset;
  memcpy_async(used, stored.raw(), stored.bytes(), runtime_.to_device);
  buffer.copies.push_back({stored, used});
  offset += round_up(stored.bytes(), alignment);
  return used;
}

void UpdateTiles::store(const Stream& stream) {
  Buffer& buffer = buffers_[static_cast<std::size_t>(current_)];
  runtime_.to_host.wait(stream.record());
  for (const Copy& copy : buffer.copies)
    memcpy_async(copy.stored.raw(), copy.used, copy.stored.bytes(), runtime_.to_host);
  buffer.stored = runtime_.to_host.record();
}

void UpdateTiles::finish(const Stream& stream) {
  if (!begun_) return;
  begun_ = false;
  stream.wait(runtime_.to_host.record());
  for (Buffer& b : buffers_) b = {};
}

}  // namespace rz
