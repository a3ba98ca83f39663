#pragma once
/// Folders that become visible under their names complete, or not at all.

#include <memory>
#include <string>

namespace rz {

/// A folder that is written under a temporary name beside its own. commit() renames it. Without commit()
/// nothing remains; what a killed process left is removed by the next DurableFolder of the same path. Errors
/// are Errc::io, "PATH: …".
class DurableFolder {
 public:
  /// Makes the parents of `path`. Errc::io if `path` exists, unless it is an empty folder.
  explicit DurableFolder(const std::string& path);
  ~DurableFolder();
  DurableFolder(const DurableFolder&) = delete;

  /// The folder to write to.
  const std::string& folder() const;
  /// Makes the folder visible, durably. All its files are durable. Call at most once.
  void commit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rz
