#include "sharding/parallel/mesh_sizes.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "comm/core/error.h"
#include "comm/core/text.h"

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

}  // namespace rz
