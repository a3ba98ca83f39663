#include "sharding/tokenizer/tokenizer.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <ranges>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "sharding/io/checksum.h"
#include "sharding/io/file.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"
#include "sharding/tokenizer/added_tokens.h"
#include "sharding/tokenizer/byte_pairs.h"
#include "sharding/tokenizer/decoder.h"
#include "sharding/tokenizer/elements.h"
#include "sharding/tokenizer/normalizer.h"
#include "sharding/tokenizer/pre_tokenizer.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr std::size_t max_file_bytes = std::size_t{512} << 20;

/// Name and contents.
using Files = std::vector<std::pair<std::string, std::string>>;

const std::string* find_file(const Files& files, std::string_view name) {
  const auto found = std::ranges::find(files, name, &Files::value_type::first);
  return found == files.end() ? nullptr : &found->second;
}

/// What encloses the tokens of a text: ids, or the text's own.
using Template = std::vector<std::optional<std::int32_t>>;

/// What transformers does, by the class of a tokenizer, where the files do not say it.
struct ClassRules {
  std::string_view name;  // that of the fast one has "Fast" behind it
  KnownPattern pattern =
      KnownPattern::gpt2;  // of vocab.json and merges.txt; none: not without tokenizer.json
  bool nfc = false;
  std::string_view beginning = "<|endoftext|>", end = "<|endoftext|>";  // where no key is; empty: none
  std::string_view unknown = "<|endoftext|>", padding = "";
  bool encloses = false;  // texts are between cls_token and sep_token, which are the same by default

  std::string_view default_token(std::string_view key) const {
    if (key == "bos_token" || (encloses && key == "cls_token")) return beginning;
    if (key == "eos_token" || (encloses && key == "sep_token")) return end;
    if (key == "mask_token" && encloses) return "<mask>";
    return key == "unk_token" ? unknown : key == "pad_token" ? padding : "";
  }
};
constexpr std::array class_rules{ClassRules{"GPT2Tokenizer"},
                                 ClassRules{"CodeGenTokenizer"},
                                 ClassRules{.name = "Qwen2Tokenizer",
                                            .pattern = KnownPattern::qwen2,
                                            .nfc = true,
                                            .beginning = "",
                                            .padding = "<|endoftext|>"},
                                 ClassRules{.name = "RobertaTokenizer",
                                            .beginning = "<s>",
                                            .end = "</s>",
                                            .unknown = "<unk>",
                                            .padding = "<pad>",
                                            .encloses = true},
                                 ClassRules{.name = "BartTokenizer",
                                            .beginning = "<s>",
                                            .end = "</s>",
                                            .unknown = "<unk>",
                                            .padding = "<pad>",
                                            .encloses = true},
                                 ClassRules{.name = "LlamaTokenizer",
                                            .pattern = KnownPattern::none,
                                            .beginning = "<s>",
                                            .end = "</s>",
                                            .unknown = "<unk>"}};

/// The class of a model_type of config.json, where no file names one.
constexpr std::array<std::pair<std::string_view, std::string_view>, 12> class_of_model{
    {{"gpt2", "GPT2Tokenizer"},
     {"gpt_neo", "GPT2Tokenizer"},
     {"gptj", "GPT2Tokenizer"},
     {"opt", "GPT2Tokenizer"},
     {"phi", "GPT2Tokenizer"},
     {"codegen", "GPT2Tokenizer"},
     {"qwen2", "Qwen2Tokenizer"},
     {"qwen2_moe", "Qwen2Tokenizer"},
     {"qwen3", "Qwen2Tokenizer"},
     {"qwen3_moe", "Qwen2Tokenizer"},
     {"roberta", "RobertaTokenizer"},
     {"bart", "RobertaTokenizer"}}};

/// nullptr: no rules are known.
const ClassRules* find_class(std::string_view name) {
  if (name.ends_with("Fast")) name.remove_suffix(4);
  const auto found = std::ranges::find(class_rules, name, &ClassRules::name);
  return found == class_rules.end() ? nullptr : &*found;
}

constexpr std::array special_keys{"bos_token", "eos_token", "unk_token", "sep_token",
                                  "pad_token", "cls_token", "mask_token"};

/// A token that files beside the vocabulary give: a text, or an object with its content.
std::optional<AddedToken> token_of_key(const JsonObject& owner, std::string_view key, bool special = true) {
  if (!owner.has(key) || owner.at(key).is_null()) return std::nullopt;
  AddedToken token{.normalized = !special, .special = special};
  if (owner.at(key).is_string()) {
    token.content = owner.text(key, "");
  } else {
    const JsonObject node = owner.object(key);
    token.content = required_text(node, "content");
    token.single_word = node.boolean("single_word", false);
    token.lstrip = node.boolean("lstrip", false);
    token.rstrip = node.boolean("rstrip", false);
    token.special = node.boolean("special", special);
    token.normalized = node.boolean("normalized", !token.special);
  }
  return token;
}

/// The files beside a vocabulary, merged in the order of AutoTokenizer: special_tokens_map.json counts before
/// tokenizer_config.json, and neither it nor added_tokens.json does where that has added_tokens_decoder.
class TokenizerConfig {
 public:
  TokenizerConfig(const Files& files, const std::string& folder) : folder_(folder) {
    const auto path = [&](const char* name) { return (fs::path(folder) / name).string(); };
    const auto parsed = [&](const char* name) {
      const std::string* const text = find_file(files, name);
      return text ? parse_json(*text, path(name), JsonDialect::relaxed) : nlohmann::json::object();
    };
    const nlohmann::json config = parsed("tokenizer_config.json"), map = parsed("special_tokens_map.json");
    merge(JsonObject(config, path("tokenizer_config.json")), config);
    const bool has_decoder = is_given("added_tokens_decoder");
    if (!has_decoder) merge(JsonObject(map, path("special_tokens_map.json")), map);
    read_further_tokens();
    if (has_decoder)
      read_decoder();
    else
      read_added_tokens(parsed("added_tokens.json"), path("added_tokens.json"));
  }

  bool has(std::string_view key) const { return values_.contains(key); }
  bool is_given(std::string_view key) const { return has(key) && !values_[std::string(key)].is_null(); }
  /// Errors at the key name its file.
  JsonObject owner(std::string_view key) const {
    const auto found = file_of_.find(std::string(key));
    return {values_, found == file_of_.end() ? folder_ : found->second};
  }
  bool boolean(const char* key, bool absent) const {
    return is_given(key) ? owner(key).boolean(key, absent) : absent;
  }
  /// The token of a key, or of the class where no file has the key.
  std::optional<AddedToken> token(const char* key, const ClassRules* rules) const {
    if (has(key) || !rules) return token_of_key(owner(key), key);
    const std::string_view name = rules->default_token(key);
    if (name.empty()) return std::nullopt;
    return AddedToken{.content = std::string(name),
                      .lstrip = rules->encloses && name == "<mask>",
                      .normalized = false,
                      .special = true};
  }
  /// The tokens of added_tokens_decoder or added_tokens.json, by their ids.
  const std::map<std::int64_t, AddedToken>& added() const { return added_; }
  /// Special tokens without a key of special_keys.
  const std::vector<AddedToken>& further_tokens() const { return further_; }

 private:
  void merge(const JsonObject& file, const nlohmann::json& values) {
    if (values.contains("extra_special_tokens") && values["extra_special_tokens"].is_object())
      values_.erase("extra_special_tokens"), values_.erase("additional_special_tokens");
    const bool has_list = is_given("extra_special_tokens") || is_given("additional_special_tokens");
    for (const auto& [key, value] : values.items()) {
      if (key == "extra_special_tokens" && value.is_object()) {
        const JsonObject all = file.object(key);
        for (const std::string& name : all.keys())
          if (auto token = token_of_key(all, name)) named_.push_back(std::move(*token));
        continue;
      }
      if (key == "additional_special_tokens" && has_list) continue;
      nlohmann::json& kept = values_[key];
      if (key == "extra_special_tokens" && kept.is_array() && value.is_array())
        kept.insert(kept.end(), value.begin(), value.end());
      else
        kept = value;
      file_of_[key] = file.file();
    }
  }
  void read_further_tokens() {
    for (const auto& [key, value] : values_.items())
      if (key.ends_with("_token") && value.is_string() &&
          std::ranges::find(special_keys, key) == special_keys.end())
        further_.push_back(*token_of_key(owner(key), key));
    std::ranges::move(named_, std::back_inserter(further_));
    const auto size = [&](const char* key) { return is_given(key) ? values_[key].size() : 0; };
    const char* const key =
        size("extra_special_tokens") > 0 ? "extra_special_tokens" : "additional_special_tokens";
    if (!is_given(key)) return;
    const nlohmann::json& list = values_[key];
    if (!list.is_array()) owner(key).fail_at(key, concat("expected tokens [ … ], found ", to_display(list)));
    for (std::size_t i = 0; i < list.size(); ++i) {
      const nlohmann::json item{{key, list[i]}};
      if (!list[i].is_string() && !list[i].is_object())
        owner(key).fail_at(key, concat("expected tokens, found ", to_display(list[i])));
      further_.push_back(*token_of_key(JsonObject(item, owner(key).file()), key));
    }
  }
  void read_added_tokens(const nlohmann::json& added, const std::string& path) {
    const JsonObject all(added, path);
    for (const std::string& key : all.keys()) {
      const bool special = is_special(key);
      added_[all.required_integer(key, 0, std::numeric_limits<std::int32_t>::max() - 1)] = {
          .content = key, .normalized = !special, .special = special};
    }
  }
  void read_decoder() {
    const JsonObject all = owner("added_tokens_decoder").object("added_tokens_decoder");
    for (const std::string& key : all.keys()) {
      const auto id = parse_number<std::int32_t>(key);
      if (!id || *id < 0) all.fail_at(key, "expected an id");
      if (const auto token = token_of_key(all, key, false)) added_[*id] = *token;
    }
  }
  bool is_special(const std::string& content) const {
    for (const char* const key : special_keys)
      if (const auto token = token_of_key(owner(key), key); token && token->content == content) return true;
    return std::ranges::find(further_, content, &AddedToken::content) != further_.end();
  }

  std::string folder_;
  nlohmann::json values_ = nlohmann::json::object();
  std::map<std::string, std::string> file_of_;
  std::vector<AddedToken> named_, further_;
  std::map<std::int64_t, AddedToken> added_;
};

}  // namespace

struct Tokenizer::State {
  Files files;
  BytePairs model;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  AddedTokens added;
  Template around{std::nullopt};
  Decoder decoder;
  std::optional<std::int32_t> bos, eos, pad;
  const ClassRules* rules = nullptr;
  std::uint64_t checksum = 0;
  std::string changes{};  // of the rules of tokenizer.json, by the files beside it
  bool keeps_bytes = false;
  mutable std::array<std::atomic<WordCache*>, 32> caches{};

  State() = default;
  State(const State&) = delete;
  ~State() {
    for (auto& cache : caches) delete cache.load();
  }

  /// Caches of calls that have ended, without a lock, which a child of fork() might find held.
  std::unique_ptr<WordCache> take_cache() const {
    for (auto& cache : caches)
      if (cache.load(std::memory_order_relaxed))
        if (WordCache* const taken = cache.exchange(nullptr)) return std::unique_ptr<WordCache>(taken);
    return std::make_unique<WordCache>();
  }
  void put_cache(std::unique_ptr<WordCache> used) const {
    for (auto& cache : caches)
      if (WordCache* free = nullptr; cache.compare_exchange_strong(free, used.get()))
        return void(used.release());
  }

  std::optional<std::int32_t> id_of(std::string_view token) const {
    if (const AddedToken* const found = added.find(token)) return found->id;
    return model.id_of(token);
  }
  /// The text of a token in what is decoded; nullptr if it has none.
  const std::string* decoded(std::int32_t id, bool skip_special_tokens) const {
    const std::string* const text = added.text_of(id) ? added.text_of(id) : model.token_of(id);
    return text && skip_special_tokens && added.is_special(*text) ? nullptr : text;
  }

  void read_json(const std::string& text, const std::string& folder);
  void read_vocabulary_and_merges(const std::string& folder);
  void add(AddedToken token);
  void add_tokens(const TokenizerConfig& config);
  void read_beginning_and_end(const TokenizerConfig& config);
  void apply_to_json(const TokenizerConfig& config);
  void encode(std::string_view text, std::vector<std::int32_t>& ids) const;
};

namespace {

/// The ids around a text that a TemplateProcessing adds.
Template read_template(const JsonObject& processor) {
  Template around;
  each_object(processor, "single", [&](const JsonObject& item) {
    if (item.has("Sequence")) {
      if (const std::string id = required_text(item.object("Sequence"), "id"); id != "A")
        item.fail_at("Sequence", concat("expected A, the one text, found ", id));
      around.push_back(std::nullopt);
      return;
    }
    if (!item.has("SpecialToken")) item.fail_at("SpecialToken", "missing, and so is Sequence");
    const std::string name = required_text(item.object("SpecialToken"), "id");
    const JsonObject tokens = processor.object("special_tokens");
    if (!tokens.has(name)) tokens.fail_at(name, "missing, but the template has it");
    const JsonObject token = tokens.object(name);
    if (!token.has("ids") || !token.at("ids").is_array()) token.fail_at("ids", "expected an array [ … ]");
    for (const auto& id : token.at("ids")) {
      if (!id.is_number_integer() || id < 0 || id >= std::numeric_limits<std::int32_t>::max())
        token.fail_at("ids", concat("expected ids, found ", to_display(id)));
      around.push_back(id.get<std::int32_t>());
    }
  });
  return around;
}

/// Appends the templates of a post-processor.
void read_post_processor(const JsonObject& processor, std::vector<Template>& templates) {
  const std::string type = required_text(processor, "type");
  if (type == "Sequence") {
    each_object(processor, "processors", [&](const JsonObject& p) { read_post_processor(p, templates); });
  } else if (type == "TemplateProcessing") {
    templates.push_back(read_template(processor));
    if (templates.size() > 1) processor.fail_at("type", "a second TemplateProcessing is not supported");
  } else if (type != "ByteLevel") {
    processor.fail_at("type", type + " is no post-processor that is supported");
  }
}

std::string listed_classes() {
  std::string all;
  for (const ClassRules& rules : class_rules)
    if (rules.pattern != KnownPattern::none) all += concat(all.empty() ? "" : ", ", rules.name);
  return all;
}

bool is_given(const JsonObject& config, std::string_view key) {
  return config.has(key) && !config.at(key).is_null();
}

/// The rules of the class that tokenizer_config.json names, else config.json, by itself or by model_type;
/// GPT-2's without these files. nullptr: no rules are known, which is an error of two files.
const ClassRules* find_rules(const TokenizerConfig& tokenizer, const std::string& folder, bool two_files) {
  const ClassRules* const none = two_files ? &class_rules[0] : nullptr;
  const auto of_class = [&](const JsonObject& config) -> const ClassRules* {
    const std::string name = config.text("tokenizer_class", "");
    const ClassRules* const rules = find_class(name);
    if (two_files && (!rules || rules->pattern == KnownPattern::none))
      config.fail_at(
          "tokenizer_class",
          concat("the rules of ", name, " are not known without a tokenizer.json, those of ",
                 listed_classes(),
                 " are; write it with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"));
    return rules;
  };
  if (tokenizer.is_given("tokenizer_class")) return of_class(tokenizer.owner("tokenizer_class"));
  const std::string path = (fs::path(folder) / "config.json").string();
  if (!fs::is_regular_file(path)) return none;
  const nlohmann::json parsed = parse_json(read_text_file(path), path, JsonDialect::relaxed);
  const JsonObject config(parsed, path);
  constexpr std::string_view any = "PreTrainedTokenizerFast";  // no class of rules
  if (is_given(config, "tokenizer_class") && config.text("tokenizer_class", "") != any)
    return of_class(config);
  if (!is_given(config, "model_type")) return none;
  const std::string type = config.text("model_type", "");
  const auto found = std::ranges::find(class_of_model, type, [](const auto& entry) { return entry.first; });
  if (found == class_of_model.end() && two_files)
    config.fail_at("model_type", concat("the rules of a tokenizer of ", type,
                                        " are not known without a tokenizer.json; give tokenizer_class in "
                                        "tokenizer_config.json, one of ",
                                        listed_classes()));
  return found == class_of_model.end() ? nullptr : find_class(found->second);
}

/// The class becomes part of the files: beside another model they are the same tokenizer.
void name_class(Files& files, const std::string& folder, std::string_view name) {
  constexpr const char* file_name = "tokenizer_config.json";
  nlohmann::json config = nlohmann::json::object();
  if (const std::string* const text = find_file(files, file_name))
    config = parse_json(*text, (fs::path(folder) / file_name).string(), JsonDialect::relaxed);
  std::erase_if(files, [](const auto& file) { return file.first == file_name; });
  config["tokenizer_class"] = name;
  files.emplace(files.begin(), file_name, config.dump(2) + "\n");
}

}  // namespace

void Tokenizer::State::read_json(const std::string& text, const std::string& folder) {
  const std::string file = (fs::path(folder) / "tokenizer.json").string();
  const nlohmann::json parsed = parse_json(text, file, JsonDialect::strict);
  const JsonObject root(parsed, file);
  if (const std::string version = root.text("version", "1.0"); version != "1.0")
    root.fail_at("version", concat("expected 1.0, found ", version));
  model = BytePairs::read(root.object("model"));
  normalizer = Normalizer::read(root, "normalizer");
  pre_tokenizer = PreTokenizer::read(root, "pre_tokenizer");
  added = AddedTokens::read(root, model, normalizer);
  decoder = Decoder::read(root, "decoder");
  if (root.has("post_processor") && !root.at("post_processor").is_null()) {
    std::vector<Template> templates;
    read_post_processor(root.object("post_processor"), templates);
    if (!templates.empty()) around = templates[0];
  }
  for (const auto& id : around)
    require(!id || added.of_id(*id) || model.token_of(*id), Errc::config, escaped(file),
            ": post_processor: no token has the id ", id.value_or(0));
}

void Tokenizer::State::read_vocabulary_and_merges(const std::string& folder) {
  const auto path = [&](const char* name) { return (fs::path(folder) / name).string(); };
  const nlohmann::json vocabulary =
      parse_json(*find_file(files, "vocab.json"), path("vocab.json"), JsonDialect::strict);
  model = BytePairs::read(JsonObject(vocabulary, path("vocab.json")), *find_file(files, "merges.txt"),
                          path("merges.txt"));
  if (rules->nfc) normalizer = Normalizer::nfc();
  decoder = Decoder::byte_level();
}

/// A token that is known keeps its id; of the model's tokens, one of the same text becomes it.
void Tokenizer::State::add(AddedToken token) {
  const AddedToken* const before = added.find(token.content);
  const auto free = std::max(static_cast<std::int32_t>(model.size()), added.largest_id() + 1);
  token.id = before ? before->id : model.id_of(token.content).value_or(free);
  if (before && *before == token) return;
  const auto flags = [](const AddedToken& t) {
    return concat(t.id, t.single_word, t.lstrip, t.rstrip, t.normalized, t.content);
  };
  if (!before || flags(*before) != flags(token)) changes += flags(token);
  added.add(std::move(token), normalizer);
}

void Tokenizer::State::add_tokens(const TokenizerConfig& config) {
  for (const auto& [id, token] : config.added())
    if (!token.content.empty()) add(token);
  std::vector<AddedToken> tokens;  // of one text, the last one counts
  for (const char* const key : special_keys) {
    std::optional<AddedToken> token = config.token(key, rules);
    if (!token || token->content.empty()) continue;
    if (const AddedToken* const known = added.find(token->content)) token = *known, token->special = true;
    tokens.push_back(std::move(*token));
  }
  for (const AddedToken& token : config.further_tokens())
    if (!token.content.empty() && !added.find(token.content)) tokens.push_back(token);
  for (AddedToken& token : tokens) {
    require(!rules || rules->name != "Qwen2Tokenizer" ||
                !(token.single_word || token.lstrip || token.rstrip || token.normalized),
            Errc::config, escaped(config.owner("tokenizer_class").file()), ": ", escaped(token.content),
            ": a special token with single_word, lstrip, rstrip or normalized; versions 4 and 5 of "
            "transformers differ on these of a Qwen2Tokenizer; remove them");
    add(std::move(token));
  }
  for (const auto& [key, id] : {std::pair{"bos_token", &bos}, {"eos_token", &eos}, {"pad_token", &pad}})
    if (const auto token = config.token(key, rules)) *id = id_of(token->content);
}

/// Sets what encloses the tokens of a text of two files.
void Tokenizer::State::read_beginning_and_end(const TokenizerConfig& config) {
  const auto token_around = [&](const char* flag, const char* enclosing_key,
                                const char* plain_key) -> std::optional<std::int32_t> {
    if (!rules->encloses && !config.boolean(flag, false)) return std::nullopt;
    const char* const key = rules->encloses ? enclosing_key : plain_key;
    const auto token = config.token(key, rules);
    const auto id = token ? id_of(token->content) : std::nullopt;
    require(id.has_value(), Errc::config, escaped(config.owner(rules->encloses ? key : flag).file()), ": ",
            rules->encloses ? rules->name : flag, ": texts would have ", key, " beside them, ",
            token ? concat("but no token is ", escaped(token->content)) : "which is not given",
            "; give it, or a tokenizer.json");
    return id;
  };
  if (const auto id = token_around("add_bos_token", "cls_token", "bos_token"))
    around.insert(around.begin(), id);
  if (const auto id = token_around("add_eos_token", "sep_token", "eos_token")) around.push_back(id);
}

/// Where the files beside a tokenizer.json contradict it, they count as in transformers. Errc::config names
/// the key where versions 4 and 5 of it differ.
void Tokenizer::State::apply_to_json(const TokenizerConfig& config) {
  if (!rules) return;
  if (rules->pattern == KnownPattern::gpt2) {
    if (pre_tokenizer.set_prefix_space(config.boolean("add_prefix_space", false)))
      changes += "add_prefix_space";
    return;
  }
  const auto require_same = [&](const char* key, bool is) {
    if (config.is_given(key) && config.boolean(key, is) != is)
      config.owner(key).fail_at(
          key,
          concat("tokenizer.json does the opposite, and versions 4 and 5 of transformers differ on which "
                 "of them counts; remove the key, or write both files anew with "
                 "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"));
  };
  std::deque<std::string> storage;
  const std::string word = normalizer.normalized("a");
  const auto words = pre_tokenizer.split(word, true, storage);
  require_same("add_prefix_space", !words.empty() && words[0] != "a");
  if (rules->name != "LlamaTokenizer") return;
  require_same("add_bos_token", !around.empty() && around.front());
  require_same("add_eos_token", !around.empty() && around.back());
}

Tokenizer Tokenizer::from_files(std::vector<std::pair<std::string, std::string>> files,
                                const std::string& folder) {
  auto state = std::make_shared<State>();
  state->files = std::move(files);
  const std::string* const json = find_file(state->files, "tokenizer.json");
  const bool two = find_file(state->files, "vocab.json") && find_file(state->files, "merges.txt");
  require(json || two, Errc::config, escaped(folder),
          ": has no tokenizer.json, and not both of vocab.json and merges.txt");
  const TokenizerConfig config(state->files, folder);
  state->rules = find_rules(config, folder, !json);
  if (json)
    state->read_json(*json, folder);
  else
    state->read_vocabulary_and_merges(folder);
  require(state->model.size() > 0 || !state->added.empty(), Errc::config, escaped(folder),
          ": the vocabulary is empty");
  if (state->rules && state->rules->pattern == KnownPattern::none && state->pre_tokenizer.spells_bytes())
    state->rules = nullptr;  // a tokenizer of another class, as AutoTokenizer sees
  if (state->rules && !config.is_given("tokenizer_class"))
    name_class(state->files, folder, state->rules->name);
  state->add_tokens(config);
  if (json) {
    state->apply_to_json(config);
  } else {
    state->pre_tokenizer =
        PreTokenizer::byte_level(config.boolean("add_prefix_space", false), state->rules->pattern);
    state->read_beginning_and_end(config);
  }
  if (state->pre_tokenizer.spells_bytes()) state->model.set_spelling(BytePairs::Spelling::bytes);
  state->keeps_bytes =
      state->normalizer.empty() && state->added.empty() && state->pre_tokenizer.is_identity_of_bytes();
  Checksum checksum;
  for (const auto& [name, text] : state->files)
    if (name == "tokenizer.json" || (!json && name != "tokenizer.model"))
      checksum.add(std::as_bytes(std::span(text)));
  if (json && !state->changes.empty()) checksum.add(std::as_bytes(std::span(state->changes)));
  state->checksum = checksum.value();
  return Tokenizer(std::move(state));
}

namespace {

constexpr std::array<std::string_view, 9> file_names{
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt",     "tokenizer.model",       "chat_template.jinja",     "chat_template.json"};

bool has_files(const fs::path& folder) {
  return fs::exists(folder / "tokenizer.json") ||
         (fs::exists(folder / "vocab.json") && fs::exists(folder / "merges.txt"));
}

/// The folder itself, or the checkpoint that `latest` in it names; empty if neither has the files.
fs::path model_folder(const fs::path& folder) {
  if (has_files(folder)) return folder;
  if (!fs::is_regular_file(folder / "latest")) return {};
  const std::string tag = read_text_file((folder / "latest").string());
  const fs::path checkpoint = folder / fs::path(tag.substr(0, tag.find_first_of("\r\n"))).filename();
  return has_files(checkpoint) ? checkpoint : fs::path();
}

/// Where the files of a tokenizer are that a path names.
fs::path tokenizer_folder(const fs::path& given) {
  if (const fs::path found = model_folder(given); !found.empty()) return found;
  return has_files(given / "tokenizer") ? given / "tokenizer" : given;
}

}  // namespace

bool is_tokenizer_file(std::string_view name) {
  return std::ranges::find(file_names, name) != file_names.end();
}

Tokenizer Tokenizer::from_pretrained(const std::string& path) {
  std::error_code error;
  const bool is_folder = fs::is_directory(path, error);
  require(is_folder || fs::exists(path, error), Errc::config, escaped(path),
          ": no such file or folder; expected a folder with tokenizer.json");
  const std::string file = is_folder ? "" : fs::path(path).filename().string();
  const bool of_two = file == "vocab.json" || file == "merges.txt";
  if (!is_folder && !of_two && file != "tokenizer.json")
    return from_files({{"tokenizer.json", read_text_file(path, max_file_bytes)}}, path);
  const fs::path folder = is_folder ? tokenizer_folder(path) : fs::path(path).parent_path();
  Files files;
  for (const std::string_view name : file_names) {
    if (of_two && name == "tokenizer.json") continue;
    if (fs::is_regular_file(folder / name, error))
      files.emplace_back(name, read_text_file((folder / name).string(), max_file_bytes));
  }
  return from_files(std::move(files), folder.empty() ? "." : folder.string());
}

void Tokenizer::State::encode(std::string_view text, std::vector<std::int32_t>& ids) const {
  std::unique_ptr<WordCache> cache = take_cache();
  std::deque<std::string> storage;
  for (const auto& [begin, end, id] : added.split(text, false)) {
    if (id >= 0) {
      ids.push_back(id);
      continue;
    }
    std::string_view part = text.substr(begin, end - begin);
    if (!normalizer.empty()) part = storage.emplace_back(normalizer.normalized(std::string(part)));
    for (const auto& [from, to, token] : added.split(part, true)) {
      if (token >= 0)
        ids.push_back(token);
      else
        for (const std::string_view word :
             pre_tokenizer.split(part.substr(from, to - from), begin == 0 && from == 0, storage))
          model.encode(word, *cache, ids);
    }
    storage.clear();
  }
  put_cache(std::move(cache));
}

std::vector<std::int32_t> Tokenizer::beginning() const {
  std::vector<std::int32_t> ids;
  for (const auto& id : state_->around) {
    if (!id) return ids;
    ids.push_back(*id);
  }
  return {};
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  std::string storage;
  std::vector<std::int32_t> own;
  state_->encode(state_->keeps_bytes ? text : valid_utf8(text, storage), own);
  if (!add_special_tokens || (state_->around.size() == 1 && !state_->around[0])) return own;
  std::vector<std::int32_t> ids;
  ids.reserve(own.size() + state_->around.size());
  for (const auto& id : state_->around) {
    if (id)
      ids.push_back(*id);
    else
      ids.insert(ids.end(), own.begin(), own.end());
  }
  return ids;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids, bool skip_special_tokens) const {
  std::vector<std::string> tokens;
  for (const std::int32_t id : ids)
    if (const std::string* const text = state_->decoded(id, skip_special_tokens)) tokens.push_back(*text);
  return Decoder::Stream(state_->decoder).next(std::move(tokens), true);
}

std::size_t Tokenizer::vocab_size() const {
  return static_cast<std::size_t>(std::max(state_->model.largest_id(), state_->added.largest_id())) + 1;
}
std::size_t Tokenizer::ordinary_vocab_size() const {
  std::size_t size = vocab_size();
  while (size > 0 && !state_->decoded(static_cast<std::int32_t>(size - 1), true)) --size;
  return size;
}
std::optional<std::int32_t> Tokenizer::token_to_id(std::string_view token) const {
  return state_->id_of(token);
}
std::string Tokenizer::id_to_token(std::int32_t id) const {
  if (const AddedToken* const token = state_->added.of_id(id)) return token->content;
  const std::string* const token = state_->model.token_of(id);
  return token ? *token : "";
}
std::optional<std::int32_t> Tokenizer::bos_token_id() const { return state_->bos; }
std::optional<std::int32_t> Tokenizer::eos_token_id() const { return state_->eos; }
std::optional<std::int32_t> Tokenizer::pad_token_id() const { return state_->pad; }
std::uint64_t Tokenizer::checksum() const { return state_->checksum; }

void Tokenizer::save_pretrained(const std::string& folder) const {
  make_folders(folder);
  for (const auto& [name, text] : state_->files) write_durably((fs::path(folder) / name).string(), text);
  for (const std::string_view name : file_names)
    if (std::ranges::find(state_->files, name, [](const auto& file) {
          return std::string_view(file.first);
        }) == state_->files.end())
      fs::remove(fs::path(folder) / name);
}

const Files& Tokenizer::files() const { return state_->files; }

// ---- a stream

struct DecodeStream::State {
  Tokenizer tokenizer;
  bool skip_special_tokens;
  Decoder::Stream stream;
  std::string uncertain{};  ///< text of the context that the stream has not returned

  std::string push(std::int32_t id) {
    const std::string* const text = tokenizer.state_->decoded(id, skip_special_tokens);
    return text ? stream.next({*text}, false) : "";
  }
  std::string behind_context(std::string made) {
    const std::size_t known = std::min(made.size(), uncertain.size());
    if (made.compare(0, known, uncertain, 0, known) != 0) {
      uncertain.clear();
      return made;
    }
    uncertain.erase(0, known);
    return made.substr(known);
  }
};

DecodeStream::DecodeStream(Tokenizer tokenizer, bool skip_special_tokens,
                           std::span<const std::int32_t> context)
    : state_(std::make_unique<State>(
          State{tokenizer, skip_special_tokens, Decoder::Stream(tokenizer.state_->decoder)})) {
  if (context.empty()) return;
  std::string certain, all = tokenizer.decode(context, skip_special_tokens);
  for (const std::int32_t id : context) certain += state_->push(id);
  if (all.starts_with(certain)) state_->uncertain = all.substr(certain.size());
}
DecodeStream::DecodeStream(DecodeStream&&) noexcept = default;
DecodeStream& DecodeStream::operator=(DecodeStream&&) noexcept = default;
DecodeStream::~DecodeStream() = default;

std::string DecodeStream::push(std::int32_t id) { return state_->behind_context(state_->push(id)); }
std::string DecodeStream::finish() {
  std::string rest = state_->behind_context(state_->stream.next({}, true));
  state_->uncertain.clear();
  return rest;
}

bool has_tokenizer(const std::string& folder) { return !model_folder(folder).empty(); }

}  // namespace rz
