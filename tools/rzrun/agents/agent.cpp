#include "tools/rzrun/agents/agent.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "comm/core/error.h"
#include "tools/rzrun/agents/agent_sockets.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::rzrun {

Agent::Agent(AgentRole& role, FrameStream stream, Console& out, Console& err)
    : role_(role), stream_(std::move(stream)), group_(out, err) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  stream_.parser.begin();
  stream_.send_begin();
}

void write_free_port(WireWriter& writer) {
  try {
    writer(free_port(), std::string());
  } catch (const Error& e) {
    writer(0, one_line(e));
  }
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
  own_stop_.look();
  handle_signals();
  stream_.receive();
  std::string why = stream_.why_ended();
  try {
    while (const auto frame = stream_.parser.next()) {
      silence_.end();
      if (frame->kind == Frame::Kind::suspended) silence_.announce();
      handle(*frame);
    }
  } catch (const Error& e) {
    why = one_line(e);
    role_.print(why);
    stream_.close();
  }
  const bool is_silent = silence_.too_long();
  if (stream_.ended() || is_silent) {
    stream_.close();  // how ranks end from here on is no news of the job
    if (!std::exchange(is_lost_, true))
      role_.lose(is_silent ? concat("no sign of it for ", Silence::limit.count(), " s") : why);
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
  role_.append_descriptors(descriptors);
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
    if (s != keeper_lost && s != SIGCHLD) role_.handle_signal(s);
  }
}

/// As at a SIGKILL of the agent, which its keeper has got.
void Agent::lose_keeper() {
  stream_.close();
  if (!std::exchange(is_lost_, true)) role_.lose("");
  end();
  kill();
}

bool Agent::wait_for_output(const std::vector<pollfd>& outputs) const {
  std::vector<pollfd> wait{{signals_.get(), POLLIN, 0}};
  wait.insert(wait.end(), outputs.begin(), outputs.end());
  return ::poll(wait.data(), wait.size(), -1) > 0 && wait.front().revents;
}

void Agent::suspend() {
  stream_.send(Frame::Kind::suspended);
  stream_.flush();
  stop_as_by_terminal();
  own_stop_.forgive();
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
  } else {
    role_.handle(frame);
  }
}

void Agent::start(const std::string& payload) {
  require(!is_active_, Errc::io, "a job while another one runs");
  Job job = role_.job_of(payload);
  is_active_ = true;
  is_killing_ = has_reported_left_ = false;
  kill_at_.reset();
  grace_ = job.grace;
  try {
    const bool is_there = job.folder.empty() || ::chdir(job.folder.c_str()) == 0;
    require(is_there, Errc::config, "the working folder ", job.folder, ": ", std::strerror(errno));
    if (!job.slots.empty()) job.devices = devices_of_slots(job.slots, devices_);
    job.processors = bindings(job.program, job.local_ranks);
    group_.start(job, [] { return true; });
  } catch (...) {
    const auto failure = start_failure_of(std::current_exception(), job.program.command.front());
    WireWriter writer;
    writer(failure.status, failure.text);
    stream_.send(Frame::Kind::start_failure, writer.bytes);
  }
}

void Agent::watch_ranks() {
  if (kill_at_ && kill_at_->expired()) is_killing_ = true;
  if (is_killing_) group_.signal_all(SIGKILL);
  for (const RankEnd& rank : group_.advance()) stream_.send(Frame::Kind::exit, pack_end(rank));
  group_.forward_output();
  const bool any_alive = group_.any_process_alive();
  if (!any_alive) group_.finish_output();
  for (const std::string& line : group_.messages()) stream_.send(Frame::Kind::message, line);
  role_.forward_output(!any_alive);
  if (!any_alive) {
    is_active_ = false;
    WireWriter writer;
    write_free_port(writer);
    stream_.send(Frame::Kind::idle, writer.bytes);
  } else if (group_.running().empty() && !has_reported_left_) {
    has_reported_left_ = true;
    stream_.send(Frame::Kind::left, with_number(static_cast<int>(group_.leftovers())));
  }
}

void Agent::end() {
  if (std::exchange(ending_, true) || !is_active_) return;
  group_.signal_all(SIGTERM);
  kill_at_ = Deadline::after(grace_);
}

// ---- `rzrun --agent`, which ssh, mpirun or srun has started for another rzrun

namespace {

/// To try all addresses, and one of them: a network that drops packets must not hide the next one.
constexpr std::chrono::seconds time_to_connect_all{60}, time_for_address{2};

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
    hello(hosts::own_addresses(), place);
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
    if (!is_stopped_) agent_.stream().send(Frame::Kind::stop, with_number(s));
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
