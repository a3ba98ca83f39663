#pragma once
/// A sequence of tokens, cut into samples of T + 1 tokens that overlap by one. Sample i is
/// tokens[i·T … i·T+T]; its inputs are the first T, its targets the last T.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sharding/data/dataset.h"

namespace rz {

/// Copies share the tokens; concurrent reads are safe.
class Tokens {
 public:
  /// Tokens of a file, of the files *.bin and *.npy of a folder, or of those whose names match a pattern with
  /// `*`, `?` or `[`, one after the other in the order of their names, or of several such, "A,B", in the
  /// order given; read on demand. A .npy file of NumPy and a file of llm.c (256 int32: 20240520 or 20240801,
  /// version, number of tokens) have uint16 or uint32 by their headers. Other files are little-endian, of
  /// `dtype`: "uint16", "uint32", or "auto", which is uint16 unless the words look like another type's, or
  /// the bytes like text, an archive or a table: these are refused. Errc::config names the file and what is
  /// wrong with it or its header.
  static Tokens from_file(const std::string& path, const std::string& dtype = "auto");
  /// The bytes of a text file, or of every text file below a directory, in sorted order, with an empty line
  /// between files. Skipped are .git and other hidden names, directories of generated files (those with a
  /// CMakeCache.txt or CACHEDIR.TAG, node_modules, __pycache__), links, files that contain a zero byte,
  /// and files of records in JSON, one per line (.jsonl, .ndjson, or two such lines at the beginning).
  /// `outputs` are skipped as well: files and directories that the run itself will write. Errc::config names
  /// a path that is missing, empty, a pipe or device, larger than 1 GiB, or a file of JSON.
  static Tokens from_text(const std::string& path, std::span<const std::string> outputs = {});

  std::uint64_t count() const;
  /// The text read by from_text(); empty for a token file.
  std::string_view text() const;
  /// Reads tokens [begin, begin + out.size()). Errc::config names position and value of the first token
  /// outside the vocabulary.
  void read(std::uint64_t begin, std::span<std::int32_t> out) const;
  /// From now on tokens >= `vocabulary` are errors.
  void limit_vocabulary(std::uint64_t vocabulary) { vocabulary_ = vocabulary; }
  /// Checks all tokens, or 8 Mi tokens in parts spread over the file if there are more; read() checks the
  /// rest. Errors as for read().
  void check_vocabulary() const;
  /// The number of samples of T + 1 tokens. Errc::config if it is zero, Errc::invalid_argument
  /// if T is.
  std::uint64_t samples(std::uint64_t seq_len) const;
  const std::string& name() const;  ///< the path, for messages

 private:
  struct State;
  void require_in_vocabulary(std::uint64_t begin, std::span<const std::int32_t>) const;

  std::shared_ptr<const State> state_;
  std::uint64_t vocabulary_ = std::uint64_t{1} << 31;
};

/// Of parts_of_checksum() of the tokens.
std::uint64_t checksum(const Tokens&);

/// Sample i has the fields `inputs`, tokens i·T … i·T + T - 1, and `targets`, the token after each: i32 [T].
class TokenDataset : public Dataset {
 public:
  /// Errc::config if there are fewer than T + 1 tokens.
  TokenDataset(Tokens, std::size_t seq_len);

  std::uint64_t size() const override { return samples_; }
  std::vector<Field> fields() const override;
  /// Errc::config names a token outside the vocabulary.
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override;
  std::optional<std::uint64_t> checksum() const override { return rz::checksum(tokens_); }

 private:
  Tokens tokens_;
  std::size_t seq_len_;
  std::uint64_t samples_;
};

}  // namespace rz
