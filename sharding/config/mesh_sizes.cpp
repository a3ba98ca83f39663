// Sizes of the mesh from all keys that state them.

#include <array>
#include <optional>
#include <string>

#include "comm/core/error.h"
#include "sharding/config/settings.h"

namespace rz::ds {
namespace {

/// A size that a key states.
struct Stated {
  std::string place;  ///< "tensor_parallel.autotp_size", or the argument
  std::int64_t size = 0;
};

/// Nothing for a key that was not read or not given, or has a number below `min`, which leaves the size to
/// other keys.
std::optional<Stated> stated(const Settings& s, const char* path, std::int64_t min) {
  const Settings::Entry* entry = s.find(path);
  if (entry == nullptr || !entry->given || !entry->value.is_number()) return {};
  const auto size = entry->value.get<std::int64_t>();
  if (size < min) return {};
  const bool in_file = entry->origin.starts_with("file") || entry->origin.starts_with("auto");
  return Stated{in_file ? path : entry->origin, size};
}

/// The one size of a dimension; Errc::config if keys contradict each other.
std::optional<Stated> agreed(const Settings& s, std::initializer_list<const char*> paths, std::int64_t min,
                             const std::string& file) {
  std::optional<Stated> first;
  for (const char* path : paths) {
    const auto other = stated(s, path, path == *paths.begin() ? 1 : min);
    if (!first) first = other;
    require(!other || other->size == first->size, Errc::config, file, ": ", other ? other->place : "",
            ": is ", other ? other->size : 0, ", but ", first ? first->place : "", " is ",
            first ? first->size : 0, "; remove one of them");
  }
  return first;
}

constexpr const char* own_keys[] = {"ringzero.mesh.replicate", "ringzero.mesh.shard", "ringzero.mesh.tp"};

/// A key of the mesh itself that is "auto", or absent.
bool is_auto(const Settings& s, const char* path, bool by_default) {
  const Settings::Entry& entry = *s.find(path);
  return entry.given ? entry.value == 0 : by_default;
}

int size_or(const std::optional<Stated>& stated, bool is_auto) {
  return stated ? static_cast<int>(stated->size) : is_auto ? 0 : 1;
}

}  // namespace

ConfiguredMesh mesh_of(const Settings& s, const RunFacts& facts, const std::string& file) {
  const auto replicate = agreed(s, {own_keys[0]}, 1, file);
  const auto shard = agreed(s, {own_keys[1], "zero_optimization.mics_shard_size"}, 1, file);
  const auto tp = agreed(s,
                         {own_keys[2], "tensor_parallel.autotp_size", "tensor_parallel.tp_size",
                          "tensor_parallel.tp.tp_size", "tensor_parallel.tensor_parallel.tp_size"},
                         2, file);
  const bool mics = stated(s, "zero_optimization.mics_shard_size", 1).has_value();
  const MeshSizes sizes{.replicate = size_or(replicate, is_auto(s, own_keys[0], mics)),
                        .shard = size_or(shard, is_auto(s, own_keys[1], true)),
                        .tp = size_or(tp, is_auto(s, own_keys[2], false))};
  ConfiguredMesh mesh{.is_default = sizes == MeshSizes{}};
  const std::string place = tp          ? tp->place
                            : shard     ? shard->place
                            : replicate ? replicate->place
                                        : "ringzero.mesh";
  try {
    mesh.sizes = resolved(sizes, facts.ranks, facts.ranks_per_node);
  } catch (const Error& e) {
    fail(e.code(), file, ": ", place, ": ", e.what());
  }
  return mesh;
}

void show_mesh(const MeshSizes& mesh, Settings& s) {
  const std::array sizes{mesh.replicate, mesh.shard, mesh.tp};
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    const Settings::Entry& entry = *s.find(own_keys[d]);
    if (entry.value != sizes[d])
      s.replace(own_keys[d], sizes[d], entry.given ? "auto: what the others leave" : "from the other sizes");
  }
}

}  // namespace rz::ds
