#include <dlfcn.h>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <thread>

#include "comm/backends/nccl/api/api.h"
#include "comm/bootstrap/local_rendezvous.h"
#include "comm/bootstrap/peer_info.h"
#include "comm/bootstrap/secret.h"
#include "comm/communicator.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "comm/net/authentication.h"
#include "comm/net/random.h"
#include "comm/net/socket.h"
#include "comm/os/cgroup.h"
#include "comm/os/child.h"
#include "comm/os/cma.h"
#include "comm/os/fd.h"
#include "comm/shared_memory/shared_memory.h"
#include "comm/store.h"
#include "comm/topology.h"
#include "comm/transport/tcp/tcp_transport.h"
#include "tools/doctor/host_facts.h"
#include "tools/doctor/instructions.h"

namespace rz::doctor {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;

constexpr seconds trial_timeout{5};

/// The message of what `f` throws; empty if it throws nothing.
template <class F>
std::string error_of(const F& f) {
  try {
    f();
    return "";
  } catch (const std::exception& e) {
    return one_line(e);
  }
}

std::string first_line(const fs::path& file) {
  std::string line;
  std::ifstream in(file);
  std::getline(in, line);
  return line;
}

/// The number of `key` in lines such as "MemTotal:  123 kB".
std::optional<std::uint64_t> number_after(const fs::path& file, std::string_view key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);)
    if (const auto words = words_of(line); words.size() > 1 && words[0] == key)
      return parse_number<std::uint64_t>(words[1]);
  return std::nullopt;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    names.push_back(at->path().filename().string());
  std::ranges::sort(names);
  return names;
}

template <class Resource>
std::optional<std::uint64_t> soft_limit(Resource resource) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

// ---- memory

void read_memory(HostFacts& f) {
  constexpr const char* meminfo = "/proc/meminfo";
  f.memory_available = available_memory();
  f.memory_total = number_after(meminfo, "MemTotal:").value_or(0) * 1024;
  f.overcommit = parse_number<int>(first_line("/proc/sys/vm/overcommit_memory")).value_or(0);
  if (const auto limit = number_after(meminfo, "CommitLimit:"), used = number_after(meminfo, "Committed_AS:");
      f.overcommit == 2 && limit && used)
    f.commit_left = (*limit - std::min(*limit, *used)) * 1024;
  const std::string huge =
      first_line("/sys/kernel/mm/transparent_hugepage/enabled");  // "always [madvise] never"
  if (const auto open = huge.find('['), close = huge.find(']'); close != std::string::npos && open < close)
    f.huge_pages = huge.substr(open + 1, close - open - 1);
  f.shared_memory_error = error_of([] { SharedMemory::create(1 << 20); });
  const Caches& c = caches();
  f.l2 = c.l2, f.l3 = c.l3, f.l3_processors = c.l3_processors;
  struct statvfs shm {};
  f.has_dev_shm = statvfs("/dev/shm", &shm) == 0 && access("/dev/shm", W_OK | X_OK) == 0;
  f.dev_shm_bytes = f.has_dev_shm ? shm.f_blocks * shm.f_frsize : 0;
  f.dev_shm_free = f.has_dev_shm ? shm.f_bavail * shm.f_frsize : 0;
  f.max_locked = soft_limit(RLIMIT_MEMLOCK), f.max_file = soft_limit(RLIMIT_FSIZE);
}

// ---- processes and processors

/// Processes and threads of this user, as RLIMIT_NPROC counts them.
std::uint64_t count_user_processes() {
  std::uint64_t count = 0;
  const std::string own = concat(getuid());
  for (const std::string& name : names_in("/proc")) {
    if (!parse_number<int>(name)) continue;
    bool ours = false;
    std::ifstream in("/proc/" + name + "/status");
    for (std::string line; std::getline(in, line);) {
      const auto words = words_of(line);
      if (words.size() > 1 && words[0] == "Uid:") ours = words[1] == own;
      if (words.size() > 1 && words[0] == "Threads:" && ours)
        count += parse_number<std::uint64_t>(words[1]).value_or(1);
    }
  }
  return count;
}

void read_limits(HostFacts& f) {
  const OpenFiles files = rz::open_files();
  f.open_files = files.open, f.open_files_soft = files.soft, f.open_files_hard = files.hard;
  if (geteuid() != 0) f.max_processes = soft_limit(RLIMIT_NPROC);
  f.user_processes = count_user_processes();
  f.cgroup_processes = cgroup_processes();
}

int numa_node_of(int processor) {
  for (const std::string& name : names_in(concat("/sys/devices/system/cpu/cpu", processor)))
    if (name.starts_with("node"))
      if (const auto node = parse_number<int>(name.substr(4))) return *node;
  return 0;
}

void read_processors(HostFacts& f) {
  const CpuLimits limits = cpu_limits();
  const Topology machine = read_topology();
  f.processors = limits.processors, f.quota = limits.quota;
  f.all_processors = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)), f.numa_nodes = machine.numa_nodes;
  std::set<std::string> cores;
  std::set<int> nodes;
  for (const int p : f.processors) {
    const std::string core =
        first_line(concat("/sys/devices/system/cpu/cpu", p, "/topology/thread_siblings_list"));
    cores.insert(core.empty() ? concat(p) : core);
    nodes.insert(numa_node_of(p));
  }
  utsname system{};
  if (uname(&system) == 0) f.machine = system.machine;
  std::ifstream cpuinfo("/proc/cpuinfo");
  f.instructions = read_instructions(std::string(std::istreambuf_iterator<char>(cpuinfo), {}));
  if (const char* const core = std::getenv("OPENBLAS_CORETYPE")) f.openblas_core = core;
  f.cores = static_cast<int>(cores.size()), f.usable_numa_nodes = static_cast<int>(nodes.size());
}

/// Ranks are processes beside each other, so one child reads the memory of another one.
std::string try_cma() {
  static constexpr std::uint64_t value = 0x72696e677a65726f;
  const ChildOptions options{.signal_if_orphaned = SIGKILL};
  return error_of([&] {
    const Child owner([] { return pause(); }, options);
    const auto read_owner = [&] {
      std::array<std::byte, sizeof value> found{};
      const int error = cma_read_process(owner.pid(), reinterpret_cast<std::uint64_t>(&value), found);
      return error ? error : std::memcmp(found.data(), &value, sizeof value) == 0 ? 0 : EFAULT;
    };
    Child reader(read_owner, options);
    require(reader.wait(Deadline::after(trial_timeout)), Errc::timeout, "process_vm_readv does not return");
    require(reader.status() == 0, Errc::system,
            "process_vm_readv: ", std::strerror(WEXITSTATUS(reader.status())));
  });
}

// ---- what the library does at the start of a job

/// Two ranks as threads connect, by shared memory, and reduce.
std::string try_group() {
  const auto store = memory_store();
  std::array<std::string, 2> errors;
  const auto run_rank = [&](int rank) {
    return error_of([&] {
      CommOptions options;
      options.backend = "native", options.rendezvous_timeout = options.timeout = trial_timeout;
      auto ranks = Communicator::connect(rank, 2, store, options);
      float value = 1;
      ranks.all_reduce(Buffer(&value, 1, DType::f32)).wait();
      require(value == 2, Errc::system, "the sum of 1 and 1 came out as ", value);
    });
  };
  const std::string no_thread = error_of([&] {
    std::thread other([&] { errors[1] = run_rank(1); });
    errors[0] = run_rank(0);
    other.join();
  });
  return !no_thread.empty() ? no_thread : errors[0].empty() ? errors[1] : errors[0];
}

std::string try_rendezvous() {
  return error_of(
      [] { local_rendezvous_store("doctor " + net::random_hex(), 0, 1, Deadline::after(trial_timeout)); });
}

// ---- network

std::vector<std::string> addresses_of(const std::string& host, std::string& error) {
  std::set<std::string> found;
  error = error_of([&] {
    for (const auto& address : net::resolve({host, 0})) found.insert(address.host());
  });
  return {found.begin(), found.end()};
}

/// Local end of the route to the host; sends nothing. Empty if there is none.
std::string way_to(const std::string& host) {
  std::string way;
  error_of([&] {
    for (net::SocketAddress address : net::resolve({host, 9})) {
      const UniqueFd socket(::socket(address.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
      if (!socket || connect(socket.get(), address.get(), address.size) != 0) continue;
      way = net::local_address(socket.get()).host();
      if (!address.loopback()) return;
    }
  });
  return way;
}

/// /sys/class/net may be that of another network namespace.
int mtu_of(const std::string& interface) {
  const UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  interface.copy(request.ifr_name, sizeof request.ifr_name - 1);
  return socket && ioctl(socket.get(), SIOCGIFMTU, &request) == 0 ? request.ifr_mtu : 0;
}

/// Counts the ports of RZ_PORTS at which ranks could listen.
void read_ports(HostFacts& f) {
  const PortRange& ports = environment().ports;
  if (ports.first == 0) return;
  f.ports = concat(ports.first, '-', ports.last);
  for (int port = ports.first; port <= ports.last; ++port)
    error_of([&] {  // one below 1024 may be forbidden
      const auto at = net::resolve({f.address.empty() ? "127.0.0.1" : f.address, port});
      if (net::listen_tcp_if_free(at.front())) ++f.ports_free;
    });
}

void read_network(HostFacts& f, const FactsRequest& request) {
  f.own_addresses = addresses_of(f.name, f.own_name_error);
  if (!request.master.empty()) f.master_addresses = addresses_of(request.master, f.master_error);
  f.address_error = error_of([&] {
    for (const auto& i : net::interfaces())
      f.interfaces.push_back({i.name, i.address.host(), mtu_of(i.name)});
    const std::string way = request.master.empty() ? "" : way_to(request.master);
    f.address = choose_address(environment().interface, request.nodes == 1, way).host();
  });
  read_ports(f);
  f.infiniband = names_in("/sys/class/infiniband");
}

// ---- secret

/// The library reads the secret, and judges the modes of its file. No file is created.
void read_secret(HostFacts& f, const std::string& nonce) {
  if (nonce.empty()) return;
  f.secret_error = error_of([&] {
    f.secret_to_create = secret_file_to_create();
    if (!f.secret_to_create.empty()) return;
    const auto secret = process_secret();
    const net::AuthenticationKey key(secret.get(), net::Purpose::agent, "doctor " + nonce);
    for (const std::uint8_t byte : key.bytes().first<8>())
      f.secret_digest += concat(f.secret_digest.empty() ? "" : ".", byte);
    if (!secret) f.secret_digest = "none";
  });
}

// ---- versions

/// First word of digits and dots, as in "mpirun (Open MPI) 4.1.4".
std::string version_in(const std::string& text) {
  for (const std::string_view word : words_of(text)) {
    const bool digits = std::ranges::all_of(word, [](char c) { return c == '.' || (c >= '0' && c <= '9'); });
    if (digits && word.find('.') != word.npos) return std::string(word);
  }
  return "";
}

std::string open_mpi_version() {
  const std::string text = output_of({"mpirun", "--version"}, Deadline::after(trial_timeout));
  const std::string first = text.substr(0, text.find('\n'));
  return first.find("Open MPI") != std::string::npos ? version_in(first) : "";
}

/// The newest CUDA that the driver supports.
std::string cuda_version() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return "";
  const auto get = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDriverGetVersion"));
  int version = 0;
  return get && get(&version) == 0 ? concat(version / 1000, '.', version % 1000 / 10) : "";
}

void read_versions(HostFacts& f, const FactsRequest& request) {
  f.version = library_version();
  utsname system{};
  if (uname(&system) == 0) f.kernel = system.release;
  f.open_mpi = open_mpi_version();
  f.driver = version_in(first_line("/proc/driver/nvidia/version"));
  f.gpus = static_cast<int>(names_in("/proc/driver/nvidia/gpus").size());
  if (!request.cuda) return;
  f.cuda = cuda_version();
  f.devices = cuda::device_count();
  f.nccl_error = error_of([&] { f.nccl = nccl::version_text(nccl::require_version(nccl::nccl_api())); });
}

}  // namespace

HostFacts read_facts(const FactsRequest& request) {
  HostFacts f;
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  f.name = host;
  f.cma_error = try_cma();  // first, while this process has one thread
  f.ptrace_scope = parse_number<int>(first_line("/proc/sys/kernel/yama/ptrace_scope")).value_or(-1);
  read_versions(f, request);
  read_limits(f);
  read_memory(f);
  read_processors(f);
  read_network(f, request);
  read_secret(f, request.nonce);
  f.rendezvous_error = try_rendezvous();
  f.group_error = try_group();
  f.clock = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  return f;
}

}  // namespace rz::doctor
