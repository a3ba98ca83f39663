#pragma once
/// What is trained on: a long row of tokens, cut into samples of T + 1 that overlap by one: sample i is
/// tokens[i·T … i·T+T], inputs the first T, targets the last T.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace rz::train_gpt {

/// Copies share the tokens; reads from several threads are safe.
class Tokens {
 public:
  /// Little-endian uint16, read from the file as they are needed. Errc::config names a missing file or an odd
  /// length.
  static Tokens from_file(const std::string& path);
  /// The bytes of a text file, or of every text file below a folder, in sorted order, with an empty line
  /// between files. Left out: .git and other hidden names, folders of what can be made again (those with
  /// a CMakeCache.txt or CACHEDIR.TAG, node_modules, __pycache__), links, and files that hold a zero byte.
  /// `outputs` are left out as well: files and folders that the run itself will write. Errc::config names
  /// what is missing, empty or above 1 GiB.
  static Tokens from_text(const std::string& path, std::span<const std::string> outputs = {});

  std::uint64_t count() const;
  /// Tokens [begin, begin + out.size()).
  void read(std::uint64_t begin, std::span<std::int32_t> out) const;
  /// Errc::config names the first token that is not below `vocabulary`: its position and value.
  void check_vocabulary(std::uint64_t vocabulary) const;
  /// How many samples of T + 1 tokens there are. Errc::config if there is none.
  std::uint64_t samples(std::uint64_t seq_len) const;
  const std::string& name() const;  ///< the path, for messages

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace rz::train_gpt
