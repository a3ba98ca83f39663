#include "sharding/io/durable_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <set>

#include "sharding/io/json.h"
#include "tests/support/error_of.h"

namespace {
int synced_folders = 0;
}

// Replaces the C library's.
extern "C" int fsync(int fd) {
  struct stat info {};
  ::fstat(fd, &info);
  synced_folders += S_ISDIR(info.st_mode);
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

namespace rz {
namespace {

namespace fs = std::filesystem;
using Temporary = DurableFile::Temporary;

class DurableFiles : public testing::TestWithParam<Temporary> {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "rz_durable_XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override { fs::remove_all(directory_); }
  std::string path(const char* name) const { return (directory_ / name).string(); }
  std::set<std::string> names() const {
    std::set<std::string> out;
    for (const auto& entry : fs::directory_iterator(directory_)) out.insert(entry.path().filename());
    return out;
  }
  /// A process that is killed while it writes.
  void killed_while_writing(const char* name) const {
    const pid_t child = ::fork();
    if (child == 0) {
      DurableFile file(path(name), GetParam());
      file.write("half");
      ::raise(SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status));
  }

  fs::path directory_;
};

TEST_P(DurableFiles, AppearWholeOrNotAtAll) {
  for (const char* text : {"first", "the second"}) {
    const bool before = fs::exists(path("x"));
    DurableFile file(path("x"), GetParam());
    file.write(text);
    EXPECT_EQ(fs::exists(path("x")), before);
    file.commit();
    EXPECT_EQ(read_text_file(path("x")), text);
  }
  { DurableFile(path("x"), GetParam()).write("never"); }
  EXPECT_EQ(read_text_file(path("x")), "the second");
  EXPECT_EQ(names(), std::set<std::string>{"x"});
}

TEST_P(DurableFiles, TheNextOneRemovesFilesOfKilledProcesses) {
  for (int i = 0; i < 3; ++i) killed_while_writing("x");
  EXPECT_LE(names().size(), 1u) << "each sweeps what the last one left";
  killed_while_writing("y");
  DurableFile file(path("x"), GetParam());
  file.write("whole");
  file.commit();
  std::set<std::string> of_x;
  for (const auto& name : names())
    if (!name.starts_with(".y.")) of_x.insert(name);
  EXPECT_EQ(of_x, std::set<std::string>{"x"});
}

TEST_P(DurableFiles, AFileBeingWrittenIsNotRemoved) {
  DurableFile first(path("x"), GetParam()), second(path("x"), GetParam());
  first.write("first"), second.write("second");
  first.commit();
  EXPECT_EQ(read_text_file(path("x")), "first");
  second.commit();
  EXPECT_EQ(read_text_file(path("x")), "second");
}

TEST_P(DurableFiles, AFolderThatIsMissingIsNamed) {
  const Error e = test::error_of([&] { DurableFile file(path("none/x"), GetParam()); });
  EXPECT_EQ(e.code(), Errc::io);
  EXPECT_NE(std::string(e.what()).find(path("none/x") + ": cannot be written"), std::string::npos)
      << e.what();
}

TEST_P(DurableFiles, CreatedFoldersAreSyncedInTheirParents) {
  synced_folders = 0;
  make_folders(path("a/b/c"));
  EXPECT_TRUE(fs::is_directory(path("a/b/c")));
  EXPECT_EQ(synced_folders, 3);
  make_folders(path("a/b/c"));
  EXPECT_EQ(synced_folders, 3) << "it was there";
  DurableFile(path("file"), GetParam()).commit();
  const Error e = test::error_of([&] { make_folders(path("file/d")); });
  EXPECT_EQ(e.code(), Errc::io);
  EXPECT_NE(std::string(e.what()).find(path("file/d") + ": cannot be made"), std::string::npos) << e.what();
}

INSTANTIATE_TEST_SUITE_P(Temporaries, DurableFiles, testing::Values(Temporary::automatic, Temporary::named),
                         [](const auto& info) {
                           return info.param == Temporary::named ? "named" : "automatic";
                         });

}  // namespace
}  // namespace rz
