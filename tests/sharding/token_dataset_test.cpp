/// Tokens as data for training: files, folders of text, samples and their order.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "sharding/data/continuous_batch_sampler.h"
#include "sharding/data/loader.h"
#include "sharding/data/token_shards.h"
#include "sharding/data/tokens.h"
#include "sharding/io/json.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using test::expect_parts;

template <class F>
std::string error_message(const F& f) {
  return test::error_of(f).what();
}
class TokenFiles : public testing::Test, protected test::Folder {
 protected:
  std::string put_tokens(const std::vector<std::uint16_t>& tokens) const {
    put("tokens.bin", std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2));
    return path("tokens.bin");
  }
};

std::vector<std::int32_t> all_of(const Tokens& tokens) {
  std::vector<std::int32_t> out(tokens.count());
  tokens.read(0, out);
  return out;
}

TEST_F(TokenFiles, TheTextOfTheDataIsThere) {
  put("text", "some words");
  EXPECT_EQ(Tokens::from_text(path("text")).text(), "some words");
  EXPECT_EQ(Tokens::from_file(put_tokens({1, 2})).text(), "");
}

// ---- records

TEST_F(TokenFiles, EachRecordIsADocument) {
  const std::string expected = "one\ntwo \xc3\xa9\xf0\x9f\x98\x80\nthree";
  put("a.jsonl",
      "\xef\xbb\xbf{\"text\": \"one\", \"n\": [1]}\r\n\r\n  \n{\"n\": 2, \"text\": "
      "\"two \\u00e9\\ud83d\\ude00\"}\n{\"text\": \"\"}\n{\"text\":\"three\"}");
  EXPECT_EQ(Tokens::from_text(path("a.jsonl")).text(), expected);
  TextOptions options{.tokenizer = Tokenizer::bytes(), .text_key = "body"};
  put("folder/deep/b.ndjson", "{\"body\": \"b\"}\n");
  put("folder/a.txt", "words"), put("folder/c.jsonl", "{\"body\": \"c\\nd\"}\n{\"body\": \"e\"}");
  EXPECT_EQ(Tokens::from_text(path("folder"), options).text(), "words\nc\nd\ne\nb");
  EXPECT_EQ(Tokens::from_text(path("folder/*.*"), options).text(), "words\nc\nd\ne");
  EXPECT_EQ(Tokens::from_text(path("folder/c.jsonl") + "," + path("folder/a.txt"), options).text(),
            "c\nd\ne\nwords");
  EXPECT_EQ(Tokens::from_text(path("folder"), options).count(), 13u);
  options.append_eos = false;
  EXPECT_EQ(all_of(Tokens::from_text(path("folder/c.jsonl"), options)),
            (std::vector<std::int32_t>{'c', '\n', 'd', 'e'}));
  options.append_eos = true, options.eos_token_id = 0;
  EXPECT_EQ(all_of(Tokens::from_text(path("folder/c.jsonl"), options)),
            (std::vector<std::int32_t>{'c', '\n', 'd', 0, 'e', 0}));
}

TEST_F(TokenFiles, WrongRecordsAreNamedWithTheirLine) {
  const auto refused = [&](const std::string& line, std::initializer_list<std::string> parts) {
    put("a.jsonl", "{\"text\": \"one\"}\n\n" + line + "\n{\"text\": \"two\"}\n");
    const std::string what = error_message([&] { Tokens::from_text(path("a.jsonl")); });
    expect_parts(what, {path("a.jsonl:3: ")});
    expect_parts(what, parts);
    EXPECT_EQ(what.find('\n'), what.npos) << what;
  };
  refused("{\"text\": \"one\"", {"not valid JSON"});
  refused("{\"text\": \"a\"} {\"text\": \"b\"}", {"not valid JSON"});
  refused("{\"text\": \"a\", \"text\": \"b\"}", {"'text' is given twice"});
  refused("{\"text\": \"\xff\"}", {"UTF-8"});
  refused("{\"text\": \"\\ud800\"}", {"surrogate"});
  refused(std::string("{\"text\": \"\0\"}", 12), {"is zero"});
  refused("{\"text\": \"a\", \"x\": " + std::string(100000, '['), {"64 levels"});
  refused("{\"content\": \"a\", \"id\": 1}", {"no \"text\" among content, id", "--text-key KEY"});
  refused("{\"text\": 7}", {"text: expected a text in quotes, found 7"});
  refused("[1]", {"expected an object", "[1]"});
  refused("words", {"not valid JSON"});
}

TEST_F(TokenFiles, JsonThatIsNotNamedAsRecordsIsNoText) {
  const auto refused = [&](const std::string& name, const std::string& text, const std::string& remedy) {
    put(name, text);
    expect_parts(error_message([&] { Tokens::from_text(path(name)); }),
                 {path(name), "records in JSON", remedy});
  };
  const std::string records = "{\"text\": \"one\"}\n{\"text\": \"two\"}\n";
  refused("a.json", "[{\"instruction\": \"x\"}]", "jq -c '.[]'");
  refused("a.txt", records, "name the file .jsonl");
  refused("b.txt", "{\"text\": \"one\"} \r\n{\"text\": \"two\"}", "name the file .jsonl");
  put("folder/log", records);
  expect_parts(error_message([&] { Tokens::from_text(path("folder")); }), {"folder/log", "records in JSON"});
  put("folder/a.txt", "words");
  put("folder/b.json", "{}");
  EXPECT_EQ(Tokens::from_text(path("folder")).text(), "words");
  put("c.txt", "{ a brace }\n{ and another }\n");
  EXPECT_EQ(Tokens::from_text(path("c.txt")).count(), 28u);
}

/// The syntax of JSON is no text, whatever the name of the file; jq makes records of it as the message says.
TEST_F(TokenFiles, JsonOfAnyShapeIsNoText) {
  const std::string record = R"({"text": "one"})", array = "[" + record + ",\n" + record + "]";
  const std::string of_texts = R"(["one", "two"])", nested = "[" + array + "]";
  std::string large = R"({"version": "1", "data": [)" + record;
  while (large.size() < (std::size_t{9} << 20)) large += "," + record;
  const std::vector<std::array<std::string, 3>> all{
      {"object.json", R"({"version": "1", "list": [1], "data": [{"text": "one"}]})",
       "jq -c '.data[]' FILE.json"},
      {"large.json", large, "jq -c '.data[]' FILE.json"},
      {"one.json", "{\n \"text\": \"one\"\n}\n", "jq -c '.' FILE.json"},
      {"texts.json", of_texts, "jq -c '.[] | {text: .}' FILE.json"},
      {"nested.json", nested, "jq -c '.[][]' FILE.json"},
      {"UPPER.JSON", array, "jq -c '.[]' FILE.json"},
      {"array.txt", "\xef\xbb\xbf" + array, "jq -c '.[]' FILE >"},
      {"one.txt", record + "\n", "name the file .jsonl"},
      {"pretty.txt", "{\n\"text\": \"one\"}\n{\"text\":\n\"]}\\\"\"}", "jq -c '.' FILE >"},
      {"numbers.json", "[1, 2]", "FILE.jsonl"},
      {"words.json", "words", "name it .txt"}};
  for (const auto& [name, text, remedy] : all) {
    put("folder/" + name, text);
    const std::string what = error_message([&, n = name] { Tokens::from_text(path("folder/" + n)); });
    expect_parts(what, {path("folder/" + name), remedy});
    EXPECT_EQ(what.find('\n'), what.npos);
  }
  put("folder/words.txt", "words");
  const Tokens read = Tokens::from_text(path("folder"));
  EXPECT_EQ(read.text(), "words");
  ASSERT_EQ(read.left_out().size(), 1u);
  expect_parts(read.left_out()[0],
               {"11 files are left out", "records in JSON", "other JSON: ", "words.json"});
  put("A.JSONL", record), put("b.NdJson", record + "\n");
  EXPECT_EQ(Tokens::from_text(path("A.JSONL") + "," + path("b.NdJson")).text(), "one\none");
  for (const std::string text : {"[1] a note\n", "[\"quoted\" words", "{\"a\": 1}\nwords", "[[link]] words",
                                 "[\"a\"] and [\"b\"]", "{\"a\": 1,}"}) {
    put("text", text);
    EXPECT_EQ(Tokens::from_text(path("text")).text(), text);
  }
}

/// Texts and lines of many blocks.
TEST_F(TokenFiles, TokensOfATextAreTheSameForAnyNumberOfThreads) {
  constexpr std::size_t block = std::size_t{1} << 18;
  std::string text, records = "{\"text\": \"\"}\n";
  for (int i = 0; text.size() < 2 * block; ++i) text += concat("line ", i * i, i % 7 ? "\n" : "\n\n  ");
  for (const std::size_t length : {std::size_t{9}, 2 * block, std::size_t{9}})
    records += concat("{\"text\": \"", std::string(length, 'x'), "\"}\n");
  put("data/a.txt", text), put("data/b.jsonl", records), put("data/c.txt", "end");
  const Tokens bytes = Tokens::from_text(path("data"));
  EXPECT_EQ(bytes.text().substr(0, text.size()), text);
  for (const int threads : {1, 3}) {
    TextOptions options{.tokenizer = Tokenizer::bytes(), .threads = threads};
    TextProgress last;
    options.on_progress = [&](const TextProgress& p) { last = p; };
    const Tokens tokens = Tokens::from_text(path("data"), options);
    EXPECT_EQ(all_of(tokens), all_of(bytes)) << threads;
    EXPECT_EQ(tokens.text(), bytes.text());
    EXPECT_EQ(last.documents, 5u) << "the first record is empty";
    EXPECT_EQ(last.bytes, last.all_bytes);
  }
  put("marked.txt", "\xef\xbb\xbfwords");
  EXPECT_EQ(Tokens::from_text(path("marked.txt")).count(), 8u);
  EXPECT_EQ(Tokens::from_text(path("marked.txt"), {.tokenizer = Tokenizer::bytes()}).count(), 5u);
  put("latin.txt", text + "caf\xe9\n");
  expect_parts(
      error_message([&] { Tokens::from_text(path("latin.txt"), {.tokenizer = Tokenizer::bytes()}); }),
      {concat(path("latin.txt"), ":", std::ranges::count(text, '\n') + 1, ": is not UTF-8: \\xe9")});
}

/// Here a line break and the character behind it are one token, so that a text has no place to be divided.
TEST_F(TokenFiles, ATextIsDividedOnlyWhereItsTokensStayTheSame) {
  Tokenizer::bytes().save_pretrained(path("tokenizer"));
  const std::string file = path("tokenizer/tokenizer.json");
  auto json = nlohmann::ordered_json::parse(read_text_file(file));
  json["model"]["vocab"]["\u010Al"] = 256;
  json["model"]["merges"] = {"\u010A l"};
  put("tokenizer/tokenizer.json", json.dump());
  const Tokenizer tokenizer = Tokenizer::from_pretrained(path("tokenizer"));
  std::string text;
  while (text.size() < (std::size_t{3} << 17)) text += "line\n";
  put("a.txt", text);
  const Tokens tokens = Tokens::from_text(path("a.txt"), {.tokenizer = tokenizer});
  EXPECT_LT(tokens.count(), text.size() * 9 / 10);
  EXPECT_EQ(all_of(tokens), tokenizer.encode(text));
}

// ---- prompts and answers

TEST_F(TokenFiles, OnlyAnswersAreTargets) {
  put("a.jsonl",
      "{\"q\": \"ab\", \"a\": \"cd\"}\n{\"q\": \"abcdefgh\", \"a\": \"xy\"}\n"
      "{\"q\": \"ab\", \"a\": \"stuvwxyz\"}\n{\"q\": \"\", \"a\": \"cd\"}\n");
  TextOptions options{
      .tokenizer = Tokenizer::bytes(), .prompt_key = "q", .answer_key = "a", .eos_token_id = 0};
  const Tokens pairs = Tokens::from_text(path("a.jsonl"), options);
  EXPECT_TRUE(pairs.has_answers());
  constexpr std::size_t length = 6;
  EXPECT_EQ(TokenDataset(pairs, length).size(), 4u);
  using Row = std::vector<std::int32_t>;
  Row inputs(length), targets(length);
  const auto read = [&](std::uint64_t pair) { pairs.read_pair(pair, inputs, targets); };
  read(0);
  EXPECT_EQ(inputs, (Row{'a', 'b', 'c', 'd', 0, 0}));
  EXPECT_EQ(targets, (Row{-100, 'c', 'd', 0, -100, -100}));
  read(1);  // the front of the prompt is cut off
  EXPECT_EQ(inputs, (Row{'e', 'f', 'g', 'h', 'x', 'y'}));
  EXPECT_EQ(targets, (Row{-100, -100, -100, 'x', 'y', 0}));
  read(2);  // and then the end of the answer
  EXPECT_EQ(inputs, (Row{'b', 's', 't', 'u', 'v', 'w'}));
  EXPECT_EQ(targets, (Row{'s', 't', 'u', 'v', 'w', 'x'}));
  read(3);
  EXPECT_EQ(inputs, (Row{'c', 'd', 0, 0, 0, 0}));
  EXPECT_EQ(targets, (Row{'d', 0, -100, -100, -100, -100}));

  const auto refused = [&](const std::string& name, std::initializer_list<std::string> parts) {
    expect_parts(error_message([&] { Tokens::from_text(path(name), options); }), parts);
  };
  options.max_pair_tokens = 7;
  refused("a.jsonl", {path("a.jsonl:2: "), "11 tokens", "--long-samples cut"});
  options.max_pair_tokens = 0;
  put("a.txt", "words"), refused("a.txt", {path("a.txt"), "is text", ".jsonl"});
  put("b.jsonl", "{\"q\": \"a\", \"a\": \"\"}"), refused("b.jsonl", {path("b.jsonl:1: a: is empty")});
  put("b.jsonl", R"({"q": [{"role": "user", "content": "a"}], "a": "b"})");
  refused("b.jsonl", {"b.jsonl:1: q: is a list of messages", "docs/guide/texts.md", "--prompt-key"});
  for (const std::string key : {"messages", "conversations"}) {
    put("b.jsonl", concat(R"({")", key, R"(": [{"role": "user", "content": "a"}]})"));
    refused("b.jsonl", {"b.jsonl:1: " + key + ": is a list of messages", "--prompt-key"});
    const std::string of_text = error_message([&] { Tokens::from_text(path("b.jsonl"), TextOptions{}); });
    expect_parts(of_text, {"b.jsonl:1: " + key + ": is a list of messages", "--prompt-key"});
  }
  put("b.jsonl", R"({"messages": "plain text", "a": "b"})");
  refused("b.jsonl", {"there is no \"q\" among", "--prompt-key KEY (TextOptions::prompt_key)"});
  put("b.jsonl", "{\"q\": \"a\"}"), refused("b.jsonl", {"b.jsonl:1", "no \"a\" among q", "--answer-key"});
  TextOptions both = options;
  both.text_key = "q";
  expect_parts(error_message([&] { Tokens::from_text(path("b.jsonl"), both); }),
               {"--text-key and --prompt-key exclude"});
  // Other prompts with the tokens of these are other data.
  put("c.jsonl", "{\"q\": \"abc\", \"a\": \"d\"}"), put("d.jsonl", "{\"q\": \"ab\", \"a\": \"cd\"}");
  EXPECT_NE(checksum(Tokens::from_text(path("c.jsonl"), options)),
            checksum(Tokens::from_text(path("d.jsonl"), options)));
}

/// A chat template writes the beginning itself.
TEST_F(TokenFiles, APromptHasTheBeginningOnce) {
  Tokenizer::bytes().save_pretrained(path("tokenizer"));
  auto json = nlohmann::ordered_json::parse(read_text_file(path("tokenizer/tokenizer.json")));
  const nlohmann::ordered_json token{{"id", "<s>"}, {"type_id", 0}}, text{{"id", "A"}, {"type_id", 0}};
  json["added_tokens"] = {{{"id", 256},
                           {"content", "<s>"},
                           {"single_word", false},
                           {"lstrip", false},
                           {"rstrip", false},
                           {"normalized", false},
                           {"special", true}}};
  const nlohmann::ordered_json parts = {{{"SpecialToken", token}}, {{"Sequence", text}}};
  json["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single", parts},
      {"pair", parts},
      {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {256}}, {"tokens", {"<s>"}}}}}}};
  put("tokenizer/tokenizer.json", json.dump());
  put("tokenizer/tokenizer_config.json", R"({"bos_token": "<s>"})");
  put("a.jsonl", "{\"q\": \"ab\", \"a\": \"cd\"}\n{\"q\": \"<s>ab\", \"a\": \"cd\"}\n");
  const Tokens pairs = Tokens::from_text(
      path("a.jsonl"),
      {.tokenizer = Tokenizer::from_pretrained(path("tokenizer")), .prompt_key = "q", .answer_key = "a"});
  std::vector<std::int32_t> inputs(5), targets(5);
  for (const std::uint64_t pair : {0, 1}) {
    pairs.read_pair(pair, inputs, targets);
    EXPECT_EQ(inputs, (std::vector<std::int32_t>{256, 'a', 'b', 'c', 'd'})) << pair;
  }
  // The template has it, whatever bos_token is, as where a prompt is encoded.
  put("b.jsonl", R"({"text": "ab"})");
  for (const char* const config :
       {R"({"bos_token": "<s>"})", R"({"bos_token": null})", R"({"bos_token": "!"})", "{}"}) {
    put("tokenizer/tokenizer_config.json", config);
    const Tokenizer tokenizer = Tokenizer::from_pretrained(path("tokenizer"));
    EXPECT_EQ(all_of(Tokens::from_text(path("b.jsonl"), {.tokenizer = tokenizer})), tokenizer.encode("ab"))
        << config;
  }
}

TEST_F(TokenFiles, TokensAreUint16OfTheFile) {
  auto tokens = Tokens::from_file(put_tokens({1, 2, 300, 65535}));
  EXPECT_EQ(all_of(tokens), (std::vector<std::int32_t>{1, 2, 300, 65535}));
  EXPECT_EQ(tokens.samples(1), 3u);
  EXPECT_EQ(tokens.samples(3), 1u);
  expect_parts(error_message([&] { tokens.samples(4); }), {path("tokens.bin"), "4 tokens", "--seq-len"});
  tokens.limit_vocabulary(300);
  expect_parts(error_message([&] { tokens.check_vocabulary(); }),
               {"token 300 at position 2", "vocab_size 300"});
  tokens.limit_vocabulary(65536);
  EXPECT_NO_THROW(tokens.check_vocabulary());
}

TEST_F(TokenFiles, ATokenFarIntoTheFileIsFound) {
  std::vector<std::uint16_t> many(50000, 7);
  many[40001] = 9;
  auto tokens = Tokens::from_file(put_tokens(many));
  tokens.limit_vocabulary(8);
  expect_parts(error_message([&] { tokens.check_vocabulary(); }), {"token 9 at position 40001"});
}

/// The header of llm.c's token files: 256 words of 32 bits.
std::string llm_c_header(std::int32_t magic, std::int32_t version, std::int32_t count) {
  std::array<std::int32_t, 256> words{magic, version, count};
  return {reinterpret_cast<const char*>(words.data()), sizeof words};
}

TEST_F(TokenFiles, TheHeaderOfLlmCIsNoTokens) {
  const std::string three("\1\0\2\0\3\0", 6);
  put("llm.bin", llm_c_header(20240520, 1, 3) + three);
  const auto tokens = Tokens::from_file(path("llm.bin"));
  EXPECT_EQ(all_of(tokens), (std::vector<std::int32_t>{1, 2, 3}));
  const auto refused = [&](const std::string& bytes, std::initializer_list<std::string> parts) {
    put("llm.bin", bytes);
    const std::string what = error_message([&] { Tokens::from_file(path("llm.bin")); });
    expect_parts(what, {path("llm.bin"), "llm.c"});
    expect_parts(what, parts);
  };
  refused(llm_c_header(20240520, 1, 4) + three, {"4 tokens", "holds 3"});
  refused(llm_c_header(20240520, 1, -1) + three, {"-1 tokens"});
  refused(llm_c_header(20240520, 2, 3) + three, {"version 2"});
  put("wide.bin", llm_c_header(20240801, 7, 3) + std::string("\1\0\0\0\2\0\1\0\3\0\0\0", 12));
  EXPECT_EQ(all_of(Tokens::from_file(path("wide.bin"))), (std::vector<std::int32_t>{1, 65538, 3}));
  refused(llm_c_header(20240801, 2, 3) + three + three, {"version 2"});
  refused(llm_c_header(20240520, 1, 3).substr(0, 1000), {"cut off"});
  // Tokens that begin as no header does are tokens.
  put("llm.bin", llm_c_header(20240521, 1, 3));
  EXPECT_EQ(Tokens::from_file(path("llm.bin")).count(), 512u);
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}
std::string npy(const std::string& type, const std::string& shape, const std::string& data,
                char version = 1) {
  const std::string dict = "{'descr': " + type + ", 'fortran_order': False, 'shape': " + shape + ", }\n";
  std::string length(version == 1 ? 2 : 4, '\0');
  length[0] = static_cast<char>(dict.size());
  return std::string("\x93NUMPY") + version + '\0' + length + dict + data;
}

TEST_F(TokenFiles, FilesOfNumPyAreReadByTheirHeaders) {
  const std::vector<std::int32_t> expected{1, 2, 300};
  const std::string narrow = bytes_of<std::uint16_t>({1, 2, 300}),
                    wide = bytes_of<std::uint32_t>({1, 2, 300});
  put("a.npy", npy("'<u2'", "(3,)", narrow));
  EXPECT_EQ(all_of(Tokens::from_file(path("a.npy"))), expected);
  put("a.npy", npy("'<u4'", "(3,)", wide, 2));
  EXPECT_EQ(all_of(Tokens::from_file(path("a.npy"))), expected);
  expect_parts(error_message([&] { Tokens::from_file(path("a.npy"), "uint16"); }), {"says uint32"});
  const auto refused = [&](const std::string& bytes, std::initializer_list<std::string> parts) {
    put("a.npy", bytes);
    const std::string what = error_message([&] { Tokens::from_file(path("a.npy")); });
    expect_parts(what, {path("a.npy")});
    expect_parts(what, parts);
  };
  put("a.npy", npy("'<i8'", "(3,)", bytes_of<std::int64_t>({1, 2, 300})));
  EXPECT_EQ(all_of(Tokens::from_file(path("a.npy"))), expected);
  expect_parts(error_message([&] { Tokens::from_file(path("a.npy"), "uint16"); }), {"says int64"});
  put("a.npy", npy("'<u8'", "(3,)", bytes_of<std::uint64_t>({1, 2, 300})));
  EXPECT_EQ(all_of(Tokens::from_file(path("a.npy"))), expected);
  put("a.npy", npy("'<i4'", "(3,)", wide));
  EXPECT_EQ(all_of(Tokens::from_file(path("a.npy"))), expected);
  put("a.npy", npy("'<i2'", "(3,)", narrow));
  EXPECT_EQ(all_of(Tokens::from_file(path("a.npy"))), expected);
  const auto beyond = [&](const std::string& bytes, std::initializer_list<std::string> parts) {
    put("b.npy", bytes);  // behind 3 tokens of another file
    const std::string what =
        error_message([&] { all_of(Tokens::from_file(path("a.npy") + "," + path("b.npy"))); });
    expect_parts(what, {path("b.npy"), "from 0 to 2147483647"});
    expect_parts(what, parts);
  };
  beyond(npy("'<i8'", "(2,)", bytes_of<std::int64_t>({7, std::int64_t{1} << 32})),
         {"token 4294967296 at position 1"});
  beyond(npy("'<i8'", "(2,)", bytes_of<std::int64_t>({-100, 7})), {"token -100 at position 0", "of int64"});
  beyond(npy("'<i4'", "(2,)", bytes_of<std::int32_t>({7, -1})), {"token -1 at position 1"});
  beyond(npy("'<i2'", "(2,)", bytes_of<std::int16_t>({7, -1})), {"token -1 at position 1"});
  beyond(npy("'<u8'", "(1,)", bytes_of<std::uint64_t>({std::uint64_t{1} << 31})), {"token 2147483648 at"});
  for (const char* type : {">i8", ">u2", "<f4", "|u1"})
    refused(npy("'" + std::string(type) + "'", "(3,)", wide), {"dtype is '" + std::string(type) + "'"});
  refused(npy("[('a', '<u2')]", "(3,)", narrow), {"dtype is"});
  refused(npy("'<u2'", "(1, 3)", narrow), {"one dimension"});
  refused(npy("'<u2'", "()", narrow), {"one dimension"});
  refused(npy("'<u2'", "(4,)", narrow), {"promises 4 tokens", "holds 3"});
  refused(npy("'<u2'", "(3,)", narrow).substr(0, 20), {"cut off"});
  refused("\x93NUMPY\1", {"cut off"});
}

TEST_F(TokenFiles, WordsThatCannotBeTokensOfTheTypeAreRefused) {
  std::vector<std::uint16_t> narrow;
  for (int i = 0; i < 200; ++i) narrow.push_back(static_cast<std::uint16_t>(i * 37 % 50257));
  const auto as = [&]<class T>(T) { return bytes_of(std::vector<T>(narrow.begin(), narrow.end())); };
  const std::vector<std::int32_t> expected(narrow.begin(), narrow.end());
  put("narrow", as(std::uint16_t{})), put("wide", as(std::uint32_t{})), put("int64", as(std::int64_t{}));
  EXPECT_EQ(all_of(Tokens::from_file(path("narrow"))), expected);
  EXPECT_EQ(all_of(Tokens::from_file(path("wide"), "uint32")), expected);
  const auto what_of = [&](const std::string& name) {
    return error_message([&] { Tokens::from_file(path(name)); });
  };
  expect_parts(what_of("wide"), {path("wide"), "looks like tokens of four bytes", "--tokens-dtype uint32"});
  expect_parts(what_of("int64"), {path("int64"), "looks like tokens of eight bytes", "--tokens-dtype int64"});
  for (const char* dtype : {"int64", "uint64"})
    EXPECT_EQ(all_of(Tokens::from_file(path("int64"), dtype)), expected) << dtype;
  for (const char* dtype : {"uint32", "int32"})
    expect_parts(error_message([&] { Tokens::from_file(path("int64"), dtype); }),
                 {"looks like tokens of eight bytes, read as " + std::string(dtype), "--tokens-dtype int64"});
  EXPECT_EQ(all_of(Tokens::from_file(path("wide"), "int32")), expected);
  std::vector<std::int64_t> masked(narrow.begin(), narrow.end());
  masked[7] = -100;
  put("masked", bytes_of(masked));
  expect_parts(what_of("masked"), {"--tokens-dtype int64"});
  expect_parts(error_message([&] { all_of(Tokens::from_file(path("masked"), "int64")); }),
               {"token -100 at position 7"});
  put("floats", as(double{}));
  expect_parts(what_of("floats"), {"floats"});
  expect_parts(error_message([&] { Tokens::from_file(path("narrow") + "," + path("odd8"), "int64"); }),
               {"odd8: cannot be opened"});
  put("odd8", as(std::uint32_t{}).substr(4));
  expect_parts(error_message([&] { Tokens::from_file(path("odd8"), "int64"); }),
               {"796 bytes", "int64, 8 bytes"});
  EXPECT_EQ(Tokens::from_file(path("wide"), "uint16").count(), 400u) << "as it is told";
  std::string swapped = as(std::uint32_t{});
  for (std::size_t i = 0; i < swapped.size(); i += 4) std::reverse(&swapped[i], &swapped[i] + 4);
  put("swapped", swapped);
  expect_parts(what_of("swapped"), {"big-endian"});
  std::string text;
  for (int i = 0; i < 20; ++i) text += "some words\n ";
  put("text", text), put("zip", std::string("PK\3\4", 4) + text), put("ints", as(std::uint16_t{}) + "a");
  expect_parts(what_of("text"), {"is text", "--data"});
  expect_parts(what_of("zip"), {"archive"});
  expect_parts(error_message([&] { Tokens::from_file(path("wide"), "int8"); }),
               {"'int8'", "uint16 or uint32", "int64"});
}

TEST_F(TokenFiles, ShardsAreReadOneAfterTheOther) {
  const auto put_shard = [&](const std::string& name, const std::vector<std::uint16_t>& tokens) {
    put(name, bytes_of(tokens));
  };
  put_shard("shards/b_1.bin", {4, 5}), put_shard("shards/a_0.bin", {1, 2, 3}),
      put_shard("shards/notes.txt", {9});
  put("shards/c.npy", npy("'<u4'", "(2,)", bytes_of<std::uint32_t>({6, 7})));
  const Tokens all = Tokens::from_file(path("shards"));
  EXPECT_EQ(all_of(all), (std::vector<std::int32_t>{1, 2, 3, 4, 5, 6, 7}));
  std::array<std::int32_t, 3> part;
  all.read(4, part);
  EXPECT_EQ(part, (std::array<std::int32_t, 3>{5, 6, 7}));
  EXPECT_EQ(all_of(Tokens::from_file(path("shards/?_*.bin"))), (std::vector<std::int32_t>{1, 2, 3, 4, 5}));
  expect_parts(error_message([&] { Tokens::from_file(path("shards/x*")); }), {"no file has such a name"});
  const std::string several =
      path("shards/c.npy") + "," + path("shards/?_*.bin") + "," + path("shards/a_0.bin");
  EXPECT_EQ(all_of(Tokens::from_file(several)), (std::vector<std::int32_t>{6, 7, 1, 2, 3, 4, 5, 1, 2, 3}));
  expect_parts(error_message([&] { Tokens::from_file(path("shards/c.npy") + "," + path("none")); }),
               {path("none") + ": cannot be opened"});
  put_shard("a,b", {1, 2});  // a name
  EXPECT_EQ(Tokens::from_file(path("a,b")).count(), 2u);
}

/// A folder of the tokens 0 … count - 1.
TokensIndex put_shards(const std::string& folder, std::int32_t count, const TokenShardsOptions& options,
                       std::uint64_t tokenizer = 7) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 0);
  TokenShards shards(folder, 1000, options);
  shards.write(std::span(tokens).first(5));
  shards.write(std::span(tokens).subspan(5));
  return shards.commit({.tokenizer = tokenizer, .eos_token_id = 3, .documents = 2});
}

TEST_F(TokenFiles, ShardsWithAnIndexAreTheTokensThatWereWritten) {
  std::vector<std::int32_t> expected(700);
  std::iota(expected.begin(), expected.end(), 0);
  for (const char* format : {"llmc", "npy", "bin"})
    for (const char* dtype : {"auto", "uint32"}) {
      const std::string folder = path(concat(format, dtype));
      const TokensIndex index =
          put_shards(folder, 700, {.format = format, .dtype = dtype, .shard_size = 300});
      EXPECT_EQ(index.shards.size(), 3u);
      const Tokens tokens = Tokens::from_file(folder);
      EXPECT_EQ(all_of(tokens), expected) << format << dtype;
      ASSERT_EQ(tokens.indices().size(), 1u);
      const TokensIndex& read = tokens.indices()[0];
      EXPECT_EQ(read.tokenizer, 7u);
      EXPECT_EQ(read.vocab_size, 1000u);
      EXPECT_EQ(read.eos_token_id, 3);
      EXPECT_EQ(read.documents, 2u);
      EXPECT_EQ(read.dtype, std::string(dtype) == "auto" ? "uint16" : "uint32");
      EXPECT_EQ(all_of(Tokens::from_file(folder + "/tokens_*", index.dtype)), expected)
          << "without the index";
    }
  // The samples of one file and of three shards are the same.
  put_shards(path("one"), 700, {});
  const TokenDataset one(Tokens::from_file(path("one")), 13), three(Tokens::from_file(path("llmcauto")), 13);
  EXPECT_EQ(one.size(), three.size());
  EXPECT_EQ(one.checksum(), three.checksum());
}

TEST_F(TokenFiles, ShardsThatDoNotFitTheirIndexAreRefused) {
  const auto what = [&](const std::string& data) { return error_message([&] { Tokens::from_file(data); }); };
  put_shards(path("a"), 20, {.shard_size = 15});
  const std::string index = read_text_file(path("a/index.json"));
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = index;
    const auto at = changed.find(from);
    EXPECT_NE(at, changed.npos) << from;
    put("a/index.json", changed.replace(at, from.size(), to));
    return what(path("a"));
  };
  expect_parts(with("ringzero.tokens", "mds"), {"a/index.json: format:", "no index of tokens"});
  expect_parts(with("\"tokens\": 20", "\"tokens\": 21"), {"a/index.json: tokens: is 21", "have 20"});
  expect_parts(with("\"tokens\": 15", "\"tokens\": 25"),
               {"a/index.json: shards:", "more tokens than the 20"});
  for (const char* name : {"../x", "a\\nb", ".x", ""})
    expect_parts(with("tokens_000000.bin", name), {"shards[0].file", "name of a file"});
  expect_parts(with("tokens_000000.bin", "tokens_9.bin"), {"a/tokens_9.bin: cannot be opened"});
  expect_parts(with("tokens_000000.bin", "tokens_000001.bin"),
               {"tokens_000001.bin: has 5 tokens where the index of its folder has 15"});
  expect_parts(with("uint16", "uint8"), {"dtype", "uint16 or uint32"});
  expect_parts(with("uint16", "uint32"), {"tokens_000000.bin", "uint16 where uint32"});
  expect_parts(with("0000000000000007", "seven"), {"tokenizer", "hexadecimal"});
  put("a/index.json", index);
  put_shards(path("b"), 20, {}, 8);
  expect_parts(what(path("a") + "," + path("b")),
               {"b/index.json", "another tokenizer than those of", "a/index.json"});
}

TEST_F(TokenFiles, AFolderOfShardsIsThereCompleteOrNotAtAll) {
  {
    TokenShards shards(path("a"), 10);
    shards.write(std::vector<std::int32_t>{1, 2});
    EXPECT_FALSE(fs::exists(path("a")));
  }
  EXPECT_TRUE(fs::is_empty(path()));
  const auto refused = [&](const std::string& folder, std::uint64_t vocabulary, const TokenShardsOptions& o) {
    return error_message([&] { TokenShards(folder, vocabulary, o).commit({}); });
  };
  expect_parts(refused(path("a"), 10, {}), {"nothing to write"});
  expect_parts(refused(path("a"), 70000, {.dtype = "uint16"}), {"--dtype uint16", "70000"});
  expect_parts(refused(path("a"), 10, {.shard_size = 0}), {"--shard-size"});
  put("b/notes", "mine");
  expect_parts(refused(path("b"), 10, {}), {path("b"), "not an empty folder"});
  EXPECT_EQ(read_text_file(path("b/notes")), "mine");
}

TEST_F(TokenFiles, WrongTokenFilesAreNamed) {
  expect_parts(error_message([&] { Tokens::from_file(path("none")); }), {path("none"), "cannot be opened"});
  expect_parts(error_message([&] { Tokens::from_file(path()); }), {"not a regular file"});
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  expect_parts(error_message([&] { Tokens::from_file(path("pipe")); }), {"not a regular file"});
  put("odd", "abc");
  expect_parts(error_message([&] { Tokens::from_file(path("odd")); }), {"odd length"});
}

TEST_F(TokenFiles, AFolderIsItsTextFilesInOrder) {
  put("b.txt", "bb");
  put("a/z.cpp", "zz\xff");
  put("a/binary", std::string("x\0y", 3));
  put("empty", "");
  put(".git/config", "no");
  put(".hidden", "no");
  put("build/CMakeCache.txt", "no");
  put("build/deep/x.txt", "no");
  put("node_modules/x.js", "no");
  put("cache/CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55");
  put("cache/x.txt", "no");
  put("out/metrics.jsonl", "no");
  put("out/model/config.json", "no");
  fs::create_symlink(path("out/model/config.json"), path("link"));
  const auto tokens =
      Tokens::from_text(path(), std::vector{path("out/metrics.jsonl"), path("out/./model"), std::string()});
  EXPECT_EQ(all_of(tokens), (std::vector<std::int32_t>{'z', 'z', 0xff, '\n', 'b', 'b'}));
}

/// As in a cache of Hugging Face, whose names are links.
TEST_F(TokenFiles, LinksInAFolderAreReadOnce) {
  put("blobs/1", "{\"text\": \"one\"}"), put("blobs/2", "two"), put("other/deep/3.txt", "three");
  put("hub/s/b.txt", "b");
  fs::create_symlink("../../blobs/1", path("hub/s/a.jsonl"));
  fs::create_symlink("../../blobs/2", path("hub/s/c.txt"));
  fs::create_symlink("../other", path("hub/d"));
  Tokens read = Tokens::from_text(path("hub"));
  EXPECT_EQ(read.text(), "three\none\nb\ntwo");
  EXPECT_TRUE(read.left_out().empty());
  const std::vector<std::string> outputs{path("other/deep")};
  EXPECT_EQ(Tokens::from_text(path("hub"), outputs).text(), "one\nb\ntwo");

  fs::create_symlink("b.txt", path("hub/s/again.txt"));
  fs::create_symlink("../hub", path("hub/s/up"));
  fs::create_symlink("../../hub", path("other/deep/loop"));
  fs::create_symlink("s", path("hub/t"));
  fs::create_symlink("none", path("hub/none"));
  fs::create_symlink("self", path("hub/self"));
  fs::create_symlink("..", path("hub/around"));
  read = Tokens::from_text(path("hub"));
  EXPECT_EQ(read.text(), "three\none\nb\ntwo");
  ASSERT_EQ(read.left_out().size(), 1u);
  expect_parts(read.left_out()[0], {"7 files are left out", "links to nothing: ", "links to folders",
                                    "other names", "again.txt", "hub/d/deep/loop"});
  // A name of records tells what a file is.
  fs::create_symlink("1", path("blobs/x.jsonl")), fs::remove(path("blobs/2"));
  EXPECT_EQ(Tokens::from_text(path("blobs")).text(), "one");
  fs::create_directory(path("linked"));
  fs::create_symlink("none", path("linked/a.txt"));
  expect_parts(error_message([&] { Tokens::from_text(path("linked")); }),
               {"1 file is left out: links to nothing: ", "linked/a.txt", "no other text"});
}

TEST_F(TokenFiles, OtherKindsOfFilesAreNamedAloneAndInFolders) {
  const auto wide = [](const std::string& text, const char* order) {
    std::string bytes;
    for (const char c : text) order[0] == 'b' ? bytes += {'\0', c} : bytes += {c, '\0'};
    return bytes;
  };
  const std::vector<std::array<std::string, 3>> kinds{
      {"a.gz", std::string("\x1f\x8b\x08\0", 4), "gzip -dc"},
      {"b.zst", "\x28\xb5\x2f\xfd", "zstd -dc"},
      {"c.parquet", "PAR1", "read_parquet"},
      {"d.txt",
       std::string("\xff\xfe"
                   "a\0",
                   4),
       "iconv -f utf-16"},
      {"e.jsonl", std::string("\x1f\x8b\x08\0", 4), "gzip -dc"},
      {"f.txt", wide("words of a text", "little"),
       "UTF-16, not text in UTF-8; convert it, e.g. iconv -f utf-16le"},
      {"g.txt", wide("words of a text", "big"),
       "UTF-16, not text in UTF-8; convert it, e.g. iconv -f utf-16be"},
      {"h.jsonl", wide("{\"text\": \"words\"}\n", "little"), "iconv -f utf-16le"},
      {"i.txt", std::string("\x2d\x4e\x87\x65\x3d\xd8\x00\xde\x0a\x00", 10), "iconv -f utf-16le"},
      {"j.txt", std::string("\xff\xfe\0\0a\0\0\0", 8), "iconv -f utf-32"},
      {"k.pdf", "%PDF-1.4\n%\xe2\xe3\xcf\xd3\n1 0 obj", "PDF, not text in UTF-8; convert it, e.g. pdftotext"},
      {"l.7z", "7z\xbc\xaf\x27\x1c...", "7z x FILE"},
      {"m.lz4", "\x04\x22\x4d\x18...", "lz4 -dc"},
      {"n.Z", "\x1f\x9d\x90...", "gzip -dc"},
      {"o.h5", "\x89HDF\r\n\x1a\n...", "HDF5"},
      {"p.npy", "\x93NUMPY\x01", "give it as --tokens"},
      {"q.pkl", "\x80\x04\x95...", "pickle"},
      {"r.avro", "Obj\x01...", "Avro"},
      {"s.orc", "ORC\x03\xff", "read_orc"},
      {"t.tar", "a.txt" + std::string(252, '\0') + "ustar", "tar -xf FILE"},
      {"u.arrow", std::string("ARROW1\0\0", 8), "Arrow"},
      {"v.arrow", std::string("\xff\xff\xff\xff\x78\0\0\0\x10\0\0\0\0\0\x0a\0", 16), "Dataset.from_file"},
      {"w.db", std::string("SQLite format 3\0", 16), "sqlite3"},
      {"x.jpg", "\xff\xd8\xff\xe0...", "leave it out"}};
  for (const auto& [name, bytes, remedy] : kinds) {
    put("folder/" + name, bytes);
    expect_parts(error_message([&, n = name] { Tokens::from_text(path("folder/" + n)); }), {name, remedy});
  }
  put("folder/train.json", "[\n {\"text\": \"one\"}\n]");
  put("folder/words.txt", "words");
  const Tokens read = Tokens::from_text(path("folder"));
  EXPECT_EQ(read.text(), "words");
  ASSERT_EQ(read.left_out().size(), 1u);
  const std::string& line = read.left_out()[0];
  expect_parts(line, {path("folder"), "25 files are left out", "gzip: ", "PDF: ", "zstd: ", "Parquet: ",
                      "UTF-16: ", "UTF-32: ", "records in JSON", "train.json", "e.jsonl"});
  EXPECT_EQ(line.find('\n'), line.npos);
  for (const auto& kind : kinds) fs::remove(path("folder/" + kind[0]));
  fs::remove(path("folder/words.txt"));
  expect_parts(error_message([&] { Tokens::from_text(path("folder")); }), {"train.json", "jq -c '.[]'"});
  put("nul", std::string("ab\0cdefg", 8));
  EXPECT_EQ(Tokens::from_text(path("nul")).text().size(), 8u) << "a zero byte is a character of UTF-8";
  put("nul", std::string("ab\0\0\0\0", 6));
  expect_parts(error_message([&] { Tokens::from_text(path("nul")); }), {path("nul"), "several zero bytes"});
  for (const std::string text : {"ORC is a being", "PAR1 and PAR2", "BZh begins a file", "LZIP", "%PD"}) {
    put("text", text + "\n");
    EXPECT_EQ(Tokens::from_text(path("text")).text(), text + "\n");
  }
}

/// Without a mark. They are not converted from some encoding.
TEST_F(TokenFiles, BytesOfNoTextAreNoTextInAnotherEncoding) {
  std::string bytes, latin = "caf\xe9 ";
  for (std::uint32_t i = 1; i < 2000; ++i)
    bytes += static_cast<char>((i * 2654435761u >> 24) | (i % 3 ? 0 : 0x80) | 1);
  for (int i = 0; i < 100; ++i) latin += latin.substr(0, 5);
  put("folder/bytes", bytes), put("latin.txt", latin), put("folder/words.txt", "words");
  const TextOptions options{.tokenizer = Tokenizer::bytes()};
  const std::string what = error_message([&] { Tokens::from_text(path("folder/bytes"), options); });
  expect_parts(what, {"is not UTF-8", "no text in another encoding"});
  EXPECT_EQ(what.find("iconv"), what.npos) << what;
  expect_parts(error_message([&] { Tokens::from_text(path("latin.txt"), options); }), {"iconv -f latin1"});
  const Tokens read = Tokens::from_text(path("folder"), options);
  EXPECT_EQ(read.text(), "words");
  ASSERT_EQ(read.left_out().size(), 1u);
  expect_parts(read.left_out()[0], {"1 file is left out: with bytes of no text: "});
}

/// What a message advises, done, makes text of the file, whatever its name.
TEST_F(TokenFiles, RemediesMakeTextOfOtherKinds) {
  const auto run = [](const std::string& command) { return std::system((command + " 2>/dev/null").c_str()); };
  const auto expect_made = [&](const std::string& make, const std::string& name, const std::string& made,
                               const std::string& text) {
    SCOPED_TRACE(make + " " + name);
    put("text", text);
    const std::string file = path(name);
    if (run(make + " < " + path("text") + " > " + file) != 0) return;  // there is no such program
    std::string remedy = error_message([&] { Tokens::from_text(file, {.tokenizer = Tokenizer::bytes()}); });
    remedy.erase(0, remedy.find("e.g. ") + 5);
    for (std::size_t at; (at = remedy.find("FILE")) != remedy.npos;) remedy.replace(at, 4, file);
    ASSERT_EQ(run(remedy), 0) << remedy;
    EXPECT_EQ(read_text_file(path(made)), text);
    EXPECT_GT(Tokens::from_text(path(made), {.tokenizer = Tokenizer::bytes()}).count(), 0u);
    fs::remove(path(made));
  };
  const std::string words = "words \xc3\xa9\n", record = "{\"text\": \"\xc3\xa9\"}\n";
  for (const char* const make :
       {"gzip -c", "bzip2 -c", "xz -c", "xz --format=lzma -c", "zstd -c", "lz4 -c", "lzip -c", "compress -c",
        "iconv -f utf-8 -t utf-16", "iconv -f utf-8 -t utf-16le", "iconv -f utf-8 -t utf-16be",
        "iconv -f utf-8 -t utf-32"}) {
    expect_made(make, "other", "other.txt", words);
    expect_made(make, "other.jsonl", "other.jsonl.jsonl", record);
    expect_made(make, "other.jsonl.gz", "other.jsonl.gz.jsonl", record);
  }
  expect_made("iconv -f utf-8 -t latin1", "other", "other.txt", words);
}

TEST_F(TokenFiles, TextThatIsNotThereIsNamed) {
  expect_parts(error_message([&] { Tokens::from_text(path("none")); }), {path("none"), "no such file"});
  put("empty", "");
  expect_parts(error_message([&] { Tokens::from_text(path("empty")); }), {"holds no text"});
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);  // nobody writes to it
  expect_parts(error_message([&] { Tokens::from_text(path("pipe")); }), {path("pipe"), "a pipe or a device"});
  expect_parts(error_message([&] { Tokens::from_text("/dev/zero"); }), {"a pipe or a device"});
  expect_parts(error_message([&] { read_text_file(path("pipe")); }), {path("pipe"), "is a named pipe"});
}

// ---- samples

TEST_F(TokenFiles, SamplesOverlapByOneToken) {
  std::vector<std::uint16_t> tokens(14);
  std::iota(tokens.begin(), tokens.end(), std::uint16_t{0});
  const auto data = std::make_shared<TokenDataset>(Tokens::from_file(put_tokens(tokens)), 4);
  EXPECT_EQ(data->size(), 3u);
  Loader loader(data,
                std::make_shared<DistributedBatchSampler>(
                    BatchSamplerOptions{.samples = data->size(), .batch_size = 2, .shuffle = false}),
                Stream());
  const auto values = [](const Tensor& t) {
    EXPECT_EQ(t.shape()[1], 4u);
    return std::vector<std::int32_t>(t.data<std::int32_t>(), t.data<std::int32_t>() + t.count());
  };
  Batch& first = loader.next();
  EXPECT_EQ(values(first["inputs"]), (std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(values(first["targets"]), (std::vector<std::int32_t>{1, 2, 3, 4, 5, 6, 7, 8}));
  Batch& last = loader.next();
  EXPECT_EQ(values(last["inputs"]), (std::vector<std::int32_t>{8, 9, 10, 11}));
  EXPECT_EQ(values(last["targets"]), (std::vector<std::int32_t>{9, 10, 11, 12}));
}

TEST_F(TokenFiles, ATokenBeyondTheVocabularyIsNamedWithItsSample) {
  auto tokens = Tokens::from_file(put_tokens({1, 2, 3, 4, 9, 6, 7}));
  tokens.limit_vocabulary(9);
  Loader loader(std::make_shared<TokenDataset>(tokens, 2),
                std::make_shared<DistributedBatchSampler>(
                    BatchSamplerOptions{.samples = 3, .batch_size = 2, .shuffle = false}),
                Stream());
  expect_parts(error_message([&] { loader.next(); }), {"sample 1: ", "tokens.bin", "token 9 at position 4"});
  EXPECT_EQ(test::error_of([&] { TokenDataset(tokens, 0); }).code(), Errc::invalid_argument);
}

// ---- batches that run on

/// Batch m of update u of a run.
std::vector<std::uint64_t> indices(const ContinuousBatchSampler& batches, std::size_t accumulation,
                                   std::uint64_t u, std::uint64_t m) {
  const std::uint64_t batch = u * accumulation + m;
  const auto found = batches.at(batch / batches.batches(), batch % batches.batches());
  EXPECT_EQ(found.padding, 0u);
  return found.indices;
}

TEST(ContinuousBatches, UnshuffledUpdatesHaveAContiguousShardPerRank) {
  // B = 12 on 3 ranks, micro 2, accumulation 2, over 30 samples: update 2 covers 24 … 29, 0 … 5.
  for (int rank = 0; rank < 3; ++rank) {
    const ContinuousBatchSampler batches(
        {.samples = 30, .batch_size = 2, .accumulation = 2, .ranks = 3, .rank = rank, .shuffle = false});
    for (std::uint64_t update = 0; update < 5; ++update)
      for (std::uint64_t m = 0; m < 2; ++m) {
        const std::uint64_t first = 12 * update + 4 * static_cast<std::uint64_t>(rank) + 2 * m;
        EXPECT_EQ(indices(batches, 2, update, m), (std::vector<std::uint64_t>{first % 30, (first + 1) % 30}));
      }
    EXPECT_EQ(batches.updates(), 2u);
    EXPECT_EQ(batches.batches(), 4u);
  }
}

TEST(ContinuousBatches, ShuffledEpochsSeeEverySampleOnce) {
  // 24 samples, B = 8 on 2 ranks: a pass is 3 updates.
  for (std::uint64_t epoch = 0; epoch < 2; ++epoch) {
    std::multiset<std::uint64_t> seen;
    for (int rank = 0; rank < 2; ++rank) {
      const ContinuousBatchSampler batches(
          {.samples = 24, .batch_size = 2, .accumulation = 2, .ranks = 2, .rank = rank, .seed = 5});
      for (std::uint64_t update = 3 * epoch; update < 3 * epoch + 3; ++update)
        for (std::uint64_t m = 0; m < 2; ++m)
          for (const auto i : indices(batches, 2, update, m)) seen.insert(i);
    }
    EXPECT_EQ(seen.size(), 24u);
    EXPECT_EQ(std::set<std::uint64_t>(seen.begin(), seen.end()).size(), 24u);
  }
}

/// The samples of a rank are those of its DistributedSampler, pass after pass, however many a batch has.
TEST(ContinuousBatches, ABatchMayBeginInOnePassAndEndInTheNext) {
  for (const bool drop_last : {false, true}) {
    const SamplerOptions samples{.samples = 23, .ranks = 2, .rank = 1, .drop_last = drop_last, .seed = 4};
    const DistributedSampler sampler(samples);
    const ContinuousBatchSampler batches(
        {.samples = 23, .batch_size = 5, .ranks = 2, .rank = 1, .drop_last = drop_last, .seed = 4});
    std::uint64_t position = 0;
    for (std::uint64_t batch = 0; batch < 12; ++batch)
      for (const auto i : indices(batches, 1, batch, 0)) {
        EXPECT_EQ(i, sampler.index(position / sampler.per_rank(), position % sampler.per_rank()));
        ++position;
      }
  }
}

TEST(ContinuousBatches, RefuseTooFewSamples) {
  EXPECT_STREQ(
      error_message([] { ContinuousBatchSampler({.samples = 2, .ranks = 3, .drop_last = true}); }).c_str(),
      "2 samples are too few for 3 ranks; give more data, or set drop_last to false "
      "(dataloader_drop_last)");
  EXPECT_EQ(ContinuousBatchSampler({.samples = 2, .batch_size = 4, .ranks = 3}).batches(), 1u);
  for (const ContinuousBatchOptions& wrong :
       {ContinuousBatchOptions{}, ContinuousBatchOptions{.samples = 4, .batch_size = 0},
        ContinuousBatchOptions{.samples = 4, .accumulation = 0},
        ContinuousBatchOptions{.samples = 4, .ranks = 2, .rank = 2}})
    EXPECT_EQ(test::error_of([&] { ContinuousBatchSampler{wrong}; }).code(), Errc::invalid_argument);
}

}  // namespace
}  // namespace rz
