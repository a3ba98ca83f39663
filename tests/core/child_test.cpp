// Runs: ci

#include "comm/os/child.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

namespace rz {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

Deadline soon() { return Deadline::after(30s); }

int exit_status(Child& child) {
  EXPECT_TRUE(child.wait(soon()));
  return WIFEXITED(child.status()) ? WEXITSTATUS(child.status()) : -1;
}

int end_signal(Child& child) {
  EXPECT_TRUE(child.wait(soon()));
  return WIFSIGNALED(child.status()) ? WTERMSIG(child.status()) : 0;
}

std::string line_from(const UniqueFd& pipe) {
  std::string text;
  for (char c; ::read(pipe.get(), &c, 1) == 1 && c != '\n';) text += c;
  return text;
}

/// No process has the id, or one that waits for its parent to ask.
bool gone(pid_t pid) {
  for (const auto end = soon(); !end.expired(); std::this_thread::sleep_for(2ms))
    if (::kill(pid, 0) != 0 ||
        output_of({"cat", "/proc/" + std::to_string(pid) + "/stat"}, soon()).find(") Z") != std::string::npos)
      return true;
  return false;
}

TEST(Child, ItsStatusIsWhatItsFunctionReturns) {
  Child seven([] { return 7; });
  EXPECT_EQ(exit_status(seven), 7);
  Child throws([]() -> int { throw std::runtime_error("of the child alone"); });
  EXPECT_EQ(exit_status(throws), 1);
}

TEST(Child, OneThatIsOverKeepsItsNumberUntilItIsWaitedFor) {
  auto [read, write] = make_pipe();
  Child child([&] {
    write.close();
    char c;
    return static_cast<int>(::read(read.get(), &c, 1));
  });
  const pid_t pid = child.pid();
  EXPECT_FALSE(child.is_over());
  read.close();
  write.close();
  for (const auto end = soon(); !child.is_over() && !end.expired();) std::this_thread::sleep_for(2ms);
  EXPECT_TRUE(child.is_over());
  EXPECT_EQ(child.pid(), pid);
  EXPECT_EQ(::kill(pid, 0), 0);
  EXPECT_EQ(exit_status(child), 0);
  EXPECT_TRUE(child.is_over());
}

TEST(Child, ProgramHasItsVariablesAndStreams) {
  auto [in_read, in_write] = make_pipe();
  auto [out_read, out_write] = make_pipe();
  Child child(
      [] {
        return exec_or_say({"sh", "-c", "read word; echo \"$word $RZ_TEST_CHILD\""},
                           {{"RZ_TEST_CHILD", "two words"}});
      },
      {.in = in_read.get(), .out = out_write.get(), .err = ChildOptions::null});
  ASSERT_EQ(::write(in_write.get(), "these\n", 6), 6);
  EXPECT_EQ(line_from(out_read), "these two words");
  EXPECT_EQ(exit_status(child), 0);
  EXPECT_EQ(std::getenv("RZ_TEST_CHILD"), nullptr);
}

TEST(Child, ProgramThatIsNotThereSaysSo) {
  auto [read, write] = make_pipe();
  Child child([] { return exec_or_say({"/not/there"}); }, {.err = write.get()});
  EXPECT_EQ(line_from(read), "cannot start '/not/there': No such file or directory");
  EXPECT_EQ(exit_status(child), 127);
}

TEST(Child, WaitEndsAtItsDeadline) {
  Child child([] { return ::pause(); });
  EXPECT_FALSE(child.wait(Deadline::after(20ms)));
  EXPECT_FALSE(child.ended());
  EXPECT_GT(child.pid(), 0);
  child.kill();
  EXPECT_EQ(end_signal(child), SIGKILL);
  EXPECT_EQ(child.pid(), 0);
}

TEST(Child, EndsByTheSignalThatItObeys) {
  Child child([] { return ::pause(); });
  child.end_within(30s);
  EXPECT_EQ(end_signal(child), SIGTERM);
}

TEST(Child, IsKilledIfItIgnoresSIGTERM) {
  auto [read, write] = make_pipe();
  Child child([&] {
    ::signal(SIGTERM, SIG_IGN);
    if (::write(write.get(), "\n", 1) != 1) return 1;
    for (;;) ::pause();
  });
  line_from(read);
  const auto start = Clock::now();
  child.end_within(50ms);
  EXPECT_GE(Clock::now() - start, 50ms);
  EXPECT_EQ(end_signal(child), SIGKILL);
}

TEST(Child, GoesWithItsGroupWhenItsOwnerDoes) {
  auto [read, write] = make_pipe();
  pid_t grandchild = 0;
  {
    const Child child(
        [] {
          return exec_or_say({"sh", "-c", "sleep 1000 & echo $!; wait"});
        },
        {.out = write.get(), .own_group = true});
    grandchild = std::stoi(line_from(read));
    EXPECT_EQ(::getpgid(grandchild), child.pid());
  }
  EXPECT_TRUE(gone(grandchild));
}

TEST(Child, EndsWithTheThreadThatStartedItIfItShall) {
  auto [read, write] = make_pipe();
  Child child;
  std::thread([&] {
    child = Child([&] { return ::write(write.get(), "\n", 1) == 1 ? ::pause() : 1; },
                  {.signal_if_orphaned = SIGUSR1});
    line_from(read);
  }).join();
  EXPECT_EQ(end_signal(child), SIGUSR1);
}

TEST(Child, IsMovedWithItsStatus) {
  Child seven([] { return 7; });
  exit_status(seven);
  Child other([] { return ::pause(); });
  const pid_t replaced = other.pid();
  other = std::move(seven);
  EXPECT_EQ(exit_status(other), 7);
  EXPECT_NE(::kill(replaced, 0), 0) << "it has been killed and waited for";
}

TEST(OutputOf, IsWhatTheProgramPrints) {
  EXPECT_EQ(output_of({"sh", "-c", "cat; echo out; echo err >&2"}, soon()), "out\n") << "its input is empty";
  EXPECT_EQ(output_of({"/not/there"}, soon()), "");
}

TEST(OutputOf, EndsAtTheDeadline) {
  const auto start = Clock::now();
  EXPECT_EQ(output_of({"sh", "-c", "echo first; exec sleep 1000"}, Deadline::after(300ms)), "first\n");
  EXPECT_LT(Clock::now() - start, 30s);
}

}  // namespace
}  // namespace rz
