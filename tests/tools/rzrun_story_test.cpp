// Needs: rzrun_lib rz_bench rzrun flight all_reduce_perf sendrecv_perf eat_memory

// What rzrun prints about a failure: the report of a rank, its call, its stack, and where the others were.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/os/fd.h"
#include "comm/os/flight_recorder.h"
#include "comm/transport/flight_report.h"
#include "tests/support/fuzz.h"
#include "tests/support/program.h"
#include "tests/support/rzrun.h"
#include "tools/rzrun/ranks/error_file.h"
#include "tools/rzrun/ranks/exit_status.h"

namespace rz {
namespace {

using test::child_of;
using test::content;
using test::Folder;
using test::lines;
using test::Program;
using test::rzrun;
using test::until;

/// Writes a report as torch's @record does.
const char* const write_report =
    "printf '{\"message\": {\"message\": \"ValueError: no\\\\nsuch %s\", \"extraInfo\": {\"py_callstack\": "
    "\"…\", \"timestamp\": \"1\"%s}}}' $RANK \"$EXTRA\" > $TORCHELASTIC_ERROR_FILE; ";

TEST(Rzrun, TheLastLineIsTheFirstFailureWithItsReport) {
  Folder folder;
  Program p(rzrun({"-n", "3"}, std::string("[ $RANK = 2 ] && { ") + write_report +
                                   "exit 5; }; trap 'echo late >&2; exit 9' TERM; sleep 60 & wait"),
            {{"TORCHELASTIC_ERROR_FILE", folder / "rzrun.json"}});
  EXPECT_EQ(p.wait(), 5);
  EXPECT_EQ(lines(p.err()).back(), "rzrun: first failure: rank 2 of 3 exited with 5: ValueError: no such 2");
  const std::string own = content(folder / "rzrun.json");
  EXPECT_NE(own.find("ValueError: no such 2"), std::string::npos) << own;
  EXPECT_NE(own.find("\"errorCode\":5"), std::string::npos) << own;
}

TEST(Rzrun, ARankThatAReportBlamesIsTheFirstFailure) {
  Program p(rzrun({"-n", "2"}, std::string("EXTRA=', \"culprit\": 1'; [ $RANK = 0 ] && { ") + write_report +
                                   "exit 1; }; trap '' TERM; sleep 0.3; EXTRA=; " + write_report + "exit 3"));
  EXPECT_EQ(p.wait(), 1);
  EXPECT_EQ(lines(p.err()).back(), "rzrun: first failure: rank 1 of 2 exited with 3: ValueError: no such 1");
}

TEST(Rzrun, ASignalIsReportedInTheErrorFile) {
  Folder folder;
  Program p(rzrun({"-n", "2", "--log-dir", folder / "logs"}, "[ $RANK = 1 ] && kill -SEGV $$; sleep 60"));
  EXPECT_EQ(p.wait(), 128 + SIGSEGV);
  const std::string report = content(folder / "logs/rank1.error.json");
  EXPECT_NE(report.find("\"message\":\"rank 1 killed by SIGSEGV (Segmentation fault)"), std::string::npos)
      << report;
  EXPECT_FALSE(std::filesystem::exists(folder / "logs/rank0.error.json"));
}

/// What the process has recorded so far.
std::string activity_of(pid_t pid) {
  std::error_code error;
  for (const auto& fd : std::filesystem::directory_iterator(concat("/proc/", pid, "/fd"), error)) {
    if (std::filesystem::read_symlink(fd, error).string().find("ringzero-flight") == std::string::npos)
      continue;
    const std::string bytes = content(fd.path());
    return flight::read_report(std::as_bytes(std::span(bytes))).activity;
  }
  return "";
}

/// Waits until the rank of all_reduce_perf makes one call after the other: those before have small numbers.
void wait_for_call(pid_t rank) {
  const std::string begin = "all_reduce #";
  const auto has_begun = [&] {
    const std::string activity = activity_of(rank);
    const auto at = activity.find(begin);
    return at != std::string::npos && std::atoi(activity.c_str() + at + begin.size()) > 100;
  };
  const auto end = Deadline::after(std::chrono::seconds(60));
  while (!has_begun() && !end.expired()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(has_begun()) << activity_of(rank);
}

/// Ends rank 1 of two that make many calls. Returns what rzrun prints.
std::string story_of(int signal, bool through_an_agent = false) {
  std::vector<std::string> flags{"-n", "2"};
  if (through_an_agent) flags.emplace_back("--force_multi");
  Program p(rzrun(flags, "[ $RANK = 1 ] && echo pid $$; exec " + test::built("all_reduce_perf") +
                             " -b 8 -e 8 -n 1000000000 -w 0 -c 0"));
  p.wait_for("pid ");
  const pid_t rank = std::stoi(p.out().substr(p.out().find("pid ") + 4));
  wait_for_call(rank);
  ::kill(rank, signal);
  EXPECT_EQ(p.wait(), 128 + signal);
  return p.err();
}

TEST(Rzrun, TheLastLineHasTheCallOfARankThatWasKilled) {
  const std::string last = lines(story_of(SIGKILL)).back();
  EXPECT_TRUE(last.starts_with("rzrun: first failure: rank 1 of 2 killed by SIGKILL (Killed); ")) << last;
  EXPECT_NE(last.find("all_reduce #"), std::string::npos) << last;
  EXPECT_NE(last.find(" (2 f32, sum) of "), std::string::npos) << last;
}

TEST(Rzrun, TheOtherRanksHaveOneLineWithTheCallTheyWaitedIn) {
  for (const bool through_an_agent : {false, true}) {
    const auto all = lines(story_of(SIGKILL, through_an_agent));
    ASSERT_GE(all.size(), 2u);
    const std::string& line = all[all.size() - 2];
    EXPECT_TRUE(line.starts_with("rzrun: rank 0 was in all_reduce #") ||
                (line.starts_with("rzrun: rank 0 waited in all_reduce #") && line.ends_with(" for rank 1")))
        << line;
    EXPECT_NE(line.find(" (2 f32, sum) of "), std::string::npos) << line;
  }
}

TEST(Rzrun, WritesTheLastCallsOfAKilledRank) {
  Folder folder;
  ::setenv("RZ_FLIGHT", (folder / "flights").c_str(), 1);
  story_of(SIGKILL);
  ::unsetenv("RZ_FLIGHT");
  Program flight({test::built("flight"), folder / "flights"});
  EXPECT_LE(flight.wait(), 1) << flight.err();  // rank 1 may have ended between two calls
  EXPECT_EQ(flight.out().find("no file"), std::string::npos) << flight.out();
  EXPECT_NE(content(folder / "flights/flight_rank_1").find("killed by SIGKILL"), std::string::npos);
  EXPECT_NE(content(folder / "flights/flight_rank_0").find("rank 1"), std::string::npos);
}

TEST(Rzrun, TheFirstFailureIsPrintedOnceAndLast) {
  const std::string story = story_of(SIGKILL);
  EXPECT_EQ(story.find("rank 1 of 2"), story.rfind("rank 1 of 2")) << story;
}

TEST(Rzrun, AGroupThatDoesNotEndHasANotice) {
  Folder folder;
  const std::string ready = folder / "ready";
  Program p(rzrun(
      {"-n", "3", "--grace", "300"},
      concat("[ $RANK = 1 ] && { ", until({ready + "0", ready + "2"}),
             "exit 5; }; trap '' TERM; echo pid $$; : > ", ready, "$RANK; while :; do sleep 0.1; done")));
  while (lines(p.out()).size() < 2) p.wait_for("pid");
  p.wait_for("rzrun: a rank has failed; ranks 0, 2 have got SIGTERM, and 300 s to end (--grace)\n");
  for (const auto& line : lines(p.out())) ::kill(std::stoi(line.substr(4)), SIGKILL);
  EXPECT_EQ(p.wait(), 5);
  EXPECT_EQ(lines(p.err()).back(), "rzrun: first failure: rank 1 of 3 exited with 5");
}

TEST(Rzrun, TheStackOfACrashIsPrinted) {
  const std::string story = story_of(SIGSEGV);
  EXPECT_NE(story.find("rzrun: the stack of rank 1:\n#0 "), std::string::npos) << story;
  EXPECT_NE(story.find("\n#3 "), std::string::npos) << story;
  EXPECT_NE(story.find("main"), std::string::npos) << story;
  EXPECT_NE(lines(story).back().find("killed by SIGSEGV (Segmentation fault); "), std::string::npos) << story;
}

/// A file of a recorder with three communicators, in the update and on the stack of a crash.
std::string flight_file() {
  const UniqueFd fd = flight::make_file();
  std::string bytes(sizeof(flight::File), '\0');
  EXPECT_EQ(::pread(fd.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  auto* const file = reinterpret_cast<flight::File*>(bytes.data());
  file->update.store(17);
  file->signal.store(SIGSEGV);
  std::memcpy(file->stack, "/bin/x+0x12\n?+0x7\n", 19);
  for (flight::Row& row : std::span(file->row).first(3)) {
    row.used.store(1);
    row.size = 4;
    std::memcpy(row.name, "world", 5);
    row.collective.begun.store(flight::max_calls + 1);
    flight::Call& call = row.collective.call[0];
    call.what.store(std::uint64_t{1} << 47 | std::uint64_t{9} << 48 | 204);
    call.in_count.store(1024);
    call.out_count.store(1024);
  }
  file->site[8].line.store(88);
  std::memcpy(file->site[8].file, "/home/me/train.cpp", 18);
  return bytes;
}

TEST(RzrunReports, AnyBytesOfARecorderAreReadOrRefused) {
  const std::string good = flight_file();
  EXPECT_EQ(flight::read_report(std::as_bytes(std::span(good)))
                .activity.find("in all_reduce #204 (1024 f32, sum) of 'world' at train.cpp:88 and "),
            0u);
  test::Fuzz fuzz(500);
  long stacks = 0;
  constexpr std::size_t parts[] = {0, offsetof(flight::File, row) + offsetof(flight::Row, collective),
                                   offsetof(flight::File, site) + 8 * sizeof(flight::Site),
                                   offsetof(flight::File, stack)};
  while (fuzz.next()) {
    const std::string bytes = fuzz.changed(good, 4, parts[fuzz.random() % std::size(parts)], 128);
    const flight::Report report = flight::read_report(std::as_bytes(std::span(bytes)));
    for (const unsigned char c : report.activity) ASSERT_TRUE(c >= 32 && c != 127);
    stacks += report.stack.size() == 2;
  }
  EXPECT_GT(stacks, fuzz.tried() / 10);
  EXPECT_LT(stacks, fuzz.tried());
}

TEST(RzrunReports, HasThePositionsOfCommunicatorsThatLive) {
  std::string bytes = flight_file();
  auto* const file = reinterpret_cast<flight::File*>(bytes.data());
  const auto positions = [&] { return flight::read_report(std::as_bytes(std::span(bytes))).positions; };
  file->row[0].collective.ended.store(205);
  file->row[1].in_streams = 1;
  auto found = positions();
  ASSERT_EQ(found.size(), 2u) << "the ends of calls on a device are not known";
  EXPECT_EQ(found[1].communicator, "'world'");
  EXPECT_EQ(found[1].call, "all_reduce #204 (1024 f32, sum) of 'world' at train.cpp:88");
  EXPECT_EQ(found[1].size, 4);
  EXPECT_EQ(found[1].number, 204u);
  EXPECT_TRUE(found[1].running);
  EXPECT_FALSE(found[0].running);
  file->row[0].used.store(0);
  EXPECT_EQ(positions().size(), 1u);
  file->row[2].used.store(0);
  EXPECT_EQ(positions().size(), 2u) << "none lives: those that have ended";
}

TEST(RzrunReports, AnyBytesOfAnErrorFileAreReadOrRefused) {
  const std::string json = R"({"message": {"message": "Error: é\n\u001b[2J\u007f\u0000", )"
                           R"("extraInfo": {"timestamp": "1", "culprit": 3}}})";
  Folder folder;
  test::Fuzz fuzz(500);
  long messages = 0;
  while (fuzz.next()) {
    std::ofstream(folder / "error.json", std::ios::binary) << fuzz.changed(json);
    const auto error = rzrun::read_error_file(folder / "error.json");
    for (const unsigned char c : error ? error->message : std::string())
      ASSERT_TRUE(c == '\n' || (c >= 32 && c != 127));
    messages += error.has_value();
  }
  EXPECT_GT(messages, fuzz.tried() / 10);
  EXPECT_LT(messages, fuzz.tried());
}

TEST(Rzrun, ErrorFilesWithoutLogFilesEndWithTheJob) {
  Folder folder;
  Program p(
      rzrun({"-n", "1"}, "echo $TORCHELASTIC_ERROR_FILE; echo garbage > $TORCHELASTIC_ERROR_FILE; exit 4"),
      {{"TMPDIR", folder.path()}});
  EXPECT_EQ(p.wait(), 4);
  EXPECT_TRUE(p.out().starts_with(folder.path())) << p.out();
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  EXPECT_EQ(lines(p.err()).size(), 1u) << p.err();
}

TEST(Rzrun, TheErrorFilesOfAKilledRzrunVanishWithTheNextOne) {
  Folder folder;
  const Program::Variables here{{"TMPDIR", folder.path()}};
  const auto folders = [&] { return std::distance(std::filesystem::directory_iterator(folder.path()), {}); };
  Program killed(rzrun({"-n", "1"}, "echo up; sleep 60"), here),
      alive(rzrun({"-n", "1"}, "echo up; sleep 60"), here);
  killed.wait_for("up");
  alive.wait_for("up");
  ::kill(child_of(killed.pid()), SIGKILL);  // the process that has made them
  EXPECT_EQ(killed.wait(), 128 + SIGKILL);
  EXPECT_EQ(folders(), 2);
  Program next(rzrun({"-n", "1"}, "exit 0"), here);
  EXPECT_EQ(next.wait(), 0);
  EXPECT_EQ(folders(), 1) << "that of a living rzrun";
  alive.signal(SIGTERM);
  alive.wait();
  EXPECT_EQ(folders(), 0);
}

// ---- memory

/// A control group of this process's that bounds memory, of version 1 or 2.
class MemoryGroup {
 public:
  /// Empty if none can be made here; `why` has the reason.
  static std::optional<MemoryGroup> make(std::size_t bytes, std::string& why) {
    const std::filesystem::path own = own_group();
    const bool is_v1 = own.string().starts_with("/sys/fs/cgroup/memory");
    MemoryGroup group(own / concat("rzrun_test_", ::getpid()));
    std::error_code error;
    if (!std::filesystem::create_directory(group.path_, error)) {
      why = concat(group.path_.string(), ": ", error.message());
      return {};
    }
    std::ofstream limit(group.path_ / (is_v1 ? "memory.limit_in_bytes" : "memory.max"));
    limit << bytes << std::flush;
    if (!limit) why = concat(group.path_.string(), " has no limit of memory");
    std::ofstream(group.path_ / (is_v1 ? "memory.memsw.limit_in_bytes" : "memory.swap.max"))
        << (is_v1 ? bytes : 0);
    return limit ? std::optional(std::move(group)) : std::nullopt;
  }
  MemoryGroup(MemoryGroup&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  /// Once all its processes have ended.
  ~MemoryGroup() {
    const Deadline end = Deadline::after(std::chrono::seconds(10));
    while (!path_.empty() && ::rmdir(path_.c_str()) != 0 && errno == EBUSY && !end.expired())
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  /// Shell words with which the shell and what it starts enter the group.
  std::string enter() const { return concat("echo $$ > ", (path_ / "cgroup.procs").string(), " && exec "); }

 private:
  explicit MemoryGroup(std::filesystem::path path) : path_(std::move(path)) {}

  static std::filesystem::path own_group() {
    std::string of_v2 = "/";
    for (const std::string& line : lines(content("/proc/self/cgroup"))) {
      const auto parts = parts_of(line, ':');
      if (parts.size() == 3 && parts[1] == "memory") return "/sys/fs/cgroup/memory" + parts[2];
      if (parts.size() == 3 && parts[1].empty()) of_v2 = parts[2];
    }
    return "/sys/fs/cgroup" + of_v2;
  }

  std::filesystem::path path_;
};

/// Rank 1 takes memory beyond the limit of its control group while both make calls.
TEST(Rzrun, AKillByTheKernelForMemoryIsExplained) {
  std::string why;
  const auto group = MemoryGroup::make(std::size_t{300} << 20, why);
  if (!group) GTEST_SKIP() << "no control group of memory can be made: " << why;
  Folder folder;
  const std::string now = folder / "now";
  const std::string script =
      "[ $RANK = 1 ] && export LD_PRELOAD=" RZ_BINARY_DIR "/stubs/eat_memory.so EAT_MEMORY_ONCE=" + now +
      " && echo pid $$; exec " + test::built("all_reduce_perf") + " -b 8 -e 8 -n 1000000000 -w 0 -c 0";
  Program p({"sh", "-c", group->enter() + "\"$0\" -n 2 sh -c \"$1\"", test::built("rzrun"), script});
  p.wait_for("pid ");
  wait_for_call(std::stoi(p.out().substr(p.out().find("pid ") + 4)));
  std::ofstream(now) << "";
  EXPECT_EQ(p.wait(), 128 + SIGKILL) << p.err();
  const std::string last = lines(p.err()).back();
  EXPECT_TRUE(last.starts_with("rzrun: first failure: rank 1 of 2 killed by SIGKILL (Killed); ")) << p.err();
  // The thread that takes the memory may be killed between two calls of the other.
  EXPECT_NE(last.find(" all_reduce #"), std::string::npos) << last;
  EXPECT_NE(last.find("; the kernel's out-of-memory killer struck meanwhile: start fewer ranks, or raise"),
            std::string::npos)
      << last;
}

TEST(RzrunExitStatus, OutOfMemoryKillsAreCounted) {
  Folder directory;
  const std::string file = directory / "memory.events";
  std::ofstream(file) << "low 0\nhigh 4\noom 1\noom_kill 2\n";
  const rzrun::OomCounter counter({directory / "missing", file});
  EXPECT_FALSE(counter.increased());
  std::ofstream(file) << "low 0\nhigh 4\noom 2\noom_kill 3\n";
  EXPECT_TRUE(counter.increased());
}

}  // namespace
}  // namespace rz
