#include "tools/rzrun/agent.h"

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
#include <optional>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "tools/rzrun/frames.h"
#include "tools/rzrun/rank_group.h"
#include "tools/rzrun/wire.h"

namespace rz::rzrun {
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

class Agent {
 public:
  Agent() : signals_(block_signals()), stream_(take_standard_streams()) {
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    stream_.parser.begin();
    stream_.send_begin();
    WireWriter hello;
    hello(own_addresses(), free_port());
    stream_.send(Frame::Kind::hello, hello.bytes);
  }

  int run() {
    while (!ending_ || is_active_) turn();
    for (const auto end = Deadline::after(std::chrono::seconds(2)); !stream_.all_sent() && !end.expired();) {
      wait(end.poll_ms(100));
      stream_.flush();
    }
    return 0;
  }

 private:
  void turn() {
    wait(timeout_ms());
    handle_signals();
    stream_.receive();
    try {
      while (const auto frame = stream_.parser.next()) handle(*frame);
    } catch (const Error& e) {
      std::fprintf(stderr, "rzrun --agent: %s\n", one_line(e).c_str());
      stream_.close();
    }
    if (stream_.ended() || silence_.too_long()) {
      stream_.close();                        // how ranks end from here on is no news of the job
      for (Console& c : streams_) c.close();  // so that no rank waits for a reader
      end();
    }
    if (is_active_) watch_ranks();
    if (next_beat_.expired()) {
      stream_.send(Frame::Kind::beat);
      next_beat_ = Deadline::after(Silence::beat_time);
    }
    stream_.flush();
  }

  void wait(int timeout) {
    std::vector<pollfd> descriptors{{signals_.get(), POLLIN, 0}};
    stream_.append_descriptors(descriptors);
    group_.append_descriptors(descriptors);
    if (::poll(descriptors.data(), descriptors.size(), timeout) < 0 && errno != EINTR) fail_errno("poll");
  }

  /// While processes are being killed poll often, since they may leave orphans to kill.
  int timeout_ms() const {
    const int beat = next_beat_.poll_ms(2000);
    return is_killing_ ? 20 : kill_at_ ? std::min(beat, kill_at_->poll_ms(2000)) : beat;
  }

  void handle_signals() {
    signalfd_siginfo info;
    while (::read(signals_.get(), &info, sizeof info) == sizeof info)
      if (const auto s = static_cast<int>(info.ssi_signo); s != SIGCHLD && s != SIGUSR1 && s != SIGUSR2)
        end();
  }

  void handle(const Frame& frame) {
    silence_.end();
    WireReader reader(frame.payload);
    int number = 0;
    if (frame.kind == Frame::Kind::job) return start(frame.payload);
    if (frame.kind == Frame::Kind::beat) return;
    reader(number);
    if (frame.kind == Frame::Kind::signal && is_active_) {
      group_.signal_all(number);
      is_killing_ = is_killing_ || number == SIGKILL;
    } else if (frame.kind == Frame::Kind::handlers && is_active_) {
      if (!group_.signal_handlers(number))
        stream_.send(Frame::Kind::message, concat("SIG", sigabbrev_np(number),
                                                  ": not forwarded, since no rank has a handler for it"));
    } else if (frame.kind == Frame::Kind::accepted) {
      not_accepted_ -= static_cast<std::size_t>(number);
    } else if (frame.kind == Frame::Kind::output_closed) {
      streams_[number == 2].close();
    }
  }

  void start(const std::string& payload) {
    require(!is_active_, Errc::io, "a job while another one runs");
    Variables variables;
    Job job = unpack_job(payload, variables);
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
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

  void watch_ranks() {
    if (kill_at_ && kill_at_->expired()) is_killing_ = true;
    if (is_killing_) group_.signal_all(SIGKILL);
    for (const RankEnd& rank : group_.reap()) stream_.send(Frame::Kind::exit, pack_end(rank));
    group_.forward_output();
    const bool any_alive = group_.any_process_alive();
    if (!any_alive) group_.finish_output();
    for (const std::string& line : group_.messages()) stream_.send(Frame::Kind::message, line);
    for (int i = 0; i < 2; ++i) send_output(i, !any_alive);
    if (!any_alive) {
      is_active_ = false;
      send_number(Frame::Kind::idle, free_port());
    } else if (group_.running().empty() && !has_reported_left_) {
      has_reported_left_ = true;
      send_number(Frame::Kind::left, group_.leftovers());
    }
  }

  /// Sends output as long as rzrun accepts it, so that a slow reader there makes ranks wait; its memory and
  /// other frames are not in the way.
  void send_output(int i, bool all) {
    if (streams_[i].pending().empty() || (!all && not_accepted_ >= Console::max_pending_bytes)) return;
    std::string payload(1, static_cast<char>(i + 1));
    payload += streams_[i].take();
    not_accepted_ += payload.size();
    stream_.send(Frame::Kind::output, payload);
  }

  template <class N>
  void send_number(Frame::Kind kind, N number) {
    WireWriter writer;
    writer(number);
    stream_.send(kind, writer.bytes);
  }

  void end() {
    if (std::exchange(ending_, true) || !is_active_) return;
    group_.signal_all(SIGTERM);
    kill_at_ = Deadline::after(grace_);
  }

  UniqueFd signals_;
  FrameStream stream_;
  Console streams_[2];  // standard output and standard error of the ranks
  RankGroup group_{streams_[0], streams_[1]};
  Silence silence_;
  Deadline next_beat_ = Deadline::after(Silence::beat_time);
  bool ending_ = false;     // rzrun is gone, or requested the end of the agent
  bool is_active_ = false;  // a job has been started, and some process of it is left
  bool is_killing_ = false, has_reported_left_ = false;
  std::optional<Deadline> kill_at_;
  std::chrono::milliseconds grace_{};
  std::size_t not_accepted_ = 0;  // bytes of output
};

}  // namespace

int run_agent() { return Agent().run(); }

}  // namespace rz::rzrun
