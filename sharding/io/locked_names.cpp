#include "sharding/io/locked_names.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "comm/os/fd.h"
#include "sharding/io/disk.h"
#include "sharding/io/temporary_name.h"

namespace rz {
namespace {

constexpr std::string_view lock_ending = ".lock";

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
