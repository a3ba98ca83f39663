#include "comm/os/cgroup.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <vector>

#include "comm/core/text.h"

namespace rz {

namespace {

/// Directory of one cgroup.
struct Group {
  std::string folder;
  bool v2;
};

bool has_controller(const std::string& controllers, const std::string& controller) {
  return concat(',', controllers, ',').find(concat(',', controller, ',')) != std::string::npos;
}

/// Directories of this process's cgroup and its ancestors, up to the mount point. A line of /proc/self/cgroup
/// is "number:controllers:path", without controllers in version 2. In a container the path may be that of the
/// host, while the container's own cgroup is mounted as the root.
std::vector<Group> cgroup_folders(const std::string& root, const std::string& controller) {
  std::vector<Group> all;
  std::ifstream in(root + "/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && !has_controller(controllers, controller)) continue;
    const std::string mount = root + "/sys/fs/cgroup" + (v2 ? "" : "/" + controller);
    for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
      all.push_back({mount + path, v2});
      if (path.rfind('/') == std::string::npos) break;
    }
  }
  return all;
}

std::string contents(const std::string& file) {
  std::ifstream in(file);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

/// The number in place `i` of a text; nullopt for "max", and if there is none.
template <class T>
std::optional<T> number_in(const std::string& text, std::size_t i = 0) {
  const auto words = words_of(text);
  return i < words.size() ? parse_number<T>(words[i]) : std::nullopt;
}

std::optional<unsigned long long> read_value(const std::string& file) {
  return number_in<unsigned long long>(contents(file));
}

/// Version 2: cpu.max is "quota period". Version 1: one file each; quota -1 means no limit.
std::optional<double> processors(const Group& g) {
  const std::string text =
      g.v2 ? contents(g.folder + "/cpu.max")
           : contents(g.folder + "/cpu.cfs_quota_us") + " " + contents(g.folder + "/cpu.cfs_period_us");
  const double quota = number_in<double>(text).value_or(0), period = number_in<double>(text, 1).value_or(0);
  return quota > 0 && period > 0 ? std::optional(quota / period) : std::nullopt;
}

unsigned long long reclaimable(const Group& g) {
  std::map<std::string, unsigned long long> stat;
  const std::string text = contents(g.folder + "/memory.stat");
  const auto words = words_of(text);
  for (std::size_t i = 0; i + 1 < words.size(); i += 2)
    stat[std::string(words[i])] = parse_number<unsigned long long>(words[i + 1]).value_or(0);
  const auto files = stat[g.v2 ? "file" : "total_cache"], shared = stat[g.v2 ? "shmem" : "total_shmem"];
  return files - std::min(files, shared) + stat["slab_reclaimable"];
}

std::optional<unsigned long long> memory(const Group& g) {
  const auto limit = read_value(g.folder + (g.v2 ? "/memory.max" : "/memory.limit_in_bytes"));
  const auto used = read_value(g.folder + (g.v2 ? "/memory.current" : "/memory.usage_in_bytes"));
  if (!limit || !used) return std::nullopt;
  const unsigned long long kept = *used - std::min(*used, reclaimable(g));
  return *limit - std::min(*limit, kept);
}

/// Both versions have the same files.
std::optional<unsigned long long> processes(const Group& g) {
  const auto limit = read_value(g.folder + "/pids.max"), used = read_value(g.folder + "/pids.current");
  return limit && used ? std::optional(*limit - std::min(*limit, *used)) : std::nullopt;
}

template <class T>
std::optional<T> min_optional(std::optional<T> a, std::optional<T> b) {
  return a && b ? std::min(*a, *b) : a ? a : b;
}

}  // namespace

std::optional<double> cgroup_processors(const std::string& root) {
  std::optional<double> fewest;
  for (const Group& g : cgroup_folders(root, "cpu")) fewest = min_optional(fewest, processors(g));
  return fewest;
}

std::optional<unsigned long long> cgroup_memory(const std::string& root) {
  std::optional<unsigned long long> smallest;
  for (const Group& g : cgroup_folders(root, "memory")) smallest = min_optional(smallest, memory(g));
  return smallest;
}

std::optional<unsigned long long> cgroup_processes(const std::string& root) {
  std::optional<unsigned long long> smallest;
  for (const Group& g : cgroup_folders(root, "pids")) smallest = min_optional(smallest, processes(g));
  return smallest;
}

}  // namespace rz
