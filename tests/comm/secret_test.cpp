// Where the secret of a job comes from: order, files and who may read them, many processes at once,
// descriptors.

#include "comm/bootstrap/secret.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include "comm/core/error.h"
#include "comm/net/random.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using test::error_of;

/// Sets variables of this process (null: removes) and restores them.
class Variables {
 public:
  Variables(std::initializer_list<std::pair<const char*, const char*>> values) {
    for (const auto& [name, value] : values) {
      const char* before = getenv(name);
      before_.emplace_back(name, before ? std::optional<std::string>(before) : std::nullopt);
      if (value)
        setenv(name, value, 1);
      else
        unsetenv(name);
    }
  }
  ~Variables() {
    for (const auto& [name, value] : before_)
      if (value)
        setenv(name, value->c_str(), 1);
      else
        unsetenv(name);
  }

 private:
  std::vector<std::pair<const char*, std::optional<std::string>>> before_;
};

/// A fresh home without any other source of a secret.
class SecretTest : public testing::Test {
 protected:
  fs::path home_ = fs::temp_directory_path() / ("ringzero-secret-" + net::random_hex());
  fs::path file_ = home_ / ".config" / "ringzero" / "secret";
  std::string home_name_ = home_.string();
  std::optional<Variables> variables_;

  void SetUp() override {
    fs::create_directory(home_);
    variables_.emplace(
        std::initializer_list<std::pair<const char*, const char*>>{{"HOME", home_name_.c_str()},
                                                                   {"XDG_CONFIG_HOME", nullptr},
                                                                   {"RZ_SECRET", nullptr},
                                                                   {"RZ_SECRET_FD", nullptr},
                                                                   {"RZ_SECRET_FILE", nullptr},
                                                                   {"RZ_INSECURE", nullptr}});
  }
  void TearDown() override {
    variables_.reset();
    fs::remove_all(home_);
  }
  std::string contents() const {
    std::ifstream in(file_);
    return {std::istreambuf_iterator<char>(in), {}};
  }
};

bool equal(const std::shared_ptr<const net::Secret>& a, const std::shared_ptr<const net::Secret>& b) {
  return a && b && std::ranges::equal(a->bytes(), b->bytes());
}

TEST_F(SecretTest, TheFirstStartCreatesAPrivateFile) {
  EXPECT_EQ(secret_file_to_create(), file_.string());
  EXPECT_FALSE(fs::exists(file_)) << "a question creates nothing";
  testing::internal::CaptureStderr();
  const auto first = process_secret(), second = process_secret();
  const std::string printed = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(equal(first, second));
  EXPECT_EQ(secret_file_to_create(), "");
  EXPECT_EQ(std::ranges::count(printed, '\n'), 1) << printed;
  EXPECT_NE(printed.find(file_.string()), std::string::npos) << printed;
  struct stat s {};
  ASSERT_EQ(stat(file_.c_str(), &s), 0);
  EXPECT_EQ(s.st_mode & 07777u, 0600u);
  EXPECT_EQ(contents().size(), 65u);
  EXPECT_EQ(printed.find(contents().substr(0, 64)), std::string::npos) << "it prints the secret";
  EXPECT_EQ(std::distance(fs::directory_iterator(file_.parent_path()), {}), 1);
}

TEST_F(SecretTest, ManyProcessesCreateOneSecret) {
  std::vector<std::pair<pid_t, int>> children;
  for (int i = 0; i < 16; ++i) {
    int fds[2];
    ASSERT_EQ(pipe(fds), 0);
    const pid_t pid = fork();
    if (pid == 0) {
      freopen("/dev/null", "w", stderr);
      const auto secret = process_secret();
      _exit(write(fds[1], secret->bytes().data(), 32) == 32 ? 0 : 1);
    }
    close(fds[1]);
    children.emplace_back(pid, fds[0]);
  }
  const std::string expected = [&] {
    const auto secret = process_secret();
    return std::string(secret->bytes().begin(), secret->bytes().end());
  }();
  for (const auto& [pid, fd] : children) {
    char bytes[32];
    EXPECT_EQ(read(fd, bytes, sizeof bytes), 32);
    EXPECT_EQ(std::string(bytes, 32), expected);
    close(fd);
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
  }
}

TEST_F(SecretTest, AFileThatOthersMayReadIsAnError) {
  process_secret();
  chmod(file_.c_str(), 0640);
  const Error e = error_of([] { process_secret(); });
  EXPECT_EQ(e.code(), Errc::config);
  EXPECT_NE(std::string(e.what()).find("mode 0640"), std::string::npos) << e.what();
  EXPECT_NE(std::string(e.what()).find(file_.string()), std::string::npos) << e.what();
}

TEST_F(SecretTest, AFileOfAnotherUserIsAnError) {
  process_secret();
  if (geteuid() != 0 || chown(file_.c_str(), 12345, 12345) != 0)
    GTEST_SKIP() << "only root can give files away";
  const Error e = error_of([] { process_secret(); });
  EXPECT_NE(std::string(e.what()).find("belongs to user 12345"), std::string::npos) << e.what();
}

TEST_F(SecretTest, WithoutAHomeTheRemediesAreNamed) {
  const Variables none{{"HOME", "/proc/nothing"}};
  const std::string what = error_of([] { process_secret(); }).what();
  EXPECT_NE(what.find("RZ_SECRET "), std::string::npos) << what;
  EXPECT_NE(what.find("RZ_SECRET_FILE"), std::string::npos) << what;
  EXPECT_EQ(what.find('\n'), std::string::npos) << what;
}

TEST_F(SecretTest, TextAndFileAreTheSameSecret) {
  const auto of_home = process_secret();
  const std::string text = contents();
  const std::string copy = (home_ / "copy").string();
  fs::copy_file(file_, copy);
  chmod(copy.c_str(), 0600);
  {
    const Variables v{{"RZ_SECRET", text.substr(0, 64).c_str()}};
    EXPECT_TRUE(equal(process_secret(), of_home));
  }
  {
    const Variables v{{"RZ_SECRET_FILE", copy.c_str()}};
    EXPECT_TRUE(equal(process_secret(), of_home));
  }
  const Variables v{{"RZ_SECRET_FILE", (home_ / "absent").c_str()}};
  EXPECT_EQ(error_of([] { process_secret(); }).code(), Errc::config);
}

TEST_F(SecretTest, NothingIsCreatedWhereAVariableHasTheSecret) {
  const Variables v{{"RZ_SECRET", "0123456789abcdef0123456789abcdef"}};
  EXPECT_EQ(secret_file_to_create(), "");
  EXPECT_TRUE(process_secret());
  EXPECT_FALSE(fs::exists(file_));
  const Variables insecure{{"RZ_INSECURE", "1"}};
  EXPECT_FALSE(process_secret());
  const Variables wrong{{"RZ_INSECURE", "yes"}};
  EXPECT_EQ(error_of([] { process_secret(); }).code(), Errc::config);
}

TEST_F(SecretTest, AShortTextIsAnErrorThatDoesNotShowIt) {
  const Variables v{{"RZ_SECRET", "hunter2"}};
  const std::string what = error_of([] { process_secret(); }).what();
  EXPECT_NE(what.find("RZ_SECRET: "), std::string::npos) << what;
  EXPECT_EQ(what.find("hunter2"), std::string::npos) << what;
}

TEST_F(SecretTest, ADescriptorIsSealedAndReadMoreThanOnce) {
  const auto secret = std::make_shared<const net::Secret>(net::Secret::random());
  const UniqueFd fd = secret_descriptor(*secret);
  EXPECT_LT(write(fd.get(), "x", 1), 0);
  EXPECT_LT(ftruncate(fd.get(), 0), 0);
  fcntl(fd.get(), F_SETFD, 0);
  const Variables v{{"RZ_SECRET_FD", concat(fd.get()).c_str()}};
  EXPECT_TRUE(equal(process_secret(), secret));
  EXPECT_TRUE(equal(process_secret(), secret));
  EXPECT_EQ(fcntl(fd.get(), F_GETFD), FD_CLOEXEC) << "programs that a rank starts would inherit it";
}

TEST_F(SecretTest, ADescriptorThatIsNoneOfRzrunIsAnError) {
  const UniqueFd file(open("/dev/zero", O_RDONLY | O_CLOEXEC));
  for (const std::string& text : {concat(file.get()), std::string("1000000"), std::string("x")}) {
    const Variables v{{"RZ_SECRET_FD", text.c_str()}};
    const Error e = error_of([] { process_secret(); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_NE(std::string(e.what()).find("RZ_SECRET_FD"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace rz
