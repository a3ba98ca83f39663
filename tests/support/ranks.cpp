#include "tests/support/ranks.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <thread>

#include "comm/core/deadline.h"
#include "comm/core/error.h"

namespace rz::test {

namespace {

std::string what(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return concat(name(e.code()), ": ", e.what());
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "something that is no std::exception";
  }
}

/// Ends the process unless `left` reaches zero in time.
class Watchdog {
 public:
  Watchdog(int size, std::chrono::seconds deadline)
      : running_(size, true), left_(size), thread_([this, deadline] { watch(deadline); }) {}
  ~Watchdog() { thread_.join(); }
  void ended(int rank) {
    const std::lock_guard lock(mutex_);
    running_[rank] = false;
    if (--left_ == 0) changed_.notify_all();
  }

 private:
  void watch(std::chrono::seconds deadline) {
    std::unique_lock lock(mutex_);
    const auto end = std::chrono::system_clock::now() + deadline;
    if (changed_.wait_until(lock, end, [&] { return left_ == 0; })) return;
    std::string names;
    for (std::size_t r = 0; r < running_.size(); ++r)
      if (running_[r]) names += concat(' ', r);
    std::fprintf(stderr, "run_ranks: after %lld s these ranks still run:%s\n",
                 static_cast<long long>(deadline.count()), names.c_str());
    std::abort();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> running_;
  int left_;
  std::thread thread_;
};

/// The report of a child before it ends: every failed EXPECT, one per line.
std::string failures_of_this_test() {
  std::string text;
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  if (!info) return text;
  const testing::TestResult& result = *info->result();
  for (int i = 0; i < result.total_part_count(); ++i)
    if (result.GetTestPartResult(i).failed()) text += concat(result.GetTestPartResult(i).message(), "\n");
  return text;
}

[[noreturn]] void be_rank(int rank, const RankFunction& f, const std::string& directory, int report) {
  std::string error;
  try {
    f(rank, file_store(directory));
    error = failures_of_this_test();
  } catch (...) {
    error = what(std::current_exception());
  }
  if (write(report, error.data(), error.size()) < 0) std::perror("write");
  std::fflush(nullptr);
  _exit(error.empty() ? 0 : 1);
}

struct Child {
  pid_t pid = 0;
  int report = -1;
  Ending ending;
};

/// Reads the child's report until it ends; kills it at the deadline.
void await(Child& child, Deadline deadline) {
  char text[4096];
  for (;;) {
    pollfd p{child.report, POLLIN, 0};
    if (poll(&p, 1, deadline.poll_ms(1000)) == 0) {
      if (!deadline.expired()) continue;
      kill(child.pid, SIGKILL);
      child.ending.error += "killed: it had not ended by the deadline";
      break;
    }
    const ssize_t n = read(child.report, text, sizeof text);
    if (n <= 0) break;
    child.ending.error.append(text, static_cast<std::size_t>(n));
  }
  close(child.report);
  int status = 0;
  waitpid(child.pid, &status, 0);
  if (WIFEXITED(status)) child.ending.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) child.ending.signal = WTERMSIG(status);
}

Child start_rank(int rank, const RankFunction& f, const std::string& directory) {
  int ends[2];
  if (pipe(ends) != 0) fail_errno("pipe");
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid < 0) fail_errno("fork");
  if (pid == 0) {
    close(ends[0]);
    be_rank(rank, f, directory, ends[1]);
  }
  close(ends[1]);
  return {pid, ends[0], {}};
}

}  // namespace

void run_ranks(int size, const RankFunction& f, std::chrono::seconds deadline) {
  const auto store = memory_store();
  std::vector<std::exception_ptr> errors(size);
  {
    Watchdog watchdog(size, deadline);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank)
      threads.emplace_back([&, rank] {
        try {
          f(rank, store);
        } catch (...) {
          errors[rank] = std::current_exception();
        }
        watchdog.ended(rank);
      });
    for (auto& t : threads) t.join();
  }
  for (int rank = 0; rank < size; ++rank)
    if (errors[rank]) ADD_FAILURE() << "rank " << rank << " threw " << what(errors[rank]);
}

std::vector<Ending> run_processes(int size, const RankFunction& f, std::chrono::seconds deadline) {
  std::string directory = (std::filesystem::temp_directory_path() / "rz-test-XXXXXX").string();
  if (!mkdtemp(directory.data())) fail_errno("mkdtemp", directory);
  std::vector<Child> children;
  for (int rank = 0; rank < size; ++rank) children.push_back(start_rank(rank, f, directory));
  const Deadline end = Deadline::after(deadline);
  std::vector<Ending> endings;
  for (Child& child : children) {
    await(child, end);
    endings.push_back(child.ending);
  }
  std::filesystem::remove_all(directory);
  return endings;
}

void expect_processes(int size, const RankFunction& f, std::chrono::seconds deadline) {
  const auto endings = run_processes(size, f, deadline);
  for (int rank = 0; rank < size; ++rank)
    EXPECT_EQ(endings[rank].exit_code, 0)
        << "rank " << rank << " (signal " << endings[rank].signal << "): " << endings[rank].error;
}

}  // namespace rz::test
