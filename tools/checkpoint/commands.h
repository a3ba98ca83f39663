#pragma once
/// The commands of the program, and what they share.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sharding/checkpoint/checkpoint_index.h"
#include "sharding/checkpoint/open_tensors.h"
#include "tools/command_line/progress.h"

namespace rz::checkpoint {

/// Each gets its own words, with its name as the first, and returns the exit status. Errors are thrown.
int inspect(int argc, const char* const* argv);
int verify(int argc, const char* const* argv);
int diff(int argc, const char* const* argv);
int merge(int argc, const char* const* argv);
int split(int argc, const char* const* argv);
int adapter(int argc, const char* const* argv);

// ---- what they share

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

/// open_checkpoint() of a path that has one, else open_tensors(), and then prints which of several sources is
/// read to standard error.
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
