#pragma once
/// The model of byte pair encoding: a vocabulary, and merges of neighbours in the order of their ranks
/// (Sennrich et al. 2016, https://doi.org/10.18653/v1/P16-1162).

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sharding/io/json.h"

namespace rz {

/// Tokens of words of one call of encode(): a table of fixed size by their hashes.
class WordCache {
 public:
  static constexpr std::size_t max_bytes = 15, max_ids = 11, slots = 1 << 14;
  struct Slot {
    std::array<char, max_bytes> word;
    std::uint8_t bytes;
    std::uint32_t count;
    std::array<std::int32_t, max_ids> ids;
  };
  /// The place of a word of 1 to max_bytes bytes; it may be another's.
  Slot& at(std::string_view word);
  static bool is_of(const Slot& slot, std::string_view word) {
    return slot.bytes == word.size() && std::string_view(slot.word.data(), slot.bytes) == word;
  }

 private:
  std::vector<Slot> slots_ = std::vector<Slot>(slots);
};

/// Immutable.
class BytePairs {
 public:
  /// How words are spelt: in characters, or in bytes, whose characters the vocabulary has
  /// (byte_characters()).
  enum class Spelling { characters, bytes };

  /// Reads the "model" of a tokenizer.json. Errc::config names the key.
  static BytePairs read(const JsonObject& model);
  /// Reads vocab.json and merges.txt.
  static BytePairs read(const JsonObject& vocabulary, std::string_view merges,
                        const std::string& merges_file);
  /// Must be called before encode().
  void set_spelling(Spelling);

  /// Appends the tokens of a word.
  void encode(std::string_view word, WordCache&, std::vector<std::int32_t>& out) const;

  std::optional<std::int32_t> id_of(std::string_view token) const;
  /// nullptr without a token of this id.
  const std::string* token_of(std::int32_t id) const;
  std::size_t size() const { return id_of_.size(); }
  std::int32_t largest_id() const { return largest_id_; }

 private:
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  using Vocabulary = std::unordered_map<std::string, std::int32_t, Hash, std::equal_to<>>;
  struct Merge {
    std::int32_t left, right, result;
  };
  struct Entry {
    std::uint64_t pair;  ///< of ids, plus 1; 0: none
    std::uint32_t rank;
  };

  void read_vocabulary(const JsonObject&);
  void add_merge(std::string_view left, std::string_view right, const std::function<std::string()>& where);
  void complete();
  std::uint32_t rank_of(std::int32_t left, std::int32_t right) const;
  void symbols_of(std::string_view word, std::vector<std::int32_t>& symbols) const;
  void add_symbols(std::string_view character, bool& unknown, std::vector<std::int32_t>&) const;
  void merge_few(std::vector<std::int32_t>& symbols) const;
  void merge_many(std::vector<std::int32_t>& symbols) const;

  Spelling spelling_ = Spelling::characters;
  bool fuse_unk_ = false, byte_fallback_ = false, ignore_merges_ = false;
  std::optional<std::int32_t> unknown_;
  Vocabulary id_of_, id_of_bytes_;
  std::unordered_map<std::int32_t, const std::string*> token_of_;
  std::int32_t largest_id_ = -1;
  std::vector<Merge> merges_;
  bool results_differ_ = true;  ///< no two merges have the same result
  std::vector<Entry> ranks_;    ///< a hash table with a power of two of places
  int shift_ = 63;
  std::array<std::int32_t, 256> first_;  ///< of bytes, or of ASCII; -1: none
  std::unordered_map<char32_t, std::int32_t> id_of_character_;
  std::array<std::int32_t, 256> fallback_;  ///< of bytes as "<0x41>"; -1: none
};

}  // namespace rz
