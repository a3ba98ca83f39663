#pragma once
/// Starts a program; returns its output and exit status.

#include <sys/types.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace rz::test {

/// A program of this build.
inline std::string built(const std::string& name) { return RZ_BINARY_DIR "/bin/" + name; }

class Program {
 public:
  using Variables = std::vector<std::pair<std::string, std::string>>;

  /// The environment is this process's without launchers' variables, plus `variables`. Standard input is
  /// empty.
  explicit Program(const std::vector<std::string>& command, const Variables& variables = {});
  Program(const Program&) = delete;
  ~Program();

  pid_t pid() const { return pid_; }
  void signal(int signal) const;
  /// Its exit status, as a shell reports it. A program that has not ended by the deadline is killed, and the
  /// test fails.
  int wait(std::chrono::seconds deadline = std::chrono::seconds(60));
  /// Waits until standard output or error holds the text; the test fails after the deadline.
  void wait_for(const std::string& text, std::chrono::seconds deadline = std::chrono::seconds(30)) const;
  /// Its output so far.
  std::string out() const;
  std::string err() const;

 private:
  pid_t pid_ = -1;
  int out_ = -1, err_ = -1;
};

/// True once no process has the id any more, or only a zombie of another parent.
bool gone(pid_t pid, std::chrono::seconds deadline = std::chrono::seconds(30));
/// True once a signal has stopped the process.
bool stopped(pid_t pid, std::chrono::seconds deadline = std::chrono::seconds(30));
/// Makes this process the first of a group, as a shell does with a job, so that SIGTSTP stops its children.
/// False if the kernel stops none of it: this process leads a session, or its parent is in another one.
bool can_be_stopped_by_a_terminal();

/// The program, one of this build, rejects these flags: status 2, and only one line that begins with its name
/// and holds the words.
void expect_refusal(const std::string& program, const std::vector<std::string>& flags,
                    const std::string& words);

/// Runs a program of this build on that many ranks, which must succeed. Returns the file that its flag --json
/// names; `out` receives its standard output.
std::string json_of(const std::string& program, int ranks, const std::vector<std::string>& flags,
                    std::string* out = nullptr);

}  // namespace rz::test
