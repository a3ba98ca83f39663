#pragma once
/// A checkpoint as the commands print it.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sharding/checkpoint/checkpoint_index.h"
#include "sharding/checkpoint/open_tensors.h"

namespace rz::checkpoint {

struct StoredCheckpoint {
  std::string path, tag;
  bool latest = false, best = false;
  std::string written;  ///< "2026-01-31 12:00:00 UTC"
  std::uint64_t bytes = 0;
  CheckpointIndex index;
  nlohmann::json state;
};

/// Errors of CheckpointReader::open().
StoredCheckpoint read_stored_checkpoint(const std::string& path);

/// The folders of the checkpoints at a path: the path itself, or those in it by steps. Errc::config if there
/// is none.
std::vector<std::string> checkpoints_at(const std::string& path);

/// open_checkpoint() of a path that has one, else open_tensors(). Prints which of several sources is read to
/// standard error, if there were several.
TensorSource open_source(const std::string& path, TensorPart = TensorPart::weights);

/// Bytes of a tensor; 0 if the dtype is unknown.
std::uint64_t bytes_of(const StoredTensor&);

/// Lines of columns that are aligned: texts to the left, numbers to the right.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace rz::checkpoint
