#include "sharding/strategy/whole_parameters.h"

#include <algorithm>
#include <utility>

#include "comm/device/allocate.h"
#include "comm/device/memory.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/ops.h"

namespace rz {

// ---- norms

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
  const NormSums sums{sums_.data(), on_device ? device_sums_.data<std::int64_t>() : nullptr};
  for (int b = 0; b < model_.layout().size(); ++b)
    tiles.each(b, stream, [&](const Tile& tile, const TileMemory& memory) {
      for (const UpdateSpans::Call& call : spans.calls(tile, memory, updates, nullptr, filter)) {
        optimizer.measure(call.spans, constants.scale_of(call, scale), sums, stream);
      }
    });
  tiles.finish(stream);
  if (model_.layout().state() == Placement::sharded) add_over_ranks(runtime_.shard_group, stream);
  if (Communicator* const tp = runtime_.mesh.tp()) {
    count_once(stream);
    add_over_ranks(*tp, stream);
  }
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

/// Counts once a parameter that the ranks of a tp group hold alike.
void ParameterNorms::count_once(const Stream& stream) {
  for (std::size_t m = 0; m < sums_.size() / 2; ++m) {
    if (runtime_.counts(model_.parameters().member(static_cast<int>(m)))) continue;
    sums_[2 * m] = sums_[2 * m + 1] = {};
    const std::size_t words = 2 * ExactLayout::words;
    if (stream.device().kind == Device::cuda)
      memset_async(device_sums_.data<std::int64_t>() + m * words, 0, words * sizeof(std::int64_t), stream);
  }
}

void ParameterNorms::add_over_ranks(Communicator& group, const Stream& stream) {
  runtime_.traffic_of(group).control.add(sums_.size() * ExactLayout::words * sizeof(std::int64_t));
  if (stream.device().kind == Device::cuda)
    runtime_.exposed.wait(group.all_reduce(device_sums_.buffer(), ReduceOp::sum, stream), stream);
  else
    runtime_.exposed.measure([&] { ExactSum::all_reduce(sums_, words_, group); });
}

// ---- directions

namespace {

/// Multiply-adds of an iteration, up to a factor.
double work_of(const Shape& shape) {
  const auto [small, large] = std::minmax({static_cast<double>(shape[0]), static_cast<double>(shape[1])});
  return small * small * (2 * large + small);
}

}  // namespace

/// The largest work first, each to the rank that has the least so far (Graham, doi:10.1137/0117039).
void MatrixDirections::assign(const std::function<bool(int member)>& filter) {
  const auto& members = model_.parameters().members();
  std::vector<std::pair<double, int>> work;
  for (int m = 0; m < static_cast<int>(members.size()); ++m) {
    if (!filter(m)) continue;
    const Parameter& p = model_.parameters().member(m);
    work.emplace_back(-work_of(p.shape), m);
  }
  std::ranges::sort(work);
  owner_.assign(members.size(), -1);
  std::vector<double> load(static_cast<std::size_t>(runtime_.shard_group.size()));
  for (const auto& [negative, m] : work) {
    const auto lightest = std::ranges::min_element(load);
    *lightest -= negative;
    owner_[static_cast<std::size_t>(m)] = static_cast<int>(lightest - load.begin());
  }
}

std::vector<int> MatrixDirections::matrices(int bucket, std::span<const MemberUpdate> updates) const {
  std::vector<int> out;
  for (const int m : model_.layout().bucket(bucket).members)
    if (is_matrix(m) && !updates[static_cast<std::size_t>(m)].skip) out.push_back(m);
  return out;
}

Tensor MatrixDirections::part(const Tensor& directions, int member) const {
  return directions.view(model_.layout().place(member).offset, model_.parameters().member(member).shape);
}

void MatrixDirections::compute(const Optimizer& optimizer, UpdateSpans& spans,
                               std::span<const MemberUpdate> updates, const UpdateScale& scale,
                               const Stream& stream) {
  owned_.clear();
  for (int b = 0; b < model_.layout().size(); ++b) collect(b, optimizer, spans, updates, scale, stream);
  for (const auto& [m, direction] : owned_)
    optimizer.orthogonalize(
        direction, updates[static_cast<std::size_t>(m)].group,
        [&](const Shape& shape) { return runtime_.transient.allocate(shape); }, stream);
}

void MatrixDirections::collect(int bucket, const Optimizer& optimizer, UpdateSpans& spans,
                               std::span<const MemberUpdate> updates, const UpdateScale& scale,
                               const Stream& stream) {
  const std::vector<int> here = matrices(bucket, updates);
  if (here.empty()) return;
  const FlatLayout& layout = model_.layout();
  const Tensor all = runtime_.transient.allocate({layout.bucket(bucket).count});
  const Range own = layout.updated(bucket);
  ops::fill(all.view(own.begin, {own.count()}), 0, stream);
  const Tile tile = whole_tile(model_, bucket);
  for (const UpdateSpans::Call& call : spans.calls(tile, in_place(model_, tile), updates, all.data<float>(),
                                                   [&](int m) { return is_matrix(m); })) {
    UpdateScale with_missed = scale;
    with_missed.missed = call.missed;
    optimizer.direct(call.spans, with_missed, stream);
  }
  if (layout.state() == Placement::sharded)
    runtime_.exposed.wait(
        runtime_.counted(runtime_.shard_group).all_gather(all.view(own.begin, {own.count()}), all, stream),
        stream);
  for (const int m : here) {
    if (owner_[static_cast<std::size_t>(m)] != runtime_.shard_group.rank()) continue;
    const Tensor mine = runtime_.transient.allocate(model_.parameters().member(m).shape);
    ops::copy(mine, part(all, m), stream);
    owned_.emplace(m, mine);
  }
}

Tensor MatrixDirections::distribute(int bucket, std::span<const MemberUpdate> updates, const Stream& stream) {
  const std::vector<int> here = matrices(bucket, updates);
  if (here.empty()) return {};
  const Tensor all = runtime_.transient.allocate({model_.layout().bucket(bucket).count});
  std::vector<Work> works;
  for (const int m : here) {
    const Tensor direction = part(all, m);
    if (const auto mine = owned_.find(m); mine != owned_.end()) {
      ops::copy(direction, mine->second, stream);
      owned_.erase(mine);
    }
    works.push_back(runtime_.counted(runtime_.shard_group)
                        .broadcast(direction, owner_[static_cast<std::size_t>(m)], stream));
  }
  for (const Work& work : works) runtime_.exposed.wait(work, stream);
  return all;
}

}  // namespace rz
