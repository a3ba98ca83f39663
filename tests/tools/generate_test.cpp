// Needs: generate

// The program that continues texts.

#include "autograd_lite/models/generate.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/nn/init.h"
#include "sharding/huggingface/families.h"
#include "sharding/huggingface/generation_config.h"
#include "sharding/huggingface/pretrained_weights.h"
#include "sharding/tokenizer/tokenizer.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"
#include "tests/support/gpt2_tiny.h"
#include "tests/support/program.h"

namespace rz {
namespace {

using test::expect_refusal;

Gpt2Config config_of(std::size_t vocabulary) {
  Gpt2Config c;
  c.vocab_size = vocabulary;
  c.n_positions = 64, c.n_embd = 32, c.n_layer = 2, c.n_head = 2;
  return c;
}

/// A folder with a GPT-2 whose tokens are bytes.
class GenerateTool : public testing::Test {
 protected:
  GenerateTool() { write_model(256); }
  void write_model(std::size_t vocabulary) const {
    const Gpt2Config config = config_of(vocabulary);
    put("config.json", config_json(Gpt2(config)));
    test::write_tiny_start(config, model() + "/model.safetensors");
  }
  std::string model() const { return folder_ / "model"; }
  void put(const std::string& name, const std::string& text) const { folder_.put("model/" + name, text); }

  struct Outcome {
    int status;
    std::string out, err;
  };
  Outcome run(std::vector<std::string> words, const std::string& input = "") const {
    std::string command =
        concat("printf '%s' '", input, "' | ", test::built("generate"), " --model ", model());
    for (const std::string& w : words) command += concat(" '", w, "'");
    test::Program p({"/bin/sh", "-c", command});
    const int status = p.wait();
    return {status, p.out(), p.err()};
  }
  /// What generate() makes of the prompt.
  std::vector<std::int32_t> tokens(const std::string& prompt, const GenerationConfig& config,
                                   const Tokenizer& tokenizer = Tokenizer::bytes()) const {
    const auto model_ = language_model_from_config(model());
    allocate_parameters(*model_);
    load_pretrained(*model_, model());
    Tape tape;
    const std::vector<std::vector<std::int32_t>> prompts{tokenizer.encode(prompt)};
    return generate(*model_, tape, prompts, config)[0];
  }
  std::string expected(const std::string& prompt, const GenerationConfig& config,
                       const Tokenizer& tokenizer = Tokenizer::bytes()) const {
    return tokenizer.decode(tokens(prompt, config, tokenizer), true);
  }

  test::Folder folder_;
};

TEST_F(GenerateTool, PrintsThePromptAndItsContinuation) {
  const std::string text = expected("Once ", {.max_new_tokens = 30, .temperature = 0});
  const Outcome flag = run({"--prompt", "Once ", "--temperature", "0", "--max-new-tokens", "30"});
  EXPECT_EQ(flag.status, 0) << flag.err;
  EXPECT_EQ(flag.out, concat("Once ", text, "\n"));
  EXPECT_NE(flag.err.find("30 tokens in "), std::string::npos) << flag.err;
  EXPECT_NE(flag.err.find("tokens/s"), std::string::npos) << flag.err;
  const Outcome input = run({"--temperature", "0", "--max-new-tokens", "30", "--no-echo"}, "Once ");
  EXPECT_EQ(input.out, text + "\n");
}

TEST_F(GenerateTool, TheTokenizerOfTheFolderIsUsed) {
  const std::string_view texts[] = {"Once upon a time, and once upon another time, there was a tokenizer."};
  const Tokenizer tokenizer = train_bpe(texts, 290);
  write_model(300);
  tokenizer.save_pretrained(model());
  const std::string text =
      expected("Once upon", {.max_new_tokens = 30, .temperature = 0, .eos_token_id = {0}}, tokenizer);
  const Outcome o =
      run({"--prompt", "Once upon", "--temperature", "0", "--max-new-tokens", "30", "--no-echo"});
  EXPECT_EQ(o.out, text + "\n") << o.err;
  write_model(280);
  expect_refusal("generate", {"--model", model(), "--prompt", "x"}, "the tokenizer is another model's");
}

TEST_F(GenerateTool, ASpecialTokenBeyondTheVocabularyMattersInATextThatHasIt) {
  const std::string_view texts[] = {"Once upon a time"};
  train_bpe(texts, 257).save_pretrained(model());
  auto json = nlohmann::json::parse(std::ifstream(model() + "/tokenizer.json"));
  auto pad = json["added_tokens"][0];
  pad["id"] = 257, pad["content"] = "<pad>";
  json["added_tokens"].push_back(pad);
  put("tokenizer.json", json.dump());
  write_model(257);
  const Tokenizer tokenizer = Tokenizer::from_pretrained(model());
  EXPECT_EQ(tokenizer.vocab_size(), 258u);
  EXPECT_EQ(tokenizer.ordinary_vocab_size(), 257u);
  const Outcome o = run({"--prompt", "Once ", "--max-new-tokens", "2"});
  EXPECT_EQ(o.status, 0) << o.err;
  const Outcome with = run({"--prompt", "Once <pad>"});
  EXPECT_EQ(with.status, 2) << with.err;
  EXPECT_NE(with.err.find("the prompt has the token \"<pad>\" (257)"), std::string::npos) << with.err;
}

/// With a decoder that removes the blank before the first word of a text, as that of Llama 2.
TEST_F(GenerateTool, AContinuationKeepsTheBlankBeforeItsFirstWord) {
  const std::string_view texts[] = {"x"};
  train_bpe(texts, 257).save_pretrained(model());
  auto json = nlohmann::json::parse(std::ifstream(model() + "/tokenizer.json"));
  json["decoder"] = nlohmann::json::parse(
      R"({"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "X"}, "content": " "}, )"
      R"({"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})");
  nlohmann::json vocabulary{{"<|endoftext|>", 0}};
  for (int word = 1; word < 257; ++word) vocabulary[concat("X", word)] = word;
  vocabulary["O"] = 257;
  json["model"]["vocab"] = vocabulary, json["model"]["merges"] = nlohmann::json::array();
  put("tokenizer.json", json.dump());
  write_model(258);
  const Tokenizer tokenizer = Tokenizer::from_pretrained(model());
  const std::string text =
      expected("O", {.max_new_tokens = 5, .repetition_penalty = 100, .temperature = 0, .eos_token_id = {0}},
               tokenizer);
  ASSERT_FALSE(text.empty());
  ASSERT_NE(text[0], ' ') << "decoded alone";
  const Outcome o =
      run({"--prompt", "O", "--temperature", "0", "--max-new-tokens", "5", "--repetition-penalty", "100"});
  EXPECT_EQ(o.out, concat("O ", text, "\n")) << o.err;
}

TEST_F(GenerateTool, ATextOfStopEndsIt) {
  const std::string text = expected("Once ", {.max_new_tokens = 30, .temperature = 0});
  std::size_t at = 10;  // of a whole character
  while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) ++at;
  const std::string stop = text.substr(at, 3);
  const std::string before = text.substr(0, text.find(stop));
  const Outcome o =
      run({"--prompt", "Once ", "--temperature", "0", "--max-new-tokens", "30", "--no-echo", "--stop", stop});
  EXPECT_EQ(o.out, before + "\n");
}

TEST_F(GenerateTool, OptionsOfTheFolderHoldUnlessGiven) {
  put("generation_config.json",
      R"({"do_sample": true, "temperature": 0.5, "top_k": 7, "num_beams": 1, "eos_token_id": [3, 999]})");
  GenerationConfig config{.max_new_tokens = 20, .temperature = 0.5, .top_k = 7, .eos_token_id = {3}};
  Outcome o = run({"--prompt", "Once ", "--max-new-tokens", "20", "--no-echo"});
  EXPECT_EQ(o.out, expected("Once ", config) + "\n");
  config.top_k = 2, config.seed = 5;
  o = run({"--prompt", "Once ", "--max-new-tokens", "20", "--no-echo", "--top-k", "2", "--seed", "5"});
  EXPECT_EQ(o.out, expected("Once ", config) + "\n");
}

TEST_F(GenerateTool, KeysThatChangeTextsAreAppliedOrRefused) {
  const std::string neutral =
      R"("guidance_scale": 1.0, "num_beams": 1, "suppress_tokens": [], "stop_strings": null, "use_cache": true, )"
      R"("pad_token_id": 0, "transformers_version": "5.24.0", "max_length": 20, "min_length": 0)";
  const std::vector<std::string> greedy{"--prompt", "Once ", "--temperature", "0", "--no-echo"};
  const auto with = [&](std::string key) {
    put("generation_config.json", concat("{", key, "}"));
    const Outcome o = run(greedy);
    EXPECT_EQ(o.status, 0) << o.err;
    return o.out;
  };
  const GenerationConfig ten{.max_new_tokens = 10, .temperature = 0};
  const std::string plain = expected("Once ", ten);
  EXPECT_EQ(with(neutral + R"(, "max_new_tokens": 10)"), plain + "\n");
  EXPECT_EQ(with(R"("max_length": 15)"), plain + "\n") << "with the prompt's five";
  GenerationConfig c = ten;
  c.no_repeat_ngram_size = 1;
  EXPECT_EQ(with(R"("max_new_tokens": 10, "no_repeat_ngram_size": 1)"), expected("Once ", c) + "\n");
  EXPECT_NE(expected("Once ", c), plain);
  const std::int32_t token = tokens("Once ", ten)[0];
  c = ten, c.suppress_tokens = {token};
  EXPECT_EQ(with(concat(R"("max_new_tokens": 10, "suppress_tokens": [)", token, "]")),
            expected("Once ", c) + "\n");
  c = ten, c.bad_words_ids = {{token}};
  EXPECT_EQ(with(concat(R"("max_new_tokens": 10, "bad_words_ids": [[)", token, "]]")),
            expected("Once ", c) + "\n");
  EXPECT_NE(expected("Once ", c), plain);
  c = ten, c.min_new_tokens = 10, c.eos_token_id = {token};
  EXPECT_EQ(tokens("Once ", c).size(), 10u);
  EXPECT_EQ(with(concat(R"("max_new_tokens": 10, "min_new_tokens": 10, "eos_token_id": )", token)),
            expected("Once ", c) + "\n");
  std::filesystem::remove(model() + "/generation_config.json");
  auto config = nlohmann::json::parse(std::ifstream(model() + "/config.json"));
  config["max_new_tokens"] = 10, config["repetition_penalty"] = 3;
  put("config.json", config.dump());
  c = ten, c.repetition_penalty = 3;
  EXPECT_EQ(run(greedy).out, expected("Once ", c) + "\n") << "of config.json, where nothing else is";
  config["num_beams"] = 4;
  put("config.json", config.dump());
  expect_refusal("generate", {"--model", model(), "--prompt", "x"}, "config.json: num_beams: is 4");
  put("alone.json", "{\"max_new_tokens\": 10}");
  std::vector<std::string> given = greedy;
  given.insert(given.end(), {"--generation-config", model() + "/alone.json"});
  EXPECT_EQ(run(given).out, plain + "\n");
}

TEST_F(GenerateTool, KeysThatAreNotAppliedAreNamed) {
  for (const std::string key :
       {R"("stop_strings": ["e"])", R"("exponential_decay_length_penalty": [2, 1.5])", R"("num_beams": 2)",
        R"("watermarking_config": {"bias": 2.5})", R"("a_key_to_come": 1)", R"("forced_eos_token_id": 0)",
        R"("eos_token_id": "89")", R"("eos_token_id": true)", R"("eos_token_id": [89, "3"])",
        R"("eos_token_id": [[89]])", R"("suppress_tokens": [256])", R"("bad_words_ids": [1])"}) {
    put("generation_config.json", concat("{", key, "}"));
    const std::string name = key.substr(1, key.find('"', 1) - 1);
    const std::string what = test::error_of([&] { generation_config_from_pretrained(model(), 256); }).what();
    EXPECT_NE(what.find(concat("generation_config.json: ", name, ": ")), std::string::npos) << what;
  }
}

TEST_F(GenerateTool, SeveralContinuationsDiffer) {
  const Outcome o = run(
      {"--prompt", "Once ", "--max-new-tokens", "8", "--temperature", "2", "--num-return-sequences", "2"});
  const std::size_t second = o.out.find("\nOnce ");
  ASSERT_NE(second, std::string::npos) << o.out;
  EXPECT_NE(o.out.substr(0, second), o.out.substr(second + 1, o.out.size() - second - 2));
}

TEST_F(GenerateTool, AGenerationConfigThatIsWrongIsNamed) {
  put("generation_config.json", R"({"do_sample": true, "top_p": 1.5})");
  EXPECT_NE(test::error_of([&] { generation_config_from_pretrained(model(), 256); }).what(), nullptr);
  expect_refusal("generate", {"--model", model(), "--prompt", "x"}, "generation_config.json: top_p");
}

TEST_F(GenerateTool, BadInputIsOneLine) {
  expect_refusal("generate", {}, "--model is required");
  expect_refusal("generate", {"RUN"}, "unexpected argument 'RUN'; --model is required");
  expect_refusal("generate", {"--model", "/none"}, "/none");
  expect_refusal("generate", {"--model", model(), "--prompt", "x", "--stop", ""}, "--stop: is empty");
  expect_refusal("generate", {"--model", model(), "--prompt-file", "/none"}, "/none: cannot be opened");
  put("config.json", config_json(Gpt2(config_of(300))));
  expect_refusal("generate", {"--model", model(), "--prompt", "x"},
                 "has no tokenizer.json; give --tokenizer");
}

}  // namespace
}  // namespace rz
