#pragma once
/// Hardware topology from hwloc (packages, cores, caches, NUMA nodes), and the CPU limits of this process.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace rz {

struct Topology {
  std::string processor;  ///< model name
  int packages = 1, cores = 1, threads = 1, numa_nodes = 1;
  int usable = 1;  ///< logical CPUs of the affinity mask, at most the cgroup's CPU quota
  unsigned long long l2_bytes = 0, l3_bytes = 0, memory_bytes = 0;
};

/// CPU limits of a thread.
struct CpuLimits {
  std::vector<int> processors;  ///< logical CPU numbers, ascending
  int quota = 0;                ///< CPU quota of the cgroup, in whole CPUs; 0: no limit
};
/// The limits of the calling thread.
CpuLimits cpu_limits();
/// Text form, and the inverse. Text that cannot be parsed yields no processors.
std::string to_string(const CpuLimits&);
CpuLimits parse_cpu_limits(const std::string& words);
/// True if the threads, one per element and all on one node, outnumber the CPUs that they may use in total.
bool oversubscribed(std::span<const CpuLimits>);
/// Number of compute threads that a rank may start; at least 1. `ranks` are the limits of all ranks on the
/// node. The rank's CPUs are divided among the ranks with exactly the same CPUs; its quota, among all ranks
/// that have one. The smaller result applies.
int threads_for(const CpuLimits& own, std::span<const CpuLimits> ranks);

/// Data caches of a CPU, in bytes; 0 if absent or not reported.
struct Caches {
  std::size_t l2 = 0, l3 = 0;
  int l3_processors = 1;  ///< logical CPUs that share one L3
};
/// Caches of the first core. Read once per process; thread-safe.
const Caches& caches();

/// Topology::usable without reading the topology; cheap.
int usable_processors();
/// Reads the topology anew. Errc::system if hwloc cannot.
Topology read_topology();
/// A multi-line summary; tools/run.sh prints it first.
std::string describe(const Topology&);
/// CPUs that local rank `rank` of `size` should be bound to. Whole cores are divided evenly in contiguous
/// ranges. With more ranks than cores: ranks share cores if every core gets the same number of ranks, since
/// the kernel is slow to rebalance an uneven binding; otherwise each rank gets all cores.
/// Errc::invalid_argument unless 0 <= rank < size.
std::vector<int> processors_for(int rank, int size);
/// Binds the calling thread, and threads that it creates later. False if the system refuses.
bool bind_process(const std::vector<int>& processors);

}  // namespace rz
