#pragma once
/// Folders of checkpoints: DIR/TAG/ for each, and DIR/latest, which holds the tag of the last one, as in
/// DeepSpeed.
///
/// A checkpoint is visible under its tag complete or not at all, and stays so after a crash of the machine:
/// it is written under a temporary name, synced, and renamed. What a killed process leaves under temporary
/// names is removed by remove_stale(), and by the next PartialCheckpoint. Any process may read a folder; one
/// saves to it at a time, which lock_checkpoint_folder() ensures. Errors are Errc::io, "PATH: …".

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace rz {

inline constexpr const char* latest_file = "latest";
inline constexpr const char* best_file = "best";

/// Errc::invalid_argument unless the tag can be the name of a folder: at most 200 bytes, no '/', no control
/// characters, not "latest", "best" or "checkpoint.json", not beginning with '.'.
void check_tag(std::string_view tag);
/// "global_step12", after that number of updates.
std::string step_tag(std::int64_t steps);
/// The number of updates in a result of step_tag(); nullopt for other tags.
std::optional<std::int64_t> steps_of_tag(std::string_view tag);

/// The tags of the checkpoints in a folder: first those of step_tag() by number, then others by name. Empty
/// if there is no such folder.
std::vector<std::string> checkpoint_tags(const std::string& dir);
/// The same tags by the time of writing.
std::vector<std::string> tags_by_time(const std::string& dir);
/// The tag in a file, DIR/latest or DIR/best; nullopt if there is none. Errc::config if it holds no tag.
std::optional<std::string> read_tag_file(const std::string& dir, const char* file);
/// Replaces it, durably.
void write_tag_file(const std::string& dir, const char* file, std::string_view tag);

/// Makes DIR, and keeps other processes from saving to it until the last result of this process is released,
/// or the process ends, however it ends. Errc::io names host and process of another one that has the folder.
/// Where the file system has no locks, none is kept off. Thread-safe.
std::shared_ptr<const void> lock_checkpoint_folder(const std::string& dir);
/// The file that DIR has while it is locked.
std::string folder_lock_file(const std::string& dir);

/// The folder of a checkpoint while it is written. One process of a group makes it; others may write to it.
class PartialCheckpoint {
 public:
  /// Makes DIR and the folder.
  PartialCheckpoint(std::string dir, std::string tag);
  /// Removes the folder unless commit() has returned.
  ~PartialCheckpoint();
  PartialCheckpoint(const PartialCheckpoint&) = delete;

  const std::string& folder() const;
  /// Writes the index, makes the checkpoint visible as DIR/TAG in place of any other, and DIR/latest name it.
  /// All other files are complete and durable. Call at most once.
  void commit(std::string_view index);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Removes what killed processes left in DIR. DIR/latest names a first checkpoint whose process was killed
/// before it had written that file. No error if there is nothing or DIR is missing.
void remove_stale(const std::string& dir);
/// Removes DIR/TAG. It is never visible in part.
void remove_checkpoint(const std::string& dir, const std::string& tag);
/// Removes all but the `keep` checkpoints of step_tag() that were written last; never those that DIR/latest
/// or DIR/best names, nor checkpoints with other tags. Returns the removed tags.
std::vector<std::string> remove_old_checkpoints(const std::string& dir, std::size_t keep);

}  // namespace rz
