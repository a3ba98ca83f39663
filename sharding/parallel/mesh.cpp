#include "sharding/parallel/mesh.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "sharding/parallel/communication_meter.h"
#include "sharding/parallel/rank_consistency.h"

namespace rz {

namespace {

struct Dimension {
  std::string_view name;
  int size;
};

std::array<Dimension, 3> dimensions(const MeshSizes& sizes) {
  return {{{"replicate", sizes.replicate}, {"shard", sizes.shard}, {"tp", sizes.tp}}};
}

MeshSizes sizes_of(const std::array<Dimension, 3>& d) { return {d[0].size, d[1].size, d[2].size}; }

/// "1, 2, 4 or 8": the divisors of `n`; of more than eight, the nearest ones of `wanted`.
std::string divisors(std::int64_t n, std::int64_t wanted) {
  std::vector<std::int64_t> all;
  for (std::int64_t d = 1; d <= n; ++d)
    if (n % d == 0) all.push_back(d);
  if (all.size() > 8) {
    const auto above = std::ranges::upper_bound(all, wanted);
    all = above == all.end() ? std::vector{all.back()} : std::vector{*(above - 1), *above};
  }
  std::string out;
  for (std::size_t i = 0; i < all.size(); ++i)
    out += concat(i == 0 ? "" : i + 1 == all.size() ? " or " : ", ", all[i]);
  return out;
}

/// "; what would fit: shard 4, or tp 2": changes of one dimension that make the product `ranks`, or a divisor
/// of it where another one is "auto".
std::string that_fit(const std::array<Dimension, 3>& all, int ranks) {
  const bool left = std::ranges::any_of(all, [](const Dimension& d) { return d.size == 0; });
  std::string out;
  for (std::size_t changed = 0; changed < all.size(); ++changed) {
    const Dimension& d = all[changed];
    if (left && d.size < 2) continue;
    std::int64_t others = 1;
    for (std::size_t i = 0; i < all.size(); ++i)
      if (i != changed) others *= std::max(all[i].size, 1);
    if (ranks % others != 0) continue;
    const std::int64_t fits = ranks / others;
    out += concat(out.empty() ? "; what would fit: " : ", or ", d.name, " ",
                  left ? divisors(fits, d.size) : std::to_string(fits));
  }
  return out;
}

/// Product of the sizes that are numbers.
std::int64_t product(const std::array<Dimension, 3>& all) {
  std::int64_t out = 1;
  for (const Dimension& d : all) out *= d.size == 0 ? 1 : d.size;
  return out;
}

[[noreturn]] void refuse(const std::array<Dimension, 3>& all, int ranks, const std::string& why) {
  throw Error(Errc::config, concat("mesh ", describe(sizes_of(all)), " on ", ranks, " ranks: ", why));
}

/// The inner one of two dimensions that are "auto" takes what the numbers within it leave of a node.
void fill_node(std::array<Dimension, 3>& all, int ranks, int ranks_per_node) {
  std::vector<std::size_t> autos;
  for (std::size_t d = 0; d < all.size(); ++d)
    if (all[d].size == 0) autos.push_back(d);
  if (autos.size() < 2) return;
  if (autos.size() == 3) refuse(all, ranks, "at most two sizes can be \"auto\"");
  const std::size_t inner = autos[1];
  std::int64_t within = 1;
  for (std::size_t d = inner + 1; d < all.size(); ++d) within *= all[d].size;
  if (ranks_per_node == 0)
    refuse(all, ranks,
           concat(all[inner].name,
                  " \"auto\" fills a node, but nodes have different numbers of ranks; give "
                  "it a number"));
  if (ranks_per_node % within != 0)
    refuse(all, ranks,
           concat(all[inner].name, " \"auto\" fills a node, but the ", ranks_per_node,
                  " ranks of a node are not a multiple of ", within));
  all[inner].size = static_cast<int>(ranks_per_node / within);
}

/// Refers to a communicator that outlives the result.
std::shared_ptr<Communicator> borrowed(Communicator& communicator) {
  return {std::shared_ptr<Communicator>(), &communicator};
}

/// The ranks with equal `color`. `size`: their number.
std::shared_ptr<Communicator> group(Communicator& all, int size, int color) {
  if (size == all.size()) return borrowed(all);
  return std::make_shared<Communicator>(*all.split(color, all.rank(), {}, true));
}

}  // namespace

MeshCoordinates coordinates(const MeshSizes& sizes, int rank) {
  const int data = rank / sizes.tp;
  return {
      {data / sizes.shard, sizes.replicate}, {data % sizes.shard, sizes.shard}, {rank % sizes.tp, sizes.tp}};
}

std::string describe(const MeshSizes& sizes) {
  std::string out;
  for (const auto& [name, size] : dimensions(sizes))
    if (size != 1 || name == "shard")
      out += concat(out.empty() ? "" : " x ", name, " ", size == 0 ? "auto" : std::to_string(size));
  return out;
}

MeshSizes resolved(const MeshSizes& sizes, int ranks, int ranks_per_node) {
  std::array<Dimension, 3> all = dimensions(sizes);
  for (const auto& [name, size] : all)
    if (size < 0) refuse(all, ranks, concat(name, " is ", size, ", expected 1 or more, or 0, \"auto\""));
  for (const auto& [name, size] : all)  // so that products do not overflow
    if (size > ranks) refuse(all, ranks, concat(name, " ", size, " is more than the ranks"));
  fill_node(all, ranks, ranks_per_node);
  const std::int64_t known = product(all);
  const bool left = std::ranges::any_of(all, [](const Dimension& d) { return d.size == 0; });
  if (left ? ranks % known != 0 : ranks != known)
    refuse(all, ranks,
           concat("the product of the sizes is ", known, left ? ", which does not divide the ranks" : "",
                  that_fit(all, ranks)));
  for (Dimension& d : all)
    if (d.size == 0) d.size = static_cast<int>(ranks / known);
  return sizes_of(all);
}

Mesh::Mesh(Communicator& communicator)
    : sizes_{.shard = communicator.size()},
      groups_{borrowed(communicator), borrowed(communicator), borrowed(communicator), nullptr, nullptr},
      meter_(std::make_shared<CommunicationMeter>()) {}

Mesh::Mesh(Communicator& communicator, const MeshSizes& sizes, int ranks_per_node)
    : sizes_(resolved(sizes, communicator.size(), ranks_per_node)),
      meter_(std::make_shared<CommunicationMeter>()) {
  const std::array facts{Fact{"the mesh", describe(sizes_)}};
  require_same("the mesh", facts, "give every rank the same sizes", communicator);
  const int rank = communicator.rank();
  const int part = rank % sizes_.tp, replica = rank / (sizes_.shard * sizes_.tp);
  groups_.all = borrowed(communicator);
  groups_.data = group(communicator, sizes_.data(), part);
  groups_.shard =
      sizes_.replicate == 1 ? groups_.data : group(communicator, sizes_.shard, replica * sizes_.tp + part);
  if (sizes_.replicate > 1)
    groups_.replicas = sizes_.shard == 1
                           ? groups_.data
                           : group(communicator, sizes_.replicate, rank % (sizes_.shard * sizes_.tp));
  if (sizes_.tp > 1) groups_.tp = group(communicator, sizes_.tp, rank / sizes_.tp);
}

Mesh::Mesh(const MeshSizes& sizes, Groups groups)
    : sizes_(sizes), groups_(std::move(groups)), meter_(std::make_shared<CommunicationMeter>()) {
  require(sizes.ranks() == groups_.all->size() && sizes.data() == groups_.data->size() &&
              sizes.shard == groups_.shard->size() &&
              (sizes.replicate > 1) == (groups_.replicas != nullptr) &&
              (sizes.tp > 1) == (groups_.tp != nullptr),
          Errc::invalid_argument, "Mesh: the communicators are not those of ", describe(sizes));
}

Mesh Mesh::resized(const MeshSizes& sizes) const {
  Mesh other(communicator(), sizes);
  other.meter_ = meter_;
  return other;
}

}  // namespace rz
