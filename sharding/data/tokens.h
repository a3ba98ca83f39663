#pragma once
/// A sequence of tokens, cut into samples of T + 1 tokens that overlap by one. Sample i is
/// tokens[i·T … i·T+T]; its inputs are the first T, its targets the last T. Or pairs of a prompt and its
/// answer, each a sample.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dataset.h"
#include "text_documents.h"
#include "token_shards.h"

namespace rz {

class Checksum;

/// Copies share the tokens; concurrent reads are safe.
class Tokens {
 public:
  /// Tokens of a file, of the files *.bin and *.npy of a folder, or of those whose names match a pattern with
  /// `*`, `?` or `[`, one after the other in the order of their names, or of several such, "A,B", in the
  /// order given; read on demand. A .npy file of NumPy has integers of 2, 4 or 8 bytes, and a file of llm.c
  /// (256 int32: 20240520 or 20240801, version, number of tokens) uint16 or uint32, by their headers. Other
  /// files are little-endian, of `dtype`: "uint16", "uint32", "int16", "int32", "uint64", "int64", or "auto",
  /// which is uint16 unless the words look like another type's: these are refused, as are bytes that look
  /// like text, an archive or a table, and eight bytes where four are said. A folder
  /// with an index (TokenShards) has the files of the index and no others, of its dtype. Errc::config names
  /// the file and what is wrong with it, its header or the index; and folders of different tokenizers.
  static Tokens from_file(const std::string& path, const std::string& dtype = "auto");
  /// Text of text_files(), all of it in memory: as bytes, or by a tokenizer, and pairs if TextOptions has
  /// their keys. Errc::config as text_files() and encode_documents(), and for nothing but empty files, or
  /// more than 1 GiB.
  static Tokens from_text(const std::string& path, const TextOptions&);
  static Tokens from_text(const std::string& path, std::span<const std::string> outputs = {});

  std::uint64_t count() const;
  /// The text read by from_text(), with a line break between documents; empty for a token file.
  std::string_view text() const;
  /// The lines of text_files() on what from_text() has left out.
  std::span<const std::string> left_out() const;
  /// The samples are pairs, and only their answers are learnt.
  bool has_answers() const;
  /// The indices of those folders of from_file() that have one.
  std::span<const TokensIndex> indices() const;
  /// Reads tokens [begin, begin + out.size()). Errc::config names position and value of the first token
  /// outside the vocabulary.
  void read(std::uint64_t begin, std::span<std::int32_t> out) const;
  /// A pair: targets of the prompt and beyond the end of the answer are -100, and inputs there are the
  /// tokenizer's padding, or the end of a text, or 0. If the pair has more than T + 1 tokens, the prompt
  /// loses its first ones, except for its last one; if that does not suffice, the answer loses its last ones.
  void read_pair(std::uint64_t pair, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const;
  /// From now on tokens >= `vocabulary` are errors.
  void limit_vocabulary(std::uint64_t vocabulary) { vocabulary_ = vocabulary; }
  /// Checks all tokens, or 8 Mi tokens in parts spread over the file if there are more; read() checks the
  /// rest. Errors as for read().
  void check_vocabulary() const;
  /// The number of samples of T + 1 tokens, or of pairs. Errc::config if it is zero, Errc::invalid_argument
  /// if T is.
  std::uint64_t samples(std::uint64_t seq_len) const;
  const std::string& name() const;  ///< the path, for messages

 private:
  friend std::uint64_t checksum(const Tokens&);
  struct State;
  void add_pairs(Checksum&) const;
  void require_in_vocabulary(std::uint64_t begin, std::span<const std::int32_t>) const;

  std::shared_ptr<const State> state_;
  std::uint64_t vocabulary_ = std::uint64_t{1} << 31;
};

/// Joins parts_of_checksum() of the tokens and of the lengths of pairs.
std::uint64_t checksum(const Tokens&);

/// Sample i has the fields `inputs`, tokens i·T … i·T + T - 1, and `targets`, the token after each: i32 [T].
/// If the samples are pairs, it is pair i, as Tokens::read_pair() has it.
class TokenDataset : public Dataset {
 public:
  /// `document_end`: a third field, `document_starts`, i32 [T], has the input at which the document of each
  /// input begins (LanguageModel::forward()), by the token that ends documents.
  /// Errc::config if there are fewer than T + 1 tokens.
  TokenDataset(Tokens, std::size_t seq_len, std::optional<std::int32_t> document_end = {});

  std::uint64_t size() const override { return samples_; }
  std::vector<Field> fields() const override;
  /// Errc::config names a token outside the vocabulary.
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override;
  std::optional<std::uint64_t> checksum() const override { return rz::checksum(tokens_); }

 private:
  Tokens tokens_;
  std::size_t seq_len_;
  std::uint64_t samples_;
  std::optional<std::int32_t> document_end_;
};

}  // namespace rz
