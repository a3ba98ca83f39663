#include "tools/rzrun/agents/host_links.h"

#include <signal.h>

#include <algorithm>
#include <cstring>

#include "comm/core/error.h"
#include "tools/rzrun/hosts/hosts.h"
#include "tools/rzrun/ranks/keeper.h"

namespace rz::rzrun {
namespace {

constexpr std::chrono::seconds time_to_start{60};
/// So long a connection that has ended may take to give its reason, and agents to end when they are not
/// needed.
constexpr std::chrono::seconds time_to_end{2};

}  // namespace

HostLink& HostLinks::start(const std::string& host, const std::vector<std::string>& words) {
  hosts::Connector c(words);
  if (hosts::is_this_host(host)) c.name = "its agent";
  FrameStream stream(std::move(c.out), std::move(c.in));
  all.push_back(
      {.host = host, .connector = std::move(c), .stream = std::move(stream), .time_to_begin = time_to_start});
  HostLink& a = all.back();
  a.errors = {std::move(a.connector.err), &a.error_lines, UniqueFd(), concat("host ", host, ": ")};
  return a;
}

HostLink& HostLinks::add(FrameStream stream, const std::string& address, std::chrono::seconds time_to_begin) {
  all.push_back({.host = address, .stream = std::move(stream), .time_to_begin = time_to_begin});
  all.back().connector.name = "its rzrun";
  return all.back();
}

HostLinks::~HostLinks() {
  for (HostLink& a : all) a.stream.close();
  const auto end = Deadline::after(time_to_end);
  for (HostLink& a : all) a.connector.process.wait(end);  // with it goes what has not ended
}

void HostLinks::begin_job(bool waits) {
  is_waiting_ = waits;
  is_killed_ = false;
}

bool HostLinks::any_lost() const {
  return !std::ranges::all_of(all, [](const HostLink& a) { return a.lost.empty(); });
}

void HostLinks::send_job(HostLink& a, Job job, const Variables& variables) {
  job.host = a.host;
  job.slots = a.slots;
  job.node = a.node;
  job.first_rank = a.first_rank;
  job.local_ranks = a.local_ranks;
  a.stream.send(Frame::Kind::job, pack_job(job, variables));
  for (int r = 0; r < a.local_ranks; ++r) a.running.insert(a.first_rank + r);
  a.is_idle = false;
  a.left = 0;
  a.stream.flush();
}

void HostLinks::append_descriptors(std::vector<pollfd>& wait) const {
  for (const HostLink& a : all) {
    a.stream.append_descriptors(wait);
    wait.push_back({a.errors.fd(), POLLIN, 0});
    wait.push_back({a.lost.empty() && !a.lost_at ? a.connector.process.pidfd() : -1, POLLIN, 0});
  }
}

void HostLinks::advance() {
  own_stop_.look();
  const bool beat = next_beat_.expired();
  if (beat) next_beat_ = Deadline::after(Silence::beat_time);
  for (HostLink& a : all) {
    if (!a.lost.empty()) continue;
    receive(a);
    if (beat) a.stream.send(Frame::Kind::beat);
    a.stream.flush();
    watch(a);
  }
}

std::vector<RankEnd> HostLinks::take_ends() {
  std::ranges::stable_partition(ends_, [](const RankEnd& e) { return e.status.signal || !e.lost.empty(); });
  return std::exchange(ends_, {});
}

void HostLinks::receive(HostLink& a) {
  a.errors.pump();
  a.stream.receive();
  try {
    if (const auto text = a.stream.parser.text_before()) a.banner += *text;
    while (const auto frame = a.stream.parser.next()) handle(a, *frame);
  } catch (const Error& e) {
    lose(a, one_line(e));
  }
  collect_lines(a);
}

/// Whole lines of what the connecting process and a shell on the host have printed.
void HostLinks::collect_lines(HostLink& a) {
  if (a.is_ready || !a.lost.empty()) a.banner += a.banner.empty() ? "" : "\n";
  for (auto end = a.banner.find('\n'); end != std::string::npos; end = a.banner.find('\n')) {
    if (end > 0) messages_.push_back(concat("host ", a.host, ": ", a.banner.substr(0, end)));
    a.banner.erase(0, end + 1);
  }
  if (a.error_lines.pending().empty()) return;
  for (const std::string& line : parts_of(a.error_lines.take(), '\n'))
    if (!line.empty()) messages_.push_back(line);
}

void HostLinks::handle(HostLink& a, const Frame& frame) {
  a.silence.end();
  WireReader reader(frame.payload);
  std::int64_t number = 0;
  switch (frame.kind) {
    case Frame::Kind::hello:
    case Frame::Kind::join:
    case Frame::Kind::stop:
      decide_(a, frame);
      break;
    case Frame::Kind::output:
      if (frame.payload.empty()) break;
      (frame.payload.front() == 2 ? stderr_ : stdout_).write(std::string_view(frame.payload).substr(1));
      a.not_accepted += frame.payload.size();
      break;
    case Frame::Kind::exit: {
      RankEnd end = unpack_end(frame.payload);
      end.host = a.host;
      a.running.erase(end.rank);
      if (!a.is_stopping) ends_.push_back(std::move(end));
      break;
    }
    case Frame::Kind::start_failure:
      failure_.emplace();
      reader(failure_->status, failure_->text);
      failure_->text = concat("host ", a.host, ": ", failure_->text);
      break;
    case Frame::Kind::message:
      messages_.push_back(concat("host ", a.host, ": ", frame.payload));
      break;
    case Frame::Kind::left:
      reader(number);
      a.left = static_cast<std::size_t>(number);
      break;
    case Frame::Kind::idle:
      reader(a.free_port, a.why_no_port);
      a.running.clear();
      a.left = 0;
      a.is_idle = true;
      break;
    case Frame::Kind::leave:
      reader(a.leaves_by);
      break;
    case Frame::Kind::suspended:
      a.silence.announce();
      break;
    default:
      break;
  }
}

/// Finds that a host is lost.
void HostLinks::watch(HostLink& a) {
  if (!a.lost.empty()) return;
  if (a.is_stopping && a.stream.ended()) {
    a.running.clear();
    a.left = 0;
    a.is_idle = true;
  }
  if (!a.connector.group && a.stream.ended() && !a.is_stopping) return lose(a, why_ended(a));
  const bool has_ended = a.connector.group && a.connector.process.is_over();
  if (!a.lost_at && (a.stream.ended() || has_ended)) a.lost_at = Deadline::after(time_to_end);
  if (a.lost_at && ((a.stream.ended() && has_ended) || a.lost_at->expired())) return lose(a, why_ended(a));
  if (a.is_ready && a.silence.too_long())
    return lose(a, concat("no sign of its agent for ", Silence::limit.count(), " s"));
  if (!a.is_ready && a.ready_by.expired())
    lose(a, concat("no agent of rzrun within ", a.time_to_begin.count(), " s"));
}

std::string HostLinks::why_ended(HostLink& a) {
  if (const char* name = a.leaves_by ? sigabbrev_np(a.leaves_by) : nullptr) return concat("SIG", name);
  hosts::Connector& c = a.connector;
  if (!c.group) return a.stream.why_ended();
  if (!c.process.is_over()) return concat(c.name, " has closed the connection");
  c.kill_group();  // what it has left, before its number can be another's
  c.process.ended();
  const std::string text = concat(c.name, " ", describe(exit_status_of_wait(c.process.status())));
  return a.is_ready ? text : concat(text, " before an agent of rzrun began");
}

void HostLinks::lose(HostLink& a, const std::string& why) {
  a.lost = why;
  a.stream.close();
  a.connector.kill_group();
  a.errors.finish();
  collect_lines(a);
  // After a stop of this process that they did not wait out, the hosts have ended for that alone.
  if (const std::string own = own_stop_.text(); !own.empty() && !a.is_idle) {
    if (!failure_) failure_ = {255, own};
  } else if (!a.is_idle || is_waiting_)
    ends_.push_back({.rank = a.first_rank,
                     .status = {255, 0, false},
                     .host = a.host,
                     .lost = why,
                     .has_left = a.leaves_by != 0,
                     .ranks = std::max(1, a.local_ranks)});
  a.running.clear();
  a.left = 0;
  a.is_idle = true;
  // A host that never came up leaves the others without a job.
  if (is_waiting_) signal_all(SIGTERM);
}

/// Tells agents how much of their output the consoles have room for.
void HostLinks::accept_output() {
  for (HostLink& a : all) {
    if (a.not_accepted == 0 || stdout_.full() || stderr_.full()) continue;
    a.stream.send(Frame::Kind::accepted, with_number(static_cast<int>(std::exchange(a.not_accepted, 0))));
    for (const auto& [console, number] : {std::pair(&stdout_, 1), std::pair(&stderr_, 2)})
      if (console->error() == EPIPE) a.stream.send(Frame::Kind::output_closed, with_number(number));
  }
}

std::vector<int> HostLinks::running() const {
  std::vector<int> ranks;
  for (const HostLink& a : all) ranks.insert(ranks.end(), a.running.begin(), a.running.end());
  return ranks;
}

bool HostLinks::any_process_alive() const {
  return is_waiting_ || !ends_.empty() || !std::ranges::all_of(all, &HostLink::is_idle);
}

std::size_t HostLinks::leftovers() const {
  std::size_t sum = 0;
  for (const HostLink& a : all) sum += a.left;
  return sum;
}

void HostLinks::signal_all(int signal) {
  if (signal == SIGKILL && std::exchange(is_killed_, true)) return;  // agents repeat it
  for (HostLink& a : all) {
    if (is_waiting_) {
      a.running.clear();
      a.is_idle = true;
    } else if (!a.is_idle) {
      a.stream.send(Frame::Kind::signal, with_number(signal));
      a.stream.flush();
    }
  }
  is_waiting_ = false;
}

void HostLinks::suspend() {
  for (HostLink& a : all) {
    a.stream.send(Frame::Kind::suspended);
    a.stream.flush();
  }
  stop_as_by_terminal();
  own_stop_.forgive();
}

void HostLinks::signal_handlers(int signal) {
  for (HostLink& a : all)
    if (!a.is_idle && !is_waiting_) a.stream.send(Frame::Kind::handlers, with_number(signal));
}

}  // namespace rz::rzrun
