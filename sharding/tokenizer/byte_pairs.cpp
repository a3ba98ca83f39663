#include "sharding/tokenizer/byte_pairs.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <queue>

#include "comm/core/error.h"
#include "sharding/io/text.h"
#include "sharding/tokenizer/characters.h"

namespace rz {
namespace {

using nlohmann::json;

constexpr std::uint32_t no_rank = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint64_t odd = 0x9E3779B97F4A7C15;

std::uint64_t pair_of(std::int32_t left, std::int32_t right) {
  return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
          static_cast<std::uint32_t>(right)) +
         1;
}

/// A key that changes results, with the one value that has none.
void require_without(const JsonObject& model, std::string_view key) {
  if (!model.has(key) || model.at(key).is_null()) return;
  const json& value = model.at(key);
  const bool none =
      (value.is_string() && value.get_ref<const std::string&>().empty()) || (value.is_number() && value == 0);
  if (!none) model.fail_at(key, concat(to_display(value), " is not supported; null is"));
}

bool flag(const JsonObject& model, std::string_view key) {
  return model.has(key) && !model.at(key).is_null() && model.boolean(key, false);
}

std::string hexadecimal_token(int byte) {
  constexpr std::string_view digits = "0123456789ABCDEF";
  return {
      '<', '0', 'x', digits[static_cast<std::size_t>(byte >> 4)], digits[static_cast<std::size_t>(byte & 15)],
      '>'};
}

}  // namespace

WordCache::Slot& WordCache::at(std::string_view word) {
  std::uint64_t low = 0, high = 0;
  std::memcpy(&low, word.data(), std::min<std::size_t>(word.size(), 8));
  if (word.size() > 8) std::memcpy(&high, word.data() + 8, word.size() - 8);
  const std::uint64_t hash = (low ^ std::rotl(high * odd, 32) ^ word.size()) * odd;
  return slots_[hash >> (64 - std::countr_zero(slots))];
}

BytePairs BytePairs::read(const JsonObject& model) {
  if (const std::string type = model.text("type", "BPE"); type != "BPE")
    model.fail_at("type", concat(type, " is not supported; BPE is"));
  for (const char* const key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"})
    require_without(model, key);
  BytePairs pairs;
  pairs.fuse_unk_ = flag(model, "fuse_unk");
  pairs.byte_fallback_ = flag(model, "byte_fallback");
  pairs.ignore_merges_ = flag(model, "ignore_merges");
  pairs.read_vocabulary(model.object("vocab"));
  if (model.has("unk_token") && !model.at("unk_token").is_null()) {
    const std::string token = model.text("unk_token", "");
    pairs.unknown_ = pairs.id_of(token);
    if (!pairs.unknown_) model.fail_at("unk_token", concat(token, " is not a token of vocab"));
  }
  if (!model.has("merges") || !model.at("merges").is_array())
    model.fail_at("merges", "expected an array [ … ]");
  const json& merges = model.at("merges");
  bool texts = !merges.empty() && merges[0].is_string();
  for (std::size_t i = 0; i < merges.size(); ++i) {
    const json& merge = merges[i];
    const auto where = [&, i] {
      return escaped(concat(model.file(), ": ", model.path("merges"), '[', i, ']'));
    };
    if (texts && merge.is_string()) {
      const auto& both = merge.get_ref<const std::string&>();
      if (both.starts_with("#version")) continue;
      const std::size_t blank = both.find(' ');
      require(blank != both.npos && both.find(' ', blank + 1) == both.npos, Errc::config, where(),
              ": expected \"A B\", found ", to_display(merge));
      pairs.add_merge(std::string_view(both).substr(0, blank), std::string_view(both).substr(blank + 1),
                      where);
    } else {
      require(!texts && merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string(),
              Errc::config, where(),
              texts ? ": expected \"A B\", as before, found " : ": expected [\"A\", \"B\"], found ",
              to_display(merge));
      pairs.add_merge(merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>(), where);
    }
  }
  pairs.complete();
  return pairs;
}

BytePairs BytePairs::read(const JsonObject& vocabulary, std::string_view merges,
                          const std::string& merges_file) {
  BytePairs pairs;
  pairs.read_vocabulary(vocabulary);
  for (std::size_t number = 1; !merges.empty(); ++number) {
    const std::size_t end = std::min(merges.find('\n'), merges.size());
    std::string_view line = merges.substr(0, end);
    merges.remove_prefix(std::min(end + 1, merges.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.starts_with("#version") || (line.empty() && merges.empty())) continue;
    const auto where = [&, number] { return concat(escaped(merges_file), ":", number); };
    const std::size_t blank = line.find(' ');
    require(blank != line.npos && line.find(' ', blank + 1) == line.npos, Errc::config, where(),
            ": expected two tokens with a blank between them, found ", escaped(line.substr(0, 60)));
    pairs.add_merge(line.substr(0, blank), line.substr(blank + 1), where);
  }
  pairs.complete();
  return pairs;
}

void BytePairs::read_vocabulary(const JsonObject& vocabulary) {
  const std::vector<std::string> tokens = vocabulary.keys();
  id_of_.reserve(tokens.size());
  token_of_.reserve(tokens.size());
  for (const std::string& token : tokens) {
    const auto id = static_cast<std::int32_t>(
        vocabulary.required_integer(token, 0, std::numeric_limits<std::int32_t>::max() - 1));
    const auto added = id_of_.emplace(token, id).first;
    const auto [other, is_new] = token_of_.emplace(id, &added->first);
    if (!is_new) vocabulary.fail_at(token, concat("the id ", id, " is that of ", *other->second, " too"));
    largest_id_ = std::max(largest_id_, id);
  }
}

void BytePairs::add_merge(std::string_view left, std::string_view right,
                          const std::function<std::string()>& where) {
  const std::string result = concat(left, right);
  const auto known = [&](std::string_view token) {
    const auto found = id_of(token);
    require(found.has_value(), Errc::config, where(), ": ", escaped(token),
            " is not a token of the vocabulary");
    return *found;
  };
  merges_.push_back({known(left), known(right), known(result)});
  require(merges_.size() < no_rank, Errc::config, where(), ": too many merges");
}

void BytePairs::complete() {
  const std::size_t places = std::bit_ceil(2 * merges_.size() + 2);
  shift_ = 64 - std::countr_zero(places);
  ranks_.assign(places, {0, no_rank});
  std::unordered_map<std::int32_t, std::size_t> merges_of;
  for (std::size_t rank = 0; rank < merges_.size(); ++rank) {
    const auto& [left, right, result] = merges_[rank];
    const std::uint64_t pair = pair_of(left, right);
    std::size_t at = pair * odd >> shift_;
    while (ranks_[at].pair != 0 && ranks_[at].pair != pair) at = (at + 1) & (places - 1);
    // A pair may be there twice: the last one counts, as in tokenizers.
    ranks_[at] = {pair, static_cast<std::uint32_t>(rank)};
    if (++merges_of[result] > 1) results_differ_ = false;
  }
  for (int byte = 0; byte < 256; ++byte)
    fallback_[static_cast<std::size_t>(byte)] =
        byte_fallback_ ? id_of(hexadecimal_token(byte)).value_or(-1) : -1;
  set_spelling(Spelling::characters);
}

void BytePairs::set_spelling(Spelling spelling) {
  spelling_ = spelling;
  first_.fill(-1);
  id_of_bytes_.clear();
  id_of_character_.clear();
  std::string bytes;
  for (const auto& [token, id] : id_of_) {
    if (spelling == Spelling::bytes) {
      if (!bytes_of_characters(token, bytes)) continue;
      if (ignore_merges_) id_of_bytes_.emplace(bytes, id);
      if (bytes.size() == 1) first_[static_cast<unsigned char>(bytes[0])] = id;
    } else if (is_one_character(token)) {
      const char32_t code = first_character(token.data()).code;
      id_of_character_.emplace(code, id);
      if (code < 128) first_[code] = id;
    }
  }
}

std::optional<std::int32_t> BytePairs::id_of(std::string_view token) const {
  const auto found = id_of_.find(token);
  return found == id_of_.end() ? std::nullopt : std::optional(found->second);
}

const std::string* BytePairs::token_of(std::int32_t id) const {
  const auto found = token_of_.find(id);
  return found == token_of_.end() ? nullptr : found->second;
}

std::uint32_t BytePairs::rank_of(std::int32_t left, std::int32_t right) const {
  const std::uint64_t pair = pair_of(left, right);
  for (std::size_t at = pair * odd >> shift_;; at = (at + 1) & (ranks_.size() - 1)) {
    if (ranks_[at].pair == pair) return ranks_[at].rank;
    if (ranks_[at].pair == 0) return no_rank;
  }
}

/// A character that the vocabulary lacks: its bytes, or the unknown token, or nothing. An unknown token is
/// added when the next known one is there, hence after bytes that follow, as in tokenizers: `unknown` is
/// whether one waits.
void BytePairs::add_symbols(std::string_view character, bool& unknown,
                            std::vector<std::int32_t>& symbols) const {
  if (byte_fallback_ &&
      std::ranges::all_of(character, [&](char c) { return fallback_[static_cast<unsigned char>(c)] >= 0; })) {
    for (const char c : character) symbols.push_back(fallback_[static_cast<unsigned char>(c)]);
    return;
  }
  if (!unknown_) return;
  if (unknown && !fuse_unk_) symbols.push_back(*unknown_);
  unknown = true;
}

void BytePairs::symbols_of(std::string_view word, std::vector<std::int32_t>& symbols) const {
  symbols.clear();
  bool unknown = false;
  const auto add = [&](std::int32_t id, std::string_view character) {
    if (id < 0) return add_symbols(character, unknown, symbols);
    if (unknown) symbols.push_back(*unknown_);
    unknown = false;
    symbols.push_back(id);
  };
  if (spelling_ == Spelling::bytes) {
    for (const char c : word) {
      const auto byte = static_cast<unsigned char>(c);
      add(first_[byte], byte_characters().of_byte[byte]);
    }
  } else {
    for (std::size_t at = 0; at < word.size();) {
      const auto [code, length] = first_character(word.data() + at);
      std::int32_t id = -1;
      if (code < 128) {
        id = first_[code];
      } else if (const auto found = id_of_character_.find(code); found != id_of_character_.end()) {
        id = found->second;
      }
      add(id, word.substr(at, length));
      at += length;
    }
  }
  if (unknown) symbols.push_back(*unknown_);
}

/// The pair of the lowest rank, the leftmost of several, again and again: for words of few symbols.
void BytePairs::merge_few(std::vector<std::int32_t>& symbols) const {
  std::array<std::uint32_t, 32> ranks;
  std::size_t n = symbols.size();
  for (std::size_t i = 0; i + 1 < n; ++i) ranks[i] = rank_of(symbols[i], symbols[i + 1]);
  while (n > 1) {
    const std::size_t at = static_cast<std::size_t>(
        std::min_element(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(n - 1)) - ranks.begin());
    if (ranks[at] == no_rank) break;
    symbols[at] = merges_[ranks[at]].result;
    for (std::size_t i = at + 1; i + 1 < n; ++i) symbols[i] = symbols[i + 1], ranks[i - 1] = ranks[i];
    --n;
    if (at + 1 < n) ranks[at] = rank_of(symbols[at], symbols[at + 1]);
    if (at > 0) ranks[at - 1] = rank_of(symbols[at - 1], symbols[at]);
  }
  symbols.resize(n);
}

/// The same by a queue of pairs, in n log n. A pair that has changed since it was queued counts if its merge
/// has the same result, as in tokenizers.
void BytePairs::merge_many(std::vector<std::int32_t>& symbols) const {
  const std::size_t n = symbols.size();
  constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();
  require(n < none, Errc::config, "a word of ", n, " characters; the limit is ", none - 1);
  struct Links {
    std::uint32_t before, after;
  };
  std::vector<Links> links(n);
  for (std::size_t i = 0; i < n; ++i)
    links[i] = {static_cast<std::uint32_t>(i) - 1, i + 1 < n ? static_cast<std::uint32_t>(i + 1) : none};
  std::vector<std::uint64_t> queued;  // rank, place
  for (std::size_t i = 0; i + 1 < n; ++i)
    if (const std::uint32_t rank = rank_of(symbols[i], symbols[i + 1]); rank != no_rank)
      queued.push_back(std::uint64_t{rank} << 32 | i);
  std::priority_queue<std::uint64_t, std::vector<std::uint64_t>, std::greater<>> queue(std::greater<>{},
                                                                                       std::move(queued));
  const auto push = [&](std::uint32_t left, std::uint32_t right) {
    if (const std::uint32_t rank = rank_of(symbols[left], symbols[right]); rank != no_rank)
      queue.push(std::uint64_t{rank} << 32 | left);
  };
  while (!queue.empty()) {
    const auto rank = static_cast<std::uint32_t>(queue.top() >> 32),
               at = static_cast<std::uint32_t>(queue.top());
    queue.pop();
    if (symbols[at] < 0 || links[at].after == none) continue;
    const std::uint32_t right = links[at].after, now = rank_of(symbols[at], symbols[right]);
    if (now == no_rank || merges_[now].result != merges_[rank].result) continue;
    symbols[at] = merges_[rank].result;
    symbols[right] = -1;
    links[at].after = links[right].after;
    if (links[at].after != none) links[links[at].after].before = at;
    if (links[at].before != none) push(links[at].before, at);
    if (links[at].after != none) push(at, links[at].after);
  }
  std::erase(symbols, -1);
}

void BytePairs::encode(std::string_view word, WordCache& cache, std::vector<std::int32_t>& out) const {
  if (word.empty()) return;
  const bool is_short = word.size() <= WordCache::max_bytes;
  WordCache::Slot* const slot = is_short ? &cache.at(word) : nullptr;
  if (slot && WordCache::is_of(*slot, word)) {
    out.insert(out.end(), slot->ids.begin(), slot->ids.begin() + slot->count);
    return;
  }
  std::vector<std::int32_t> symbols;
  const Vocabulary& words = spelling_ == Spelling::bytes ? id_of_bytes_ : id_of_;
  const auto whole = ignore_merges_ ? words.find(word) : words.end();
  if (whole != words.end()) {
    symbols.push_back(whole->second);
  } else {
    symbols_of(word, symbols);
    if (symbols.size() <= 32 && results_differ_)
      merge_few(symbols);
    else
      merge_many(symbols);
  }
  if (slot && symbols.size() <= WordCache::max_ids) {
    std::ranges::copy(word, slot->word.begin());
    slot->bytes = static_cast<std::uint8_t>(word.size());
    slot->count = static_cast<std::uint32_t>(symbols.size());
    std::ranges::copy(symbols, slot->ids.begin());
  }
  out.insert(out.end(), symbols.begin(), symbols.end());
}

}  // namespace rz
