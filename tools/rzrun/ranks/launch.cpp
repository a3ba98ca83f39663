#include "tools/rzrun/ranks/launch.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <tuple>

#include "comm/bootstrap/secret.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/net/socket.h"
#include "comm/os/child.h"
#include "comm/os/flight_recorder.h"
#include "comm/topology.h"

namespace rz::rzrun {
namespace {

std::string log_folder(const Output& o, int restarts) {
  return restarts ? concat(o.log_dir, "/restart", restarts) : o.log_dir;
}

/// The rank of a file "rank<R>.stdout", "rank<R>.stderr" or "rank<R>.error.json"; nothing of another one.
std::optional<int> rank_of_file(const std::string& name) {
  const auto dot = name.find('.');
  if (!name.starts_with("rank") || dot == std::string::npos) return {};
  const std::string kind = name.substr(dot);
  if (kind != ".stdout" && kind != ".stderr" && kind != ".error.json") return {};
  return parse_number<int>(std::string_view(name).substr(4, dot - 4));
}

/// Removes the files of an earlier job from the folder: those of the ranks that this host starts, of ranks
/// that the job does not have, and of later restarts. Those of other hosts may be new.
void remove_old_logs(const Job& job, const std::filesystem::path& folder) {
  const int first = job.first_rank, behind = first + job.local_ranks;
  std::error_code error;
  const auto remove_files = [&](const std::filesystem::path& from, const auto& is_old) {
    for (const auto& entry : std::filesystem::directory_iterator(from, error))
      if (const auto rank = rank_of_file(entry.path().filename()); rank && is_old(*rank))
        std::filesystem::remove(entry.path(), error);
  };
  remove_files(folder, [&](int r) { return (first <= r && r < behind) || r >= job.ranks; });
  for (const auto& entry : std::filesystem::directory_iterator(job.output.log_dir, error)) {
    const std::string name = entry.path().filename();
    const auto restart =
        name.starts_with("restart") ? parse_number<int>(std::string_view(name).substr(7)) : std::nullopt;
    if (restart.value_or(0) <= job.restarts || !entry.is_directory(error)) continue;
    remove_files(entry.path(), [](int) { return true; });
    ::rmdir(entry.path().c_str());  // unless there are files of others
  }
}

UniqueFd open_log(const std::string& path) {
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file) fail_errno("open", path);
  return file;
}

/// The end of a stream that the child uses, and the descriptors that this process keeps.
struct ChildStream {
  UniqueFd child, read, log;
};

ChildStream open_stream(const Job& job, int local_rank, int stream) {
  const Output& o = job.output;
  const char* const name = stream == Streams::out ? "stdout" : "stderr";
  const bool to_file = o.to_file(local_rank, stream);
  ChildStream s;
  if (to_file) s.log = open_log(log_path(o, job.restarts, job.first_rank + local_rank, name));
  if (!o.to_console(local_rank, stream))  // the child writes to the file directly, or to nothing
    s.child = to_file ? std::move(s.log) : UniqueFd(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  else if (to_file || o.has_prefix(local_rank, stream))
    std::tie(s.read, s.child) = make_pipe();
  return s;
}

/// Only rank 0 reads standard input, since concurrent readers of a pipe would split the data. A terminal is
/// not passed on, since a background process group must not read it; nor is an agent's, which has frames.
void redirect_stdin(const Job& job, int rank) {
  if (rank == 0 && job.nodes == 1 && !::isatty(STDIN_FILENO)) return;
  if (const int null = ::open("/dev/null", O_RDONLY); null >= 0) {
    ::dup2(null, STDIN_FILENO);
    if (null != STDIN_FILENO) ::close(null);
  }
}

/// Runs in the child. Returns errno if it fails.
int exec_child(const Job& job, int local_rank, pid_t parent, int secret, int flight, const ChildStream& out,
               const ChildStream& err) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  default_signals();
  redirect_stdin(job, job.first_rank + local_rank);
  if (out.child) ::dup2(out.child.get(), STDOUT_FILENO);
  if (err.child) ::dup2(err.child.get(), STDERR_FILENO);
  for (const auto& [name, value] : job.program.variables) ::setenv(name.c_str(), value.c_str(), 1);
  for (const auto& [name, value] : rank_environment(job, local_rank))
    ::setenv(name.c_str(), value.c_str(), 1);
  ::fcntl(secret, F_SETFD, 0);  // not closed by exec
  ::setenv("RZ_SECRET_FD", concat(secret).c_str(), 1);
  if (flight >= 0 && ::fcntl(flight, F_SETFD, 0) == 0)
    ::setenv("RZ_FLIGHT_FD", concat(flight).c_str(), 1);
  else
    ::unsetenv("RZ_FLIGHT_FD");  // of a launcher above this one
  if (!job.processors.empty())
    bind_process(job.processors[static_cast<std::size_t>(local_rank)]);  // failure costs speed only
  std::vector<std::string> words = job.program.command;
  if (const auto at = job.program.local_rank_at)
    words.insert(words.begin() + std::min(at, static_cast<int>(words.size())),
                 concat("--local_rank=", local_rank));
  return exec_program(words);
}

/// The error pipe closes when exec succeeds; otherwise it carries errno.
void check_exec(UniqueFd error_pipe, pid_t pid) {
  int error = 0;
  ssize_t n;
  do n = ::read(error_pipe.get(), &error, sizeof error);
  while (n < 0 && errno == EINTR);
  if (n != sizeof error) return;
  ::waitpid(pid, nullptr, 0);
  throw LaunchError{error};
}

/// Listens at this port of all addresses of the host, of both families where it has them; empty if it is in
/// use. A given port may have connections that have ended (TIME_WAIT), as it may for the ranks.
UniqueFd listen_everywhere(int port) {
  for (const int family : {AF_INET6, AF_INET}) {
    UniqueFd s(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int off = 0, on = 1;
    if (!s || (family == AF_INET6 && ::setsockopt(s.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) != 0))
      continue;
    net::SocketAddress any;
    any.storage.ss_family = static_cast<sa_family_t>(family);
    any.size = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    any.set_port(port);
    if (port) ::setsockopt(s.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (::bind(s.get(), any.get(), any.size) == 0 && ::listen(s.get(), 1) == 0) return s;
    if (errno == EADDRINUSE) return {};
  }
  return {};
}

}  // namespace

int free_port() {
  const PortRange& ports = environment().ports;
  for (int i = 0; i < ports.size(); ++i)
    if (const UniqueFd s = listen_everywhere(ports.at(static_cast<int>(::getpid()), i)))
      return net::local_address(s.get()).port();
  if (ports.first == 0) fail_errno("bind", "a free port");
  fail(Errc::config, "none of the ports RZ_PORTS=", ports.first, "-", ports.last,
       " is free; give more of them");
}

std::string random_id() {
  unsigned char bytes[8];
  if (::getrandom(bytes, sizeof bytes, 0) != sizeof bytes) fail_errno("getrandom");
  std::string id;
  for (unsigned char b : bytes) (id += "0123456789abcdef"[b >> 4]) += "0123456789abcdef"[b & 15];
  return id;
}

std::vector<std::pair<std::string, std::string>> rank_environment(const Job& job, int local_rank) {
  const std::string rank = concat(job.first_rank + local_rank), size = concat(job.ranks);
  std::vector<std::pair<std::string, std::string>> variables{
      {"RANK", rank},
      {"LOCAL_RANK", concat(local_rank)},
      {"WORLD_SIZE", size},
      {"LOCAL_WORLD_SIZE", concat(job.local_ranks)},
      {"GROUP_RANK", concat(job.node)},
      {"GROUP_WORLD_SIZE", concat(job.nodes)},
      {"ROLE_RANK", rank},
      {"ROLE_WORLD_SIZE", size},
      {"ROLE_NAME", job.program.role},
      {"MASTER_ADDR", job.master_addr},
      {"MASTER_PORT", concat(job.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", concat(job.restarts)},
      {"TORCHELASTIC_MAX_RESTARTS", concat(job.max_restarts)},
      {"TORCHELASTIC_RUN_ID", job.run_id},
      {"RZ_LAUNCH", job.launch},
  };
  if (!job.error_folder.empty())
    variables.emplace_back("TORCHELASTIC_ERROR_FILE",
                           error_path(job.error_folder, job.first_rank + local_rank));
  if (!job.devices.empty()) variables.emplace_back("CUDA_VISIBLE_DEVICES", job.devices);
  if (job.local_ranks > 1 && !std::getenv("OMP_NUM_THREADS")) variables.emplace_back("OMP_NUM_THREADS", "1");
  if (!std::getenv("RZ_WAIT_REPORT_S")) variables.emplace_back("RZ_WAIT_REPORT_S", "10");
  return variables;
}

std::vector<std::vector<int>> bindings(const Program& p, int local_ranks) {
  std::vector<std::vector<int>> processors;
  for (int r = 0; p.bind && r < local_ranks; ++r) processors.push_back(processors_for(r, local_ranks));
  return processors;
}

void make_log_folder(const Job& job) {
  if (job.output.log_dir.empty()) return;
  const std::string path = log_folder(job.output, job.restarts);
  std::error_code error;
  std::filesystem::create_directories(path, error);
  require(!error, Errc::config, "--log-dir ", path, ": ", error.message());
  remove_old_logs(job, path);
}

std::string log_path(const Output& o, int restarts, int rank, const char* stream) {
  return concat(log_folder(o, restarts), "/rank", rank, ".", stream);
}

std::string error_path(const std::string& folder, int rank) {
  return concat(folder, "/rank", rank, ".error.json");
}

ChildProcess launch(const Job& job, int local_rank) {
  const int rank = job.first_rank + local_rank;
  ChildStream out = open_stream(job, local_rank, Streams::out),
              err = open_stream(job, local_rank, Streams::err);
  auto [error_read, error_write] = make_pipe();
  const UniqueFd secret = secret_descriptor(job.secret);
  UniqueFd flight = flight::make_file();
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) fail_errno("fork", concat("rank ", rank));
  if (pid == 0) {
    const int error = exec_child(job, local_rank, parent, secret.get(), flight.get(), out, err);
    if (::write(error_write.get(), &error, sizeof error)) ::_exit(127);
    ::_exit(127);
  }
  ::setpgid(pid, pid);  // parent and child both call it, so that neither can run ahead
  error_write.close();
  check_exec(std::move(error_read), pid);
  ChildProcess started{pid,
                       UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))),
                       std::move(out.read),
                       std::move(err.read),
                       std::move(flight),
                       std::move(out.log),
                       std::move(err.log)};
  if (!started.pidfd) fail_errno("pidfd_open", concat("rank ", rank));
  return started;
}

}  // namespace rz::rzrun
