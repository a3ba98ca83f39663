#pragma once
/// What a host has that jobs depend on. Read once on the host, then judged by pure functions
/// (checks.h).

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace rz::doctor {

/// An address of an interface that is up.
struct Interface {
  std::string name, address;
  int mtu = 0;
  bool operator==(const Interface&) const = default;
};

/// Where a fact could not be had, a text ending in _error has the library's message; it is empty otherwise.
/// An absent limit means unlimited.
struct HostFacts {
  std::string name;     ///< of the host, by itself
  std::string version;  ///< of ringzero
  std::string kernel;   ///< its release
  double clock = 0;     ///< seconds since 1970, when the facts were complete

  std::uint64_t memory_available = 0;  ///< by the kernel and the control groups
  std::uint64_t memory_total = 0;
  int overcommit = 0;                        ///< vm.overcommit_memory
  std::optional<std::uint64_t> commit_left;  ///< with overcommit 2: what may still be allocated
  std::string huge_pages;                    ///< "always", "madvise" or "never"; empty: the kernel has none

  std::string shared_memory_error;  ///< a memfd of the library
  std::uint64_t l2 = 0, l3 = 0;     ///< caches, from which the size of a rank's shared memory follows
  std::int64_t l3_processors = 1;   ///< that share one L3
  bool has_dev_shm = false;         ///< /dev/shm is there and writable
  std::uint64_t dev_shm_bytes = 0, dev_shm_free = 0;
  std::optional<std::uint64_t> max_locked, max_file;  ///< RLIMIT_MEMLOCK, RLIMIT_FSIZE

  std::uint64_t open_files = 0, open_files_soft = 0, open_files_hard = 0;
  std::optional<std::uint64_t> max_processes;     ///< RLIMIT_NPROC; absent for root, whom it does not bind
  std::uint64_t user_processes = 0;               ///< processes and threads of this user
  std::optional<std::uint64_t> cgroup_processes;  ///< that may still start in the control groups

  std::vector<int> processors;  ///< of the affinity mask, which cpusets narrow
  int quota = 0;                ///< of the control groups, in whole processors; 0: none
  int all_processors = 1;       ///< of the machine
  int cores = 1;                ///< that have one of `processors`
  int numa_nodes = 1, usable_numa_nodes = 1;
  std::string machine;                    ///< as uname -m has it: "x86_64"
  std::vector<std::string> instructions;  ///< instruction sets of the processors (instructions.h)
  std::string openblas_core;              ///< OPENBLAS_CORETYPE; empty: not set

  std::string cma_error;         ///< one process reads the memory of another one of this user
  int ptrace_scope = -1;         ///< kernel.yama.ptrace_scope; -1: not there
  std::string rendezvous_error;  ///< the directory in which ranks of one host meet
  std::string group_error;       ///< two ranks, as threads, connect and reduce

  std::vector<std::string> own_addresses;  ///< of `name`
  std::string own_name_error;
  std::vector<std::string> master_addresses;  ///< of MASTER_ADDR
  std::string master_error;
  std::vector<Interface> interfaces;
  std::string address;  ///< on which ranks of this host would listen for those of others
  std::string address_error;
  std::string ports;                    ///< RZ_PORTS; empty: any
  int ports_free = 0;                   ///< of these, on that address
  std::vector<std::string> infiniband;  ///< devices

  /// A digest of the secret and FactsRequest::nonce: equal for equal secrets, and of no use later. "none":
  /// RZ_INSECURE=1. Empty: not asked for, or there is none.
  std::string secret_digest;
  std::string secret_error;
  std::string secret_to_create;  ///< file that the first job would create; empty: none

  int devices = 0;     ///< GPUs that this build can use
  int gpus = 0;        ///< GPUs that the driver has
  std::string driver;  ///< versions; empty: not there
  std::string cuda, nccl, open_mpi;
  std::string nccl_error;

  bool operator==(const HostFacts&) const = default;
};

/// What depends on the job.
struct FactsRequest {
  std::string master;  ///< MASTER_ADDR; empty: none
  int nodes = 1;       ///< of the job
  bool cuda = false;
  std::string nonce;  ///< random, for HostFacts::secret_digest; empty: the secret is not read
};

/// Reads the facts of this host. Takes less than a second unless something hangs; then about five.
HostFacts read_facts(const FactsRequest&);

/// One line of JSON, and the inverse. Errc::config names `source` and the key that is wrong; unknown keys are
/// those of another version.
std::string to_json(const HostFacts&);
HostFacts parse_facts(const std::string& json, const std::string& source);
std::string to_json(const FactsRequest&);
FactsRequest parse_request(const std::string& json, const std::string& source);

}  // namespace rz::doctor
