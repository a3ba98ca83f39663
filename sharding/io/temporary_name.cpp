#include "sharding/io/temporary_name.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>
#include <utility>

#include "comm/os/fd.h"
#include "sharding/io/disk.h"

namespace rz {
namespace {

constexpr std::string_view mark = ".ringzero-", alphabet = "abcdefghijklmnopqrstuvwxyz0123456789";
constexpr std::size_t digits = 6;

}  // namespace

TemporaryName::TemporaryName(const std::string& path, std::string_view ending)
    : folder_(folder_of(path) + "/"),
      front_("." + std::filesystem::path(path).filename().string() + std::string(mark)),
      ending_(ending) {}

bool TemporaryName::matches(std::string_view name) const {
  return name.size() == front_.size() + digits + ending_.size() && name.starts_with(front_) &&
         name.ends_with(ending_);
}

std::string TemporaryName::fresh() const {
  std::random_device random;
  std::string name = front_;
  for (std::size_t i = 0; i < digits; ++i) name += alphabet[random() % alphabet.size()];
  return in_folder(name + ending_);
}

// ---- LockedNames

namespace {

constexpr std::string_view lock_ending = ".lock";

/// NAME of a temporary name with this ending; empty if it is none.
std::string_view name_of_temporary(std::string_view temporary, std::string_view ending) {
  const std::size_t around = 1 + mark.size() + digits + ending.size();
  if (temporary.size() <= around || temporary.front() != '.' || !temporary.ends_with(ending)) return {};
  const std::string_view name = temporary.substr(1, temporary.size() - around);
  const std::string_view rest = temporary.substr(1 + name.size());
  const bool random = std::ranges::all_of(rest.substr(mark.size(), digits),
                                          [](char c) { return alphabet.find(c) != std::string_view::npos; });
  return rest.starts_with(mark) && random ? name : std::string_view();
}

}  // namespace

LockedNames::LockedNames(const std::string& path) : lock_(std::make_shared<UniqueFd>()) {
  const TemporaryName name(path, lock_ending);
  do {
    set_path(name.fresh());
    *lock_ = UniqueFd(::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (!*lock_ && errno != EEXIST) fail_on_disk(path_, "cannot be made");
  } while (!*lock_ || (!lock(lock_->get()) && errno == EWOULDBLOCK) || !is_linked(lock_->get()));
}

LockedNames::LockedNames(std::shared_ptr<UniqueFd> lock, const std::string& path) : lock_(std::move(lock)) {
  set_path(path);
}

std::optional<LockedNames> LockedNames::of_killed(const std::string& lock_path) {
  UniqueFd file(::open(lock_path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
  if (!file || !lock(file.get()) || !is_linked(file.get())) return std::nullopt;
  return LockedNames(std::make_shared<UniqueFd>(std::move(file)), lock_path);
}

std::string_view LockedNames::name_of_lock(std::string_view name) {
  return name_of_temporary(name, lock_ending);
}

void LockedNames::remove() {
  remove_path(partial());
  remove_path(replaced());
  ::unlink(path_.c_str());
}

void LockedNames::set_path(const std::string& path) {
  path_ = path;
  front_ = path.substr(0, path.size() - lock_ending.size());
}

}  // namespace rz
