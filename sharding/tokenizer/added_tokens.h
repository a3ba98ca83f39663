#pragma once
/// Tokens beside those of the model: special ones, and others that a text may contain.

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "sharding/io/json.h"
#include "sharding/tokenizer/byte_pairs.h"
#include "sharding/tokenizer/normalizer.h"

namespace rz {

struct AddedToken {
  std::int32_t id = -1;
  std::string content;
  bool single_word = false, lstrip = false, rstrip = false, normalized = true, special = false;

  bool operator==(const AddedToken&) const = default;
};

/// Immutable, except for add().
class AddedTokens {
 public:
  /// "added_tokens" of a tokenizer.json. The id of an entry is that of the model's token of this text, or
  /// else the next free one. Errc::config names an entry with another id.
  static AddedTokens read(const JsonObject& owner, const BytePairs&, const Normalizer&);
  /// Adds a token, or replaces one of the same text.
  void add(AddedToken, const Normalizer&);

  bool empty() const { return of_id_.empty(); }
  std::int32_t largest_id() const { return largest_id_; }
  /// nullptr if there is none.
  const AddedToken* find(std::string_view content) const;
  /// The text that the token decodes to: in the form of the normalizer, as in tokenizers. nullptr if there is
  /// none of this id.
  const std::string* text_of(std::int32_t id) const;
  const AddedToken* of_id(std::int32_t id) const;
  bool is_special(std::string_view text) const { return special_.contains(std::string(text)); }

  /// A part of a text, which is a token, or is none if its id is -1.
  struct Piece {
    std::size_t begin, end;
    std::int32_t id;
  };
  /// The pieces of a text before it is normalized, or after: the leftmost longest tokens.
  std::vector<Piece> split(std::string_view text, bool normalized) const;

 private:
  void insert(const AddedToken&, const Normalizer&);

  /// Texts by their bytes.
  struct Trie {
    struct Node {
      std::unordered_map<unsigned char, std::size_t> next;
      std::int32_t id = -1;
    };
    std::vector<Node> nodes = std::vector<Node>(1);
    std::array<bool, 256> begins{};

    /// The id of a text, which becomes one of them; -1 at first.
    std::int32_t& id_of(std::string_view text);
    /// Bytes of the longest text at the front; 0 if there is none.
    std::size_t match(std::string_view text, std::int32_t& id) const;
  };

  std::map<std::int32_t, AddedToken> of_id_;
  std::unordered_map<std::int32_t, std::string> normalized_;
  std::unordered_map<std::string, std::int32_t> id_of_;
  std::unordered_set<std::string> special_;
  std::int32_t largest_id_ = -1;
  Trie raw_, after_;
};

}  // namespace rz
