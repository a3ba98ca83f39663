#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <set>
#include <string_view>
#include <vector>

#include "comm/core/integer_math.h"
#include "sharding/io/file.h"
#include "sharding/io/json.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"

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

class DurableFiles : public testing::TestWithParam<Temporary>, protected test::Folder {
 protected:
  std::set<std::string> names() const {
    std::set<std::string> out;
    for (const auto& entry : fs::directory_iterator(path())) out.insert(entry.path().filename());
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

/// Memory whose address is `offset` modulo the alignment of direct writes.
std::vector<char> aligned_bytes(std::size_t bytes, std::size_t offset, char*& data) {
  std::vector<char> memory(bytes + 2 * DurableFile::direct_alignment);
  const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
  data = memory.data() + round_up(at, DurableFile::direct_alignment) - at + offset;
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(i * 31 + i / 4096);
  return memory;
}

/// Writes that are aligned like the file, and others, in turn: the file has every byte.
TEST_P(DurableFiles, LargeAlignedWritesAreDirect) {
  constexpr std::size_t block = DurableFile::direct_alignment, large = DurableFile::min_direct;
  const std::size_t sizes[] = {5000,          3 * large + 77,   1,  large + 2 * block,
                               large - block, 2 * large + 5000, 123};
  std::size_t all = 0;
  for (const std::size_t n : sizes) all += n;
  for (const std::size_t offset : {std::size_t{0}, std::size_t{8}}) {  // 8: never aligned like the file
    char* data = nullptr;
    const std::vector<char> memory = aligned_bytes(all, offset, data);
    DurableFile file(path("large"), GetParam());
    std::size_t at = 0;
    for (const std::size_t n : sizes) file.write(data + at, n), at += n;
    file.commit();
    EXPECT_TRUE(read_text_file(path("large")) == std::string_view(data, all)) << offset;
    if (offset) {
      EXPECT_EQ(file.direct_bytes(), 0u);
    } else if (file.direct_bytes() > 0) {  // else the file system has no direct writes
      EXPECT_GE(file.direct_bytes(), 6 * large);
    } else {
      GTEST_SKIP() << "no direct writes on this file system";
    }
  }
}

}  // namespace
}  // namespace rz
