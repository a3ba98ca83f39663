#pragma once
/// The machine as hwloc sees it: packages, cores, caches, NUMA nodes, and what this process may use of it.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace rz {

struct Topology {
  std::string processor;  ///< model name
  int packages = 1, cores = 1, threads = 1, numa_nodes = 1;
  int usable = 1;  ///< processors of this process's affinity mask, at most the cgroup's CPU quota
  unsigned long long l2_bytes = 0, l3_bytes = 0, memory_bytes = 0;
};

/// What a thread may use of its machine.
struct CpuLimits {
  std::vector<int> processors;  ///< by number, ascending
  int quota = 0;                ///< how many of them its cgroup lets it keep busy; 0: all
};
/// Of the calling thread.
CpuLimits cpu_limits();
/// For a line of text, and back; nothing of it is readable: no processors.
std::string to_string(const CpuLimits&);
CpuLimits parse_cpu_limits(const std::string& words);
/// Whether so many threads of one machine are more than the processors that they may use between them.
bool oversubscribed(std::span<const CpuLimits>);
/// Threads that one of the ranks of a machine may start for computing: its processors, shared out among the
/// ranks that have exactly the same, and no more than its part of the quota, shared out among all that have
/// one; at least 1.
int threads_for(const CpuLimits& own, std::span<const CpuLimits> ranks);

/// The data caches of a processor. Bytes; 0: there is none, or the system does not report it.
struct Caches {
  std::size_t l2 = 0, l3 = 0;
  int l3_processors = 1;  ///< hardware threads that share one L3
};
/// Of the machine's first core. Read once a process; thread-safe.
const Caches& caches();

/// Topology::usable alone, without looking at the machine: cheap.
int usable_processors();
/// Read once a call. Errc::system if hwloc cannot read the machine.
Topology read_topology();
/// A few lines for people: what tools/run.sh prints first.
std::string describe(const Topology&);
/// The processors that local rank `rank` of `size` should be bound to: whole cores dealt out evenly,
/// neighbours together. More ranks than cores share them, as many on each, since the system evens out what it
/// has put together only after many calls; or get all of them, if their number is no multiple.
std::vector<int> processors_for(int rank, int size);
/// Binds the calling process. False if the system refuses.
bool bind_process(const std::vector<int>& processors);

}  // namespace rz
