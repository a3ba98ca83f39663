#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <sstream>

#include "comm/bootstrap/store_internal.h"
#include "comm/core/error.h"
#include "comm/net/random.h"
#include "comm/os/fd.h"
#include "comm/os/wait_policy.h"
#include "comm/store.h"

namespace rz {

namespace {

/// File name of a key: bytes other than alphanumerics, '-' and '_' are encoded as %XX. The name ends in
/// "=", which distinguishes keys from temporary files and the lock.
std::string file_name(std::string_view key) {
  static constexpr char hex[] = "0123456789abcdef";
  std::string name;
  for (const unsigned char c : key) {
    const bool alphabetic = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');  // in every locale
    if (alphabetic || (c >= '0' && c <= '9') || c == '-' || c == '_')
      name += static_cast<char>(c);
    else
      name += {'%', hex[c >> 4], hex[c & 15]};
  }
  require(name.size() < 240, Errc::invalid_argument, "key '", key, "' is too long for a file_store");
  return name + "=";
}

void write_all(int file, std::string_view bytes, const std::string& name) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(file, bytes.data(), bytes.size());
    if (n < 0 && errno != EINTR) fail_errno("write", name);
    if (n > 0) bytes.remove_prefix(static_cast<std::size_t>(n));
  }
}

class FileStore final : public Store {
 public:
  explicit FileStore(std::string directory) : directory_(std::move(directory)) {
    std::error_code error;
    std::filesystem::create_directories(directory_, error);
    std::error_code ignored;
    require(std::filesystem::is_directory(directory_, ignored), Errc::rendezvous, "file_store: ", directory_,
            " is no directory and cannot be made one: ", error.message());
  }

  void set(std::string_view key, std::string_view value) override { replace(path(key), value); }

  std::string get(std::string_view key, Deadline deadline) override {
    const std::string file = path(key);
    for (unsigned polls = 0;; ++polls) {
      if (auto value = read(file)) return *std::move(value);
      if (deadline.expired()) fail(Errc::timeout, missing_key(key, directory_));
      file_store_backoff.wait(polls, deadline.remaining());
    }
  }

  std::int64_t add(std::string_view key, std::int64_t amount) override {
    // Each call opens the file anew, so that flock also excludes other threads of this process.
    const std::string lock = directory_ + "/lock";
    const UniqueFd held(open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!held || flock(held.get(), LOCK_EX) != 0) fail_errno("flock", lock);
    const auto old = read(path(key));
    const std::int64_t sum = add_to_counter(key, old ? *old : "", amount);
    replace(path(key), concat(sum));
    return sum;
  }

 private:
  std::string path(std::string_view key) const { return concat(directory_, '/', file_name(key)); }

  static std::optional<std::string> read(const std::string& file) {
    std::ifstream in(file, std::ios::binary);
    if (!in) return std::nullopt;
    std::ostringstream text;
    text << in.rdbuf();
    return std::move(text).str();
  }

  void replace(const std::string& file, std::string_view value) const {
    const std::string temporary = concat(directory_, "/new-", net::random_hex());
    {
      const UniqueFd out(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
      if (!out) fail_errno("open", temporary);
      write_all(out.get(), value, temporary);
    }
    if (std::rename(temporary.c_str(), file.c_str()) != 0) fail_errno("rename", file);
  }

  std::string directory_;
};

}  // namespace

std::shared_ptr<Store> file_store(const std::string& directory) {
  return std::make_shared<FileStore>(directory);
}

}  // namespace rz
