#include "sharding/tokenizer/pattern.h"

#include <dlfcn.h>
#include <oniguruma.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "comm/core/error.h"
#include "comm/os/process.h"
#include "sharding/io/text.h"
#include "sharding/tokenizer/characters.h"

namespace rz {
namespace {

/// What is used of Oniguruma. It is not linked, since it defines regcomp(), regexec() and regfree(), which
/// would take the place of the C library's in every program that uses this library.
struct OnigLibrary {
  void* handle;  // null: not loaded yet
  decltype(&::onig_initialize) initialize;
  decltype(&::onig_unicode_define_user_property) define_user_property;
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
  find_symbol(onig.define_user_property, "onig_unicode_define_user_property");
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

enum class Category {
  upper,
  lower,
  title,
  modifier,
  other_alpha,
  mark,
  digit,
  numeral,
  other_number,
  connector,
  punctuation
};

struct Run {
  OnigCodePoint first, last;
  Category category;
};
constexpr Run runs[] = {
#define RUN(first, last, category) {first, last, Category::category},
#include "sharding/tokenizer/categories.inc"
#undef RUN
};

/// Categories that Oniguruma has of an older Unicode, and the last of ours that each one has: those from the
/// first on.
struct Property {
  std::string_view name;
  Category first, last;
  const char* own_name;
};
constexpr std::array properties{Property{"L", Category::upper, Category::other_alpha, "rzL"},
                                Property{"Lu", Category::upper, Category::upper, "rzLu"},
                                Property{"Ll", Category::lower, Category::lower, "rzLl"},
                                Property{"Lt", Category::title, Category::title, "rzLt"},
                                Property{"Lm", Category::modifier, Category::modifier, "rzLm"},
                                Property{"Lo", Category::other_alpha, Category::other_alpha, "rzLo"},
                                Property{"M", Category::mark, Category::mark, "rzM"},
                                Property{"N", Category::digit, Category::other_number, "rzN"},
                                Property{"Nd", Category::digit, Category::digit, "rzNd"},
                                Property{"P", Category::connector, Category::punctuation, "rzP"}};

/// Once in a process, under a lock.
void define_properties() {
  static bool defined = false;
  if (std::exchange(defined, true)) return;
  for (const Property& property : properties) {
    // Oniguruma refers to the ranges as long as the process lives.
    auto* const ranges = new std::vector<OnigCodePoint>{0};
    for (const auto& [first, last, category] : runs) {
      if (category < property.first || category > property.last) continue;
      if ((*ranges)[0] > 0 && ranges->back() + 1 == first) {
        ranges->back() = last;
        continue;
      }
      ranges->insert(ranges->end(), {first, last});
      ++(*ranges)[0];
    }
    onig.define_user_property(property.own_name, ranges->data());
    leak_reachable(ranges);
  }
}

/// The expression with our names of the properties.
std::string with_own_properties(std::string_view expression) {
  std::string out;
  while (!expression.empty()) {
    const bool is_property = expression.starts_with("\\p{") || expression.starts_with("\\P{");
    const std::size_t end = is_property ? expression.find('}') : expression.npos;
    if (end != expression.npos) {
      std::string_view name = expression.substr(3, end - 3);
      out += expression.substr(0, 3);
      if (name.starts_with('^')) out += '^', name.remove_prefix(1);
      const auto found = std::ranges::find(properties, name, &Property::name);
      out += found == properties.end() ? name : found->own_name;
      expression.remove_prefix(end);
      continue;
    }
    const std::size_t taken = expression[0] == '\\' && expression.size() > 1 ? 2 : 1;
    out += expression.substr(0, taken);
    expression.remove_prefix(taken);
  }
  return out;
}

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
  const std::string expression = with_own_properties(given);
  regex_t* compiled = nullptr;
  OnigErrorInfo info;
  static constinit ProcessMutex mutex;  // Oniguruma's initialization is not thread-safe
  const std::lock_guard lock(mutex);
  load_onig();
  OnigEncoding encodings[] = {onig.utf8};
  int status = onig.initialize(encodings, 1);
  if (status == ONIG_NORMAL) define_properties();
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
