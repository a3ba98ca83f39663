#pragma once
/// What is trained on: a long row of tokens, cut into samples of T + 1 that overlap by one: sample i is
/// tokens[i·T … i·T+T], inputs the first T, targets the last T.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace rz::train_gpt {

/// Copies share the tokens; reads from several threads are safe.
class Tokens {
 public:
  /// Little-endian uint16, read from the file as they are needed, without the header that llm.c's files have
  /// (256 int32: 20240520, version 1, number of tokens). Errc::config names a missing file, an odd length, or
  /// what is wrong with the header.
  static Tokens from_file(const std::string& path);
  /// The bytes of a text file, or of every text file below a folder, in sorted order, with an empty line
  /// between files. Left out: .git and other hidden names, folders of what can be made again (those with
  /// a CMakeCache.txt or CACHEDIR.TAG, node_modules, __pycache__), links, and files that hold a zero byte.
  /// `outputs` are left out as well: files and folders that the run itself will write. Errc::config names
  /// what is missing, empty or above 1 GiB.
  static Tokens from_text(const std::string& path, std::span<const std::string> outputs = {});

  std::uint64_t count() const;
  /// The text that from_text() read; empty for a file of tokens.
  std::string_view text() const;
  /// Tokens [begin, begin + out.size()). Errc::config names the first that is beyond the vocabulary: its
  /// position and value.
  void read(std::uint64_t begin, std::span<std::int32_t> out) const;
  /// From now on tokens from `vocabulary` on are beyond it.
  void limit_vocabulary(std::uint64_t vocabulary) { vocabulary_ = vocabulary; }
  /// Reads all tokens; of more than 8 Mi, as many in parts spread over the file. read() checks the others.
  /// Errors as read().
  void check_vocabulary() const;
  /// How many samples of T + 1 tokens there are. Errc::config if there is none.
  std::uint64_t samples(std::uint64_t seq_len) const;
  const std::string& name() const;  ///< the path, for messages

 private:
  struct State;
  void require_in_vocabulary(std::uint64_t begin, std::span<const std::int32_t>) const;

  std::shared_ptr<const State> state_;
  std::uint64_t vocabulary_ = std::uint64_t{1} << 31;
};

}  // namespace rz::train_gpt
