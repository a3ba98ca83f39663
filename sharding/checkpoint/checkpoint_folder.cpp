#include "sharding/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/core/error.h"
#include "comm/os/fd.h"
#include "comm/os/process.h"
#include "sharding/checkpoint/checkpoint_index.h"
#include "sharding/io/disk.h"
#include "sharding/io/file.h"
#include "sharding/io/json.h"
#include "sharding/io/temporary_name.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view step_prefix = "global_step";
constexpr const char* writer_lock_file = ".ringzero.lock";

/// Exchanges two names; false where the file system cannot.
bool exchange_names(const std::string& a, const std::string& b) {
  return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
}

std::vector<std::string> names_in(const std::string& dir) {
  std::vector<std::string> names;
  std::error_code problem;
  for (fs::directory_iterator at(dir, problem); !problem && at != fs::directory_iterator();
       at.increment(problem))
    names.push_back(at->path().filename());
  require(!problem || problem == std::errc::no_such_file_or_directory, Errc::io, dir,
          ": cannot be read: ", problem.message());
  return names;
}

bool is_checkpoint(const std::string& path) { return path_exists(concat(path, "/", checkpoint_index_file)); }

/// What is not a checkpoint is never removed.
void check_replaceable(const std::string& path) {
  require(!path_exists(path) || is_checkpoint(path), Errc::io, path,
          ": exists, and is not a checkpoint: it has no ", checkpoint_index_file,
          "; choose another tag, or remove it");
}

/// The second of the two renames that replace a checkpoint failed, or its process was killed before it: the
/// old one comes back. It is removed only where there is another one.
void restore_replaced(const LockedNames& names, const std::string& checkpoint) {
  if (path_exists(names.replaced()) && !is_checkpoint(checkpoint)) rename_path(names.replaced(), checkpoint);
}

/// A process was killed after its checkpoint, the first one, had become visible, and before a file named it.
void name_first_checkpoint(const std::string& dir, std::string_view tag) {
  if (path_exists((fs::path(dir) / latest_file).string())) return;
  if (is_checkpoint((fs::path(dir) / tag).string())) write_tag_file(dir, latest_file, tag);
}

}  // namespace

// ---- tags

void check_tag(std::string_view tag) {
  const auto refuse = [&](const char* what) {
    fail(Errc::invalid_argument, "the tag '", escaped(tag), "' of a checkpoint ", what,
         "; give the name of a folder");
  };
  if (tag.empty()) refuse("is empty");
  if (tag.size() > 200) refuse("is longer than 200 bytes");
  if (tag.front() == '.') refuse("begins with '.'");
  if (tag == latest_file || tag == best_file || tag == checkpoint_index_file)
    refuse("is the name of a file beside the checkpoints, or in them");
  if (tag.find('/') != std::string_view::npos) refuse("has a '/' in it");
  if (escaped(tag) != tag) refuse("has control characters in it, or is not UTF-8");
}

std::string step_tag(std::int64_t steps) { return concat(step_prefix, steps); }

std::optional<std::int64_t> steps_of_tag(std::string_view tag) {
  if (!tag.starts_with(step_prefix)) return std::nullopt;
  std::int64_t steps = 0;
  std::from_chars(tag.data() + step_prefix.size(), tag.data() + tag.size(), steps);
  return step_tag(steps) == tag ? std::optional(steps) : std::nullopt;
}

std::vector<std::string> checkpoint_tags(const std::string& dir) {
  std::vector<std::string> tags;
  for (const std::string& name : names_in(dir))
    if (name.front() != '.' && is_checkpoint(concat(dir, "/", name))) tags.push_back(name);
  std::ranges::sort(
      tags, {}, [](const std::string& tag) { return std::pair(steps_of_tag(tag).value_or(INT64_MAX), tag); });
  return tags;
}

std::vector<std::string> tags_by_time(const std::string& dir) {
  std::vector<std::string> tags = checkpoint_tags(dir);
  std::map<std::string, fs::file_time_type> written;
  for (const std::string& tag : tags) {
    std::error_code removed;
    written[tag] = fs::last_write_time(fs::path(dir) / tag / checkpoint_index_file, removed);
  }
  std::ranges::stable_sort(tags, {}, [&](const std::string& tag) { return written[tag]; });
  return tags;
}

std::optional<std::string> read_tag_file(const std::string& dir, const char* file) {
  const std::string path = (fs::path(dir) / file).string();
  if (!path_exists(path)) return std::nullopt;
  std::string tag = read_text_file(path);
  while (!tag.empty() && (tag.back() == '\n' || tag.back() == '\r')) tag.pop_back();
  try {
    check_tag(tag);
  } catch (const Error& e) {
    fail(Errc::config, path, ": ", e.what());
  }
  return tag;
}

void write_tag_file(const std::string& dir, const char* file, std::string_view tag) {
  DurableFile out((fs::path(dir) / file).string());
  out.write(tag);
  out.commit();
}

// ---- writing

namespace {

/// The lock of a folder, and the name of its file while this process has it.
struct WriterLock {
  WriterLock(UniqueFd f, std::string p) : file(std::move(f)), path(std::move(p)) {}
  ~WriterLock() {
    if (process == ::getpid() && is_linked(file.get())) ::unlink(path.c_str());
  }
  WriterLock(const WriterLock&) = delete;

  UniqueFd file;
  const std::string path;
  const pid_t process = ::getpid();
};

/// The locks of this process, by device and inode.
struct WriterLocks {
  const Creator creator{};
  std::mutex mutex;
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<WriterLock>> held;

  /// Never destroyed. A child of fork() has none of its parent's locks, and a mutex of its own.
  static WriterLocks& of_this_process() {
    static constinit std::atomic<WriterLocks*> current{nullptr};
    WriterLocks* locks = current.load();
    while (!locks || !locks->creator.is_this_generation()) {
      auto made = std::make_unique<WriterLocks>();
      WriterLocks* const inherited = locks;
      if (!current.compare_exchange_strong(locks, made.get())) continue;
      if (inherited) leak_reachable(inherited);
      locks = made.release();
    }
    return *locks;
  }
};

/// A process that removes the file of a killed one has it for a moment, in remove_stale().
constexpr int max_lock_attempts = 20;

[[noreturn]] void refuse_second_writer(const std::string& dir, const UniqueFd& lock_file) {
  std::array<char, 300> text{};
  const ssize_t bytes = ::pread(lock_file.get(), text.data(), text.size(), 0);
  const std::string first(text.data(), static_cast<std::size_t>(std::max<ssize_t>(0, bytes)));
  fail(Errc::io, dir, ": ", first.empty() ? "another process" : escaped(first),
       " saves checkpoints to it; wait until it ends, or give another folder");
}

/// For those that are refused.
void write_own_name(const UniqueFd& lock_file) {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  const std::string text = concat("process ", ::getpid(), " on ", host.data());
  if (::ftruncate(lock_file.get(), 0) != 0 || ::pwrite(lock_file.get(), text.data(), text.size(), 0) < 0)
    return;  // a full disk: it is refused without a name
}

}  // namespace

std::string folder_lock_file(const std::string& dir) { return (fs::path(dir) / writer_lock_file).string(); }

std::shared_ptr<const void> lock_checkpoint_folder(const std::string& dir) {
  WriterLocks& locks = WriterLocks::of_this_process();
  make_folders(dir);
  const std::string path = folder_lock_file(dir);
  const std::lock_guard guard(locks.mutex);
  for (int attempt = 0;; ++attempt) {
    UniqueFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644));
    struct stat info {};
    if (!file || ::fstat(file.get(), &info) != 0) fail_on_disk(path, "cannot be made");
    std::weak_ptr<WriterLock>& known = locks.held[{info.st_dev, info.st_ino}];
    if (auto held = known.lock()) return held;
    // A file system without locks has other errors; there nothing is refused.
    if (!lock(file.get()) && errno == EWOULDBLOCK) {
      if (attempt == max_lock_attempts) refuse_second_writer(dir, file);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    if (!is_linked(file.get())) continue;  // its process has just ended
    write_own_name(file);
    auto held = std::make_shared<WriterLock>(std::move(file), path);
    known = held;
    return held;
  }
}

struct PartialCheckpoint::State {
  State(std::string d, std::string t)
      : dir(std::move(d)), tag(std::move(t)), path((fs::path(dir) / tag).string()), names(path) {
    folder = names.partial();
  }
  ~State() {
    try {
      restore_replaced(names, path);
      names.remove();
    } catch (const Error&) {  // remove_stale() tries again
    }
  }
  /// Where names cannot be exchanged, a moment passes without a checkpoint of this tag; remove_stale() ends
  /// it after a crash, and the destructor after an error.
  void replace() {
    check_replaceable(path);
    if (exchange_names(folder, path)) return;
    rename_path(path, names.replaced());
    rename_path(folder, path);
  }

  const std::string dir, tag, path;
  LockedNames names;
  std::string folder;
};

PartialCheckpoint::PartialCheckpoint(std::string dir, std::string tag) {
  check_tag(tag);
  make_folders(dir);
  remove_stale(dir);
  check_replaceable((fs::path(dir) / tag).string());
  state_ = std::make_unique<State>(std::move(dir), std::move(tag));
  std::error_code problem;
  fs::create_directory(state_->folder, problem);
  require(!problem, Errc::io, state_->folder, ": cannot be made: ", problem.message());
}

PartialCheckpoint::~PartialCheckpoint() = default;

const std::string& PartialCheckpoint::folder() const { return state_->folder; }

void PartialCheckpoint::commit(std::string_view index) {
  DurableFile file((fs::path(folder()) / checkpoint_index_file).string());
  file.write(index);
  file.commit();
  if (path_exists(state_->path)) {
    state_->replace();
  } else {
    rename_path(folder(), state_->path);
  }
  sync_folder(state_->dir);
  write_tag_file(state_->dir, latest_file, state_->tag);
}

// ---- removing

namespace {

/// Unless its process lives.
void remove_writer_lock(const std::string& dir) {
  const std::string path = folder_lock_file(dir);
  const UniqueFd file(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
  if (file && lock(file.get()) && is_linked(file.get())) ::unlink(path.c_str());
}

}  // namespace

void remove_stale(const std::string& dir) {
  for (const char* file : {latest_file, best_file})
    remove_stale_temporary_files((fs::path(dir) / file).string());
  remove_writer_lock(dir);
  for (const std::string& name : names_in(dir)) {
    const std::string_view tag = LockedNames::name_of_lock(name);
    if (tag.empty()) continue;
    auto names = LockedNames::of_killed((fs::path(dir) / name).string());
    if (!names) continue;
    restore_replaced(*names, (fs::path(dir) / tag).string());
    name_first_checkpoint(dir, tag);
    names->remove();
  }
}

void remove_checkpoint(const std::string& dir, const std::string& tag) {
  const std::string path = (fs::path(dir) / tag).string();
  LockedNames names(path);
  if (::rename(path.c_str(), names.partial().c_str()) != 0 && errno != ENOENT)
    fail_on_disk(path, "cannot be removed");
  names.remove();
}

std::vector<std::string> remove_old_checkpoints(const std::string& dir, std::size_t keep) {
  std::vector<std::string> tags = tags_by_time(dir), removed;
  std::erase_if(tags, [](const std::string& tag) { return !steps_of_tag(tag); });
  const auto latest = read_tag_file(dir, latest_file), best = read_tag_file(dir, best_file);
  for (std::size_t i = 0; i + keep < tags.size(); ++i) {
    if (tags[i] == latest || tags[i] == best) continue;
    remove_checkpoint(dir, tags[i]);
    removed.push_back(tags[i]);
  }
  return removed;
}

}  // namespace rz
