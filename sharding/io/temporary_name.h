#pragma once
/// Temporary names beside a file or folder.

#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace rz {

class UniqueFd;

/// ".NAME.ringzero-XXXXXX" and an ending, with X in a-z and 0-9, in the folder of a path PARENT/NAME: no
/// other program uses such names.
class TemporaryName {
 public:
  TemporaryName(const std::string& path, std::string_view ending);

  /// Whether fresh() could return the name.
  bool matches(std::string_view name) const;
  std::string in_folder(std::string_view name) const { return folder_ + std::string(name); }
  /// The path of a random name.
  std::string fresh() const;

 private:
  std::string folder_, front_, ending_;
};

/// Names beside a path PARENT/NAME, which one process uses as long as it holds a lock:
/// ".NAME.ringzero-XXXXXX.lock", and the same with ".partial" and ".replaced". A process that is killed
/// leaves its files, and the kernel releases the lock. Errors are Errc::io.
class LockedNames {
 public:
  /// New names, locked.
  explicit LockedNames(const std::string& path);
  LockedNames(LockedNames&&) = default;
  /// The names of a process that was killed; nullopt if it still runs.
  static std::optional<LockedNames> of_killed(const std::string& lock_path);
  /// NAME of the name of a lock; empty if it is none.
  static std::string_view name_of_lock(std::string_view name);

  std::string partial() const { return front_ + ".partial"; }
  std::string replaced() const { return front_ + ".replaced"; }
  /// Removes what has these names.
  void remove();

 private:
  LockedNames(std::shared_ptr<UniqueFd> lock, const std::string& path);
  void set_path(const std::string& path);

  std::shared_ptr<UniqueFd> lock_;
  std::string path_, front_;
};

}  // namespace rz
