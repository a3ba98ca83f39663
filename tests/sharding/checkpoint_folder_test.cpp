// Runs: ci
// Not under sanitizers: TwoHundredKills

// Folders of checkpoints: a checkpoint is visible complete or not at all, whenever its process is killed.

#include "sharding/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <random>
#include <set>

#include "sharding/checkpoint/checkpoint_reader.h"
#include "sharding/io/file.h"
#include "sharding/io/json.h"
#include "tests/support/error_of.h"
#include "tests/support/forked.h"
#include "tests/support/written_checkpoint.h"

namespace {
bool names_can_be_exchanged = true;
/// Calls that change a folder until this process is killed; negative: it is not.
int calls_to_live = -1;
/// Renames that succeed before the first one that fails, and how many fail.
int renames_before_failure = -1, failing_renames = 0;

void count_call() {
  if (calls_to_live >= 0 && calls_to_live-- == 0) ::raise(SIGKILL);
}
}  // namespace

// These replace the C library's.
extern "C" {
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  count_call();
  if (names_can_be_exchanged)
    return static_cast<int>(::syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
  errno = EINVAL;
  return -1;
}
int rename(const char* from, const char* to) noexcept {
  count_call();
  if (renames_before_failure >= 0 && --renames_before_failure < 0) {
    if (--failing_renames > 0) renames_before_failure = 0;
    errno = EIO;
    return -1;
  }
  return ::renameat(AT_FDCWD, from, AT_FDCWD, to);
}
int fsync(int fd) {
  count_call();
  return static_cast<int>(::syscall(SYS_fsync, fd));
}
int unlink(const char* path) noexcept {
  count_call();
  return static_cast<int>(::syscall(SYS_unlinkat, AT_FDCWD, path, 0));
}
int unlinkat(int folder, const char* path, int flags) noexcept {
  count_call();
  return static_cast<int>(::syscall(SYS_unlinkat, folder, path, flags));
}
int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) noexcept {
  count_call();
  return static_cast<int>(::syscall(SYS_linkat, from_folder, from, to_folder, to, flags));
}
int mkdir(const char* path, mode_t mode) noexcept {
  count_call();
  return static_cast<int>(::syscall(SYS_mkdirat, AT_FDCWD, path, mode));
}
}

namespace rz {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using test::Folder;
using test::in_forked_child;
using Tags = std::vector<std::string>;

std::set<std::string> names_in_folder(const std::string& dir) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir)) names.insert(entry.path().filename());
  return names;
}

/// Writes a checkpoint whose tensor begins with `first`.
void save(const std::string& dir, const std::string& tag, float first) {
  PartialCheckpoint checkpoint(dir, tag);
  const CheckpointIndex index =
      test::write_shards(checkpoint.folder(), {{"model/w", {8}, test::equal_ranges(8, 2), first}}, 2);
  checkpoint.commit(to_json(index));
}

/// The first element of a checkpoint that is complete and undamaged.
float first_element(const std::string& dir, const std::string& tag) {
  CheckpointReader reader = CheckpointReader::open(dir + "/" + tag);
  for (std::size_t f = 0; f < 2; ++f) reader.verify(f);
  std::vector<float> values(8);
  const TensorSource tensors = reader.tensors(TensorPart::all);
  tensors.read_f32(*tensors.find("model/w"), 0, values);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(values[i], values[0] + static_cast<float>(i));
  return values[0];
}

// ---- tags

TEST(CheckpointTags, AreNamesOfFolders) {
  for (const char* tag : {"a", "global_step1", "best model é", "step=3,loss=0.5", "a.b", "-x"})
    EXPECT_NO_THROW(check_tag(tag)) << tag;
  EXPECT_NO_THROW(check_tag(std::string(200, 'x')));
  const std::pair<std::string, const char*> wrong[] = {
      {"", "'' of a checkpoint is empty"},
      {std::string(201, 'x'), "is longer than 200 bytes"},
      {".hidden", "begins with '.'"},
      {"..", "begins with '.'"},
      {"latest", "is the name of a file beside the checkpoints"},
      {"best", "is the name of a file beside the checkpoints"},
      {"checkpoint.json", "is the name of a file beside the checkpoints, or in them"},
      {"a/b", "has a '/' in it"},
      {"a\nb", "has control characters in it"},
      {"\xff", "is not UTF-8"}};
  for (const auto& [tag, what] : wrong) {
    const Error e = error_of([&] { check_tag(tag); });
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    EXPECT_NE(std::string(e.what()).find(what), std::string::npos) << e.what();
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
  }
}

TEST(CheckpointTags, HaveTheNumberOfSteps) {
  EXPECT_EQ(step_tag(12), "global_step12");
  EXPECT_EQ(steps_of_tag("global_step12"), 12);
  for (const char* tag : {"global_step", "global_step012", "global_step1x", "global_step 1", "step1", "",
                          "global_step99999999999999999999"})
    EXPECT_EQ(steps_of_tag(tag), std::nullopt) << tag;
}

// ---- folders, where names can be exchanged and where not

class CheckpointFolder : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override { names_can_be_exchanged = GetParam(); }
  void TearDown() override { names_can_be_exchanged = true; }
  const std::string& dir() const { return dir_.path(); }
  std::set<std::string> names() const { return names_in_folder(dir()); }
  std::string latest() const { return read_tag_file(dir(), latest_file).value_or("none"); }

  Folder dir_;
};

TEST_P(CheckpointFolder, ACheckpointIsVisibleWhenItIsCommitted) {
  EXPECT_EQ(checkpoint_tags(dir() + "/none"), Tags{});
  EXPECT_EQ(read_tag_file(dir(), latest_file), std::nullopt);
  {
    PartialCheckpoint checkpoint(dir() + "/a/b", "global_step1");
    EXPECT_EQ(checkpoint_tags(dir() + "/a/b"), Tags{});
  }
  EXPECT_EQ(names_in_folder(dir() + "/a/b"), std::set<std::string>{}) << "it was not committed";
  save(dir() + "/a/b", "global_step1", 5);
  EXPECT_EQ(names_in_folder(dir() + "/a/b"), (std::set<std::string>{"global_step1", "latest"}));
  EXPECT_EQ(first_element(dir() + "/a/b", "global_step1"), 5);
}

TEST_P(CheckpointFolder, TagsAreInTheOrderOfSteps) {
  for (const char* tag : {"z", "global_step10", "global_step9", "a"}) save(dir(), tag, 1);
  fs::create_directory(dir() + "/no_checkpoint");
  EXPECT_EQ(checkpoint_tags(dir()), (Tags{"global_step9", "global_step10", "a", "z"}));
  EXPECT_EQ(latest(), "a");
}

TEST_P(CheckpointFolder, AFolderThatCannotBeReadIsNamed) {
  std::ofstream(dir() + "/file") << "x";
  const Error e = error_of([&] { checkpoint_tags(dir() + "/file"); });
  EXPECT_EQ(e.code(), Errc::io);
  EXPECT_EQ(std::string(e.what()), dir() + "/file: cannot be read: Not a directory");
}

TEST_P(CheckpointFolder, ATagFileHoldsATag) {
  const std::string path = dir() + "/latest";
  write_tag_file(dir(), latest_file, "global_step3");
  EXPECT_EQ(read_text_file(path), "global_step3");
  std::ofstream(path) << "by hand\r\n";
  EXPECT_EQ(latest(), "by hand");
  std::ofstream(path) << "../x";
  const Error e = error_of([&] { latest(); });
  EXPECT_EQ(e.code(), Errc::config);
  EXPECT_EQ(std::string(e.what()).rfind(path + ": the tag '../x' ", 0), 0u) << e.what();
}

TEST_P(CheckpointFolder, ACheckpointReplacesOneOfItsTag) {
  save(dir(), "x", 1);
  std::ofstream(dir() + "/x/config.json") << "of the first";
  save(dir(), "x", 2);
  EXPECT_EQ(first_element(dir(), "x"), 2);
  EXPECT_FALSE(fs::exists(dir() + "/x/config.json"));
  EXPECT_EQ(names(), (std::set<std::string>{"x", "latest"}));
}

TEST_P(CheckpointFolder, AFolderThatIsNoCheckpointIsNotReplaced) {
  const std::string mine = dir() + "/x/mine.txt";
  const auto make_mine = [&] {
    fs::create_directory(dir() + "/x");
    std::ofstream(mine) << "mine";
  };
  const std::string what = dir() +
                           "/x: exists, and is not a checkpoint: it has no checkpoint.json; choose "
                           "another tag, or remove it";
  make_mine();
  EXPECT_EQ(error_of([&] { save(dir(), "x", 1); }).what(), what);
  fs::remove_all(dir() + "/x");
  {
    PartialCheckpoint checkpoint(dir(), "x");
    make_mine();
    EXPECT_EQ(error_of([&] { checkpoint.commit(to_json(CheckpointIndex{})); }).what(), what);
  }
  EXPECT_EQ(read_text_file(mine), "mine");
  EXPECT_EQ(names(), std::set<std::string>{"x"});
}

// ---- processes that are killed

/// A process that replaces a checkpoint is killed before its call number `call`. Returns false once it lives.
bool killed_at(const std::string& dir, int call) {
  const int status = in_forked_child([&] {
    calls_to_live = call;
    save(dir, "x", 2);
    calls_to_live = -1;
    return true;
  });
  EXPECT_TRUE(status == 0 || status == 1000 + SIGKILL) << status;
  return status != 0;
}

TEST_P(CheckpointFolder, AProcessKilledAtAnyCallLeavesACompleteCheckpoint) {
  int call = 0;
  std::set<float> found;
  for (bool killed = true; killed; ++call) {
    SCOPED_TRACE(call);
    save(dir(), "x", 1);
    killed = killed_at(dir(), call);
    if (GetParam()) first_element(dir(), "x");
    remove_stale(dir());
    EXPECT_EQ(names(), (std::set<std::string>{"x", "latest"}));
    found.insert(first_element(dir(), latest()));
  }
  EXPECT_GT(call, 12) << "the calls of a save were counted";
  EXPECT_EQ(found, (std::set<float>{1, 2}));
}

TEST_P(CheckpointFolder, AKillDuringTheFirstSaveLeavesNothingOrACheckpointThatLatestNames) {
  std::set<std::set<std::string>> found;
  int call = 0;
  for (bool killed = true; killed; ++call) {
    SCOPED_TRACE(call);
    fs::remove_all(dir());
    killed = killed_at(dir(), call);
    remove_stale(dir());
    if (!fs::exists(dir())) continue;  // not made yet
    found.insert(names());
    if (names().contains("x")) {
      EXPECT_EQ(first_element(dir(), latest()), 2);
    }
  }
  EXPECT_EQ(found, (std::set<std::set<std::string>>{{}, {"x", "latest"}}));
}

TEST_P(CheckpointFolder, FailedRenamesLeaveACompleteCheckpoint) {
  for (const int failing : {1, 2, 3})
    for (int before = 0, failed = true; failed; ++before) {
      SCOPED_TRACE(testing::Message() << failing << " fail after " << before);
      save(dir(), "x", 1);
      renames_before_failure = before, failing_renames = failing;
      failed = true;
      try {
        save(dir(), "x", 2);
        failed = false;
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Errc::io);
      }
      renames_before_failure = -1;
      remove_stale(dir());
      EXPECT_EQ(names(), (std::set<std::string>{"x", "latest"}));
      const float first = first_element(dir(), latest());
      EXPECT_TRUE(first == 2 || (failed && first == 1)) << first;
    }
}

TEST_P(CheckpointFolder, AnotherFolderOfTheNameDoesNotReplaceTheOldCheckpoint) {
  const std::string old = dir() + "/.x.ringzero-abcdef.replaced";
  save(dir(), "x", 1);
  fs::rename(dir() + "/x", old);
  std::ofstream(dir() + "/.x.ringzero-abcdef.lock") << "";
  fs::create_directory(dir() + "/x");
  std::ofstream(dir() + "/x/mine.txt") << "mine";
  EXPECT_EQ(error_of([&] { remove_stale(dir()); }).code(), Errc::io);
  EXPECT_TRUE(fs::exists(old + "/checkpoint.json"));
  fs::remove_all(dir() + "/x");
  remove_stale(dir());
  EXPECT_EQ(first_element(dir(), "x"), 1);
}

/// Runs f in a child that is killed after that time, unless it has ended.
template <class F>
void kill_after(std::chrono::microseconds time, const F& f) {
  const pid_t child = ::fork();
  if (child == 0) {
    f();
    _exit(0);
  }
  std::this_thread::sleep_for(time);
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
}

TEST_P(CheckpointFolder, TwoHundredKillsAtRandomInstantsLoseNothing) {
  std::mt19937 random(GetParam());
  save(dir(), "global_step0", 0);
  for (int kill = 1; kill <= 200; ++kill) {
    SCOPED_TRACE(kill);
    kill_after(std::chrono::microseconds(random() % 20000), [&] {
      for (int i = 0;; ++i) {
        const int step = i % 3;  // replaces those of the killed process before it
        save(dir(), step_tag(step), static_cast<float>(step + 10 * kill));
      }
    });
    if (GetParam()) first_element(dir(), latest());
    remove_stale(dir());
    for (const std::string& tag : checkpoint_tags(dir()))
      EXPECT_EQ(static_cast<int>(first_element(dir(), tag)) % 10, steps_of_tag(tag)) << tag;
    std::set<std::string> expected{"latest"};
    for (const std::string& tag : checkpoint_tags(dir())) expected.insert(tag);
    ASSERT_EQ(names(), expected) << "nothing else is left";
    ASSERT_TRUE(expected.contains(latest()));
  }
}

TEST_P(CheckpointFolder, APartialCheckpointOfALiveProcessIsNotRemoved) {
  test::Gate ready, end;
  const pid_t child = ::fork();
  if (child == 0) {
    PartialCheckpoint checkpoint(dir(), "x");
    std::ofstream(checkpoint.folder() + "/half") << "half";
    ready.open();
    end.wait();
    _exit(0);
  }
  ready.wait();
  const auto before = names();
  EXPECT_EQ(before.size(), 2u) << "a lock and a folder";
  remove_stale(dir());
  save(dir(), "y", 3);
  save(dir(), "x", 4);
  auto now = names();
  for (const char* name : {"x", "y", "latest"}) EXPECT_EQ(now.erase(name), 1u) << name;
  EXPECT_EQ(now, before);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  remove_stale(dir());
  EXPECT_EQ(names(), (std::set<std::string>{"x", "y", "latest"}));
  remove_stale(dir() + "/none");
}

// ---- one writer

TEST(CheckpointFolders, OneProcessSavesToAFolder) {
  const Folder folder;
  const std::string dir = folder / "run";
  test::Gate ready, end;
  const pid_t child = ::fork();
  if (child == 0) {
    const auto lock = lock_checkpoint_folder(dir), again = lock_checkpoint_folder(dir + "/.");
    ready.open();
    end.wait();
    _exit(lock != again);
  }
  ready.wait();
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  const Error e = error_of([&] { lock_checkpoint_folder(dir); });
  EXPECT_EQ(e.code(), Errc::io);
  EXPECT_EQ(std::string(e.what()),
            concat(dir, ": process ", child, " on ", host.data(),
                   " saves checkpoints to it; wait until it ends, or give another folder"));
  remove_stale(dir);
  EXPECT_EQ(error_of([&] { lock_checkpoint_folder(dir); }).code(), Errc::io);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  {
    const auto lock = lock_checkpoint_folder(dir);
    remove_stale(dir);
    EXPECT_EQ(
        in_forked_child([&] { return error_of([&] { lock_checkpoint_folder(dir); }).code() == Errc::io; }), 0)
        << "a child is another process";
    EXPECT_EQ(names_in_folder(dir), std::set<std::string>{".ringzero.lock"});
  }
  EXPECT_EQ(names_in_folder(dir), std::set<std::string>{});
  in_forked_child([&] {
    const auto lock = lock_checkpoint_folder(dir);
    return ::raise(SIGKILL) == 0;
  });
  EXPECT_EQ(names_in_folder(dir).size(), 1u);
  remove_stale(dir);
  EXPECT_EQ(names_in_folder(dir), std::set<std::string>{});
}

TEST_P(CheckpointFolder, NamesOfOthersAreNotRemoved) {
  for (const char* name :
       {".x.ringzero-abcdef.lock.old", ".x.lock", "x.ringzero-abcdef.lock", ".x.ringzero-ABCDEF.lock"})
    std::ofstream(dir() + "/" + name) << "mine";
  const auto before = names();
  remove_stale(dir());
  EXPECT_EQ(names(), before);
}

INSTANTIATE_TEST_SUITE_P(FileSystems, CheckpointFolder, testing::Bool(),
                         [](const auto& info) { return info.param ? "exchange_names" : "rename_twice"; });

// ---- removing

TEST(OldCheckpoints, TheLastOnesAndThoseWithAFileOfTheirOwnRemain) {
  const Folder folder;
  const std::string& dir = folder.path();
  for (int step = 1; step <= 6; ++step) save(dir, step_tag(step), static_cast<float>(step));
  save(dir, "final", 7);
  write_tag_file(dir, latest_file, "global_step3");
  write_tag_file(dir, best_file, "global_step1");
  EXPECT_EQ(remove_old_checkpoints(dir, 100), Tags{});
  EXPECT_EQ(remove_old_checkpoints(dir, 2), (Tags{"global_step2", "global_step4"}));
  const Tags left{"global_step1", "global_step3", "global_step5", "global_step6", "final"};
  EXPECT_EQ(checkpoint_tags(dir), left);
  EXPECT_EQ(remove_old_checkpoints(dir, 2), Tags{});
  EXPECT_EQ(names_in_folder(dir), (std::set<std::string>{"global_step1", "global_step3", "global_step5",
                                                         "global_step6", "final", "latest", "best"}));
  EXPECT_EQ(remove_old_checkpoints(dir, 0), (Tags{"global_step5", "global_step6"}));
  EXPECT_EQ(first_element(dir, "global_step3"), 3);
}

TEST(OldCheckpoints, TheLastOnesAreThoseThatWereWrittenLast) {
  const Folder folder;
  const std::string& dir = folder.path();
  int age = 100;
  for (const int step : {20, 40, 60, 5, 10, 15}) {
    save(dir, step_tag(step), 1);
    fs::last_write_time(dir + "/" + step_tag(step) + "/checkpoint.json",
                        fs::file_time_type::clock::now() - std::chrono::seconds(age--));
  }
  EXPECT_EQ(remove_old_checkpoints(dir, 2),
            (Tags{"global_step20", "global_step40", "global_step60", "global_step5"}));
  EXPECT_EQ(checkpoint_tags(dir), (Tags{"global_step10", "global_step15"}));
}

TEST(OldCheckpoints, AKilledRemovalIsCompletedLater) {
  const Folder folder;
  const std::string& dir = folder.path();
  for (int call = 0, status = 1; status != 0; ++call) {
    save(dir, "kept", 1), save(dir, "x", 2), save(dir, "kept", 1);
    status = in_forked_child([&] {
      calls_to_live = call;
      remove_checkpoint(dir, "x");
      return true;
    });
    if (fs::exists(dir + "/x")) {
      EXPECT_EQ(first_element(dir, "x"), 2);
    }
    remove_stale(dir);
    std::set<std::string> names = names_in_folder(dir);
    names.erase("x");
    EXPECT_EQ(names, (std::set<std::string>{"kept", "latest"}));
  }
  EXPECT_FALSE(fs::exists(dir + "/x"));
  EXPECT_NO_THROW(remove_checkpoint(dir, "x")) << "there is none";
}

// ---- other folders

TEST(DurableFolders, AppearCompleteOrNotAtAll) {
  const Folder folder;
  const std::string path = folder / "a/out/";
  { DurableFolder unfinished(path); }
  EXPECT_EQ(names_in_folder(folder / "a"), std::set<std::string>{});
  fs::create_directory(folder / "a/out");
  DurableFolder out(path);
  std::ofstream(out.folder() + "/x") << "text";
  EXPECT_TRUE(fs::is_empty(folder / "a/out"));
  out.commit();
  EXPECT_EQ(read_text_file(folder / "a/out/x"), "text");
  EXPECT_EQ(error_of([&] { DurableFolder again(path); }).what(),
            folder / "a/out" + ": exists already; choose another name, or remove it");
}

TEST(DurableFolders, TheNextOneRemovesWhatAKilledProcessLeft) {
  const Folder folder;
  const int status = in_forked_child([&] {
    DurableFolder half(folder / "out");
    std::ofstream(half.folder() + "/x") << "half";
    return ::raise(SIGKILL) == 0;
  });
  EXPECT_EQ(status, 1000 + SIGKILL);
  EXPECT_EQ(names_in_folder(folder.path()).size(), 2u);
  { DurableFolder other(folder / "other"); }
  EXPECT_EQ(names_in_folder(folder.path()).size(), 2u) << "those of another path";
  DurableFolder(folder / "out").commit();
  EXPECT_EQ(names_in_folder(folder.path()), std::set<std::string>{"out"});
}

}  // namespace
}  // namespace rz
