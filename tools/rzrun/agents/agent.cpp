#include "tools/rzrun/agents/agent.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>

#include "comm/core/error.h"

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
  for (const RankEnd& rank : group_.reap()) stream_.send(Frame::Kind::exit, pack_end(rank));
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
    send_number(Frame::Kind::left, group_.leftovers());
  }
}

void Agent::end() {
  if (std::exchange(ending_, true) || !is_active_) return;
  group_.signal_all(SIGTERM);
  kill_at_ = Deadline::after(grace_);
}

}  // namespace rz::rzrun
