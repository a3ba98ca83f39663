#include "sharding/strategy/update_tiles.h"

#include <algorithm>
#include <utility>

#include "comm/core/integer_math.h"
#include "comm/device/allocate.h"
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

/// The bytes of the largest tile: the first of a bucket is as large as any other.
std::size_t UpdateTiles::buffer_bytes() const {
  std::size_t max_bytes = 0;
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
    max_bytes = std::max(max_bytes, bytes);
  }
  return max_bytes;
}

void UpdateTiles::begin(const Stream& stream) {
  begun_ = true;
  require_may_copy(model_.options().offload_optimizer, stream);
  require_may_copy(model_.options().offload_param, stream);
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

// ---- calls of an optimizer

std::vector<MemberRun> member_runs(const BucketLayout& layout, int bucket, Range range,
                                   std::span<const MemberUpdate> updates, std::vector<MemberRun> reused) {
  std::vector<MemberRun> out = std::move(reused);
  out.clear();
  const auto& members = layout.buckets[static_cast<std::size_t>(bucket)].members;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const int m = members[i];
    const Range here = intersect(padded_extent(layout, bucket, i), range);
    const MemberUpdate& update = updates[static_cast<std::size_t>(m)];
    if (!here.count() || update.skip) continue;
    if (!update.alone && !out.empty() && out.back().update == update && out.back().range.end == here.begin)
      out.back().range.end = here.end;
    else
      out.push_back({here, m, update});
  }
  return out;
}

std::span<const UpdateSpans::Call> UpdateSpans::calls(const Tile& tile, const TileMemory& memory,
                                                      std::span<const MemberUpdate> updates,
                                                      float* directions,
                                                      const std::function<bool(int member)>& filter) {
  runs_ = member_runs(model_.layout().buckets(), tile.bucket, tile.range, updates, std::move(runs_));
  if (filter) std::erase_if(runs_, [&](const MemberRun& run) { return !filter(run.first); });
  std::ranges::sort(runs_, {},
                    [](const MemberRun& run) { return std::pair(run.update.missed, run.range.begin); });
  spans_.clear(), calls_.clear();
  for (const MemberRun& run : runs_) spans_.push_back(span(run, tile, memory, directions));
  for (std::size_t begin = 0, end = 0; begin < runs_.size(); begin = end) {
    const std::int64_t missed = runs_[begin].update.missed;
    while (end < runs_.size() && runs_[end].update.missed == missed) ++end;
    calls_.push_back({std::span(spans_).subspan(begin, end - begin), missed, runs_[begin].first});
  }
  return calls_;
}

UpdateSpan UpdateSpans::span(const MemberRun& run, const Tile& tile, const TileMemory& memory,
                             float* directions) const {
  const std::size_t at = run.range.begin - tile.range.begin,
                    updated = run.range.begin - model_.layout().updated(tile.bucket).begin;
  const Tensor& gradients = model_.gradients().mean(tile.bucket);
  UpdateSpan span;
  span.value = memory.value + at;
  span.gradient = gradients.raw() + updated * size_of(gradients.dtype());
  span.gradient_dtype = gradients.dtype();
  if (memory.working) {
    span.working_dtype = model_.options().precision.parameters;
    span.working = memory.working + at * size_of(span.working_dtype);
  }
  span.count = run.range.count();
  span.group = run.update.group;
  span.member = run.first;
  if (directions) span.direction = directions + run.range.begin;
  for (std::size_t s = 0; s < max_states; ++s) {
    const TileMemory::State& moved = memory.states[s];
    float* const stored = state_.at(s, run.first, run.range.begin);
    span.state[s] = stored && moved.used ? moved.used + (stored - moved.stored) : stored;
  }
  return span;
}

// ---- constants

void DeviceConstants::write(const Optimizer& optimizer, std::span<const std::int64_t> missed,
                            const Stream& stream) {
  std::vector<std::byte> constants = optimizer.constants(0);
  stride_ = constants.size();
  if (!memory_.defined())
    memory_ = Tensor::empty({stride_ * (1 + missed.size())}, DType::u8, allocator_on(stream.device()));
  constants.resize(memory_.bytes());
  for (std::size_t m = 0; m < missed.size(); ++m)
    if (missed[m] != 0)
      std::ranges::copy(optimizer.constants(missed[m]), &constants[slot(missed[m], static_cast<int>(m))]);
  memory_.assign(constants, stream);
  written_ = true;
}

bool DeviceConstants::take_written() { return std::exchange(written_, false); }

std::size_t DeviceConstants::slot(std::int64_t missed, int first) const {
  return missed == 0 ? 0 : stride_ * (1 + static_cast<std::size_t>(first));
}

UpdateScale DeviceConstants::scale_of(const UpdateSpans::Call& call, UpdateScale scale) const {
  scale.missed = call.missed;
  if (scale.constants) scale.constants = memory_.raw() + slot(call.missed, call.first);
  return scale;
}

}  // namespace rz
