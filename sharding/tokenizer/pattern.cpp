#include "sharding/tokenizer/pattern.h"

#include <dlfcn.h>
#include <oniguruma.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "comm/core/error.h"
#include "comm/os/process.h"
#include "sharding/io/text.h"
#include "sharding/tokenizer/characters.h"
#include "sharding/tokenizer/unicode.h"

namespace rz {
namespace {

/// What is used of Oniguruma. It is not linked, since it defines regcomp(), regexec() and regfree(), which
/// would take the place of the C library's in every program that uses this library.
struct OnigLibrary {
  void* handle;  // null: not loaded yet
  decltype(&::onig_initialize) initialize;
  decltype(&::onig_new) create;
  decltype(&::onig_free) free;
  decltype(&::onig_search) search;
  decltype(&::onig_region_new) region_new;
  decltype(&::onig_region_free) region_free;
  decltype(&::onig_error_code_to_str) error_code_to_str;
  OnigEncoding utf8;
  OnigSyntaxType* syntax;
};
constinit OnigLibrary onig{};  // written once, under the lock of compile()

template <class T>
void find_symbol(T& to, const char* name) {
  to = reinterpret_cast<T>(::dlsym(onig.handle, name));
  require(to != nullptr, Errc::unsupported, "libonig.so.5 has no ", name, "; install another version");
}

/// Under a lock. Errc::unsupported.
void load_onig() {
  if (onig.syntax) return;
  if (!onig.handle) onig.handle = ::dlopen("libonig.so.5", RTLD_NOW | RTLD_LOCAL);
  require(onig.handle != nullptr, Errc::unsupported,
          "regular expressions of tokenizers need Oniguruma: ", ::dlerror(), "; install libonig5");
  find_symbol(onig.initialize, "onig_initialize");
  find_symbol(onig.create, "onig_new");
  find_symbol(onig.free, "onig_free");
  find_symbol(onig.search, "onig_search");
  find_symbol(onig.region_new, "onig_region_new");
  find_symbol(onig.region_free, "onig_region_free");
  find_symbol(onig.error_code_to_str, "onig_error_code_to_str");
  find_symbol(onig.utf8, "OnigEncodingUTF8");
  find_symbol(onig.syntax, "OnigSyntaxOniguruma");
}

struct FreeRegex {
  void operator()(regex_t* regex) const { onig.free(regex); }
};
using Onig = std::unique_ptr<regex_t, FreeRegex>;

const OnigUChar* chars(const char* text) { return reinterpret_cast<const OnigUChar*>(text); }

/// A class of the characters in the ranges, or of all others.
std::string class_of(const std::vector<CharacterRange>& ranges, bool negated) {
  std::string out = negated ? "[^" : "[";
  char text[40];
  const auto add = [&](char32_t first, char32_t last) {
    if (first > last) return;
    std::snprintf(text, sizeof text, "\\x{%X}-\\x{%X}", static_cast<unsigned>(first),
                  static_cast<unsigned>(last));
    out += text;
  };
  for (const auto& [first, last] : ranges)  // no text has surrogates, which no expression may name
    add(first, std::min<char32_t>(last, first < 0xD800 ? 0xD7FF : last)),
        add(std::max<char32_t>(first, first < 0xE000 ? 0xE000 : first), last);
  return out + "]";
}

/// Rewrites an expression so that what depends on a version of Unicode is that of our table. Oniguruma
/// accepts few properties of one's own, so their characters are written out.
class Rewriter {
 public:
  Rewriter(std::string_view expression, const std::string& where) : rest_(expression), where_(where) {}

  std::string rewritten() {
    while (!rest_.empty()) {
      if (rest_.starts_with('\\'))
        escape();
      else if (depth_ == 0 && rest_.starts_with("(?"))
        group();
      else if (depth_ > 0 && rest_.starts_with("[:"))
        bracket();
      else
        character();
    }
    return std::move(out_);
  }

 private:
  void take(std::size_t n) { out_ += rest_.substr(0, n), rest_.remove_prefix(std::min(n, rest_.size())); }
  void refuse(std::string_view what) const {
    fail(Errc::config, where_, ": ", escaped(what),
         " is not supported: it depends on the version of Unicode of libonig");
  }

  void character() {
    const char c = rest_[0];
    take(1);
    if (c == '[') {
      ++depth_;
      if (rest_.starts_with('^')) take(1);
      if (rest_.starts_with(']')) take(1);  // the character
    } else if (c == ']' && depth_ > 0) {
      --depth_;
    } else if (c == '#' && extended_ && depth_ == 0) {
      take(std::min(rest_.find('\n'), rest_.size()));
    }
  }
  void group() {
    if (rest_.starts_with("(?#")) return take(std::min(rest_.find(')'), rest_.size() - 1) + 1);
    const std::size_t end = std::min(rest_.find_first_not_of("imxWDSPyILCa-{gw}", 2), rest_.size());
    const std::string_view options = rest_.substr(2, end - 2);
    const bool are_options = end < rest_.size() && (rest_[end] == ':' || rest_[end] == ')');
    if (are_options && options.find_first_of("WDSPyI") != options.npos) refuse(rest_.substr(0, end));
    if (are_options && options.substr(0, options.find('-')).find('x') != options.npos) extended_ = true;
    take(2);
  }
  /// [:alpha:] in a class.
  void bracket() {
    const std::size_t end = rest_.find(":]");
    if (end == rest_.npos) return character();
    std::string_view name = rest_.substr(2, end - 2);
    const bool negated = name.starts_with('^');
    if (negated) name.remove_prefix(1);
    if (name.find_first_not_of("abcdefghijklmnopqrstuvwxyz") != name.npos) return character();
    put(name == "punct" ? "posixpunct" : name, negated, "[:" + std::string(name) + ":]");
    rest_.remove_prefix(end + 2);
  }
  void escape() {
    if (rest_.starts_with("\\p{") || rest_.starts_with("\\P{")) return property();
    const char c = rest_.size() > 1 ? rest_[1] : '\0';
    const bool negated = c >= 'A' && c <= 'Z';
    if (c == 'd' || c == 'D')
      put("nd", negated);
    else if (c == 's' || c == 'S')
      put("space", negated);
    else if (c == 'w' || c == 'W')
      put_word(negated);
    else if (depth_ == 0 && (c == 'b' || c == 'B'))
      put_boundary(negated);
    else if (depth_ == 0 && (c == 'X' || c == 'y' || c == 'Y'))
      refuse(rest_.substr(0, 2));
    else
      return take(2);
    rest_.remove_prefix(2);
  }
  void property() {
    const std::size_t end = std::min(rest_.find('}'), rest_.size() - 1);
    std::string_view name = rest_.substr(3, end - 3);
    bool negated = rest_[1] == 'P';
    if (name.starts_with('^')) negated = !negated, name.remove_prefix(1);
    find_property(name) == find_property("word") ? put_word(negated)
                                                 : put(name, negated, rest_.substr(0, end + 1));
    rest_.remove_prefix(end + 1);
  }

  /// Outside a class, Oniguruma does not ignore the case of a property.
  void put(std::string_view name, bool negated, std::string_view spelled = {}) {
    const auto* const ranges = find_property(name);
    require(ranges != nullptr, Errc::config, where_, ": ", escaped(spelled),
            " is no property of Unicode 16 that is known here");
    put(class_of(*ranges, negated));
  }
  void put(const std::string& set) { out_ += depth_ > 0 ? set : "(?-i:" + set + ")"; }
  /// Outside a class, Oniguruma has some numbers of Latin-1 among characters of words.
  static std::string word_class(bool negated) {
    std::vector<CharacterRange> ranges = ranges_of("WORD");
    for (const char32_t c : {0xB2, 0xB3, 0xB9, 0xBC, 0xBD, 0xBE}) ranges.push_back({c, c});
    return class_of(ranges, negated);
  }
  void put_word(bool negated) {
    put(depth_ > 0 ? class_of(ranges_of("WORD"), negated) : word_class(negated));
  }
  void put_boundary(bool negated) {
    const std::string word = word_class(false);
    out_ += concat("(?-i:(?<=", word, negated ? ")(?=" : ")(?!", word, ")|(?<!", word,
                   negated ? ")(?!" : ")(?=", word, "))");
  }

  std::string_view rest_;
  const std::string& where_;
  std::string out_;
  int depth_ = 0;          // of classes
  bool extended_ = false;  // # begins a comment
};

/// Repeated repetitions are compiled to as many copies.
void limit_repetitions(std::string_view expression, const std::string& where) {
  std::uint64_t all = 1;
  for (std::size_t at = 0; at < expression.size(); ++at) {
    if (expression[at] != '{') continue;
    std::uint64_t largest = 1;
    for (++at; at < expression.size() && expression[at] != '}'; ++at) {
      std::uint64_t number = 0;
      for (; at < expression.size() && expression[at] >= '0' && expression[at] <= '9'; ++at)
        number = std::min<std::uint64_t>(number * 10 + static_cast<std::uint64_t>(expression[at] - '0'),
                                         1'000'000);
      largest = std::max(largest, number);
      if (at >= expression.size() || expression[at] == '}') break;
    }
    all *= largest;
    require(all <= 10'000, Errc::config, where, ": the expression repeats its parts more than 10000 times");
  }
}

Onig compile(const std::string& given, const std::string& where) {
  limit_repetitions(given, where);
  const std::string expression = Rewriter(given, where).rewritten();
  regex_t* compiled = nullptr;
  OnigErrorInfo info;
  static constinit ProcessMutex mutex;  // Oniguruma's initialization is not thread-safe
  const std::lock_guard lock(mutex);
  load_onig();
  OnigEncoding encodings[] = {onig.utf8};
  int status = onig.initialize(encodings, 1);
  if (status == ONIG_NORMAL)
    status = onig.create(&compiled, chars(expression.data()), chars(expression.data() + expression.size()),
                         ONIG_OPTION_NONE, onig.utf8, onig.syntax, &info);
  if (status != ONIG_NORMAL) {
    OnigUChar text[ONIG_MAX_ERROR_MESSAGE_LEN] = {};
    onig.error_code_to_str(text, status, &info);
    fail(Errc::config, where, ": ", escaped(reinterpret_cast<const char*>(text)));
  }
  return Onig(compiled);
}

}  // namespace

struct Pattern::State {
  std::string text, where;
  Onig regex;
};

Pattern Pattern::text(std::string text) {
  if (text.empty()) return regex("", "an empty pattern");
  Pattern pattern;
  auto state = std::make_shared<State>();
  state->text = std::move(text);
  pattern.state_ = std::move(state);
  return pattern;
}

Pattern Pattern::regex(const std::string& expression, const std::string& where) {
  Pattern pattern;
  auto state = std::make_shared<State>();
  state->where = where;
  state->regex = compile(expression, where);
  pattern.state_ = std::move(state);
  return pattern;
}

Pattern Pattern::read(const JsonObject& owner) {
  const JsonObject pattern = owner.object("pattern");
  const std::vector<std::string> keys = pattern.keys();
  if (keys.size() == 1 && keys[0] == "String") return text(pattern.text("String", ""));
  if (keys.size() == 1 && keys[0] == "Regex")
    return regex(pattern.text("Regex", ""), escaped(concat(owner.file(), ": ", pattern.path("Regex"))));
  owner.fail_at("pattern", R"(expected {"String": "…"} or {"Regex": "…"})");
}

const std::string* Pattern::as_text() const { return state_->regex ? nullptr : &state_->text; }

std::vector<Pattern::Match> Pattern::find(std::string_view text) const {
  std::vector<Match> all;
  if (const std::string* const searched = as_text()) {
    for (std::size_t at = text.find(*searched); at != text.npos; at = text.find(*searched, all.back().end))
      all.push_back({at, at + searched->size()});
    return all;
  }
  if (text.empty()) return all;
  const std::unique_ptr<OnigRegion, void (*)(OnigRegion*)> region(
      onig.region_new(), [](OnigRegion* r) { onig.region_free(r, 1); });
  const OnigUChar *const begin = chars(text.data()), *const end = begin + text.size();
  std::optional<std::size_t> last;
  for (std::size_t at = 0; at <= text.size();) {
    const auto found =
        onig.search(state_->regex.get(), begin, end, begin + at, end, region.get(), ONIG_OPTION_NONE);
    if (found == ONIG_MISMATCH) break;
    if (found < 0) {
      OnigUChar message[ONIG_MAX_ERROR_MESSAGE_LEN] = {};
      onig.error_code_to_str(message, static_cast<int>(found));
      fail(Errc::config, state_->where, ": a search of ", text.size(),
           " bytes: ", reinterpret_cast<const char*>(message));
    }
    const auto from = static_cast<std::size_t>(region->beg[0]), to = static_cast<std::size_t>(region->end[0]);
    if (from == to && last == to) {
      at += at < text.size() ? first_character(text.data() + at).length : 1;
      continue;
    }
    all.push_back({from, to});
    at = to;
    last = to;
  }
  return all;
}

std::string Pattern::replaced(std::string_view text, std::string_view by) const {
  std::string out;
  std::size_t last = 0;
  for (const auto& [begin, end] : find(text)) {
    out += text.substr(last, begin - last);
    out += by;
    last = end;
  }
  out += text.substr(last);
  return out;
}

SplitBehavior split_behavior(const JsonObject& owner, std::string_view key, SplitBehavior absent) {
  constexpr std::array names{"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
  if (!owner.has(key)) return absent;
  const std::string name = owner.text(key, "");
  const auto found = std::ranges::find(names, name);
  if (found == names.end())
    owner.fail_at(
        key,
        concat("expected Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous, found ", name));
  return static_cast<SplitBehavior>(found - names.begin());
}

std::vector<Part> parts_of_matches(const std::vector<Pattern::Match>& matches, std::size_t size) {
  std::vector<Part> parts;
  std::size_t last = 0;
  for (const auto& [begin, end] : matches) {
    if (last != begin) parts.push_back({last, begin, false});
    parts.push_back({begin, end, true});
    last = end;
  }
  if (last != size) parts.push_back({last, size, false});
  return parts;
}

std::vector<Part> apply(SplitBehavior behavior, const std::vector<Part>& parts) {
  std::vector<Part> kept;
  bool after_match = false;
  switch (behavior) {
    case SplitBehavior::isolated:
      return parts;
    case SplitBehavior::removed:
      std::ranges::copy_if(parts, std::back_inserter(kept), [](const Part& p) { return !p.match; });
      return kept;
    case SplitBehavior::contiguous:
      for (const Part& part : parts) {
        if (part.match == after_match && !kept.empty())
          kept.back().end = part.end;
        else
          kept.push_back(part);
        after_match = part.match;
      }
      return kept;
    case SplitBehavior::merged_with_previous:
      for (const Part& part : parts) {
        if (part.match && !after_match && !kept.empty())
          kept.back().end = part.end;
        else
          kept.push_back(part);
        after_match = part.match;
      }
      return kept;
    case SplitBehavior::merged_with_next:
      for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
        if (part->match && !after_match && !kept.empty())
          kept.back().begin = part->begin;
        else
          kept.push_back(*part);
        after_match = part->match;
      }
      std::ranges::reverse(kept);
      return kept;
  }
  return kept;
}

// ---- known expressions

namespace {

constexpr std::string_view gpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view llama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view qwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

constexpr std::uint8_t kinds = CharacterSet::alpha | CharacterSet::number | CharacterSet::space;

/// Finds the end of the match at the beginning of a text.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : end_(text.data() + text.size()) {}

  const char* gpt2_match(const char* from) const {
    if (*from == '\'')
      if (const std::size_t length = contraction(from, false)) return from + length;
    const char* const body = *from == ' ' && from + 1 < end_ ? from + 1 : from;
    const std::uint8_t kind = kind_at(body);
    return kind == CharacterSet::space ? spaces(from) : run(body, kind);
  }

  const char* llama3_match(const char* from, int max_digits) const {
    if (*from == '\'')
      if (const std::size_t length = contraction(from, true)) return from + length;
    const auto [code, length] = first_character(from);
    const std::uint8_t kind = sets_[code] & kinds;
    if (kind == CharacterSet::alpha) return run(from, kind);
    if (kind == CharacterSet::number) return numbers(from, max_digits);
    if (code != '\r' && code != '\n' && from + length < end_ && kind_at(from + length) == CharacterSet::alpha)
      return run(from + length, CharacterSet::alpha);
    const char* const body = code == ' ' && from + 1 < end_ ? from + 1 : from;
    if (kind_at(body) == 0) {
      const char* at = run(body, 0);
      while (at < end_ && (*at == '\r' || *at == '\n')) ++at;
      return at;
    }
    const char* const last = run(from, CharacterSet::space);
    for (const char* at = last; at > from; --at)
      if (at[-1] == '\r' || at[-1] == '\n') return at;
    return spaces(from);
  }

 private:
  std::uint8_t kind_at(const char* at) const { return sets_[first_character(at).code] & kinds; }

  const char* run(const char* at, std::uint8_t kind) const {
    while (at < end_) {
      const auto [code, length] = first_character(at);
      if ((sets_[code] & kinds) != kind) break;
      at += length;
    }
    return at;
  }
  const char* numbers(const char* at, int max) const {
    for (int i = 0; i < max && at < end_ && kind_at(at) == CharacterSet::number; ++i)
      at += first_character(at).length;
    return at;
  }
  /// \s+(?!\S)|\s+: without the last one before another character, unless it is the only one.
  const char* spaces(const char* from) const {
    const char* const after = run(from, CharacterSet::space);
    if (after == end_) return after;
    const char* const last = from + last_character({from, static_cast<std::size_t>(after - from)});
    return last == from ? after : last;
  }
  /// 's|'t|'re|'ve|'m|'ll|'d, with the long s if the case is ignored.
  std::size_t contraction(const char* at, bool any_case) const {
    const auto left = static_cast<std::size_t>(end_ - at);
    const auto character = [&](std::size_t i) {
      if (i >= left) return '\0';
      return any_case && at[i] >= 'A' && at[i] <= 'Z' ? static_cast<char>(at[i] + 32) : at[i];
    };
    switch (character(1)) {
      case 's':
      case 't':
      case 'm':
      case 'd':
        return 2;
      case 'r':
      case 'v':
        return character(2) == 'e' ? 3 : 0;
      case 'l':
        return character(2) == 'l' ? 3 : 0;
      case '\xC5':
        return any_case && character(2) == '\xBF' ? 3 : 0;
      default:
        return 0;
    }
  }

  const std::uint8_t* sets_ = character_sets();
  const char* end_;
};

}  // namespace

KnownPattern known_pattern(std::string_view expression) {
  for (const KnownPattern known : {KnownPattern::gpt2, KnownPattern::llama3, KnownPattern::qwen2})
    if (expression == expression_of(known)) return known;
  return KnownPattern::none;
}

std::string_view expression_of(KnownPattern known) {
  return known == KnownPattern::gpt2     ? gpt2
         : known == KnownPattern::llama3 ? llama3
         : known == KnownPattern::qwen2  ? qwen2
                                         : "";
}

std::size_t split(KnownPattern known, std::string_view text, std::vector<std::string_view>& out,
                  std::size_t max) {
  const Scanner scanner(text);
  const char *const begin = text.data(), *const end = begin + text.size(), *at = begin;
  for (; at < end && max > 0; --max) {
    const char* const next = known == KnownPattern::gpt2
                                 ? scanner.gpt2_match(at)
                                 : scanner.llama3_match(at, known == KnownPattern::llama3 ? 3 : 1);
    out.emplace_back(at, static_cast<std::size_t>(next - at));
    at = next;
  }
  return static_cast<std::size_t>(at - begin);
}

}  // namespace rz
