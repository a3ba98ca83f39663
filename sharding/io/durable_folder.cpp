#include "sharding/io/durable_folder.h"

#include <filesystem>
#include <optional>

#include "comm/core/error.h"
#include "sharding/io/disk.h"
#include "sharding/io/durable_file.h"
#include "sharding/io/locked_names.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

/// Removes what killed processes left while they wrote this path.
void remove_stale_folders(const fs::path& path) {
  std::error_code problem;
  for (fs::directory_iterator entry(folder_of(path.string()), problem), end; !problem && entry != end;
       entry.increment(problem)) {
    if (LockedNames::name_of_lock(entry->path().filename().string()) != path.filename().string()) continue;
    if (auto names = LockedNames::of_killed(entry->path().string())) names->remove();
  }
}

void check_absent(const std::string& path) {
  std::error_code ignored;
  const bool empty =
      fs::is_directory(fs::symlink_status(path, ignored)) && fs::is_empty(path, ignored) && !ignored;
  require(empty || !path_exists(path), Errc::io, path, ": exists already; choose another name, or remove it");
}

/// Without a '/' at its end, which would hide the name.
std::string without_slash(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

}  // namespace

struct DurableFolder::State {
  explicit State(const std::string& p) : path(p), names(p), folder(names.partial()) {}
  ~State() {
    try {
      names.remove();
    } catch (const Error&) {  // the next one of this path tries again
    }
  }
  const std::string path;
  LockedNames names;
  const std::string folder;
};

DurableFolder::DurableFolder(const std::string& given) {
  const std::string path = without_slash(given);
  check_absent(path);
  make_folders(folder_of(path));
  remove_stale_folders(path);
  state_ = std::make_unique<State>(path);
  make_folders(state_->folder);
}

DurableFolder::~DurableFolder() = default;

const std::string& DurableFolder::folder() const { return state_->folder; }

void DurableFolder::commit() {
  check_absent(state_->path);
  rename_path(state_->folder, state_->path);
  sync_folder(folder_of(state_->path));
}

}  // namespace rz
