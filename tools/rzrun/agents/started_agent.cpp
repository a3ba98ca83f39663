// `rzrun --agent`, which ssh, mpirun or srun has started for another rzrun.

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <signal.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>

#include "comm/core/error.h"
#include "tools/rzrun/agents/agent.h"
#include "tools/rzrun/agents/agent_sockets.h"

namespace rz::rzrun {
namespace {

/// To try all addresses, and one of them: a network that drops packets must not hide the next one.
constexpr std::chrono::seconds time_to_connect_all{60}, time_for_address{2};

/// The bytes of an address of IPv4 or IPv6; empty for another family.
std::span<const std::uint8_t> bytes_of(const sockaddr* a) {
  if (a->sa_family == AF_INET)
    return {reinterpret_cast<const std::uint8_t*>(&reinterpret_cast<const sockaddr_in*>(a)->sin_addr), 4};
  if (a->sa_family != AF_INET6) return {};
  return {reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr.s6_addr, 16};
}

/// Addresses of the interfaces that are up, each with the length of its prefix. Loopback is left out, and
/// addresses that are valid on one link alone.
std::vector<std::string> own_addresses() {
  std::vector<std::string> found;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return found;
  for (const ifaddrs* i = all; i; i = i->ifa_next) {
    const bool usable = (i->ifa_flags & IFF_UP) && !(i->ifa_flags & IFF_LOOPBACK);
    if (!usable || !i->ifa_addr || !i->ifa_netmask) continue;
    const auto address = bytes_of(i->ifa_addr);
    const bool is_of_link = address.size() == 16 && address[0] == 0xfe && (address[1] & 0xc0) == 0x80;
    if (address.empty() || is_of_link) continue;
    int prefix = 0;
    for (const std::uint8_t byte : bytes_of(i->ifa_netmask)) prefix += std::popcount(byte);
    char text[INET6_ADDRSTRLEN];
    ::inet_ntop(i->ifa_addr->sa_family, address.data(), text, sizeof text);
    found.push_back(concat(text, "/", prefix));
  }
  ::freeifaddrs(all);
  return found;
}

/// The stream of frames at the standard descriptors, which then are those of other output: what a library
/// prints must not be taken for a frame.
FrameStream take_standard_streams() {
  UniqueFd in(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3)), out(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3));
  if (!in || !out) fail_errno("fcntl", "standard streams of the agent");
  ::dup2(STDERR_FILENO, STDOUT_FILENO);
  const UniqueFd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (null) ::dup2(null.get(), STDIN_FILENO);
  return {std::move(in), std::move(out)};
}

/// Output of the ranks goes to rzrun, which has the program and the variables too.
class StartedAgent : public AgentRole {
 public:
  StartedAgent(FrameStream stream, const std::string& place)
      : agent_(*this, std::move(stream), streams_[0], streams_[1]) {
    WireWriter hello;
    hello(own_addresses(), place);
    write_free_port(hello);
    agent_.stream().send(Frame::Kind::hello, hello.bytes);
  }

  void run() { agent_.run(); }

 private:
  Job job_of(const std::string& payload) override {
    Variables variables;
    Job job = unpack_job(payload, variables);
    for (const auto& [name, value] : variables)
      if (name != "CUDA_VISIBLE_DEVICES" || !agent_.has_devices_of_slurm())
        ::setenv(name.c_str(), value.c_str(), 1);
    return job;
  }

  void handle(const Frame& frame) override {
    WireReader reader(frame.payload);
    int number = 0;
    if (frame.kind == Frame::Kind::accepted) {
      reader(number);
      not_accepted_ -= static_cast<std::size_t>(number);
    } else if (frame.kind == Frame::Kind::output_closed) {
      reader(number);
      streams_[number == 2].close();
    }
  }

  void handle_signal(int s) override {
    if (s == SIGTSTP) return agent_.suspend();
    if (s == SIGUSR1 || s == SIGUSR2) return;
    // rzrun has its own way to end an agent: this comes from what has started it, or from a user.
    if (!is_stopped_) agent_.send_number(Frame::Kind::stop, s);
    if (s == SIGCONT) return;
    is_stopped_ = true;
    agent_.end();
  }
  void lose(const std::string&) override {
    for (Console& c : streams_) c.close();  // so that no rank waits for a reader
  }
  void print(const std::string& line) override { std::fprintf(stderr, "rzrun --agent: %s\n", line.c_str()); }

  /// As long as rzrun accepts it, so that a slow reader there makes ranks wait; its memory and other frames
  /// are not in the way.
  void forward_output(bool all) override {
    for (int i = 0; i < 2; ++i) {
      if (streams_[i].pending().empty() || (!all && not_accepted_ >= Console::max_pending_bytes)) continue;
      std::string payload(1, static_cast<char>(i + 1));
      payload += streams_[i].take();
      not_accepted_ += payload.size();
      agent_.stream().send(Frame::Kind::output, payload);
    }
  }

  void append_descriptors(std::vector<pollfd>&) const override {}

  Console streams_[2];            // standard output and standard error of the ranks
  std::size_t not_accepted_ = 0;  // bytes of output
  bool is_stopped_ = false;       // by a signal
  Agent agent_;
};

/// To the rzrun that is at one of the addresses of RZ_AGENT.
FrameStream connect_to_named() {
  std::vector<net::HostPort> all;
  for (const std::string& address : parts_of(std::getenv("RZ_AGENT"), ','))
    all.push_back(net::parse_host_port(address));
  const AgentAccess access = process_access();
  std::string why;
  for (const auto until = Deadline::after(time_to_connect_all); !until.expired();)
    for (const net::HostPort& where : all) {
      try {
        return connect_to_rzrun(where, access, Deadline::after(time_for_address), [](const auto&) {});
      } catch (const Error& e) {
        why = e.what();
      }
    }
  fail(Errc::rendezvous, "no connection to rzrun at ", std::getenv("RZ_AGENT"), ": ", why);
}

/// The host among those of mpirun or srun, as rzrun knows it.
std::string place_among_hosts() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "SLURMD_NODENAME"})
    if (const char* place = std::getenv(name)) return place;
  return "";
}

/// Ranks are not those of mpirun or srun: a library of MPI in one must not take it for this agent. Nor do
/// they get the secret of the agents.
void remove_variables_of_starter() {
  const bool is_of_mpirun = std::getenv("OMPI_COMM_WORLD_RANK");
  std::vector<std::string> names{"RZ_AGENT", "RZ_SECRET", "RZ_SECRET_FD", "RZ_FLIGHT_FD"};
  for (char** v = environ; *v; ++v) {
    const std::string_view name(*v, std::strcspn(*v, "="));
    for (const std::string_view prefix : {"PMIX_", "PMI_", "PMI2_", "OMPI_"})
      if (name.starts_with(prefix) && (prefix != "OMPI_" || is_of_mpirun)) names.emplace_back(name);
  }
  for (const std::string& name : names) ::unsetenv(name.c_str());
}

}  // namespace

int run_agent() {
  if (!std::getenv("RZ_AGENT")) {
    StartedAgent(take_standard_streams(), "").run();
    return 0;
  }
  FrameStream stream = connect_to_named();
  const std::string place = place_among_hosts();
  remove_variables_of_starter();
  StartedAgent(std::move(stream), place).run();
  return 0;
}

}  // namespace rz::rzrun
