#include "tools/rzrun/agents/agent.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "comm/core/error.h"
#include "tools/rzrun/agents/agent_sockets.h"
#include "tools/rzrun/ranks/keeper.h"

namespace rz::rzrun {

// ---- any agent

Agent::Agent(UniqueFd signals, FrameStream stream, Console& out, Console& err)
    : signals_(std::move(signals)), stream_(std::move(stream)), group_(out, err) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  stream_.parser.begin();
  stream_.send_begin();
}

void Agent::run() {
  while (!ending_ || is_active_) turn();
  for (const auto end = Deadline::after(std::chrono::seconds(2)); !stream_.all_sent() && !end.expired();) {
    wait(end.poll_ms(100));
    stream_.flush();
  }
}

void Agent::turn() {
  wait(timeout_ms());
  handle_signals();
  stream_.receive();
  std::string why = stream_.why_ended();
  try {
    while (const auto frame = stream_.parser.next()) {
      silence_.end();
      handle(*frame);
    }
  } catch (const Error& e) {
    why = one_line(e);
    print(why);
    stream_.close();
  }
  const bool is_silent = silence_.too_long();
  if (stream_.ended() || is_silent) {
    stream_.close();  // how ranks end from here on is no news of the job
    if (!std::exchange(is_lost_, true))
      lose(is_silent ? concat("no sign of it for ", Silence::limit.count(), " s") : why);
    end();
  }
  if (is_active_) watch_ranks();
  if (next_beat_.expired()) {
    stream_.send(Frame::Kind::beat);
    next_beat_ = Deadline::after(Silence::beat_time);
  }
  stream_.flush();
}

void Agent::wait(int timeout) {
  std::vector<pollfd> descriptors{{signals_.get(), POLLIN, 0}};
  stream_.append_descriptors(descriptors);
  group_.append_descriptors(descriptors);
  append_descriptors(descriptors);
  if (::poll(descriptors.data(), descriptors.size(), timeout) < 0 && errno != EINTR) fail_errno("poll");
}

/// While processes are being killed poll often, since they may leave orphans to kill.
int Agent::timeout_ms() const {
  const int beat = next_beat_.poll_ms(2000);
  return is_killing_ ? 20 : kill_at_ ? std::min(beat, kill_at_->poll_ms(2000)) : beat;
}

void Agent::handle_signals() {
  signalfd_siginfo info;
  while (::read(signals_.get(), &info, sizeof info) == sizeof info) {
    const auto s = static_cast<int>(info.ssi_signo);
    if (s == keeper_lost) lose_keeper();
    if (s != keeper_lost && s != SIGCHLD) handle_signal(s);
  }
}

/// As at a SIGKILL of the agent, which its keeper has got.
void Agent::lose_keeper() {
  stream_.close();
  if (!std::exchange(is_lost_, true)) lose("");
  end();
  kill();
}

void Agent::handle(const Frame& frame) {
  WireReader reader(frame.payload);
  int number = 0;
  if (frame.kind == Frame::Kind::job) return start(frame.payload);
  if (frame.kind == Frame::Kind::signal && is_active_) {
    reader(number);
    group_.signal_all(number);
    is_killing_ = is_killing_ || number == SIGKILL;
  } else if (frame.kind == Frame::Kind::handlers && is_active_) {
    reader(number);
    if (!group_.signal_handlers(number))
      stream_.send(Frame::Kind::message, concat("SIG", sigabbrev_np(number),
                                                ": not forwarded, since no rank has a handler for it"));
  }
}

void Agent::start(const std::string& payload) {
  require(!is_active_, Errc::io, "a job while another one runs");
  Job job = job_of(payload);
  is_active_ = true;
  is_killing_ = has_reported_left_ = false;
  kill_at_.reset();
  grace_ = job.options.grace;
  try {
    job.processors = bindings(job.options, job.local_ranks);
    group_.start(job, [] { return true; });
  } catch (...) {
    const auto failure = start_failure_of(std::current_exception(), job.options.command.front());
    WireWriter writer;
    writer(failure.status, failure.text);
    stream_.send(Frame::Kind::start_failure, writer.bytes);
  }
}

void Agent::watch_ranks() {
  if (kill_at_ && kill_at_->expired()) is_killing_ = true;
  if (is_killing_) group_.signal_all(SIGKILL);
  for (const RankEnd& rank : group_.reap()) stream_.send(Frame::Kind::exit, pack_end(rank));
  group_.forward_output();
  const bool any_alive = group_.any_process_alive();
  if (!any_alive) group_.finish_output();
  for (const std::string& line : group_.messages()) stream_.send(Frame::Kind::message, line);
  forward_output(!any_alive);
  if (!any_alive) {
    is_active_ = false;
    send_number(Frame::Kind::idle, free_port());
  } else if (group_.running().empty() && !has_reported_left_) {
    has_reported_left_ = true;
    send_number(Frame::Kind::left, group_.leftovers());
  }
}

void Agent::end() {
  if (std::exchange(ending_, true) || !is_active_) return;
  group_.signal_all(SIGTERM);
  kill_at_ = Deadline::after(grace_);
}

// ---- of an rzrun that has started it

namespace {

/// IPv4 addresses of the interfaces that are up, loopback left out, each with the length of its prefix.
std::vector<std::string> own_addresses() {
  std::vector<std::string> found;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return found;
  for (const ifaddrs* i = all; i; i = i->ifa_next) {
    const bool usable = (i->ifa_flags & IFF_UP) && !(i->ifa_flags & IFF_LOOPBACK);
    if (!usable || !i->ifa_addr || i->ifa_addr->sa_family != AF_INET || !i->ifa_netmask) continue;
    char text[INET_ADDRSTRLEN];
    const auto* mask = reinterpret_cast<const sockaddr_in*>(i->ifa_netmask);
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(i->ifa_addr)->sin_addr, text, sizeof text);
    found.push_back(concat(text, "/", std::popcount(mask->sin_addr.s_addr)));
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
class StartedAgent : public Agent {
 public:
  explicit StartedAgent(FrameStream stream)
      : Agent(block_signals(), std::move(stream), streams_[0], streams_[1]) {
    WireWriter hello;
    hello(own_addresses(), free_port());
    stream_.send(Frame::Kind::hello, hello.bytes);
  }

 private:
  Job job_of(const std::string& payload) override {
    Variables variables;
    Job job = unpack_job(payload, variables);
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    return job;
  }

  void handle(const Frame& frame) override {
    Agent::handle(frame);
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
    if (s != SIGUSR1 && s != SIGUSR2) end();
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
      stream_.send(Frame::Kind::output, payload);
    }
  }

  Console streams_[2];            // standard output and standard error of the ranks
  std::size_t not_accepted_ = 0;  // bytes of output
};

/// To the rzrun that RZ_AGENT names. Its ranks get neither that variable nor the secret of the agents.
FrameStream connect_to_named() {
  const net::HostPort where = net::parse_host_port(std::getenv("RZ_AGENT"));
  const AgentAccess access = process_access();
  for (const char* name : {"RZ_AGENT", "RZ_SECRET"}) ::unsetenv(name);
  return connect_to_rzrun(where, access, Deadline::after(std::chrono::seconds(60)), [](const auto&) {});
}

}  // namespace

int run_agent() {
  StartedAgent(std::getenv("RZ_AGENT") ? connect_to_named() : take_standard_streams()).run();
  return 0;
}

}  // namespace rz::rzrun
