#pragma once
/// What splits and replacements search: a text, or a regular expression.

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sharding/io/json.h"

namespace rz {

/// Immutable; concurrent searches are safe.
class Pattern {
 public:
  static Pattern text(std::string text);
  /// A regular expression of Oniguruma, as of Hugging Face's tokenizers, whose properties, \d, \s, \w, \b and
  /// classes of POSIX are those of Unicode 16. Errc::config, after `where`, if it is none, if it has a
  /// property that find_property() lacks, \X, \y or an option that limits these to ASCII, or if it repeats
  /// its parts more than 10,000 times in all.
  static Pattern regex(const std::string& expression, const std::string& where);
  /// Reads a key "pattern": {"String": …} or {"Regex": …}.
  static Pattern read(const JsonObject& owner);

  struct Match {
    std::size_t begin, end;
  };
  /// The matches in valid UTF-8, from left to right, without overlap. An empty match does not follow another
  /// match at once. Errc::config if the search exceeds Oniguruma's limits.
  std::vector<Match> find(std::string_view text) const;
  /// The text with all matches replaced.
  std::string replaced(std::string_view text, std::string_view by) const;
  /// The text, if it is one.
  const std::string* as_text() const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

/// What becomes of the matches of a pattern when it splits a text.
enum class SplitBehavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };
SplitBehavior split_behavior(const JsonObject& owner, std::string_view key, SplitBehavior absent);

/// A part of a text.
struct Part {
  std::size_t begin, end;
  bool match;
};
/// Parts between matches that cover a text, and the matches.
std::vector<Part> parts_of_matches(const std::vector<Pattern::Match>& matches, std::size_t size);
/// The parts that remain. They may be empty.
std::vector<Part> apply(SplitBehavior, const std::vector<Part>& parts);

/// Expressions that split most byte-level vocabularies, without Oniguruma, with the same result.
enum class KnownPattern {
  none,
  gpt2,    ///< 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  llama3,  ///< (?i:'s|…)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|…
  qwen2,   ///< the same with \p{N}
};
KnownPattern known_pattern(std::string_view expression);
std::string_view expression_of(KnownPattern);
/// Appends the matches, which cover the text, or the first `max`; the bytes of these.
std::size_t split(KnownPattern, std::string_view text, std::vector<std::string_view>& out,
                  std::size_t max = std::string_view::npos);

}  // namespace rz
