#include "sharding/strategy/parameter_norms.h"

#include "comm/device/allocate.h"
#include "comm/device/memory.h"
#include "tensor/kernels/device_ops.h"

namespace rz {

void ParameterNorms::measure(const Optimizer& optimizer, UpdateTiles& tiles, UpdateSpans& spans,
                             std::span<const MemberUpdate> updates, const DeviceConstants& constants,
                             UpdateScale& scale, const std::function<bool(int member)>& filter,
                             const Stream& stream) {
  const std::size_t count = 2 * updates.size();
  const bool on_device = stream.device().kind == Device::cuda;
  sums_.assign(count, {});
  if (on_device && !device_sums_.defined()) {
    const auto allocator = allocator_on(stream.device());
    device_sums_ = Tensor::empty({count * ExactLayout::words}, DType::i64, allocator);
    device_norms_ = Tensor::empty({count}, DType::f64, allocator);
  }
  if (on_device) memset_async(device_sums_.raw(), 0, device_sums_.bytes(), stream);
  const NormSums sums{sums_, on_device ? device_sums_.data<std::int64_t>() : nullptr};
  for (int b = 0; b < model_.layout().size(); ++b)
    tiles.each(b, stream, [&](const Tile& tile, const TileMemory& memory) {
      for (const UpdateSpans::Call& call : spans.calls(tile, memory, updates, nullptr, filter)) {
        UpdateScale own = scale;
        own.missed = call.missed;
        if (scale.constants) own.constants = constants.of(call.missed, call.first);
        optimizer.measure(call.spans, own, sums, stream);
      }
    });
  tiles.finish(stream);
  if (model_.layout().state() == Placement::sharded) add_over_ranks(stream);
  if (on_device) {
    ops::device_ops().optimizer.read_sums(device_norms_.data<double>(), device_sums_.data<std::int64_t>(),
                                          count, stream);
    scale.device_norms = reinterpret_cast<const SquaredNorms*>(device_norms_.raw());
    return;
  }
  norms_.clear();
  for (std::size_t m = 0; m < updates.size(); ++m)
    norms_.push_back({sums_[2 * m].value(), sums_[2 * m + 1].value()});
  scale.norms = norms_;
}

void ParameterNorms::add_over_ranks(const Stream& stream) {
  Communicator& group = runtime_.shard_group;
  runtime_.traffic.control.add(sums_.size() * ExactLayout::words * sizeof(std::int64_t));
  if (stream.device().kind == Device::cuda)
    runtime_.exposed.wait(group.all_reduce(device_sums_.buffer(), ReduceOp::sum, stream), stream);
  else
    runtime_.exposed.measure([&] { ExactSum::all_reduce(sums_, words_, group); });
}

}  // namespace rz
