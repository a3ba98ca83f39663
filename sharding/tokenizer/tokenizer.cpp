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
#include "sharding/io/durable_file.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"
#include "sharding/tokenizer/added_tokens.h"
#include "sharding/tokenizer/byte_level_json.h"
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

std::string byte_tokenizer_config(std::size_t model_max_length) {
  ordered_json config{{"tokenizer_class", "PreTrainedTokenizerFast"}};
  if (model_max_length > 0) config["model_max_length"] = model_max_length;
  config["clean_up_tokenization_spaces"] = false;
  return config.dump(1) + "\n";
}

}  // namespace

std::string byte_level_tokenizer_json(const ordered_json& vocabulary, const ordered_json& merges,
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

namespace {

std::string byte_tokenizer_json() {
  ordered_json vocabulary = ordered_json::object();
  for (std::size_t byte = 0; byte < 256; ++byte) vocabulary[byte_characters().of_byte[byte]] = byte;
  return byte_level_tokenizer_json(vocabulary, ordered_json::array(), ordered_json::array(), false);
}

/// What transformers does, by the class of a tokenizer, where the files do not say it.
struct ClassRules {
  std::string_view name;  // that of the fast one has "Fast" behind it
  KnownPattern pattern = KnownPattern::gpt2;
  bool nfc = false;
  std::string_view beginning = "<|endoftext|>", end = "<|endoftext|>";  // where no key is; empty: none
  bool encloses = false;  // texts are between cls_token and sep_token, which are the same by default
};
constexpr std::array class_rules{
    ClassRules{"GPT2Tokenizer"}, ClassRules{"CodeGenTokenizer"},
    ClassRules{.name = "Qwen2Tokenizer", .pattern = KnownPattern::qwen2, .nfc = true, .beginning = ""},
    ClassRules{.name = "RobertaTokenizer", .beginning = "<s>", .end = "</s>", .encloses = true},
    ClassRules{.name = "BartTokenizer", .beginning = "<s>", .end = "</s>", .encloses = true}};

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
  const ClassRules* rules = nullptr;  // of two files
  std::uint64_t checksum = 0;
  bool keeps_bytes = false, config_changes_rules = false;
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

  void read_json(const std::string& text, const std::string& file);
  void read_vocabulary_and_merges(const std::string& folder);
  void read_special_tokens(const std::string& folder);
  void read_beginning_and_end(const std::string& folder);
  void read_prefix_space(const std::string& folder);
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

/// A token of tokenizer_config.json or special_tokens_map.json: a text, or an object with its content.
std::optional<AddedToken> token_of_key(const JsonObject& owner, std::string_view key) {
  if (!owner.has(key) || owner.at(key).is_null()) return std::nullopt;
  AddedToken token{.special = true};
  if (owner.at(key).is_string()) {
    token.content = owner.text(key, "");
  } else {
    const JsonObject node = owner.object(key);
    token.content = required_text(node, "content");
    token.single_word = node.boolean("single_word", false);
    token.lstrip = node.boolean("lstrip", false);
    token.rstrip = node.boolean("rstrip", false);
    token.normalized = node.boolean("normalized", true);
    token.special = node.boolean("special", true);
  }
  return token;
}

constexpr std::array config_names{"tokenizer_config.json", "special_tokens_map.json"};
constexpr std::array special_keys{"bos_token", "eos_token", "unk_token", "sep_token",
                                  "pad_token", "cls_token", "mask_token"};

/// Files of the two with special tokens that are there.
std::vector<std::pair<std::string, nlohmann::json>> read_configs(const Files& files,
                                                                 const std::string& folder) {
  std::vector<std::pair<std::string, nlohmann::json>> configs;
  for (const char* const name : config_names)
    if (const std::string* const text = find_file(files, name)) {
      const std::string path = (fs::path(folder) / name).string();
      configs.emplace_back(path, parse_json(*text, path, JsonDialect::relaxed));
    }
  return configs;
}

bool is_absent(const Files& files, const std::string& folder, std::string_view key) {
  return std::ranges::none_of(read_configs(files, folder), [&](const auto& config) {
    return JsonObject(config.second, config.first).has(key);
  });
}

bool is_given(const JsonObject& config, std::string_view key) {
  return config.has(key) && !config.at(key).is_null();
}

std::string listed_classes() {
  std::string all;
  for (const ClassRules& rules : class_rules) all += concat(all.empty() ? "" : ", ", rules.name);
  return all;
}

const ClassRules& rules_of_class(const JsonObject& config) {
  const std::string name = config.text("tokenizer_class", "");
  const ClassRules* const rules = find_class(name);
  if (!rules)
    config.fail_at(
        "tokenizer_class",
        concat("the rules of ", name, " are not known without a tokenizer.json, those of ", listed_classes(),
               " are; write it with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"));
  return *rules;
}

/// Of the class that tokenizer_config.json names, else config.json, by itself or by model_type; GPT-2's
/// without these files.
const ClassRules& rules_of_two_files(const Files& files, const std::string& folder) {
  for (const auto& [file, parsed] : read_configs(files, folder))
    if (const JsonObject config(parsed, file); is_given(config, "tokenizer_class"))
      return rules_of_class(config);
  const std::string path = (fs::path(folder) / "config.json").string();
  if (!fs::is_regular_file(path)) return class_rules[0];
  const nlohmann::json parsed = parse_json(read_text_file(path), path, JsonDialect::relaxed);
  const JsonObject config(parsed, path);
  constexpr std::string_view any = "PreTrainedTokenizerFast";  // no class of rules
  if (is_given(config, "tokenizer_class") && config.text("tokenizer_class", "") != any)
    return rules_of_class(config);
  if (!is_given(config, "model_type")) return class_rules[0];
  const std::string type = config.text("model_type", "");
  const auto found = std::ranges::find(class_of_model, type, [](const auto& entry) { return entry.first; });
  if (found == class_of_model.end())
    config.fail_at("model_type", concat("the rules of a tokenizer of ", type,
                                        " are not known without a tokenizer.json; give tokenizer_class in "
                                        "tokenizer_config.json, one of ",
                                        listed_classes()));
  return *find_class(found->second);
}

/// The class becomes part of the files: beside another model they are the same tokenizer.
void name_class(Files& files, const std::string& folder, std::string_view name) {
  for (const auto& [file, parsed] : read_configs(files, folder))
    if (is_given(JsonObject(parsed, file), "tokenizer_class")) return;
  nlohmann::json config = nlohmann::json::object();
  if (const std::string* const text = find_file(files, config_names[0]))
    config = parse_json(*text, (fs::path(folder) / config_names[0]).string(), JsonDialect::relaxed);
  std::erase_if(files, [](const auto& file) { return file.first == config_names[0]; });
  config["tokenizer_class"] = name;
  files.emplace(files.begin(), config_names[0], config.dump(2) + "\n");
}

}  // namespace

void Tokenizer::State::read_json(const std::string& text, const std::string& file) {
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
  std::vector<AddedToken> tokens;
  bool add_prefix_space = false;
  rules = &rules_of_two_files(files, folder);
  name_class(files, folder, rules->name);
  if (rules->nfc) normalizer = Normalizer::nfc();
  for (const auto& [file, parsed] : read_configs(files, folder)) {
    const JsonObject config(parsed, file);
    if (is_given(config, "add_prefix_space")) add_prefix_space = config.boolean("add_prefix_space", false);
    if (config.has("added_tokens_decoder")) {
      const JsonObject all = config.object("added_tokens_decoder");
      std::map<std::int64_t, AddedToken> by_id;
      for (const std::string& key : all.keys()) {
        const auto id = parse_number<std::int32_t>(key);
        if (!id || *id < 0) all.fail_at(key, "expected an id");
        by_id[*id] = *token_of_key(all, key);
      }
      for (const auto& [id, token] : by_id) tokens.push_back(token);
    }
    for (const char* const key : special_keys)
      if (const auto token = token_of_key(config, key)) tokens.push_back(*token);
  }
  if (const std::string* const text = find_file(files, "added_tokens.json")) {
    const nlohmann::json parsed = parse_json(*text, path("added_tokens.json"), JsonDialect::strict);
    const JsonObject all(parsed, path("added_tokens.json"));
    std::map<std::int64_t, std::string> by_id;
    for (const std::string& key : all.keys())
      by_id[all.required_integer(key, 0, std::numeric_limits<std::int32_t>::max() - 1)] = key;
    for (const auto& [id, content] : by_id) tokens.push_back({.content = content});
  }
  for (const auto& [key, name] : {std::pair{"bos_token", rules->beginning}, {"eos_token", rules->end}})
    if (is_absent(files, folder, key) && model.id_of(name))
      tokens.push_back({.content = std::string(name), .special = true});
  if (rules->encloses)
    for (const std::string_view name : {"<s>", "<pad>", "</s>", "<unk>", "<mask>"})
      if (model.id_of(name))
        tokens.push_back({.content = std::string(name), .lstrip = name == "<mask>", .special = true});
  auto next = static_cast<std::int32_t>(model.size());
  for (AddedToken& token : tokens) {
    if (token.content.empty() || added.find(token.content)) continue;
    const auto of_model = model.id_of(token.content);
    token.id = of_model ? *of_model : next++;
    added.add(std::move(token), normalizer);
  }
  pre_tokenizer = PreTokenizer::byte_level(add_prefix_space, rules->pattern);
  decoder = Decoder::byte_level();
  read_beginning_and_end(folder);
}

/// Sets what encloses the tokens of a text.
void Tokenizer::State::read_beginning_and_end(const std::string& folder) {
  const auto configs = read_configs(files, folder);
  const auto token_around = [&](const char* flag, const char* enclosing_key, const char* plain_key,
                                std::string_view absent) -> std::optional<std::int32_t> {
    bool wanted = rules->encloses;
    const char* const key = rules->encloses ? enclosing_key : plain_key;
    std::string where = folder, token(absent);
    for (const auto& [file, parsed] : configs | std::views::reverse) {  // the first one counts
      const JsonObject config(parsed, file);
      if (is_given(config, flag) && !rules->encloses) wanted = config.boolean(flag, false), where = file;
      if (!config.has(key)) continue;
      const auto given = token_of_key(config, key);
      token = given ? given->content : "";
    }
    if (!wanted) return std::nullopt;
    const auto id = id_of(token);
    require(id.has_value(), Errc::config, escaped(where), ": ", rules->encloses ? rules->name : flag,
            ": texts would have ", key, " beside them, ",
            token.empty() ? "which is not given" : concat("but no token is ", escaped(token)),
            "; give it, or a tokenizer.json");
    return id;
  };
  if (const auto id = token_around("add_bos_token", "cls_token", "bos_token", rules->beginning))
    around.insert(around.begin(), id);
  if (const auto id = token_around("add_eos_token", "sep_token", "eos_token", rules->end))
    around.push_back(id);
}

/// Where tokenizer_config.json of a class of GPT-2's form differs from tokenizer.json, it counts.
void Tokenizer::State::read_prefix_space(const std::string& folder) {
  for (const auto& [file, parsed] : read_configs(files, folder)) {
    const JsonObject config(parsed, file);
    const ClassRules* const rules =
        is_given(config, "tokenizer_class") ? find_class(config.text("tokenizer_class", "")) : nullptr;
    if (rules && rules->pattern == KnownPattern::gpt2 && is_given(config, "add_prefix_space"))
      config_changes_rules = pre_tokenizer.set_prefix_space(config.boolean("add_prefix_space", false));
  }
}

void Tokenizer::State::read_special_tokens(const std::string& folder) {
  const std::array<std::pair<const char*, std::optional<std::int32_t>*>, 3> all{
      {{"bos_token", &bos}, {"eos_token", &eos}, {"pad_token", &pad}}};
  for (const auto& [file, parsed] : read_configs(files, folder))
    for (const auto& [key, id] : all)
      if (const auto token = token_of_key(JsonObject(parsed, file), key); token && !*id)
        *id = id_of(token->content);
  if (rules && is_absent(files, folder, "bos_token")) bos = id_of(rules->beginning);
  if (rules && is_absent(files, folder, "eos_token")) eos = id_of(rules->end);
}

Tokenizer Tokenizer::from_files(std::vector<std::pair<std::string, std::string>> files,
                                const std::string& folder) {
  auto state = std::make_shared<State>();
  state->files = std::move(files);
  const std::string* const json = find_file(state->files, "tokenizer.json");
  const bool two = find_file(state->files, "vocab.json") && find_file(state->files, "merges.txt");
  require(json || two, Errc::config, escaped(folder),
          ": has no tokenizer.json, and not both of vocab.json and merges.txt");
  if (json)
    state->read_json(*json, (fs::path(folder) / "tokenizer.json").string()), state->read_prefix_space(folder);
  else
    state->read_vocabulary_and_merges(folder);
  require(state->model.size() > 0 || !state->added.empty(), Errc::config, escaped(folder),
          ": the vocabulary is empty");
  state->read_special_tokens(folder);
  if (state->pre_tokenizer.spells_bytes()) state->model.set_spelling(BytePairs::Spelling::bytes);
  state->keeps_bytes =
      state->normalizer.empty() && state->added.empty() && state->pre_tokenizer.is_identity_of_bytes();
  Checksum checksum;
  for (const auto& [name, text] : state->files)
    if (name == "tokenizer.json" || (!json && name != "tokenizer.model"))
      checksum.add(std::as_bytes(std::span(text)));
  if (state->config_changes_rules) checksum.add(std::as_bytes(std::span("add_prefix_space")));
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

Tokenizer Tokenizer::bytes(std::size_t model_max_length) {
  return from_files({{"tokenizer.json", byte_tokenizer_json()},
                     {"tokenizer_config.json", byte_tokenizer_config(model_max_length)}},
                    "Tokenizer::bytes()");
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

void remove_byte_tokenizer(const std::string& folder) {
  const fs::path tokenizer = fs::path(folder) / "tokenizer.json";
  if (!fs::exists(tokenizer) || read_text_file(tokenizer.string(), max_file_bytes) != byte_tokenizer_json())
    return;
  fs::remove(tokenizer);
  fs::remove(fs::path(folder) / "tokenizer_config.json");
}

}  // namespace rz
