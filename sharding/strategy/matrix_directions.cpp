#include "sharding/strategy/matrix_directions.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"
#include "tensor/ops.h"

namespace rz {

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
    require(p.shape.dims() == 2, Errc::invalid_argument, "parameter ", p.name, " of shape ", name(p.shape),
            " is in a group of matrices; put it into a group of another rule");
    work.emplace_back(-work_of(p.shape), m);
  }
  std::ranges::sort(work);
  owner_.assign(members.size(), -1);
  std::vector<double> load(static_cast<std::size_t>(runtime_.shard_group.size()));
  for (const auto& [negative, m] : work) {
    const auto least = std::ranges::min_element(load);
    *least -= negative;
    owner_[static_cast<std::size_t>(m)] = static_cast<int>(least - load.begin());
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
    runtime_.exposed.wait(runtime_.all_gather(all.view(own.begin, {own.count()}), all, stream), stream);
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
    works.push_back(runtime_.broadcast(direction, owner_[static_cast<std::size_t>(m)], stream));
  }
  for (const Work& work : works) runtime_.exposed.wait(work, stream);
  return all;
}

}  // namespace rz
