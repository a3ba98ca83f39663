#include "comm/topology.h"

#include <hwloc.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <new>
#include <set>

#include "comm/core/error.h"
#include "comm/core/lazy.h"
#include "comm/core/text.h"
#include "comm/os/cgroup.h"
#include "comm/os/process.h"

namespace rz {

namespace {

/// The processors (hardware threads) of a core, by the system's numbers.
using Core = std::vector<int>;

struct Machine {
  Topology topology;
  std::vector<Core> cores;  ///< all that hwloc reports, in its order: neighbours are adjacent
  bool is_this_one = true;  ///< false: a file or variable has told hwloc about another machine
};

/// A set of processors of the kernel's size, which cpu_set_t has up to 1,024 processors.
class ProcessorSet {
 public:
  explicit ProcessorSet(std::size_t processors)
      : processors_(processors), bytes_(CPU_ALLOC_SIZE(processors)), set_(CPU_ALLOC(processors)) {
    if (!set_) throw std::bad_alloc();
    CPU_ZERO_S(bytes_, set_);
  }
  ProcessorSet(const ProcessorSet&) = delete;
  ~ProcessorSet() { CPU_FREE(set_); }

  /// False if the kernel has more processors than the set.
  bool read() { return sched_getaffinity(0, bytes_, set_) == 0 || errno != EINVAL; }
  bool apply() const { return sched_setaffinity(0, bytes_, set_) == 0; }
  void add(int processor) { CPU_SET_S(static_cast<std::size_t>(processor), bytes_, set_); }
  std::vector<int> numbers() const {
    std::vector<int> all;
    for (std::size_t i = 0; i < processors_; ++i)
      if (CPU_ISSET_S(i, bytes_, set_)) all.push_back(static_cast<int>(i));
    return all;
  }

 private:
  std::size_t processors_, bytes_;
  cpu_set_t* set_;
};

/// More than any kernel has.
constexpr std::size_t max_processors = std::size_t{1} << 20;

std::vector<int> affinity() {
  for (std::size_t processors = CPU_SETSIZE; processors <= max_processors; processors *= 2) {
    ProcessorSet set(processors);
    if (!set.read()) continue;
    if (auto numbers = set.numbers(); !numbers.empty()) return numbers;
    break;
  }
  return {0};
}

std::string processor_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.rfind("model name", 0) == 0 || line.rfind("Model", 0) == 0)
      if (const auto colon = line.find(": "); colon != std::string::npos) return line.substr(colon + 2);
  return "unknown processor";
}

unsigned long long physical_memory() {
  return static_cast<unsigned long long>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<unsigned long long>(sysconf(_SC_PAGE_SIZE));
}

class Hwloc {
 public:
  enum class Objects { all, caches };  // loading only caches takes a tenth of the time

  explicit Hwloc(Objects objects) {
    if (hwloc_topology_init(&topology_) != 0) fail(Errc::system, "hwloc_topology_init failed");
    if (objects == Objects::caches) {
      hwloc_topology_set_all_types_filter(topology_, HWLOC_TYPE_FILTER_KEEP_NONE);
      hwloc_topology_set_cache_types_filter(topology_, HWLOC_TYPE_FILTER_KEEP_ALL);
    }
    if (hwloc_topology_load(topology_) != 0) {
      hwloc_topology_destroy(topology_);
      fail(Errc::system, "hwloc_topology_load failed");
    }
  }
  ~Hwloc() { hwloc_topology_destroy(topology_); }
  Hwloc(const Hwloc&) = delete;
  Hwloc& operator=(const Hwloc&) = delete;
  bool is_this_machine() const { return hwloc_topology_is_thissystem(topology_) != 0; }
  int count(hwloc_obj_type_t type) const { return std::max(1, hwloc_get_nbobjs_by_type(topology_, type)); }
  unsigned long long cache(hwloc_obj_type_t type) const {
    const hwloc_obj_t cache = hwloc_get_obj_by_type(topology_, type, 0);
    return cache ? cache->attr->cache.size : 0;
  }
  int processors_of_cache(hwloc_obj_type_t type) const {
    const hwloc_obj_t cache = hwloc_get_obj_by_type(topology_, type, 0);
    return cache ? std::max(1, hwloc_bitmap_weight(cache->cpuset)) : 1;
  }
  std::vector<Core> cores() const {
    std::vector<Core> cores;
    for (hwloc_obj_t core = nullptr; (core = hwloc_get_next_obj_by_type(topology_, HWLOC_OBJ_CORE, core));) {
      cores.emplace_back();
      for (int pu = hwloc_bitmap_first(core->cpuset); pu >= 0; pu = hwloc_bitmap_next(core->cpuset, pu))
        cores.back().push_back(pu);
    }
    return cores;
  }

 private:
  hwloc_topology_t topology_;
};

Machine read_machine() {
  const Hwloc hwloc(Hwloc::Objects::all);
  Machine m;
  m.topology.packages = hwloc.count(HWLOC_OBJ_PACKAGE);
  m.topology.cores = hwloc.count(HWLOC_OBJ_CORE);
  m.topology.threads = hwloc.count(HWLOC_OBJ_PU);
  m.topology.numa_nodes = hwloc.count(HWLOC_OBJ_NUMANODE);
  m.topology.l2_bytes = hwloc.cache(HWLOC_OBJ_L2CACHE);
  m.topology.l3_bytes = hwloc.cache(HWLOC_OBJ_L3CACHE);
  m.cores = hwloc.cores();
  m.is_this_one = hwloc.is_this_machine();
  return m;
}

Caches read_caches() try {
  const Hwloc hwloc(Hwloc::Objects::caches);
  return {hwloc.cache(HWLOC_OBJ_L2CACHE), hwloc.cache(HWLOC_OBJ_L3CACHE),
          hwloc.processors_of_cache(HWLOC_OBJ_L3CACHE)};
} catch (const Error&) {  // a communicator works without the sizes
  return {};
}

/// The cores, reduced to the processors that this process may use.
std::vector<Core> usable_cores() {
  const auto allowed = affinity();
  const Machine machine = read_machine();
  require(machine.is_this_one, Errc::config,
          "hwloc describes another machine than this one (HWLOC_XMLFILE, HWLOC_SYNTHETIC), and its cores are "
          "no places for ranks; unset that variable, set HWLOC_THISSYSTEM=1 if it is this machine's, or do "
          "not bind ranks (rzrun --bind none)");
  std::vector<Core> cores;
  for (const Core& core : machine.cores) {
    Core kept;
    std::set_intersection(core.begin(), core.end(), allowed.begin(), allowed.end(), std::back_inserter(kept));
    if (!kept.empty()) cores.push_back(kept);
  }
  if (cores.empty()) cores.push_back(allowed);
  return cores;
}

}  // namespace

CpuLimits cpu_limits() {
  const auto quota = cgroup_processors();
  return {affinity(), quota ? std::max(1, static_cast<int>(std::ceil(*quota - 0.01))) : 0};
}

std::string to_string(const CpuLimits& a) {
  std::string words = concat(a.quota);
  for (const int p : a.processors) words += concat(' ', p);
  return words;
}

CpuLimits parse_cpu_limits(const std::string& words) {
  CpuLimits a;
  const auto numbers = words_of(words);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const auto number = parse_number<int>(numbers[i]);
    if (!number) break;
    if (i == 0)
      a.quota = *number;
    else
      a.processors.push_back(*number);
  }
  return a;
}

bool oversubscribed(std::span<const CpuLimits> threads) {
  std::set<int> processors;
  std::size_t quota = 0;  // threads of one machine usually share a cgroup
  for (const CpuLimits& a : threads) {
    processors.insert(a.processors.begin(), a.processors.end());
    if (a.quota > 0) quota = std::max(quota, static_cast<std::size_t>(a.quota));
  }
  return threads.size() > processors.size() || (quota > 0 && threads.size() > quota);
}

int threads_for(const CpuLimits& own, std::span<const CpuLimits> ranks) {
  const auto sharers = std::ranges::count(ranks, own.processors, &CpuLimits::processors);
  const auto limited = std::ranges::count_if(ranks, [](const CpuLimits& a) { return a.quota > 0; });
  const auto mine = std::ssize(own.processors) / std::max<std::ptrdiff_t>(1, sharers);
  const auto of_quota = own.quota > 0 ? own.quota / std::max<std::ptrdiff_t>(1, limited) : mine;
  return static_cast<int>(std::max<std::ptrdiff_t>(1, std::min(mine, of_quota)));
}

int usable_processors() {
  const CpuLimits a = cpu_limits();
  const int allowed = static_cast<int>(a.processors.size());
  return a.quota > 0 ? std::min(a.quota, allowed) : allowed;
}

Topology read_topology() {
  Topology t = read_machine().topology;
  t.processor = processor_name();
  t.memory_bytes = physical_memory();
  t.usable = usable_processors();
  return t;
}

const Caches& caches() {
  static constinit Lazy<Caches> read;
  // hwloc has locks of its own, which a child must not inherit locked. Threads that wait here find the value.
  if (!read.find()) without_fork([] { read.get(read_caches); });
  return *read.find();
}

std::string describe(const Topology& t) {
  const auto many = [](int n, const char* what) { return concat(n, ' ', what, n == 1 ? "" : "s"); };
  return concat(t.processor, "\n", many(t.packages, "package"), ", ", many(t.cores, "core"), ", ",
                many(t.threads, "hardware thread"), ", ", many(t.numa_nodes, "NUMA node"),
                "; this process may use ", many(t.usable, "processor"), "\nL2 ", human_bytes(t.l2_bytes),
                ", L3 ", human_bytes(t.l3_bytes), ", memory ", human_bytes(t.memory_bytes), "\n");
}

std::vector<int> processors_for(int rank, int size) {
  require(size >= 1 && rank >= 0 && rank < size, Errc::invalid_argument, "processors_for: local rank ", rank,
          " of ", size);
  const auto cores = usable_cores();
  const auto n = cores.size(), r = static_cast<std::size_t>(rank), of = static_cast<std::size_t>(size);
  const bool even = of <= n || of % n == 0;  // otherwise some cores would have more ranks than others
  const std::size_t begin = even ? n * r / of : 0, end = even ? std::max(n * (r + 1) / of, begin + 1) : n;
  std::vector<int> processors;
  for (auto i = begin; i < end; ++i) processors.insert(processors.end(), cores[i].begin(), cores[i].end());
  std::sort(processors.begin(), processors.end());
  return processors;
}

bool bind_process(const std::vector<int>& processors) {
  const int last = processors.empty() ? 0 : *std::max_element(processors.begin(), processors.end());
  if (last >= static_cast<int>(max_processors)) return false;
  ProcessorSet set(static_cast<std::size_t>(std::max(last + 1, CPU_SETSIZE)));
  for (const int p : processors)
    if (p >= 0) set.add(p);
  return set.apply();
}

}  // namespace rz
