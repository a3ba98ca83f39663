// Byte-level tokenizers that are made here: one of bytes alone, and one that is trained.

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/core/error.h"
#include "sharding/io/text.h"
#include "sharding/tokenizer/characters.h"
#include "sharding/tokenizer/pattern.h"
#include "sharding/tokenizer/tokenizer.h"

namespace rz {
namespace {

using nlohmann::ordered_json;

struct TextHash : std::hash<std::string_view> {
  using is_transparent = void;
};

/// The different words of texts, in the order of their first appearance.
class CountedWords {
 public:
  struct Word {
    std::vector<std::int32_t> tokens;
    std::int64_t count;
  };

  void add(std::string_view text) {
    constexpr std::size_t words_at_once = 1 << 16;
    std::string storage;
    text = valid_utf8(text, storage);
    std::vector<std::string_view> parts;
    while (!text.empty()) {
      parts.clear();
      text.remove_prefix(split(KnownPattern::gpt2, text, parts, words_at_once));
      for (const std::string_view part : parts) ++count_of(part);
    }
  }
  /// With each byte as its token.
  std::vector<Word> words(const std::array<std::int32_t, 256>& id_of_byte) const {
    std::vector<Word> all(counts_.size());
    for (const auto& [text, place] : place_of_) {
      for (const char c : text) all[place].tokens.push_back(id_of_byte[static_cast<unsigned char>(c)]);
      all[place].count = counts_[place];
    }
    return all;
  }

 private:
  std::int64_t& count_of(std::string_view word) {
    auto found = place_of_.find(word);
    if (found == place_of_.end()) {
      found = place_of_.emplace(word, counts_.size()).first;
      counts_.push_back(0);
    }
    return counts_[found->second];
  }

  std::unordered_map<std::string, std::size_t, TextHash, std::equal_to<>> place_of_;
  std::vector<std::int64_t> counts_;
};

/// Tokens by their ids.
class GrowingVocabulary {
 public:
  std::int32_t add(const std::string& token) {
    const auto [found, is_new] = id_of_.emplace(token, static_cast<std::int32_t>(tokens_.size()));
    if (is_new) tokens_.push_back(token);
    return found->second;
  }
  std::size_t size() const { return tokens_.size(); }
  const std::string& operator[](std::int32_t id) const { return tokens_[static_cast<std::size_t>(id)]; }
  ordered_json json() const {
    std::vector<std::pair<std::string, ordered_json>> all;
    for (std::size_t id = 0; id < tokens_.size(); ++id) all.emplace_back(tokens_[id], id);
    return ordered_json::object_t(all.begin(), all.end());
  }

 private:
  std::vector<std::string> tokens_;
  std::unordered_map<std::string, std::int32_t> id_of_;
};

using TokenPair = std::pair<std::int32_t, std::int32_t>;

/// Merges the most frequent pair, the one of the lowest ids of several, again and again. A queue has the
/// pairs with the words in which they arose; counts of queued pairs are corrected when they are its top.
class PairMerger {
 public:
  PairMerger(std::vector<CountedWords::Word> words, GrowingVocabulary& vocabulary)
      : words_(std::move(words)), vocabulary_(vocabulary) {
    for (std::size_t w = 0; w < words_.size(); ++w)
      for (std::size_t i = 0; i + 1 < words_[w].tokens.size(); ++i) {
        const std::uint64_t pair = key(words_[w].tokens[i], words_[w].tokens[i + 1]);
        counts_[pair] += words_[w].count;
        note(pair, w);
      }
    queue_noted();
  }

  /// The merges until the vocabulary has `size` tokens, or no pair is there `min_frequency` times.
  std::vector<TokenPair> merge_until(std::size_t size, std::int64_t min_frequency) {
    std::vector<TokenPair> merges;
    while (vocabulary_.size() < size && !queue_.empty()) {
      std::pop_heap(queue_.begin(), queue_.end());
      Candidate& top = queue_.back();
      if (const std::int64_t count = std::max<std::int64_t>(counts_[top.pair], 0); top.count != count) {
        top.count = count;
        std::push_heap(queue_.begin(), queue_.end());
        continue;
      }
      if (top.count < std::max<std::int64_t>(min_frequency, 1)) break;
      const Candidate taken = std::move(top);
      queue_.pop_back();
      const TokenPair pair{static_cast<std::int32_t>(taken.pair >> 32),
                           static_cast<std::int32_t>(taken.pair)};
      const std::int32_t result = vocabulary_.add(vocabulary_[pair.first] + vocabulary_[pair.second]);
      merges.push_back(pair);
      for (const std::uint32_t w : taken.words) merge_in(w, pair, result);
      queue_noted();
    }
    return merges;
  }

 private:
  struct Candidate {
    std::int64_t count;
    std::uint64_t pair;
    std::vector<std::uint32_t> words;

    bool operator<(const Candidate& other) const {
      return count != other.count ? count < other.count : pair > other.pair;
    }
  };

  static std::uint64_t key(std::int32_t left, std::int32_t right) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
           static_cast<std::uint32_t>(right);
  }
  void note(std::uint64_t pair, std::size_t word) {
    std::vector<std::uint32_t>& words = noted_[pair];
    if (words.empty() || words.back() != word) words.push_back(static_cast<std::uint32_t>(word));
  }
  void queue_noted() {
    for (auto& [pair, words] : noted_)
      if (const std::int64_t count = counts_[pair]; count > 0) {
        queue_.push_back({count, pair, std::move(words)});
        std::push_heap(queue_.begin(), queue_.end());
      }
    noted_.clear();
  }
  void merge_in(std::uint32_t word, TokenPair pair, std::int32_t result) {
    auto& [tokens, count] = words_[word];
    const auto arises = [&, n = count](std::int32_t left, std::int32_t right) {
      counts_[key(left, right)] += n;
      note(key(left, right), word);
    };
    std::size_t end = 0;  // of what is merged, in place
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (i + 1 == tokens.size() || tokens[i] != pair.first || tokens[i + 1] != pair.second) {
        tokens[end++] = tokens[i];
        continue;
      }
      if (end > 0) {
        counts_[key(tokens[end - 1], pair.first)] -= count;
        arises(tokens[end - 1], result);
      }
      ++i;
      if (i + 1 < tokens.size()) {
        counts_[key(pair.second, tokens[i + 1])] -= count;
        arises(result, tokens[i + 1]);
      }
      tokens[end++] = result;
    }
    tokens.resize(end);
  }

  std::vector<CountedWords::Word> words_;
  GrowingVocabulary& vocabulary_;
  std::unordered_map<std::uint64_t, std::int64_t> counts_;
  std::unordered_map<std::uint64_t, std::vector<std::uint32_t>> noted_;
  std::vector<Candidate> queue_;
};

/// "A B", of which a pair that was merged twice is there once, the second time.
ordered_json merges_json(const std::vector<TokenPair>& merges, const GrowingVocabulary& vocabulary) {
  std::unordered_map<std::uint64_t, std::size_t> last;
  const auto key = [](TokenPair pair) {
    return static_cast<std::uint64_t>(pair.first) << 32 | static_cast<std::uint32_t>(pair.second);
  };
  for (std::size_t i = 0; i < merges.size(); ++i) last[key(merges[i])] = i;
  ordered_json all = ordered_json::array();
  for (std::size_t i = 0; i < merges.size(); ++i)
    if (last[key(merges[i])] == i)
      all.push_back(vocabulary[merges[i].first] + " " + vocabulary[merges[i].second]);
  return all;
}

/// `use_regex`: GPT-2's pattern splits texts; otherwise a text is one word.
std::string tokenizer_json(const ordered_json& vocabulary, const ordered_json& merges,
                           const ordered_json& added_tokens, bool use_regex) {
  const ordered_json bytes{
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", use_regex}};
  const ordered_json all{{"version", "1.0"},
                         {"truncation", nullptr},
                         {"padding", nullptr},
                         {"added_tokens", added_tokens},
                         {"normalizer", nullptr},
                         {"pre_tokenizer", bytes},
                         {"post_processor", nullptr},
                         {"decoder", bytes},
                         {"model",
                          {{"type", "BPE"},
                           {"dropout", nullptr},
                           {"unk_token", nullptr},
                           {"continuing_subword_prefix", nullptr},
                           {"end_of_word_suffix", nullptr},
                           {"fuse_unk", false},
                           {"byte_fallback", false},
                           {"ignore_merges", false},
                           {"vocab", vocabulary},
                           {"merges", merges}}}};
  return all.dump(1) + "\n";
}

/// tokenizer_config.json; `special`: the first token of a text, and the last.
std::string tokenizer_config(const std::string& special, std::size_t model_max_length) {
  ordered_json config{{"tokenizer_class", "PreTrainedTokenizerFast"}};
  if (!special.empty()) config["bos_token"] = config["eos_token"] = special;
  if (model_max_length > 0) config["model_max_length"] = model_max_length;
  config["clean_up_tokenization_spaces"] = false;
  return config.dump(1) + "\n";
}

}  // namespace

Tokenizer Tokenizer::bytes(std::size_t model_max_length) {
  ordered_json vocabulary = ordered_json::object();
  for (std::size_t byte = 0; byte < 256; ++byte) vocabulary[byte_characters().of_byte[byte]] = byte;
  return from_files(
      {{"tokenizer.json", tokenizer_json(vocabulary, ordered_json::array(), ordered_json::array(), false)},
       {"tokenizer_config.json", tokenizer_config("", model_max_length)}},
      "Tokenizer::bytes()");
}

Tokenizer train_bpe(std::span<const std::string_view> texts, std::size_t vocab_size,
                    const BpeTrainingOptions& options) {
  GrowingVocabulary vocabulary;
  ordered_json special = ordered_json::array();
  for (const std::string& token : options.special_tokens) {
    require(!token.empty() && is_utf8(token), Errc::invalid_argument, "train_bpe(): the special token ",
            escaped(token), " is empty or not UTF-8");
    const auto id = vocabulary.add(token);
    require(vocabulary.size() == special.size() + 1, Errc::invalid_argument,
            "train_bpe(): the special token ", escaped(token), " is there twice");
    special.push_back({{"id", id},
                       {"content", token},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false},
                       {"special", true}});
  }
  const ByteCharacters& characters = byte_characters();
  std::array<std::int32_t, 256> id_of_byte{};
  for (const std::int16_t byte : characters.byte_of)  // in the order of the characters
    if (byte >= 0)
      id_of_byte[static_cast<std::size_t>(byte)] =
          vocabulary.add(characters.of_byte[static_cast<std::size_t>(byte)]);
  require(vocab_size >= vocabulary.size(), Errc::invalid_argument, "train_bpe(): vocab_size is ", vocab_size,
          "; bytes and special tokens are ", vocabulary.size());
  CountedWords words;
  for (const std::string_view text : texts) words.add(text);
  const auto merges =
      PairMerger(words.words(id_of_byte), vocabulary).merge_until(vocab_size, options.min_frequency);
  return Tokenizer::from_files(
      {{"tokenizer.json", tokenizer_json(vocabulary.json(), merges_json(merges, vocabulary), special, true)},
       {"tokenizer_config.json",
        tokenizer_config(options.special_tokens.empty() ? "" : options.special_tokens[0],
                         options.model_max_length)}},
      "train_bpe()");
}

}  // namespace rz
