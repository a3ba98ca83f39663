#include <algorithm>

#include "comm/bootstrap/store_server.h"
#include "comm/core/text.h"
#include "comm/os/fd.h"
#include "comm/topology.h"
#include "comm/transport/shm/shm_transport.h"
#include "comm/transport/shm_layout.h"
#include "comm/transport/tcp/tcp_transport.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/instructions.h"

namespace rz::doctor {
namespace {

constexpr std::uint64_t mib = 1 << 20, gib = std::uint64_t{1} << 30;

/// A finding before its check and host are known.
struct Judged {
  std::string found, needed;
  Verdict verdict = Verdict::ok;
  std::string remedy = {};
};

Judged ok(std::string found, std::string needed) { return {std::move(found), std::move(needed)}; }
Judged judged(bool is_well, Verdict otherwise, std::string found, std::string needed, std::string remedy) {
  if (is_well) return ok(std::move(found), std::move(needed));
  return {std::move(found), std::move(needed), otherwise, std::move(remedy)};
}
Judged missing_unless(bool is_well, std::string found, std::string needed, std::string remedy) {
  return judged(is_well, Verdict::missing, std::move(found), std::move(needed), std::move(remedy));
}
Judged warning_unless(bool is_well, std::string found, std::string needed, std::string remedy) {
  return judged(is_well, Verdict::warning, std::move(found), std::move(needed), std::move(remedy));
}

std::string many(std::uint64_t n, const char* what) { return concat(n, ' ', what, n == 1 ? "" : "s"); }
std::string joined(const std::vector<std::string>& all) {
  std::string text;
  for (const auto& one : all) text += (text.empty() ? "" : ", ") + one;
  return text;
}

/// What the library creates for one rank of the host before the first call.
std::uint64_t shared_bytes_of_rank(const HostFacts& f, const Job& job) {
  if (job.local_ranks < 2) return 0;
  const auto ranks = static_cast<std::size_t>(job.local_ranks);
  return shm::rank_memory_bytes(ranks,
                                staging_ring_bytes({f.l2, f.l3, static_cast<int>(f.l3_processors)}, ranks));
}

// ---- memory

Judged memory(const HostFacts& f, const Job& job) {
  constexpr std::uint64_t program = 128 * mib;  // libraries, threads, buffers
  const auto ranks = static_cast<std::uint64_t>(job.local_ranks);
  const std::uint64_t shared = ranks * shared_bytes_of_rank(f, job), whole = shared + ranks * program;
  const std::string found = human_bytes(f.memory_available) + " available";
  const std::string needed =
      concat(human_bytes(whole), " for ", many(ranks, "rank"), ", and what `plan` predicts");
  const std::string remedy =
      "Start fewer ranks here, or raise the limit of the container or job: docker run --memory=SIZE, sbatch "
      "--mem=SIZE";
  if (f.memory_available < shared) return {found, needed, Verdict::missing, remedy};
  return warning_unless(f.memory_available >= whole, found, needed, remedy);
}

Judged shared_memory(const HostFacts& f, const Job& job) {
  const std::string needed = "memfd_create(2), files of any size";
  const std::uint64_t rank = std::max(shared_bytes_of_rank(f, job), mib);
  const bool by_limit = f.max_file && *f.max_file < rank;
  if (!f.shared_memory_error.empty() && !by_limit)
    return {f.shared_memory_error, needed, Verdict::missing,
            "Permit memfd_create in the container's seccomp profile: docker run --security-opt "
            "seccomp=unconfined"};
  const std::string found =
      f.max_file ? "memfd works, files up to " + human_bytes(*f.max_file) : "memfd works";
  const std::string remedy = "Raise the limit of file sizes: ulimit -f unlimited";
  if (by_limit) return {found, needed, Verdict::missing, remedy};
  return warning_unless(!f.max_file, found, needed, remedy);
}

/// NCCL's documentation asks containers for 1 GiB; a connection through shared memory takes about 10 MiB.
Judged dev_shm(const HostFacts& f, const Job& job) {
  const std::string found =
      !f.has_dev_shm ? "none that is writable"
                     : concat(human_bytes(f.dev_shm_free), " free of ", human_bytes(f.dev_shm_bytes));
  if (!job.cuda) return ok(found, "nothing: host memory of ranks is in memfds");
  const auto floor = static_cast<std::uint64_t>(job.local_ranks) * 10 * mib;
  const std::string needed = concat("1 GiB for NCCL, at least ", human_bytes(floor));
  const std::string remedy =
      f.has_dev_shm ? "Enlarge it: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
                    : "Mount it: mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm";
  if (job.local_ranks > 1 && f.dev_shm_free < floor) return {found, needed, Verdict::missing, remedy};
  return warning_unless(f.dev_shm_free >= gib || job.local_ranks == 1, found, needed, remedy);
}

Judged locked_memory(const HostFacts& f, const Job& job) {
  const std::string found = f.max_locked ? human_bytes(*f.max_locked) : "unlimited";
  const bool infiniband = job.cuda && job.nodes > 1 && !f.infiniband.empty();
  if (!infiniband) return ok(found, "nothing: neither registered memory nor CUDA's pinned memory counts");
  return missing_unless(!f.max_locked, found, concat("unlimited for NCCL over ", joined(f.infiniband)),
                        "Lift the limit: ulimit -l unlimited, or docker run --ulimit memlock=-1");
}

Judged overcommit(const HostFacts& f, const Job& job) {
  if (!f.commit_left) return ok(concat("vm.overcommit_memory=", f.overcommit), "0 or 1");
  const std::uint64_t need =
      static_cast<std::uint64_t>(job.local_ranks) * gib;  // address space of threads' stacks
  return warning_unless(*f.commit_left >= need, concat("mode 2, ", human_bytes(*f.commit_left), " left"),
                        concat(human_bytes(need), " of address space, or mode 0 or 1"),
                        "Permit overcommitment: sysctl -w vm.overcommit_memory=0");
}

Judged huge_pages(const HostFacts& f, const Job&) {
  if (f.huge_pages.empty())
    return {
        "not in this kernel", "transparent huge pages, for large shared buffers", Verdict::warning,
        "Use a kernel with CONFIG_TRANSPARENT_HUGEPAGE: zgrep TRANSPARENT_HUGEPAGE /proc/config.gz shows it"};
  return ok(f.huge_pages, "any: shared memory asks for them itself");
}

// ---- limits

Judged open_files(const HostFacts& f, const Job& job) {
  const auto peers = static_cast<std::size_t>(job.local_ranks - 1);
  const auto others = static_cast<std::size_t>(std::max(0, job.ranks - job.local_ranks));
  std::size_t more = ShmTransport::files_for(peers) + TcpTransport::files_for(others, job.sockets);
  if (job.first && job.nodes > 1) more += StoreServer::files_for(job.ranks);
  const OpenFiles files{f.open_files, f.open_files_soft, f.open_files_hard};
  const std::size_t need = files.needed(more);
  const bool unlimited = f.open_files_hard > std::uint64_t{1} << 40;
  return missing_unless(need <= files.hard, concat("up to ", unlimited ? "any number" : concat(files.hard)),
                        concat(need, " in a rank"),
                        concat("Raise the hard limit as root: prlimit --pid $$ --nofile=",
                               std::max<std::size_t>(need, 65536), ", or docker run --ulimit nofile=65536"));
}

Judged processes(const HostFacts& f, const Job& job) {
  const std::vector<CpuLimits> ranks(static_cast<std::size_t>(job.local_ranks),
                                     CpuLimits{f.processors, f.quota});
  const int compute = ranks.empty() ? 1 : threads_for(ranks.front(), ranks);
  constexpr int others = 6;  // main, progress, store, loader and its readers
  const auto need =
      static_cast<std::uint64_t>(job.local_ranks) * static_cast<std::uint64_t>(compute + others);
  std::optional<std::uint64_t> left = f.cgroup_processes;
  if (f.max_processes) {
    const std::uint64_t of_user = *f.max_processes - std::min(*f.max_processes, f.user_processes);
    left = std::min(left.value_or(of_user), of_user);
  }
  const bool by_cgroup = left && f.cgroup_processes == left;
  return missing_unless(
      !left || *left >= need, left ? concat(*left, " more may start") : "any number may start",
      concat(need, " processes and threads of ", many(static_cast<std::uint64_t>(job.local_ranks), "rank")),
      by_cgroup ? "Raise pids.max of the control group: docker run --pids-limit=-1, or systemctl "
                  "set-property UNIT TasksMax=infinity"
                : "Raise the limit of processes: ulimit -u unlimited");
}

Judged kernel(const HostFacts& f, const Job&) {
  const auto parts = parts_of(f.kernel, '.');
  const int major = parse_number<int>(parts[0]).value_or(0);
  const int minor = parts.size() > 1 ? parse_number<int>(parts[1]).value_or(0) : 0;
  const bool expedited = major > 4 || (major == 4 && minor >= 16);
  return warning_unless(
      expedited, f.kernel, "4.16, for membarrier; 6.1 for huge pages of shared memory",
      "Upgrade the kernel: without membarrier small calls take longer (uname -r shows the version)");
}

// ---- processors

Judged processors(const HostFacts& f, const Job& job) {
  const std::vector<CpuLimits> ranks(static_cast<std::size_t>(job.local_ranks),
                                     CpuLimits{f.processors, f.quota});
  std::string found = concat(f.processors.size(), " of ", f.all_processors);
  if (f.quota > 0) found += concat(", quota ", f.quota);
  const bool by_quota = f.quota > 0 && f.quota < job.local_ranks;
  return warning_unless(
      !oversubscribed(ranks), found, concat(job.local_ranks, ", one a rank"),
      by_quota ? "Raise the quota of the control group: docker run --cpus=N, or sbatch --cpus-per-task=N"
               : "Start fewer ranks here, or widen the processors: taskset -c LIST, docker run "
                 "--cpuset-cpus=LIST, or mpirun --bind-to none");
}

Judged placement(const HostFacts& f, const Job& job) {
  const auto threads = static_cast<int>(f.processors.size());
  const std::string found =
      concat(many(static_cast<std::uint64_t>(f.cores), "core"), ", ", f.usable_numa_nodes, " of ",
             many(static_cast<std::uint64_t>(f.numa_nodes), "NUMA node"),
             threads > f.cores ? ", hardware threads share cores" : "");
  if (job.local_ranks > f.cores && job.local_ranks <= threads)
    return {
        found, "a core for each rank", Verdict::warning,
        concat("Start ", f.cores, " ranks here, so that no two share a core: --nproc-per-node ", f.cores)};
  return warning_unless(f.usable_numa_nodes == f.numa_nodes || job.local_ranks == 1, found, "all NUMA nodes",
                        "Let the job use all of them: numactl --all, or docker run --cpuset-cpus=LIST");
}

Judged instructions(const HostFacts& f, const Job&) {
  const Vectors has = vectors_of(f);
  return warning_unless(has == Vectors::other || has >= Vectors::avx2, describe_instructions(f),
                        "AVX2 on x86; without it computation takes a multiple of the time",
                        "Choose hosts with AVX2, or let the virtual machine pass the processor on: qemu -cpu "
                        "host, or an instance of a newer type");
}

Judged openblas_core(const HostFacts& f, const Job&) {
  if (f.openblas_core.empty()) return ok("not set", "nothing: OpenBLAS chooses by the processor");
  const Vectors has = vectors_of(f);
  const auto needs = vectors_of_core(f.openblas_core);
  const std::string found = concat(f.openblas_core, ", on a processor with ", describe_instructions(f)),
                    remedy = "Let OpenBLAS choose: unset OPENBLAS_CORETYPE";
  if (has == Vectors::other) return ok(found, "a name of this processor");
  if (!needs) return {found, "a name that OpenBLAS knows", Verdict::warning, remedy};
  if (*needs > has) return {found, "instructions that the processor has", Verdict::missing, remedy};
  return warning_unless(*needs == has, found, "kernels for this processor; others are slower", remedy);
}

Judged aes(const HostFacts& f, const Job& job) {
  const std::string found = has_instruction(f, "aes") ? "available" : "none";
  if (job.nodes == 1) return ok(found, "nothing: data stay on the host");
  return warning_unless(has_instruction(f, "aes"), found,
                        "AES instructions, so that encryption between hosts is fast",
                        "Choose hosts with AES instructions, or let the virtual machine pass them on: qemu "
                        "-cpu host (grep -c aes /proc/cpuinfo shows them)");
}

Judged single_copy(const HostFacts& f, const Job& job) {
  const std::string scope =
      f.ptrace_scope >= 0 ? concat(" (kernel.yama.ptrace_scope=", f.ptrace_scope, ')') : "";
  if (f.cma_error.empty()) return ok("a process may read another one of the user" + scope, "the same");
  std::string remedy =
      f.ptrace_scope > 0
          ? "Permit it: sysctl -w kernel.yama.ptrace_scope=0"
          : "Permit it in the container: docker run --cap-add=SYS_PTRACE --security-opt seccomp=unconfined";
  if (f.ptrace_scope == 3) remedy += "; scope 3 lasts until the next boot";
  return warning_unless(job.local_ranks < 2, f.cma_error + scope,
                        "ptrace permission; otherwise large messages are copied twice", remedy);
}

// ---- start of a job

/// The library's message ends with its own remedies.
Judged temporary_directory(const HostFacts& f, const Job& job) {
  return judged(f.rendezvous_error.empty(), job.nodes == 1 ? Verdict::missing : Verdict::warning,
                f.rendezvous_error.empty() ? "a private directory can be made" : f.rendezvous_error,
                "a place where ranks of one host meet", "Name a directory that exists: export TMPDIR=/tmp");
}

Judged trial(const HostFacts& f, const Job&) {
  return missing_unless(f.group_error.empty(), f.group_error.empty() ? "connect and reduce" : f.group_error,
                        "two ranks of this host connect and reduce",
                        "Mend what the message names, then repeat: doctor");
}

// ---- names and network

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }
bool only_loopback(const std::vector<std::string>& all) { return std::ranges::all_of(all, is_loopback); }

Judged own_name(const HostFacts& f, const Job& job) {
  const std::string needed = job.nodes > 1 ? "an address that is not loopback" : "an address";
  const std::string remedy =
      concat("Add the host's address to /etc/hosts: echo 'ADDRESS ", f.name, "' >> /etc/hosts");
  if (!f.own_name_error.empty())
    return {concat(f.name, ": ", f.own_name_error), needed, Verdict::warning, remedy};
  return warning_unless(job.nodes == 1 || !only_loopback(f.own_addresses),
                        concat(f.name, ": ", joined(f.own_addresses)), needed, remedy);
}

Judged master(const HostFacts& f, const Job& job) {
  if (job.master.empty()) return ok("not set", "nothing: the ranks meet in a directory");
  const std::string needed = "an address of rank 0's host";
  if (!f.master_error.empty())
    return {f.master_error, needed, Verdict::missing,
            concat("Make the name known here: echo 'ADDRESS ", job.master,
                   "' >> /etc/hosts, or set MASTER_ADDR to an address")};
  const std::string found = concat(job.master, ": ", joined(f.master_addresses));
  if (!job.first)
    return missing_unless(!only_loopback(f.master_addresses), found, needed,
                          concat("Correct the line of ", job.master,
                                 " in /etc/hosts here, or set MASTER_ADDR to an address: "
                                 "getent hosts ",
                                 job.master));
  const auto is_own = [&](const std::string& address) {
    return is_loopback(address) || std::ranges::count(f.interfaces, address, &Interface::address) > 0;
  };
  const bool own = std::ranges::any_of(f.master_addresses, is_own);
  if (!own)
    return {found, needed, Verdict::missing,
            "Set MASTER_ADDR to an address of the first host: ip -brief address lists them"};
  return warning_unless(job.nodes == 1 || !only_loopback(f.master_addresses), found, needed,
                        concat("Give ", job.master,
                               " an address that other hosts reach, in /etc/hosts or by MASTER_ADDR: "
                               "ip -brief address lists them"));
}

Judged interfaces(const HostFacts& f, const Job& job) {
  std::string found;
  for (const Interface& i : f.interfaces) {
    const bool chosen = i.address == f.address;
    if (chosen) found = concat(i.name, ' ', i.address, ", MTU ", i.mtu);
  }
  if (!f.address_error.empty()) found = f.address_error;
  return missing_unless(
      f.address_error.empty(), found, job.nodes > 1 ? "one that is not loopback" : "loopback",
      job.nodes > 1 ? "Choose one that is up: ip -brief address lists them, export RZ_INTERFACE=NAME"
                    : "Bring it up: ip link set lo up");
}

/// Ranks of one host share memory, and only their launcher takes a port. Those of several hosts listen, and
/// the store beside them on the first.
Judged ports(const HostFacts& f, const Job& job) {
  const int needed = job.nodes > 1 ? job.local_ranks + (job.first ? 1 : 0) : 1;
  const std::string what =
      concat(needed, job.nodes > 1 ? ", and as many as ranks for each further communicator" : "");
  if (f.ports.empty()) return ok("not set: any port that is free", what);
  const int first = parse_number<int>(f.ports.substr(0, f.ports.find('-'))).value_or(1);
  return missing_unless(
      f.ports_free >= needed, concat(f.ports_free, " of ", f.ports, " are free"), what,
      concat("Give more on all hosts, and in the firewall: export RZ_PORTS=", first, "-",
             static_cast<std::int64_t>(first) + needed - 1, " or wider; ss -ltn lists those in use"));
}

/// Judges whether it can be used; whether hosts have the same is another check.
Judged secret(const HostFacts& f, const Job& job) {
  const std::string needed = job.nodes > 1 ? "one that only this user can read" : "nothing: one host";
  if (!f.secret_error.empty())
    return {
        f.secret_error, needed, Verdict::missing,
        "Protect it, or make another one: chmod 600 ~/.config/ringzero/secret, export RZ_SECRET_FILE=FILE"};
  if (!f.secret_to_create.empty()) return ok("the first job creates " + f.secret_to_create, needed);
  return ok(f.secret_digest.empty()     ? "not read"
            : f.secret_digest == "none" ? "RZ_INSECURE=1"
                                        : "usable",
            needed);
}

// ---- devices

Judged gpus(const HostFacts& f, const Job& job) {
  if (!job.cuda) return ok(many(static_cast<std::uint64_t>(f.gpus), "GPU"), "nothing: --device host");
  const std::string found = concat(many(static_cast<std::uint64_t>(f.devices), "usable GPU"), " of ", f.gpus,
                                   f.driver.empty() ? ", no driver" : ", driver " + f.driver,
                                   f.cuda.empty() ? "" : ", CUDA " + f.cuda);
  const std::string needed = concat(job.local_ranks, ", one a rank");
  if (f.devices > 0)
    return warning_unless(f.devices >= job.local_ranks, found, needed,
                          concat("Start ", f.devices, " ranks here: --nproc-per-node ", f.devices));
  if (f.driver.empty())
    return {found, needed, Verdict::missing,
            "Install NVIDIA's driver, or pass the GPUs to the container: docker run --gpus all"};
  return {found, needed, Verdict::missing, "Install a build with CUDA: cmake --preset release -DRZ_CUDA=ON"};
}

Judged nccl(const HostFacts& f, const Job& job) {
  if (!job.cuda) return ok("not looked for", "nothing: --device host");
  const bool native = job.nodes == 1;  // peer_cuda serves GPUs of one host
  return judged(f.nccl_error.empty(), native ? Verdict::warning : Verdict::missing,
                f.nccl_error.empty() ? f.nccl : f.nccl_error, "2.18 or newer, below 3",
                "Install it: apt-get install libnccl2, or pip install nvidia-nccl-cu12");
}

struct Check {
  const char* name;
  Judged (*judge)(const HostFacts&, const Job&);
};
constexpr Check checks[] = {
    {"kernel", kernel},
    {"memory", memory},
    {"shared memory", shared_memory},
    {"/dev/shm", dev_shm},
    {"locked memory", locked_memory},
    {"overcommit", overcommit},
    {"huge pages", huge_pages},
    {"open files", open_files},
    {"processes", processes},
    {"processors", processors},
    {"placement", placement},
    {"instructions", instructions},
    {"OPENBLAS_CORETYPE", openblas_core},
    {"AES", aes},
    {"single copy", single_copy},
    {"own name", own_name},
    {"MASTER_ADDR", master},
    {"interface", interfaces},
    {"RZ_PORTS", ports},
    {"secret", secret},
    {"GPUs", gpus},
    {"NCCL", nccl},
    {"temporary directory", temporary_directory},
    {"trial group", trial},
};

}  // namespace

const char* name(Verdict v) {
  return v == Verdict::ok ? "ok" : v == Verdict::warning ? "warning" : "missing";
}

std::vector<Finding> check_host(const std::string& host, const HostFacts& facts, const Job& job) {
  std::vector<Finding> findings;
  for (const Check& check : checks) {
    const Judged j = check.judge(facts, job);
    findings.push_back({host, check.name, j.found, j.needed, j.verdict, j.remedy});
  }
  return findings;
}

}  // namespace rz::doctor
