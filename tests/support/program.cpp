#include "tests/support/program.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "comm/core/deadline.h"
#include "comm/core/text.h"

namespace rz::test {
namespace {

constexpr const char* launcher_variables[] = {
    "RANK",        "WORLD_SIZE",      "LOCAL_RANK", "LOCAL_WORLD_SIZE",   "MASTER_ADDR",
    "MASTER_PORT", "OMP_NUM_THREADS", "RZ_LAUNCH",  "TORCHELASTIC_RUN_ID"};

void wait_a_little() { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }

std::string content(int fd) {
  std::string text(static_cast<std::size_t>(::lseek(fd, 0, SEEK_END)), '\0');
  const auto n = ::pread(fd, text.data(), text.size(), 0);
  text.resize(n < 0 ? 0 : static_cast<std::size_t>(n));
  return text;
}

/// Appends, as the ranks of a launcher share the file.
int output_file() {
  const int fd = ::memfd_create("output", MFD_CLOEXEC);
  ::fcntl(fd, F_SETFL, O_APPEND);
  return fd;
}

/// Waits for a process that has this state, or is not there, if that will do.
bool reaches(pid_t pid, const std::string& state, bool or_none, std::chrono::seconds deadline) {
  const auto end = Deadline::after(deadline);
  do {
    std::string stat;
    std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), stat);
    const auto after_name = stat.rfind(')');
    if (after_name == std::string::npos ? or_none : stat.substr(after_name + 2, 1) == state) return true;
    wait_a_little();
  } while (!end.expired());
  return false;
}

}  // namespace

Program::Program(const std::vector<std::string>& command, const Variables& variables)
    : out_(output_file()), err_(output_file()) {
  std::vector<char*> argv;
  for (const auto& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  pid_ = ::fork();
  if (pid_ != 0) return;
  for (const char* name : launcher_variables) ::unsetenv(name);
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  ::dup2(::open("/dev/null", O_RDONLY), STDIN_FILENO);
  ::dup2(out_, STDOUT_FILENO);
  ::dup2(err_, STDERR_FILENO);
  ::execvp(argv[0], argv.data());
  ::_exit(127);
}

Program::~Program() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  ::close(out_);
  ::close(err_);
}

void Program::signal(int signal) const { ::kill(pid_, signal); }

int Program::wait(std::chrono::seconds deadline) {
  const auto end = Deadline::after(deadline);
  int status = 0;
  while (::waitpid(pid_, &status, WNOHANG) == 0) {
    if (end.expired()) {
      ADD_FAILURE() << "still running after " << deadline.count() << " s; it wrote:\n" << out() << err();
      ::kill(pid_, SIGKILL);
    }
    wait_a_little();
  }
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void Program::wait_for(const std::string& text, std::chrono::seconds deadline) const {
  const auto end = Deadline::after(deadline);
  while (out().find(text) == std::string::npos && err().find(text) == std::string::npos) {
    if (end.expired()) {
      ADD_FAILURE() << "'" << text << "' was not written, but:\n" << out() << err();
      return;
    }
    wait_a_little();
  }
}

std::string Program::out() const { return content(out_); }
std::string Program::err() const { return content(err_); }

bool gone(pid_t pid, std::chrono::seconds deadline) { return reaches(pid, "Z", true, deadline); }

bool stopped(pid_t pid, std::chrono::seconds deadline) { return reaches(pid, "T", false, deadline); }

bool can_be_stopped_by_a_terminal() {
  return (::getpgrp() == ::getpid() || ::setpgid(0, 0) == 0) && ::getsid(0) == ::getsid(::getppid()) &&
         ::getpgrp() != ::getpgid(::getppid());
}

void expect_refusal(const std::string& program, const std::vector<std::string>& flags,
                    const std::string& words) {
  std::vector<std::string> command{built(program)};
  command.insert(command.end(), flags.begin(), flags.end());
  Program p(command);
  EXPECT_EQ(p.wait(), 2);
  const std::string err = p.err();
  EXPECT_EQ(err.find(program + ": "), 0u) << err;
  EXPECT_NE(err.find(words), std::string::npos) << err;
  EXPECT_EQ(std::count(err.begin(), err.end(), '\n'), 1) << err;
  EXPECT_EQ(p.out(), "");
}

std::string json_of(const std::string& program, int ranks, const std::vector<std::string>& flags,
                    std::string* out) {
  const auto path = std::filesystem::temp_directory_path() /
                    concat("rz_", program, "_test_", static_cast<int>(::getpid()), ".json");
  std::vector<std::string> command{built("rzrun"), "-n",     concat(ranks),
                                   built(program), "--json", path.string()};
  command.insert(command.end(), flags.begin(), flags.end());
  Program p(command);
  EXPECT_EQ(p.wait(), 0) << p.err();
  if (out) *out = p.out();
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  std::filesystem::remove(path);
  return text.str();
}

}  // namespace rz::test
