#include "tools/rzrun/agent_group.h"

#include <limits.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "comm/core/error.h"
#include "tools/rzrun/hosts/hosts.h"
#include "tools/rzrun/processes.h"
#include "tools/rzrun/wire.h"

namespace rz::rzrun {
namespace {

constexpr std::chrono::seconds time_to_start{60};
/// So long a connection that has ended may take to give its reason, and agents to end when they are not
/// needed.
constexpr std::chrono::seconds time_to_end{2};

std::string in_quotes(const std::string& path) {
  std::string text = "'";
  for (const char c : path) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

std::string own_name() {
  char name[HOST_NAME_MAX + 1] = {};
  ::gethostname(name, HOST_NAME_MAX);
  return name;
}

/// Starts the process with pipes at its standard streams. Returns its pid.
pid_t spawn_connector(const std::vector<std::string>& words, UniqueFd& in, UniqueFd& out, UniqueFd& err) {
  auto [child_in, to_child] = make_pipe();
  auto [from_child, child_out] = make_pipe();
  auto [errors, child_err] = make_pipe();
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) fail_errno("fork", words.front());
  if (pid == 0) {
    ::setpgid(0, 0);  // Ctrl-C is for rzrun alone
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(1);
    default_signals();
    ::dup2(child_in.get(), STDIN_FILENO);
    ::dup2(child_out.get(), STDOUT_FILENO);
    ::dup2(child_err.get(), STDERR_FILENO);
    std::vector<char*> argv;
    for (const auto& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    ::execvp(argv[0], argv.data());
    const std::string line = concat("cannot start '", words.front(), "': ", std::strerror(errno), "\n");
    if (::write(STDERR_FILENO, line.data(), line.size()) < 0) ::_exit(126);
    ::_exit(127);
  }
  ::setpgid(pid, pid);
  in = std::move(from_child);
  out = std::move(to_child);
  err = std::move(errors);
  return pid;
}

std::string with_number(int n) {
  WireWriter writer;
  writer(n);
  return std::move(writer.bytes);
}

}  // namespace

bool is_this_host(const std::string& name) {
  const std::string own = own_name();
  return name == "localhost" || name == "127.0.0.1" || name == own || name == own.substr(0, own.find('.'));
}

std::vector<std::string> agent_command(const Options& o, const std::string& host) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  if (is_this_host(host)) return {self, "--agent"};
  std::vector<std::string> words;
  for (const auto word : words_of(o.rsh)) words.emplace_back(word);
  if (words.empty()) {
    words = {"ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5"};
    if (o.ssh_port) words.insert(words.end(), {"-p", concat(o.ssh_port)});
  }
  words.push_back(host);
  words.push_back(
      concat("cd ", in_quotes(std::filesystem::current_path()), " && exec ", in_quotes(self), " --agent"));
  return words;
}

Variables forwarded_environment() {
  static constexpr std::string_view own[] = {"HOME",     "USER",      "LOGNAME", "SHELL",    "MAIL",
                                             "HOSTNAME", "HOST",      "PWD",     "OLDPWD",   "SHLVL",
                                             "_",        "TMPDIR",    "TERM",    "TTY",      "DISPLAY",
                                             "TMUX",     "TMUX_PANE", "STY",     "WINDOWID", "RZ_SECRET_FD"};
  static constexpr std::string_view own_prefixes[] = {"SSH_", "XDG_", "DBUS_", "WAYLAND_", "BASH_FUNC_"};
  Variables found;
  for (char** v = environ; *v; ++v) {
    const std::string_view text = *v;
    const auto equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view name = text.substr(0, equals);
    const auto begins = [&](std::string_view prefix) { return name.starts_with(prefix); };
    if (std::ranges::count(own, name) || std::ranges::any_of(own_prefixes, begins)) continue;
    found.emplace_back(name, text.substr(equals + 1));
  }
  return found;
}

AgentGroup::AgentGroup(const Options& o, Console& out, Console& err) : stdout_(out), stderr_(err) {
  int first_rank = 0;
  for (int node = 0; node < static_cast<int>(o.nodes.size()); ++node) {
    start_agent(o, node, first_rank);
    first_rank += agents_.back().local_ranks;
  }
}

void AgentGroup::start_agent(const Options& o, int node, int first_rank) {
  const hosts::Host& host = o.nodes[static_cast<std::size_t>(node)];
  const auto words = agent_command(o, host.name);
  UniqueFd in, out, err;
  const pid_t pid = spawn_connector(words, in, out, err);
  UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  agents_.push_back({.host = host.name,
                     .connector = is_this_host(host.name) ? "its agent" : words.front(),
                     .node = node,
                     .first_rank = first_rank,
                     .local_ranks = static_cast<int>(host.slots.size()),
                     .devices = host.filtered ? host.slots : std::vector<int>(),
                     .pid = pid,
                     .pidfd = std::move(pidfd),
                     .stream = {std::move(in), std::move(out)},
                     .errors = {std::move(err), nullptr, UniqueFd(), concat("host ", host.name, ": ")},
                     .ready_by = Deadline::after(time_to_start)});
  agents_.back().errors.set_console(&agents_.back().error_lines);
}

AgentGroup::~AgentGroup() {
  for (Agent& a : agents_) a.stream.close();
  for (const auto end = Deadline::after(time_to_end); !end.expired();) {
    std::erase_if(agents_, [](const Agent& a) { return ::waitpid(a.pid, nullptr, WNOHANG) != 0; });
    if (agents_.empty()) return;
    ::usleep(5000);
  }
  for (Agent& a : agents_) {
    ::kill(-a.pid, SIGKILL);
    ::waitpid(a.pid, nullptr, 0);
  }
}

void AgentGroup::start(const Job& job, const std::function<bool()>&) {
  job_ = job;
  job_.options.prefix = job.options.to_console();  // whole lines, as each host sends them
  job_.nodes = static_cast<int>(agents_.size());
  for (Agent& a : agents_) {
    require(a.lost.empty(), Errc::peer_lost, "host ", a.host, " is gone: ", a.lost);
    for (int r = 0; r < a.local_ranks; ++r) a.running.insert(a.first_rank + r);
    a.is_idle = false;
    a.left = 0;
  }
  is_pending_ = true;
  is_killed_ = false;
  send_jobs();
}

void AgentGroup::send_jobs() {
  if (!is_pending_ || !std::ranges::all_of(agents_, [](const Agent& a) { return a.is_ready; })) return;
  is_pending_ = false;
  std::vector<std::vector<std::string>> addresses;
  for (const Agent& a : agents_) addresses.push_back(a.addresses);
  job_.master_addr =
      job_.options.master_addr.empty() ? hosts::master_address(addresses) : job_.options.master_addr;
  if (job_.master_addr.empty()) {
    failure_ = {
        2, concat("host ", agents_.front().host, " has no IPv4 address but loopback; set --master-addr")};
    return signal_all(SIGTERM);
  }
  job_.master_port = job_.options.master_port ? job_.options.master_port : agents_.front().free_port;
  const Variables variables = forwarded_environment();
  for (Agent& a : agents_) {
    Job job = job_;
    job.host = a.host;
    job.devices = a.devices;
    job.node = a.node;
    job.first_rank = a.first_rank;
    job.local_ranks = a.local_ranks;
    a.stream.send(Frame::Kind::job, pack_job(job, variables));
    a.stream.flush();
  }
}

void AgentGroup::append_descriptors(std::vector<pollfd>& wait) const {
  for (const Agent& a : agents_) {
    a.stream.append_descriptors(wait);
    wait.push_back({a.errors.fd(), POLLIN, 0});
    wait.push_back({a.lost.empty() && !a.lost_at ? a.pidfd.get() : -1, POLLIN, 0});
  }
}

std::vector<RankEnd> AgentGroup::reap() {
  const bool beat = next_beat_.expired();
  if (beat) next_beat_ = Deadline::after(Silence::beat_time);
  for (Agent& a : agents_) {
    if (!a.lost.empty()) continue;
    receive(a);
    if (beat) a.stream.send(Frame::Kind::beat);
    a.stream.flush();
    watch(a);
  }
  send_jobs();
  std::ranges::stable_partition(ends_, [](const RankEnd& e) { return e.status.signal || !e.lost.empty(); });
  return std::exchange(ends_, {});
}

void AgentGroup::receive(Agent& a) {
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
void AgentGroup::collect_lines(Agent& a) {
  if (a.is_ready || !a.lost.empty()) a.banner += a.banner.empty() ? "" : "\n";
  for (auto end = a.banner.find('\n'); end != std::string::npos; end = a.banner.find('\n')) {
    if (end > 0) messages_.push_back(concat("host ", a.host, ": ", a.banner.substr(0, end)));
    a.banner.erase(0, end + 1);
  }
  if (a.error_lines.pending().empty()) return;
  for (const std::string& line : parts_of(a.error_lines.take(), '\n'))
    if (!line.empty()) messages_.push_back(line);
}

void AgentGroup::handle(Agent& a, const Frame& frame) {
  a.silence.end();
  WireReader reader(frame.payload);
  std::int64_t number = 0;
  switch (frame.kind) {
    case Frame::Kind::hello:
      reader(a.addresses, a.free_port);
      a.is_ready = true;
      break;
    case Frame::Kind::output:
      if (frame.payload.empty()) break;
      (frame.payload.front() == 2 ? stderr_ : stdout_).write(std::string_view(frame.payload).substr(1));
      a.not_accepted += frame.payload.size();
      break;
    case Frame::Kind::exit:
      ends_.push_back(unpack_end(frame.payload));
      ends_.back().host = a.host;
      a.running.erase(ends_.back().rank);
      break;
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
      reader(a.free_port);
      a.running.clear();
      a.left = 0;
      a.is_idle = true;
      break;
    default:
      break;
  }
}

/// Finds that a host is lost.
void AgentGroup::watch(Agent& a) {
  if (!a.lost.empty()) return;
  pollfd ended{a.pidfd.get(), POLLIN, 0};
  if (!a.lost_at && (a.stream.ended() || ::poll(&ended, 1, 0) > 0)) a.lost_at = Deadline::after(time_to_end);
  if (a.lost_at && ((a.stream.ended() && ::poll(&ended, 1, 0) > 0) || a.lost_at->expired()))
    return lose(a, why_ended(a));
  if (a.is_ready && a.silence.too_long())
    return lose(a, concat("no sign of its agent for ", Silence::limit.count(), " s"));
  if (!a.is_ready && a.ready_by.expired())
    lose(a, concat("no agent of rzrun within ", time_to_start.count(), " s"));
}

std::string AgentGroup::why_ended(Agent& a) {
  int status = 0;
  if (::waitpid(a.pid, &status, WNOHANG) == 0) return concat(a.connector, " has closed the connection");
  const std::string text = concat(a.connector, " ", describe(exit_status_of_wait(status)));
  return a.is_ready ? text : concat(text, " before an agent of rzrun began");
}

void AgentGroup::lose(Agent& a, const std::string& why) {
  a.lost = why;
  a.stream.close();
  ::kill(-a.pid, SIGKILL);
  a.errors.finish();
  collect_lines(a);
  if (!a.is_idle || is_pending_) ends_.push_back({a.first_rank, {255, 0, false}, a.host, false, why});
  a.running.clear();
  a.left = 0;
  a.is_idle = true;
  // A host that never came up leaves the others without a job.
  if (is_pending_) signal_all(SIGTERM);
}

void AgentGroup::forward_output() {
  for (Agent& a : agents_) {
    if (a.not_accepted == 0 || stdout_.full() || stderr_.full()) continue;
    a.stream.send(Frame::Kind::accepted, with_number(static_cast<int>(std::exchange(a.not_accepted, 0))));
    for (const auto& [console, number] : {std::pair(&stdout_, 1), std::pair(&stderr_, 2)})
      if (console->error() == EPIPE) a.stream.send(Frame::Kind::output_closed, with_number(number));
  }
}

std::vector<int> AgentGroup::running() const {
  std::vector<int> all;
  for (const Agent& a : agents_) all.insert(all.end(), a.running.begin(), a.running.end());
  return all;
}

bool AgentGroup::any_process_alive() const {
  return !ends_.empty() || !std::ranges::all_of(agents_, &Agent::is_idle);
}

std::size_t AgentGroup::leftovers() const {
  std::size_t sum = 0;
  for (const Agent& a : agents_) sum += a.left;
  return sum;
}

void AgentGroup::signal_all(int signal) {
  if (signal == SIGKILL && std::exchange(is_killed_, true)) return;  // agents repeat it
  for (Agent& a : agents_) {
    if (is_pending_) {
      a.running.clear();
      a.is_idle = true;
    } else if (!a.is_idle) {
      a.stream.send(Frame::Kind::signal, with_number(signal));
      a.stream.flush();
    }
  }
  is_pending_ = false;
}

bool AgentGroup::signal_handlers(int signal) {
  for (Agent& a : agents_)
    if (!a.is_idle && !is_pending_) a.stream.send(Frame::Kind::handlers, with_number(signal));
  return true;  // an agent whose ranks have no handler reports that
}

}  // namespace rz::rzrun
