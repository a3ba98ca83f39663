#pragma once
/// Saving of a checkpoint by all ranks of a group.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "sharding/checkpoint/owned_state.h"

namespace rz {

/// Equal on all ranks.
struct SaveRequest {
  std::string dir;                           ///< a folder that all ranks share
  std::string tag;                           ///< name of the checkpoint in it
  std::string state = "{}";                  ///< JSON object; that of rank 0 is written
  std::map<std::string, std::string> files;  ///< texts beside the index, by name; those of rank 0 are written
  bool best = false;                         ///< then DIR/best names it
  std::size_t keep = 0;                      ///< then remove_old_checkpoints(); 0: none are removed
};

/// Errc::io on every rank, which names the first rank that has no file or folder `made`, which rank 0 has
/// made in `dir`: a host has a folder of its own with that name. Collective.
void require_shared_folder(Communicator&, const std::string& dir, const std::string& made);

/// Memory for a copy of what a rank saves. It grows to the largest copy and is used again.
class SnapshotMemory {
 public:
  /// Memory of at least that many bytes, aligned for direct writes; valid until the next call.
  std::byte* reserve(std::size_t bytes);
  std::size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t bytes_ = 0;
};

/// A save in progress. Every rank writes its own file; when all are durable, rank 0 writes the index and
/// makes the checkpoint visible (sharding/checkpoint/checkpoint_folder.h). Its functions are
/// collective: every rank calls them in the same order. An error of any rank is thrown on all, and the
/// checkpoint is then not visible. The communicator must outlive the object.
class SaveOperation {
 public:
  /// Agrees on the request before anything is written: Errc::mismatch shows the tags of all ranks; Errc::io
  /// names a rank that does not see the folder. With `snapshot` the state is copied, and a thread writes it
  /// while training goes on; the memory is used until the operation is complete. Without, the state must
  /// outlive the operation, and must not change before it is complete.
  SaveOperation(Communicator&, const OwnedState&, const SaveRequest&, SnapshotMemory* snapshot);
  /// Waits for the threads of this rank. A checkpoint that is not complete then never becomes visible.
  ~SaveOperation();
  SaveOperation(const SaveOperation&) = delete;

  /// True once the checkpoint is complete. Does not wait for files; one all_reduce of 4 bytes.
  bool poll();
  /// Waits until it is complete.
  void wait();
  /// The lock of the folder, which others may keep longer; null but on rank 0.
  std::shared_ptr<const void> folder_lock() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rz
