#pragma once
/// Positions of the loaders of a run, to save and resume it.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace rz {

/// The next sample of a loader, for any number of ranks.
struct LoaderPosition {
  std::uint64_t epoch = 0;    ///< pass over the data
  std::uint64_t samples = 0;  ///< of the epoch, that batches of all ranks have taken
  std::string data{};         ///< StatefulLoader::data(), where a position was saved
  bool operator==(const LoaderPosition&) const = default;
};

/// Batches whose position can be saved and restored: a Loader, or a program's own source of batches.
class StatefulLoader {
 public:
  virtual LoaderPosition position() const = 0;
  /// Continues there, as a run that was never interrupted. Errc::invalid_argument if there is no such batch.
  virtual void set_position(const LoaderPosition&) = 0;
  /// One line that differs for other data or another order of them; empty: unknown.
  virtual std::string data() const { return {}; }
  /// What it does if data() differ from those of a checkpoint.
  virtual const char* when_others() const { return "it begins with the first sample"; }
  /// If the next batch could not be read: continues behind it.
  virtual void skip_failed() {}
  /// The time that its user has waited for data, so far.
  virtual double waited_seconds() const { return 0; }

 protected:
  StatefulLoader() = default;
  ~StatefulLoader() = default;
};

/// Knows loaders by name while they live. One thread.
class LoaderPositions {
 public:
  using ByName = std::map<std::string, LoaderPosition>;

  /// Called by a loader that is made. It continues where restore() has it. Errc::invalid_argument if there is
  /// one of this name.
  void attach(const std::string& name, StatefulLoader&);
  void detach(const StatefulLoader&);
  /// A name that no loader has had: "loader 0", "loader 1", …
  std::string new_name();

  /// An update ends: the next one begins with the next samples.
  void end_update();
  ByName now() const;
  /// StatefulLoader::waited_seconds() of all, those that are detached included.
  double waited_seconds() const;
  /// StatefulLoader::skip_failed() of all.
  void skip_failed();
  /// At the beginning of the update in progress.
  ByName of_update() const;

  /// Moves the loaders there, those that are attached later too. One whose data() are not those of its
  /// position begins anew.
  void restore(const ByName&);
  /// Lines on loaders that have begun anew.
  const std::vector<std::string>& differences() const { return differences_; }
  /// Called with each of them; may be empty.
  void on_difference(std::function<void(const std::string&)> f) { on_difference_ = std::move(f); }

 private:
  void move(const std::string& name, StatefulLoader&, const LoaderPosition&);

  struct Entry {
    StatefulLoader* loader;
    LoaderPosition of_update;
  };
  std::map<std::string, Entry> loaders_;
  ByName pending_;
  int named_ = 0;
  double waited_seconds_ = 0;  // of those that are detached
  std::vector<std::string> differences_;
  std::function<void(const std::string&)> on_difference_;
};

}  // namespace rz
