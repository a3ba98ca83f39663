#include "comm/bootstrap/secret.h"

#include <openssl/crypto.h>
#include <pwd.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <vector>

#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/net/random.h"

namespace rz {

namespace {

namespace fs = std::filesystem;

constexpr const char* remedies =
    "; set RZ_SECRET to one text of at least 32 characters on all hosts (openssl rand -hex 32), or "
    "RZ_SECRET_FILE "
    "to a file that has it; RZ_INSECURE=1 lets everybody in who reaches a port";
constexpr std::size_t max_file = 4096;
constexpr int all_seals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

/// A variable that is set to something.
std::optional<std::string> setting(const char* name) {
  auto value = environment_variable(name);
  return value && !value->empty() ? value : std::nullopt;
}

/// Text whose memory is erased at its end.
struct ErasedText {
  std::string text;
  ~ErasedText() { OPENSSL_cleanse(text.data(), text.size()); }
};

net::Secret secret_of_text(std::string_view text, const std::string& where) {
  constexpr std::string_view space = " \t\r\n";
  const std::size_t begin = std::min(text.find_first_not_of(space), text.size());
  try {
    return net::Secret::of_text(text.substr(begin, text.find_last_not_of(space) + 1 - begin));
  } catch (const Error& e) {
    fail(Errc::config, where, ": ", e.what());
  }
}

// ---- descriptor

std::optional<int> descriptor_number() {
  const auto text = setting("RZ_SECRET_FD");
  if (!text) return std::nullopt;
  const auto number = parse_number<int>(*text);
  require(number && *number >= 0, Errc::config, "RZ_SECRET_FD='", *text, "' is no number of a descriptor");
  return number;
}

net::Secret secret_of_descriptor(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  std::array<std::uint8_t, net::Secret::size> bytes{};
  require(seals >= 0 && (seals & all_seals) == all_seals &&
              pread(fd, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
          Errc::config, "RZ_SECRET_FD=", fd,
          " is not the descriptor that rzrun opened; a program between rzrun and this rank has closed it",
          remedies);
  const net::Secret secret{std::span<const std::uint8_t, net::Secret::size>(bytes)};
  OPENSSL_cleanse(bytes.data(), bytes.size());
  return secret;
}

// ---- files

/// Whether others than this user, and root, may have read or written the file; the reason, or empty.
std::string distrust(const struct stat& file, bool may_be_roots) {
  const bool roots = may_be_roots && file.st_uid == 0;
  if (!S_ISREG(file.st_mode)) return "it is no regular file";
  if (file.st_uid != geteuid() && !roots)
    return concat("it belongs to user ", file.st_uid, ", not to ", geteuid());
  const unsigned others = file.st_mode & (roots ? 027u : 077u);
  if (!others) return "";
  char mode[8];
  std::snprintf(mode, sizeof mode, "%04o", file.st_mode & 07777u);
  return concat(
      "other users may access it (mode ", mode,
      "); chmod 600, or where it is mounted read-only, mode 0400 there (mode: 0400 of a secret in Docker, "
      "defaultMode: 0400 in Kubernetes)");
}

/// Empty if the file does not exist.
std::optional<net::Secret> secret_of_file(const fs::path& path, bool may_be_roots) {
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file && errno == ENOENT) return std::nullopt;
  const std::string name = "the secret in " + path.string();
  require(static_cast<bool>(file), Errc::config, name, ": ", std::strerror(errno), remedies);
  struct stat s {};
  if (fstat(file.get(), &s) != 0) fail_errno("fstat", path.string());
  const std::string why = distrust(s, may_be_roots);
  require(why.empty(), Errc::config, name, ": ", why);
  ErasedText contents{std::string(max_file, '\0')};
  const ssize_t n = pread(file.get(), contents.text.data(), contents.text.size(), 0);
  require(n >= 0, Errc::config, name, ": ", std::strerror(errno));
  contents.text.resize(std::min(static_cast<std::size_t>(n), contents.text.find('\n')));
  return secret_of_text(contents.text, name);
}

[[noreturn]] void fail_home(const std::string& why) {
  fail(Errc::config, "a group over several hosts, or a store that other hosts reach, needs a secret: ", why,
       remedies);
}

fs::path configuration_folder() {
  if (const auto xdg = setting("XDG_CONFIG_HOME"); xdg && xdg->front() == '/') return *xdg;
  if (const auto home = setting("HOME"); home && home->front() == '/') return fs::path(*home) / ".config";
  std::vector<char> buffer(16384);
  passwd entry{}, *found = nullptr;
  getpwuid_r(geteuid(), &entry, buffer.data(), buffer.size(), &found);
  if (!found || !found->pw_dir || found->pw_dir[0] != '/')
    fail_home(concat("HOME is not set, and user ", geteuid(), " has no home"));
  return fs::path(found->pw_dir) / ".config";
}

void make_folder(const fs::path& folder) {
  if (mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST) return;
  if (errno == ENOENT && folder.has_relative_path()) {
    make_folder(folder.parent_path());
    if (mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST) return;
  }
  fail_home(concat("mkdir ", folder.string(), ": ", std::strerror(errno)));
}

/// Gives the file its name, unless that exists; false if it does.
bool name_if_new(const fs::path& file, const fs::path& name) {
  if (link(file.c_str(), name.c_str()) == 0) return true;
  if (errno == EEXIST) return false;
  // A file system without links.
  if (renameat2(AT_FDCWD, file.c_str(), AT_FDCWD, name.c_str(), RENAME_NOREPLACE) == 0) return true;
  if (errno == EEXIST) return false;
  fail_home(concat("cannot create ", name.string(), ": ", std::strerror(errno)));
}

/// Creates the file, complete at once under its name, unless another process has done so before.
void create_secret(const fs::path& path) {
  make_folder(path.parent_path());
  const fs::path temporary = path.string() + "." + net::random_hex();
  UniqueFd file(open(temporary.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file) fail_home(concat("cannot create ", path.string(), ": ", std::strerror(errno)));
  const ErasedText text{net::random_hex() + net::random_hex() + "\n"};
  bool created = false;
  try {
    if (fchmod(file.get(), 0600) != 0 ||
        ::write(file.get(), text.text.data(), text.text.size()) != std::ssize(text.text) ||
        fsync(file.get()) != 0)
      fail_home(concat("cannot write ", path.string(), ": ", std::strerror(errno)));
    created = name_if_new(temporary, path);
  } catch (const Error&) {
    unlink(temporary.c_str());
    throw;
  }
  unlink(temporary.c_str());
  if (created)
    std::fprintf(
        stderr,
        "ringzero: created %s; ranks of several hosts authenticate each other by this secret, which must be "
        "the same on all hosts\n",
        path.c_str());
}

fs::path file_of_home() { return configuration_folder() / "ringzero" / "secret"; }

net::Secret secret_of_home() {
  const fs::path path = file_of_home();
  if (const auto found = secret_of_file(path, false)) return *found;
  create_secret(path);
  const auto created = secret_of_file(path, false);
  if (!created) fail_home(path.string() + " was removed");
  return *created;
}

net::Secret find_secret() {
  if (const auto fd = descriptor_number()) return secret_of_descriptor(*fd);
  if (const auto text = setting("RZ_SECRET")) return secret_of_text(*text, "RZ_SECRET");
  if (const auto path = setting("RZ_SECRET_FILE")) {
    const auto secret = secret_of_file(*path, true);
    require(secret.has_value(), Errc::config, "RZ_SECRET_FILE='", *path, "' does not exist");
    return *secret;
  }
  return secret_of_home();
}

}  // namespace

std::shared_ptr<const net::Secret> process_secret() {
  keep_secret_descriptor();
  return net::is_insecure() ? nullptr : std::make_shared<const net::Secret>(find_secret());
}

std::string variable_of_secret() {
  if (net::is_insecure()) return "RZ_INSECURE";
  for (const char* name : {"RZ_SECRET_FD", "RZ_SECRET", "RZ_SECRET_FILE"})
    if (setting(name)) return name;
  return "";
}

std::string secret_file_to_create() {
  if (!variable_of_secret().empty()) return "";
  const fs::path path = file_of_home();
  struct stat s {};
  return lstat(path.c_str(), &s) == 0 || errno != ENOENT ? "" : path.string();
}

UniqueFd secret_descriptor(const net::Secret& secret) {
  UniqueFd file(memfd_create("ringzero-secret", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const auto bytes = secret.bytes();
  if (!file || ::write(file.get(), bytes.data(), bytes.size()) != std::ssize(bytes) ||
      fcntl(file.get(), F_ADD_SEALS, all_seals) != 0)
    fail_errno("memfd_create", "for the secret of the job");
  return file;
}

void keep_secret_descriptor() {
  const auto fd = descriptor_number();
  if (fd && fcntl(*fd, F_GET_SEALS) >= 0) fcntl(*fd, F_SETFD, FD_CLOEXEC);
}

}  // namespace rz
