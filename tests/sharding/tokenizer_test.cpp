// Tokenizers against Hugging Face's: tests/data/tokenizers/expected.json, and the shared fixtures where they
// are.

#include "sharding/tokenizer/tokenizer.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <regex>
#include <thread>

#include "sharding/io/json.h"
#include "sharding/io/text.h"
#include "sharding/tokenizer/characters.h"
#include "sharding/tokenizer/pattern.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::error_of;
using Ids = std::vector<std::int32_t>;

class TokenizerFiles : public ::testing::Test, protected test::Folder {
 protected:
  Tokenizer tokenizer_of(const std::string& text) const {
    put("tokenizer.json", text);
    return Tokenizer::from_pretrained(path());
  }
};

const json& expected() {
  static const json* const all =
      new json(json::parse(read_text_file(RZ_SOURCE_DIR "/tests/data/tokenizers/expected.json")));
  return *all;
}

/// The whole tokenizer.json of one of the expected.
json tokenizer_json(std::string_view name) {
  for (const json& one : expected()["tokenizers"]) {
    if (one["name"] != name) continue;
    json all = one["tokenizer"];
    all["model"] = expected()["models"][one["model"].get<std::string>()];
    return all;
  }
  throw std::runtime_error("no such tokenizer");
}

/// The parts of a stream are whole characters, and in all the text of decode().
std::string streamed(const Tokenizer& tokenizer, const Ids& ids, bool skip_special_tokens) {
  DecodeStream stream(tokenizer, skip_special_tokens);
  std::string all;
  const auto add = [&](const std::string& part) {
    EXPECT_TRUE(is_utf8(part)) << escaped(part);
    all += part;
  };
  for (const std::int32_t id : ids) add(stream.push(id));
  add(stream.finish());
  EXPECT_EQ(stream.finish(), tokenizer.decode({}, skip_special_tokens)) << "a new text begins";
  return all;
}

/// A stream behind the first tokens has the rest of the text.
void expect_streams_behind_contexts(const Tokenizer& tokenizer, const Ids& ids, bool skip_special_tokens) {
  const std::string text = tokenizer.decode(ids, skip_special_tokens);
  for (std::size_t n = 0; n <= ids.size(); ++n) {
    const std::span<const std::int32_t> context(ids.data(), n);
    const std::string before = tokenizer.decode(context, skip_special_tokens);
    if (!text.starts_with(before)) continue;  // later tokens change its end
    DecodeStream stream(tokenizer, skip_special_tokens, context);
    std::string rest;
    for (std::size_t i = n; i < ids.size(); ++i) rest += stream.push(ids[i]);
    rest += stream.finish();
    EXPECT_EQ(before + rest, text) << "behind " << n << " tokens";
    EXPECT_EQ(stream.finish(), tokenizer.decode({}, skip_special_tokens)) << "a new text begins";
  }
}

TEST_F(TokenizerFiles, EveryPartHasTheResultsOfHuggingFace) {
  const json& texts = expected()["texts"];
  for (const json& one : expected()["tokenizers"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    const Tokenizer tokenizer = tokenizer_of(tokenizer_json(one["name"].get<std::string>()).dump());
    for (std::size_t i = 0; i < one["cases"].size(); ++i) {
      const json& wanted = one["cases"][i];
      if (wanted[0].is_null()) continue;  // Hugging Face's own failed
      const Ids ids = wanted[0].get<Ids>();
      if (i < texts.size()) {
        EXPECT_EQ(tokenizer.encode(texts[i].get<std::string>()), ids) << texts[i];
      }
      for (const bool skip : {false, true}) {
        const json& text = skip ? wanted.back() : wanted[1];
        if (text.is_null()) continue;
        EXPECT_EQ(tokenizer.decode(ids, skip), text.get<std::string>()) << wanted[0];
        EXPECT_EQ(streamed(tokenizer, ids, skip), text.get<std::string>()) << wanted[0];
        if (ids.size() < 60) expect_streams_behind_contexts(tokenizer, ids, skip);
      }
    }
  }
}

/// Oniguruma has a regcomp() of its own, which the rest of a program must not find.
TEST(TokenizerPatterns, OnigurumaIsLoadedForPatternsAlone) {
  EXPECT_EQ(Pattern::regex("a+", "test").find("baab").size(), 1u);
  EXPECT_EQ(::dlsym(RTLD_DEFAULT, "onig_new"), nullptr);
}

/// Known expressions are matched without Oniguruma.
TEST(TokenizerPatterns, KnownExpressionsMatchAsOniguruma) {
  std::mt19937 random(3);
  const std::array<std::u32string, 8> pools{U"'sStTrReEvVlLmMdD\u017F",
                                            U"abcXYZ\u00E9\u03A3\u4E2D\u0939\u05D0\u0E01",
                                            U"0123\u0663\u00BD\u2167\uFF11",
                                            U" ",
                                            U" \t\n\r\u00A0\u3000\u2028\x85",
                                            U".,!-_<|>$\u2014\u3002",
                                            U"\u0301\u093F\u200D\uFE0F\U0001F600\U0001F1E9",
                                            U"\x01\x7F\uFFFD\uE000"};
  for (const KnownPattern known : {KnownPattern::gpt2, KnownPattern::llama3, KnownPattern::qwen2}) {
    const Pattern regex = Pattern::regex(std::string(expression_of(known)), "test");
    EXPECT_EQ(known_pattern(expression_of(known)), known);
    for (int i = 0; i < 1500; ++i) {
      std::string text;
      for (std::size_t n = random() % 12 + 1; n > 0; --n) {
        const std::u32string& pool = pools[random() % pools.size()];
        append_character(text, pool[random() % pool.size()]);
      }
      std::vector<std::string_view> words;
      EXPECT_EQ(split(known, text, words), text.size());
      std::vector<std::string_view> wanted;
      for (const auto& [begin, end] : regex.find(text))
        wanted.push_back(std::string_view(text).substr(begin, end - begin));
      ASSERT_EQ(words, wanted) << escaped(text);
    }
  }
}

TEST_F(TokenizerFiles, BytesAreTheirValues) {
  const Tokenizer bytes = Tokenizer::bytes(64);
  const std::string all = "A \n\xFF\xC3\xA9";
  const Ids ids{65, 32, 10, 255, 195, 169};
  EXPECT_EQ(bytes.encode(all), ids);
  EXPECT_EQ(bytes.decode(ids), "A \n\xEF\xBF\xBD\xC3\xA9");
  EXPECT_EQ(bytes.vocab_size(), 256u);
  EXPECT_EQ(bytes.token_to_id("\xC4\xA0"), 32) << "GPT-2's character of the blank";
  EXPECT_EQ(bytes.eos_token_id(), std::nullopt);
  bytes.save_pretrained(path());
  const Tokenizer again = Tokenizer::from_pretrained(path());
  EXPECT_EQ(again.encode(all), ids);
  EXPECT_EQ(again.checksum(), bytes.checksum());
}

TEST_F(TokenizerFiles, FilesAreSavedAsTheyWereRead) {
  const std::map<std::string, std::string> files{
      {"tokenizer.json", tokenizer_json("llama2").dump(3) + "\n\n"},
      {"tokenizer_config.json",
       R"({"bos_token": {"content": "<s>"}, "eos_token": "</s>",  "pad_token": null})"},
      {"special_tokens_map.json", R"({"pad_token": "<unk>"})"},
      {"tokenizer.model", std::string("\0\xFF\n", 3)},
      {"chat_template.jinja", "{{ messages }}"}};
  for (const auto& [name, text] : files) put(name, text);
  put("model.safetensors", "no file of the tokenizer");
  const Tokenizer tokenizer = Tokenizer::from_pretrained(path());
  EXPECT_EQ(tokenizer.bos_token_id(), 1);
  EXPECT_EQ(tokenizer.eos_token_id(), 2);
  EXPECT_EQ(tokenizer.pad_token_id(), 0);
  tokenizer.save_pretrained(path("saved"));
  std::size_t saved = 0;
  for (const auto& entry : fs::directory_iterator(path("saved"))) {
    EXPECT_EQ(read_text_file(entry.path().string()), files.at(entry.path().filename().string()));
    ++saved;
  }
  EXPECT_EQ(saved, files.size());
  EXPECT_EQ(tokenizer.files().size(), files.size());
  EXPECT_EQ(Tokenizer::from_pretrained(path("saved/tokenizer.json")).checksum(), tokenizer.checksum());
  EXPECT_NE(tokenizer_of(tokenizer_json("gpt2").dump()).checksum(), tokenizer.checksum());
}

TEST_F(TokenizerFiles, ASavedTokenizerIsTheOnlyOneOfItsFolder) {
  const auto json = tokenizer_json("gpt2");
  fs::create_directories(path("two"));
  put("two/vocab.json", json.at("model").at("vocab").dump());
  std::string merges = "#version: 0.2\n";
  for (const auto& merge : json.at("model").at("merges"))
    merges += merge.is_string() ? merge.get<std::string>() + "\n"
                                : merge[0].get<std::string>() + " " + merge[1].get<std::string>() + "\n";
  put("two/merges.txt", merges);
  const Tokenizer of_two = Tokenizer::from_pretrained(path("two"));
  Tokenizer::bytes(16).save_pretrained(path("model"));
  put("model/config.json", "{}");
  of_two.save_pretrained(path("model"));
  EXPECT_EQ(Tokenizer::from_pretrained(path("model")).checksum(), of_two.checksum());
  EXPECT_TRUE(fs::exists(path("model/config.json")));
}

TEST_F(TokenizerFiles, FoldersOfTokensAndOfCheckpointsHaveATokenizerInThem) {
  const Tokenizer tokenizer = Tokenizer::bytes();
  tokenizer.save_pretrained(path("tokens/tokenizer"));
  tokenizer.save_pretrained(path("run/global_step2"));
  put("run/latest", "global_step1\n");
  EXPECT_FALSE(has_tokenizer(path("tokens"))) << "a tokenizer that may be another model's";
  EXPECT_FALSE(has_tokenizer(path("run"))) << "the latest has none";
  put("run/latest", "global_step2\n");
  EXPECT_TRUE(has_tokenizer(path("run")));
  for (const char* folder : {"tokens", "run"})
    EXPECT_EQ(Tokenizer::from_pretrained(path(folder)).checksum(), tokenizer.checksum());
}

TEST_F(TokenizerFiles, VocabularyAndMergesAreATokenizerOfGpt2) {
  const json whole = tokenizer_json("gpt2");
  put("vocab.json", whole["model"]["vocab"].dump());
  std::string merges = "#version: 0.2\n";
  for (const json& merge : whole["model"]["merges"])
    merges += merge[0].get<std::string>() + " " + merge[1].get<std::string>() + "\n";
  put("merges.txt", merges);
  put("special_tokens_map.json", R"({"eos_token": "<|endoftext|>", "pad_token": "<pad>"})");
  const Tokenizer two = Tokenizer::from_pretrained(path("vocab.json"));
  const auto size = static_cast<std::int32_t>(whole["model"]["vocab"].size());
  EXPECT_EQ(two.eos_token_id(), size) << "a token that is not of the vocabulary is added";
  EXPECT_EQ(two.pad_token_id(), size + 1);
  EXPECT_EQ(two.vocab_size(), static_cast<std::size_t>(size) + 2);
  EXPECT_EQ(two.encode("<|endoftext|><pad>"), (Ids{size, size + 1}));
  EXPECT_EQ(two.id_to_token(size + 1), "<pad>");
  const std::string text = "the don't \xE4\xB8\xAD";
  EXPECT_EQ(two.encode(text), tokenizer_of(whole.dump()).encode(text));
  put("merges.txt", std::regex_replace(merges, std::regex("\n"), "\r\n"));
  EXPECT_EQ(Tokenizer::from_pretrained(path("vocab.json")).encode(text), two.encode(text));
  fs::remove(path("tokenizer.json"));
  put("merges.txt", "#version: 0.2\n\xC4\xA0 t\n\na b\n");
  EXPECT_EQ(error_of([&] { Tokenizer::from_pretrained(path()); }).what(),
            path("merges.txt") + ":3: expected two tokens with a blank between them, found ");
}

TEST_F(TokenizerFiles, TheRulesOfTwoFilesAreThoseOfTheirClass) {
  json vocabulary = json::parse(Tokenizer::bytes().files()[0].second)["model"]["vocab"];
  const auto id = [&](const char* token) { return vocabulary.at(token).get<std::int32_t>(); };
  for (const char* const token : {"12", "hi", "\xC4\xA0hi", "!\xC4\x8A", "<s>", "</s>", "<mask>"})
    vocabulary[token] = vocabulary.size();
  put("vocab.json", vocabulary.dump());
  put("merges.txt", "1 2\nh i\n\xC4\xA0 hi\n! \xC4\x8A\n");
  const auto of_config = [&](const char* config) {
    put("tokenizer_config.json", config);
    return Tokenizer::from_pretrained(path());
  };
  EXPECT_EQ(of_config("{}").encode("12 hi"), (Ids{id("12"), id("\xC4\xA0hi")}));
  EXPECT_EQ(of_config(R"({"tokenizer_class": "Qwen2TokenizerFast"})").encode("12 hi!\n"),
            (Ids{id("1"), id("2"), id("\xC4\xA0hi"), id("!\xC4\x8A")}));
  EXPECT_EQ(of_config(R"({"tokenizer_class": "Qwen2Tokenizer"})").encode("e\xCC\x81"),
            of_config("{}").encode("\xC3\xA9"))
      << "NFC";
  EXPECT_EQ(
      of_config(R"({"add_bos_token": true, "add_eos_token": true, "bos_token": "<s>", "eos_token": "</s>"})")
          .encode("hi"),
      (Ids{id("<s>"), id("hi"), id("</s>")}));
  EXPECT_EQ(of_config(R"({"tokenizer_class": "RobertaTokenizer"})").encode("hi <mask>"),
            (Ids{id("<s>"), id("hi"), id("<mask>"), id("</s>")}));
  EXPECT_EQ(of_config(R"({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": true})").encode("hi"),
            (Ids{id("\xC4\xA0hi")}));
  EXPECT_EQ(error_of([&] { of_config(R"({"add_bos_token": true, "bos_token": null})"); }).what(),
            path("tokenizer_config.json") +
                ": add_bos_token: texts would have bos_token beside them, which is not given; give it, or a "
                "tokenizer.json");
  const std::string error = error_of([&] { of_config(R"({"tokenizer_class": "CLIPTokenizer"})"); }).what();
  EXPECT_TRUE(
      error.starts_with(path("tokenizer_config.json") + ": tokenizer_class: the rules of CLIPTokenizer"))
      << error;
}

/// As AutoTokenizer finds the class where tokenizer_config.json has none.
TEST_F(TokenizerFiles, TheRulesOfTwoFilesAreThoseOfTheirModel) {
  json vocabulary = json::parse(Tokenizer::bytes().files()[0].second)["model"]["vocab"];
  const auto id = [&](const char* token) { return vocabulary.at(token).get<std::int32_t>(); };
  for (const char* const token : {"12", "<s>", "</s>", "<|endoftext|>"})
    vocabulary[token] = vocabulary.size();
  put("vocab.json", vocabulary.dump());
  put("merges.txt", "1 2\n");
  const auto of_model = [&](const char* config) {
    put("config.json", config);
    return Tokenizer::from_pretrained(path());
  };
  const Ids whole{id("12")}, digits{id("1"), id("2")}, enclosed{id("<s>"), id("12"), id("</s>")};
  for (const char* const type : {"gpt2", "gpt_neo", "gptj", "opt", "phi", "codegen"})
    EXPECT_EQ(of_model((R"({"model_type": ")" + std::string(type) + "\"}").c_str()).encode("12"), whole)
        << type;
  for (const char* const type : {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
    EXPECT_EQ(of_model((R"({"model_type": ")" + std::string(type) + "\"}").c_str()).encode("12"), digits)
        << type;
  for (const char* const type : {"roberta", "bart"})
    EXPECT_EQ(of_model((R"({"model_type": ")" + std::string(type) + "\"}").c_str()).encode("12"), enclosed)
        << type;
  EXPECT_EQ(of_model(R"({"model_type": "llama", "tokenizer_class": "Qwen2TokenizerFast"})").encode("12"),
            digits);
  EXPECT_EQ(of_model(R"({"model_type": "gpt2", "tokenizer_class": "PreTrainedTokenizerFast"})").encode("12"),
            whole)
      << "as models are saved here";
  EXPECT_TRUE(std::string(error_of([&] { of_model(R"({"model_type": "llama"})"); }).what())
                  .starts_with(path("config.json") + ": model_type: the rules of a tokenizer of llama"));
  EXPECT_TRUE(std::string(error_of([&] {
                            of_model(R"({"model_type": "gpt2", "tokenizer_class": "CLIPTokenizer"})");
                          }).what())
                  .starts_with(path("config.json") + ": tokenizer_class: the rules of CLIPTokenizer"));

  // A saved tokenizer is the same beside another model.
  const Tokenizer qwen = of_model(R"({"model_type": "qwen3"})"), gpt2 = of_model(R"({"model_type": "gpt2"})");
  EXPECT_EQ(qwen.bos_token_id(), std::nullopt);
  EXPECT_EQ(qwen.eos_token_id(), id("<|endoftext|>"));
  EXPECT_EQ(gpt2.bos_token_id(), id("<|endoftext|>"));
  for (const auto& [tokenizer, type] : {std::pair{&qwen, "gpt2"}, {&gpt2, "qwen3"}}) {
    tokenizer->save_pretrained(path("saved"));
    put("saved/config.json", std::string(R"({"model_type": ")") + type + "\"}");
    const Tokenizer read = Tokenizer::from_pretrained(path("saved"));
    EXPECT_EQ(read.checksum(), tokenizer->checksum());
    EXPECT_EQ(read.encode("12"), tokenizer->encode("12"));
    EXPECT_EQ(read.bos_token_id(), tokenizer->bos_token_id());
  }
  put("tokenizer_config.json", R"({"tokenizer_class": "CodeGenTokenizer"})");
  EXPECT_EQ(of_model(R"({"model_type": "qwen2"})").encode("12"), whole);
}

TEST_F(TokenizerFiles, PrefixSpaceOfTheConfigurationCountsBesideTheFile) {
  put("tokenizer.json", tokenizer_json("gpt2").dump());
  const Tokenizer plain = Tokenizer::from_pretrained(path());
  put("tokenizer_config.json", R"({"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": true})");
  const Tokenizer prefixed = Tokenizer::from_pretrained(path());
  EXPECT_NE(prefixed.encode("the"), plain.encode("the"));
  EXPECT_EQ(prefixed.encode("the"), plain.encode(" the"));
  EXPECT_NE(prefixed.checksum(), plain.checksum());
  put("tokenizer_config.json", R"({"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": true})");
  EXPECT_EQ(Tokenizer::from_pretrained(path()).encode("the"), plain.encode("the"));
}

/// Results of AutoTokenizer of transformers 5.24 (and of 4.57, but where a comment says so).
TEST_F(TokenizerFiles, FilesBesideTheVocabularyCountAsInTransformers) {
  const json whole = tokenizer_json("gpt2");
  const auto n = static_cast<std::int32_t>(whole["model"]["vocab"].size());
  std::string merges = "#version: 0.2\n";
  for (const json& merge : whole["model"]["merges"])
    merges += merge[0].get<std::string>() + " " + merge[1].get<std::string>() + "\n";
  for (const bool two : {false, true}) {
    const auto of = [&](std::string config, const char* map = "{}", const char* added = "{}") {
      if (two)
        put("vocab.json", whole["model"]["vocab"].dump()), put("merges.txt", merges);
      else
        put("tokenizer.json", whole.dump());
      if (config == "{}") config = R"({"tokenizer_class": "GPT2Tokenizer"})";
      put("tokenizer_config.json", config);
      put("special_tokens_map.json", map);
      put("added_tokens.json", added);
      return Tokenizer::from_pretrained(path());
    };
    const std::string begin = R"({"tokenizer_class": "GPT2Tokenizer", )";

    const Tokenizer plain = of("{}");
    EXPECT_EQ(plain.eos_token_id(), n) << "the class has one";
    EXPECT_EQ(plain.bos_token_id(), n);
    EXPECT_EQ(plain.id_to_token(n), "<|endoftext|>");
    EXPECT_EQ(of(begin + R"("eos_token": null})").eos_token_id(), std::nullopt);
    EXPECT_EQ(of(R"({"tokenizer_class": "Qwen2Tokenizer"})").pad_token_id(), n);

    const Ids user{n + 1};
    const std::string texts[]{R"("additional_special_tokens": ["<|user|>"]})",
                              R"("additional_special_tokens": [{"content": "<|user|>"}]})",
                              R"("extra_special_tokens": ["<|user|>"]})",
                              R"("extra_special_tokens": {"user_token": "<|user|>"}})",
                              R"("pad_token": "<|user|>"})"};
    for (const std::string& text : texts) {
      EXPECT_EQ(of(begin + text).encode("<|user|>"), user) << text;
      EXPECT_EQ(of("{}", ("{" + text).c_str()).encode("<|user|>"), user) << text;
    }
    EXPECT_EQ(of(begin + texts[4]).pad_token_id(), n + 1);
    EXPECT_NE(plain.checksum(), of(begin + texts[0]).checksum());
    EXPECT_EQ(of(begin + texts[2], R"({"additional_special_tokens": ["<|other|>"]})").vocab_size(),
              static_cast<std::size_t>(n) + 2)
        << "those of tokenizer_config.json count";
    EXPECT_EQ(of("{}", "{}", R"({"<|user|>": 9000, "<|a|>": 8000})").encode("<|user|><|a|>"), (Ids{n + 1, n}))
        << "the next ids, in their order";

    const char* const map = R"({"eos_token": "<b>", "additional_special_tokens": ["<|user|>"]})";
    const Tokenizer by_map = of(begin + R"("eos_token": "<a>"})", map);
    EXPECT_EQ(by_map.id_to_token(by_map.eos_token_id().value()), "<b>");
    EXPECT_EQ(by_map.token_to_id("<a>"), std::nullopt);
    const Tokenizer by_decoder = of(begin + R"("eos_token": "<a>", "added_tokens_decoder": {"9": {"content":
      "<c>", "rstrip": true, "special": true}}})",
                                    map, R"({"<d>": 9})");
    EXPECT_EQ(by_decoder.id_to_token(by_decoder.eos_token_id().value()), "<a>");
    EXPECT_EQ(by_decoder.encode("<c> \n<c>"), (Ids{n, n}));
    for (const char* const token : {"<b>", "<d>", "<|user|>"})
      EXPECT_EQ(by_decoder.token_to_id(token), std::nullopt) << token;
    EXPECT_EQ(
        of(begin + R"("pad_token": {"content": "<a>", "rstrip": true}, "extra_special_tokens": ["<a>"]})")
            .encode("<a>\n<a>")
            .size(),
        3u)
        << "the last one of a text";
    EXPECT_EQ(of(begin + R"("additional_special_tokens": ["<a>"]})",
                 R"({"extra_special_tokens": {"b_token": "<b>"}})")
                  .token_to_id("<a>"),
              std::nullopt);
  }
  fs::remove(path("vocab.json"));

  // The class of a model, and of none. It is saved with the files.
  put("tokenizer_config.json", R"({"model_max_length": 64})"), put("special_tokens_map.json", "{}");
  put("config.json", R"({"model_type": "gpt2"})"), put("added_tokens.json", "{}");
  const Tokenizer of_model = Tokenizer::from_pretrained(path());
  EXPECT_EQ(of_model.eos_token_id(), n);
  of_model.save_pretrained(path("saved"));
  EXPECT_EQ(Tokenizer::from_pretrained(path("saved")).eos_token_id(), n);
  put("config.json", R"({"model_type": "mistral"})");
  EXPECT_EQ(Tokenizer::from_pretrained(path()).eos_token_id(), std::nullopt);

  // A token of tokenizer.json gets the flags of added_tokens_decoder.
  json with_token = whole;
  with_token["added_tokens"] = {{{"id", n}, {"content", "<c>"}, {"normalized", true}, {"special", false}}};
  put("tokenizer.json", with_token.dump());
  const Ids blank = Tokenizer::from_pretrained(path()).encode(" ");
  EXPECT_EQ(Tokenizer::from_pretrained(path()).encode("<c> "), (Ids{n, blank.at(0)}));
  put("tokenizer_config.json",
      R"({"added_tokens_decoder": {"5": {"content": "<c>", "normalized": false, "rstrip": true}}})");
  EXPECT_EQ(Tokenizer::from_pretrained(path()).encode("<c> "), (Ids{n}));
}

/// As in tokenizers 0.23.3, special or not.
TEST_F(TokenizerFiles, OfTokensWithOneNormalFormTheFirstCounts) {
  json whole = tokenizer_json("strip");
  const auto n = static_cast<std::int32_t>(whole["model"]["vocab"].size());
  const auto token = [](std::int32_t id, const char* content, bool special) {
    return json{{"id", id}, {"content", content}, {"normalized", true}, {"special", special}};
  };
  whole["added_tokens"] = {token(n, " foo", false), token(n + 1, "foo", false), token(n + 2, "foo ", false)};
  EXPECT_EQ(tokenizer_of(whole.dump()).encode("foo"), Ids{n});
  whole["added_tokens"][2]["special"] = true;
  EXPECT_EQ(tokenizer_of(whole.dump()).encode("foo"), Ids{n});
}

TEST_F(TokenizerFiles, WhereVersionsOfTransformersDifferAKeyIsRefused) {
  const auto refused = [&](const std::string& keys, const char* key) {
    put("tokenizer_config.json", keys);
    EXPECT_TRUE(std::string(error_of([&] { Tokenizer::from_pretrained(path()); }).what())
                    .starts_with(path("tokenizer_config.json") + ": " + key + ": tokenizer.json does the"))
        << keys;
  };
  const auto read = [&](const std::string& keys) {
    put("tokenizer_config.json", keys);
    return Tokenizer::from_pretrained(path());
  };
  put("tokenizer.json", tokenizer_json("qwen2").dump());
  refused(R"({"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": true})", "add_prefix_space");
  EXPECT_NO_THROW(read(R"({"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": false})"));
  EXPECT_NO_THROW(read(R"({"tokenizer_class": "LlamaTokenizer", "add_bos_token": true})"))
      << "not of Llama's form";
  put("tokenizer_config.json", R"({"tokenizer_class": "Qwen2Tokenizer", "eos_token": {"content": "<a>",
    "rstrip": true}})");
  EXPECT_TRUE(std::string(error_of([&] { Tokenizer::from_pretrained(path()); }).what())
                  .starts_with(path("tokenizer_config.json") + ": <a>: a special token with single_word"));
  put("tokenizer.json", tokenizer_json("llama2").dump());
  const std::string begin = R"({"tokenizer_class": "LlamaTokenizer", )";
  refused(begin + R"("add_prefix_space": false})", "add_prefix_space");
  refused(begin + R"("add_bos_token": false})", "add_bos_token");
  refused(begin + R"("add_eos_token": true})", "add_eos_token");
  const Tokenizer same =
      read(begin + R"("add_prefix_space": true, "add_bos_token": true, "add_eos_token": false})");
  EXPECT_EQ(same.beginning(), Ids{1});
  EXPECT_EQ(same.bos_token_id(), 1) << "of the class";
  EXPECT_EQ(same.eos_token_id(), 2);
  EXPECT_EQ(read(R"({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": false})").encode("a"),
            same.encode("a"));
}

TEST_F(TokenizerFiles, BytesThatAreNotUtf8BecomeReplacementCharacters) {
  const Tokenizer tokenizer = tokenizer_of(tokenizer_json("gpt2").dump());
  const std::string mark = "\xEF\xBF\xBD";
  const auto same = [&](const std::string& bytes, const std::string& text) {
    EXPECT_EQ(tokenizer.encode(bytes), tokenizer.encode(text)) << escaped(bytes);
  };
  same("a\xFFz", "a" + mark + "z");
  same("\xC3", mark);
  same("\xE4\xB8z", mark + "z");
  same("\xED\xA0\x80", mark + mark + mark);
  same("\xF0\x9F\x98\xF0\x9F\x98\x80", mark + "\xF0\x9F\x98\x80");
  same("\xC0\xAF", mark + mark);
}

TEST_F(TokenizerFiles, ALongWordTakesItsLengthOnly) {
  for (const char* const name : {"gpt2", "words without merges", "llama2"}) {
    const Tokenizer tokenizer = tokenizer_of(tokenizer_json(name).dump());
    for (const char* const part : {"a", "1", " ", "the", "!", "\xE4\xB8\xAD", "<"}) {
      std::string text;
      while (text.size() < 200'000) text += part;
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(text, false)), text) << name;
    }
  }
}

TEST_F(TokenizerFiles, ThreadsShareATokenizer) {
  const Tokenizer tokenizer = tokenizer_of(tokenizer_json("llama3").dump());
  const json& texts = expected()["texts"];
  std::vector<Ids> wanted;
  for (const json& text : texts) wanted.push_back(tokenizer.encode(text.get<std::string>()));
  std::vector<std::thread> threads;
  std::array<int, 3> wrong{};
  for (int& count : wrong)
    threads.emplace_back([&, copy = tokenizer] {
      for (int i = 0; i < 10; ++i)
        for (std::size_t t = 0; t < texts.size(); ++t)
          count += copy.encode(texts[t].get<std::string>()) != wanted[t];
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, (std::array<int, 3>{}));
}

TEST_F(TokenizerFiles, TrainingHasTheMergesOfHuggingFace) {
  const auto text = expected()["trained_on"].get<std::string>();
  for (const json& one : expected()["trained"]) {
    const auto special = one["special"].get<std::vector<std::string>>();
    // In two texts, which are cut between words.
    const std::array<std::string_view, 2> texts{std::string_view(text).substr(0, 15),
                                                std::string_view(text).substr(15)};
    const Tokenizer tokenizer =
        train_bpe(texts, one["size"], {.special_tokens = special, .model_max_length = 9});
    tokenizer.save_pretrained(path());
    const json written = json::parse(read_text_file(path("tokenizer.json")));
    EXPECT_EQ(written["model"]["merges"], one["merges"]);
    for (std::size_t i = 0; i < one["from_259"].size(); ++i)
      EXPECT_EQ(tokenizer.id_to_token(static_cast<std::int32_t>(259 + i)),
                one["from_259"][i].get<std::string>());
    EXPECT_EQ(tokenizer.vocab_size(), one["vocab_size"].get<std::size_t>());
    EXPECT_EQ(tokenizer.eos_token_id(), special.empty() ? std::nullopt : std::optional<std::int32_t>(0));
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
    EXPECT_EQ(Tokenizer::from_pretrained(path()).checksum(), tokenizer.checksum());
    EXPECT_EQ(json::parse(read_text_file(path("tokenizer_config.json")))["model_max_length"], 9);
  }
  EXPECT_STREQ(error_of([] { train_bpe({}, 256); }).what(),
               "train_bpe(): vocab_size is 256; bytes and special tokens are 257");
  EXPECT_STREQ(error_of([] {
                 train_bpe({}, 300, {.special_tokens = {"x", "x"}});
               }).what(),
               "train_bpe(): the special token x is there twice");
}

// ---- files that are not what they should be

struct RefusedPatch {
  const char* patch;  ///< JSON merge patch
  const char* message;
};
constexpr RefusedPatch refused_patches[] = {
    {R"({"model": null})", "model: missing; give an object { … }"},
    {R"({"version": "2.0"})", "version: expected 1.0, found 2.0"},
    {R"({"model": {"type": "Unigram"}})", "model.type: Unigram is not supported; BPE is"},
    {R"({"model": {"dropout": 0.1}})", "model.dropout: 0.1 is not supported; null is"},
    {R"({"model": {"end_of_word_suffix": "</w>"}})",
     R"(model.end_of_word_suffix: "</w>" is not supported; null is)"},
    {R"({"model": {"unk_token": "<what>"}})", "model.unk_token: <what> is not a token of vocab"},
    {R"({"model": {"vocab": {"a": 1}}})", "model.vocab.a: the id 1 is that of "},
    {R"({"model": {"vocab": {"a": -1}}})", "model.vocab.a: must be from 0 to 2147483646, found -1"},
    {R"({"model": {"vocab": {"a": 3000000000}}})",
     "model.vocab.a: must be from 0 to 2147483646, found 3000000000"},
    {R"({"model": {"merges": [["a", "zz"]]}})", "model.merges[0]: zz is not a token of the vocabulary"},
    {R"({"model": {"merges": ["a b c"]}})", R"(model.merges[0]: expected "A B", found "a b c")"},
    {R"({"model": {"merges": [["a", 7]]}})", R"(model.merges[0]: expected ["A", "B"], found ["a",7])"},
    {R"({"model": {"merges": 7}})", "model.merges: expected an array [ … ]"},
    {R"({"normalizer": {"type": "Precompiled"}})",
     "normalizer.type: Precompiled is no normalizer that is supported"},
    {R"({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Nmt"}]}})",
     "normalizer.normalizers[0].type: Nmt is no normalizer"},
    {R"({"normalizer": {"type": "Replace", "pattern": {"Glob": "*"}, "content": ""}})",
     "normalizer.pattern: expected {\"String\""},
    {R"({"pre_tokenizer": {"type": "BertPreTokenizer"}})",
     "pre_tokenizer.type: BertPreTokenizer is no pre-tokenizer that is supported"},
    {R"({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated"}})",
     "pre_tokenizer.pattern.Regex: end pattern with unmatched parenthesis"},
    {R"({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "((a{1000}){1000}){1000}"}}})",
     "the expression repeats its parts more than 10000 times"},
    {R"({"pre_tokenizer": {"type": "Split", "pattern": {"String": "a"}, "behavior": "Sideways"}})",
     "pre_tokenizer.behavior: expected Removed, Isolated"},
    {R"({"pre_tokenizer": {"type": "Metaspace", "replacement": "ab"}})",
     "pre_tokenizer.replacement: expected one character"},
    {R"({"pre_tokenizer": {"use_regex": 3}})", "pre_tokenizer.use_regex: expected true or false, found 3"},
    {R"({"post_processor": {"type": "BertProcessing"}})",
     "post_processor.type: BertProcessing is no post-processor that is supported"},
    {R"({"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}], "special_tokens": {}}})",
     "post_processor.special_tokens.<s>: missing, but the template has it"},
    {R"({"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "s"}}], "special_tokens": {"s": {"ids": [99999]}}}})",
     "post_processor: no token has the id 99999"},
    {R"({"decoder": {"type": "WordPiece"}})", "decoder.type: WordPiece is no decoder that is supported"},
    {R"({"added_tokens": [{"id": 7, "content": "<x>"}]})",
     "added_tokens[0].id: is 7 of <x>, but tokenizers gives it "},
    {R"({"added_tokens": [4]})", "added_tokens[0]: "},
};

TEST_F(TokenizerFiles, WhatIsMalformedOrNotSupportedIsNamed) {
  const json whole = tokenizer_json("gpt2");
  for (const auto& [patch, message] : refused_patches) {
    json changed = whole;
    changed.merge_patch(json::parse(patch));
    const Error error = error_of([&] { tokenizer_of(changed.dump()); });
    EXPECT_EQ(error.code(), Errc::config) << patch;
    const std::string text = error.what();
    EXPECT_TRUE(text.starts_with(path("tokenizer.json: "))) << text;
    EXPECT_NE(text.find(message), text.npos) << text << "\n  lacks " << message;
    EXPECT_EQ(text.find('\n'), text.npos);
  }
  EXPECT_EQ(error_of([&] { tokenizer_of("{"); }).code(), Errc::config);
  fs::remove(path("tokenizer.json"));
  put("vocab.json", "{}");
  EXPECT_EQ(error_of([&] { Tokenizer::from_pretrained(path()); }).what(),
            path() + ": has no tokenizer.json, and not both of vocab.json and merges.txt");
  EXPECT_EQ(error_of([&] { Tokenizer::from_pretrained(path("none")); }).what(),
            path("none") + ": no such file or folder; expected a folder with tokenizer.json");
}

/// Files that tokenizers have, with few merges.
std::vector<json> small_tokenizers() {
  std::vector<json> all;
  for (const json& one : expected()["tokenizers"])
    all.push_back(tokenizer_json(one["name"].get<std::string>()));
  for (json& tokenizer : all) {
    json& merges = tokenizer["model"]["merges"];
    if (merges.size() > 12) merges.erase(merges.begin() + 12, merges.end());
  }
  return all;
}

/// One of the files with other values, parts of other files, other bytes, or a part of it.
std::string mutated(const std::vector<json>& files, std::mt19937& random) {
  static const std::vector<json> values{nullptr,
                                        true,
                                        0,
                                        -1,
                                        1e300,
                                        4294967296,
                                        "",
                                        "a",
                                        "▁",
                                        "\xC4\xA0",
                                        "<0x41>",
                                        "(?<x>a|b\\g<x>)*",
                                        "[[:",
                                        "\\p{L}{3,}",
                                        json::array(),
                                        json::object(),
                                        "Sequence",
                                        "ByteLevel",
                                        "Replace",
                                        "Metaspace"};
  const auto pick = [&](std::size_t n) { return random() % n; };
  json changed = files[pick(files.size())];
  for (std::size_t n = pick(3) + 1; n > 0; --n) {
    json* node = &changed;
    while (node->is_structured() && !node->empty() && (node == &changed || pick(5) > 0)) {
      auto child = node->begin();
      std::advance(child, static_cast<std::ptrdiff_t>(pick(node->size())));
      node = &*child;
    }
    const json& other = files[pick(files.size())];
    *node = pick(4) > 0 ? values[pick(values.size())] : json(other.begin().value());
  }
  std::string text = changed.dump(-1, ' ', false, json::error_handler_t::replace);
  for (std::size_t n = pick(4) == 0 ? pick(6) : 0; n > 0; --n)
    text[pick(text.size())] = static_cast<char>(pick(256));
  if (pick(16) == 0) text.resize(pick(text.size()));
  return text;
}

/// Mutations of a tokenizer.json: a node is replaced, moved or removed, or bytes change. Each is read, and
/// encodes and decodes anything, or is refused. RZ_FUZZ_SECONDS: for so long; RZ_FUZZ_SEED: others.
TEST_F(TokenizerFiles, MutatedFilesAreReadOrRefused) {
  const char* const seed = std::getenv("RZ_FUZZ_SEED");
  std::mt19937 random(seed ? static_cast<unsigned>(std::atoi(seed)) : 7);
  const auto pick = [&](std::size_t n) { return random() % n; };
  const char* const limit = std::getenv("RZ_FUZZ_SECONDS");
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(limit ? std::atoi(limit) : 0);
  const std::vector<json> files = small_tokenizers();
  std::size_t tried = 0, read = 0;
  for (; tried < 150 || std::chrono::steady_clock::now() < end; ++tried) {
    const std::string text = mutated(files, random);
    try {
      const Tokenizer tokenizer = tokenizer_of(text);
      ++read;
      std::string bytes;
      for (std::size_t n = pick(60); n > 0; --n)
        bytes += pick(3) > 0 ? " aetEl<|1\n'"[pick(11)] : static_cast<char>(pick(256));
      Ids ids = tokenizer.encode(bytes);
      for (std::size_t n = pick(6); n > 0; --n) ids.push_back(static_cast<std::int32_t>(pick(400)) - 20);
      ASSERT_EQ(streamed(tokenizer, ids, false), tokenizer.decode(ids)) << text;
      ASSERT_TRUE(is_utf8(tokenizer.decode(ids, true)));
    } catch (const Error& e) {
      ASSERT_EQ(e.code(), Errc::config) << e.what();
      ASSERT_EQ(std::string_view(e.what()).find('\n'), std::string_view::npos) << e.what();
    }
  }
  if (limit) std::printf("%zu files, of which %zu were read\n", tried, read);
  EXPECT_GT(read, tried / 20);
  EXPECT_LT(read, tried);
}

// ---- the shared fixtures

class TokenizerFixtures : public ::testing::TestWithParam<const char*> {
 protected:
  static std::string folder() {
    return std::string(RZ_SOURCE_DIR "/../shared/fixtures/tokenizer_") + GetParam();
  }
  static void compare(const Tokenizer& tokenizer, const std::string& file) {
    std::ifstream lines(file);
    std::size_t count = 0;
    for (std::string line; std::getline(lines, line); ++count) {
      const json wanted = json::parse(line);
      Ids ids = wanted["ids"].get<Ids>(), with_special = ids;
      if (wanted.contains("text")) {
        const auto text = wanted["text"].get<std::string>();
        EXPECT_EQ(tokenizer.encode(text, false), ids) << line;
        with_special = tokenizer.encode(text);
        EXPECT_EQ(with_special, wanted["ids_with_special"].get<Ids>()) << line;
      }
      EXPECT_EQ(tokenizer.decode(ids), wanted["decoded"].get<std::string>()) << line;
      EXPECT_EQ(tokenizer.decode(with_special, true), wanted["decoded_skip_special"].get<std::string>())
          << line;
      EXPECT_EQ(streamed(tokenizer, ids, false), wanted["decoded"].get<std::string>()) << line;
    }
    EXPECT_GT(count, 0u) << file;
  }
};

TEST_P(TokenizerFixtures, EveryCaseIsExact) {
  if (!fs::exists(folder() + "/tokenizer.json") && !fs::exists(folder() + "/vocab.json"))
    GTEST_SKIP() << folder() << " is not here";
  std::vector<Tokenizer> all{Tokenizer::from_pretrained(folder())};
  if (fs::exists(folder() + "/vocab.json"))
    all.push_back(Tokenizer::from_pretrained(folder() + "/vocab.json"));
  for (const Tokenizer& tokenizer : all)
    for (const char* const file : {"/cases.jsonl", "/decode_cases.jsonl"})
      compare(tokenizer, folder() + file);
}

INSTANTIATE_TEST_SUITE_P(, TokenizerFixtures, ::testing::Values("gpt2", "llama3", "llama2", "gpt2_real"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace rz
