#pragma once
/// How a text is split into the words of the model: the "pre_tokenizer" of a tokenizer.json.

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "sharding/tokenizer/elements.h"
#include "sharding/tokenizer/pattern.h"

namespace rz {

/// ByteLevel, Split, Digits, Metaspace, Punctuation, Whitespace, WhitespaceSplit, CharDelimiterSplit and
/// Sequence. Immutable.
class PreTokenizer {
 public:
  PreTokenizer() = default;
  /// Reads a node that is null or an object. Errc::config names a key that is not supported.
  static PreTokenizer read(const JsonObject& owner, std::string_view key);
  /// GPT-2's.
  static PreTokenizer byte_level(bool add_prefix_space, bool use_regex = true);
  /// Splits bytes by a known expression.
  static PreTokenizer byte_level(bool add_prefix_space, KnownPattern);

  bool empty() const { return stages_.empty(); }
  /// Whether the words are spelt in the characters of their bytes. Words of split() are then the bytes.
  bool spells_bytes() const { return !stages_.empty() && stages_.back().kind == Kind::byte_level; }
  /// Sets the value of a ByteLevel, and leaves others alone. Returns whether it had another value.
  bool set_prefix_space(bool add);
  /// Whether a text is one word, the very bytes.
  bool is_identity_of_bytes() const;

  /// The words of valid UTF-8. They refer to the text, or to `storage`. `first`: the text is at the beginning
  /// of what is encoded. Errc::config as for Pattern::find().
  std::vector<std::string_view> split(std::string_view text, bool first,
                                      std::deque<std::string>& storage) const;

 private:
  enum class Kind { byte_level, split, digits, metaspace, characters, whitespace };
  struct Stage {
    Kind kind;
    bool add_prefix_space = false, use_regex = false, invert = false, individual = false;
    PrependScheme prepend = PrependScheme::never;
    std::string character{};  ///< of Metaspace
    std::uint8_t set = 0;     ///< of CharacterSet
    SplitBehavior behavior = SplitBehavior::isolated;
    KnownPattern known = KnownPattern::none;
    Pattern pattern{};
  };
  void read_stage(const JsonObject& stage);
  /// Appends the words of a text. Whether the first of them begins where the text does.
  static bool apply(const Stage&, bool last, std::string_view text, bool first,
                    std::deque<std::string>& storage, std::vector<std::string_view>& out);

  std::vector<Stage> stages_;
};

}  // namespace rz
