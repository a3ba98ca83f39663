#include "tools/rzrun/launch.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <tuple>

#include "comm/bootstrap/secret.h"
#include "comm/core/error.h"
#include "comm/topology.h"

namespace rz::rzrun {
namespace {

std::pair<UniqueFd, UniqueFd> make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail_errno("pipe2");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

std::string log_folder(const Options& o, int restarts) {
  return restarts ? concat(o.log_dir, "/restart", restarts) : o.log_dir;
}

void make_log_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  require(!error, Errc::config, "--log-dir ", path, ": ", error.message());
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

ChildStream open_stream(const Job& job, int rank, const char* name) {
  const Options& o = job.options;
  ChildStream s;
  if (!o.log_dir.empty()) s.log = open_log(log_path(o, job.restarts, rank, name));
  if (!o.log_dir.empty() && !o.tee)
    s.child = std::move(s.log);  // the child writes to the file directly
  else if (o.prefix || o.tee)
    std::tie(s.read, s.child) = make_pipe();
  return s;
}

void default_signals() {
  for (int s : {SIGPIPE, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCHLD}) ::signal(s, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

/// Only rank 0 reads standard input, since concurrent readers of a pipe would split the data. A terminal is
/// not passed on, since a background process group must not read it.
void redirect_stdin(int rank) {
  if (rank == 0 && !::isatty(STDIN_FILENO)) return;
  if (const int null = ::open("/dev/null", O_RDONLY); null >= 0) {
    ::dup2(null, STDIN_FILENO);
    if (null != STDIN_FILENO) ::close(null);
  }
}

/// Runs in the child. Returns only on failure, with errno set.
void exec_child(const Job& job, int rank, pid_t parent, const ChildStream& out, const ChildStream& err) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  default_signals();
  redirect_stdin(rank);
  if (out.child) ::dup2(out.child.get(), STDOUT_FILENO);
  if (err.child) ::dup2(err.child.get(), STDERR_FILENO);
  for (const auto& [name, value] : rank_environment(job, rank)) ::setenv(name.c_str(), value.c_str(), 1);
  ::fcntl(job.secret.get(), F_SETFD, 0);  // not closed by exec
  ::setenv("RZ_SECRET_FD", concat(job.secret.get()).c_str(), 1);
  if (!job.processors.empty())
    bind_process(job.processors[static_cast<std::size_t>(rank)]);  // failure costs speed only
  std::vector<char*> argv;
  for (const auto& word : job.options.command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  ::execvp(argv[0], argv.data());
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

}  // namespace

int free_port() {
  UniqueFd s(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* a = reinterpret_cast<sockaddr*>(&address);
  if (!s || ::bind(s.get(), a, length) != 0 || ::getsockname(s.get(), a, &length) != 0)
    fail_errno("bind", "a free port of 127.0.0.1");
  return ntohs(address.sin_port);
}

std::string random_id() {
  unsigned char bytes[8];
  if (::getrandom(bytes, sizeof bytes, 0) != sizeof bytes) fail_errno("getrandom");
  std::string id;
  for (unsigned char b : bytes) (id += "0123456789abcdef"[b >> 4]) += "0123456789abcdef"[b & 15];
  return id;
}

std::vector<std::pair<std::string, std::string>> rank_environment(const Job& job, int rank) {
  const std::string r = concat(rank), n = concat(job.options.ranks);
  std::vector<std::pair<std::string, std::string>> variables{
      {"RANK", r},
      {"LOCAL_RANK", r},
      {"WORLD_SIZE", n},
      {"LOCAL_WORLD_SIZE", n},
      {"GROUP_RANK", "0"},
      {"GROUP_WORLD_SIZE", "1"},
      {"ROLE_RANK", r},
      {"ROLE_WORLD_SIZE", n},
      {"ROLE_NAME", "default"},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", concat(job.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", concat(job.restarts)},
      {"TORCHELASTIC_MAX_RESTARTS", concat(job.options.max_restarts)},
      {"TORCHELASTIC_RUN_ID", job.run_id},
      {"RZ_LAUNCH", job.launch},
  };
  if (job.options.ranks > 1 && !std::getenv("OMP_NUM_THREADS"))
    variables.emplace_back("OMP_NUM_THREADS", "1");
  if (!std::getenv("RZ_WAIT_REPORT_S")) variables.emplace_back("RZ_WAIT_REPORT_S", "10");
  return variables;
}

std::vector<std::vector<int>> bindings(const Options& o) {
  std::vector<std::vector<int>> processors;
  for (int rank = 0; o.bind && rank < o.ranks; ++rank) processors.push_back(processors_for(rank, o.ranks));
  return processors;
}

Job new_job(const Options& o, std::vector<std::vector<int>> processors, const std::string& run_id,
            int restarts) {
  if (!o.log_dir.empty()) make_log_folder(log_folder(o, restarts));
  return {o,
          std::move(processors),
          o.master_port ? o.master_port : free_port(),
          run_id,
          restarts ? random_id() : run_id,
          restarts,
          secret_descriptor(net::Secret::random())};
}

std::string log_path(const Options& o, int restarts, int rank, const char* stream) {
  return concat(log_folder(o, restarts), "/rank", rank, ".", stream);
}

ChildProcess launch(const Job& job, int rank) {
  ChildStream out = open_stream(job, rank, "stdout"), err = open_stream(job, rank, "stderr");
  auto [error_read, error_write] = make_pipe();
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) fail_errno("fork", concat("rank ", rank));
  if (pid == 0) {
    exec_child(job, rank, parent, out, err);
    const int error = errno;
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
                       std::move(out.log),
                       std::move(err.log)};
  if (!started.pidfd) fail_errno("pidfd_open", concat("rank ", rank));
  return started;
}

}  // namespace rz::rzrun
