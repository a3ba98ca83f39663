// Runs: ci
// Not under sanitizers: TokenizerCharacters

// What is done with each character, against Hugging Face's tokenizers: tests/data/tokenizers/characters.json.
// The versions of Unicode of the libraries on this machine must not show.

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <deque>
#include <nlohmann/json.hpp>
#include <string>

#include "sharding/io/json.h"
#include "sharding/io/text.h"
#include "sharding/tokenizer/characters.h"
#include "sharding/tokenizer/normalizer.h"
#include "sharding/tokenizer/pattern.h"
#include "sharding/tokenizer/pre_tokenizer.h"
#include "sharding/tokenizer/unicode.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

using nlohmann::json;
using test::error_of;

/// FNV-1a of 64 bits.
class Fnv {
 public:
  void add(std::string_view bytes) {
    for (const char c : bytes) value_ = (value_ ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  }
  std::string text() const {
    std::array<char, 20> out{};
    std::snprintf(out.data(), out.size(), "%016llx", static_cast<unsigned long long>(value_));
    return out.data();
  }

 private:
  std::uint64_t value_ = 0xCBF29CE484222325;
};

class TokenizerCharacters : public ::testing::Test {
 protected:
  TokenizerCharacters()
      : expected_(json::parse(read_text_file(RZ_SOURCE_DIR "/tests/data/tokenizers/characters.json"))) {
    for (const json& range : expected_["codes"])
      for (char32_t c = range[0].get<char32_t>(); c <= range[1].get<char32_t>(); ++c) codes_.push_back(c);
  }
  /// Each character with a text before and behind it.
  std::string text(const char* before = "", const char* behind = "") const {
    std::string all;
    for (const char32_t c : codes_) {
      all += before;
      append_character(all, c);
      all += behind;
    }
    return all;
  }
  /// Of the runs of characters for which `f` holds.
  template <class F>
  std::string checksum(const F& f) const {
    Fnv fnv;
    char32_t first = 1, last = 0;
    const auto end_run = [&] {
      std::array<char, 24> line{};
      std::snprintf(line.data(), line.size(), "%x %x\n", static_cast<unsigned>(first),
                    static_cast<unsigned>(last));
      if (first <= last) fnv.add(line.data());
    };
    for (const char32_t c : codes_) {
      if (!f(c)) continue;
      if (first > last || c != last + 1) end_run(), first = c;
      last = c;
    }
    end_run();
    return fnv.text();
  }

  json expected_;
  std::vector<char32_t> codes_;
};

TEST_F(TokenizerCharacters, PropertiesAreThoseOfHuggingFace) {
  EXPECT_GT(expected_["properties"].size(), 300u);
  std::vector<bool> has(0x110000);
  for (const auto& [name, wanted] : expected_["properties"].items()) {
    const auto* const ranges = find_property(name);
    ASSERT_TRUE(ranges) << name;
    for (const auto& [first, last] : *ranges)
      for (char32_t c = first; c <= last; ++c) has[c] = true;
    EXPECT_EQ(checksum([&](char32_t c) { return has[c]; }), wanted.get<std::string>()) << name;
    has.assign(has.size(), false);
  }
}

TEST_F(TokenizerCharacters, ExpressionsMatchWhatHuggingFaceMatches) {
  const std::string all = text();
  std::vector<bool> stays(0x110000);
  for (const auto& [expression, wanted] : expected_["expressions"].items()) {
    const std::string rest = Pattern::regex(expression, "test").replaced(all, "");
    stays.assign(stays.size(), false);
    for (std::size_t at = 0; at < rest.size();) {
      const auto [code, length] = first_character(rest.data() + at);
      stays[code] = true, at += length;
    }
    EXPECT_EQ(checksum([&](char32_t c) { return !stays[c]; }), wanted.get<std::string>()) << expression;
  }
}

TEST_F(TokenizerCharacters, NormalizersMakeWhatHuggingFaceMakes) {
  const std::string all = text("a", "\xCC\xB4\xCC\x81\n");
  for (const auto& [name, wanted] : expected_["normalizers"].items()) {
    const json document{{"normalizer", {{"type", name}}}};
    Fnv fnv;
    fnv.add(Normalizer::read(JsonObject(document, "test"), "normalizer").normalized(all));
    EXPECT_EQ(fnv.text(), wanted.get<std::string>()) << name;
  }
}

TEST_F(TokenizerCharacters, PreTokenizersSplitWhereHuggingFaceSplits) {
  const std::string all = text("x", "\n");
  for (const auto& [name, wanted] : expected_["pre_tokenizers"].items()) {
    const json document{{"pre_tokenizer", {{"type", name}}}};
    std::deque<std::string> storage;
    Fnv fnv;
    for (const std::string_view word :
         PreTokenizer::read(JsonObject(document, "test"), "pre_tokenizer").split(all, true, storage))
      fnv.add(word), fnv.add("\xFF");
    EXPECT_EQ(fnv.text(), wanted.get<std::string>()) << name;
  }
}

/// Marks that Unicode has since 15 are not ordered before others: the tables of Hugging Face lack them.
TEST_F(TokenizerCharacters, ANormalFormLeavesLaterMarksWhereTheyAre) {
  const std::string marks = "a\xCC\x95\xF0\x9E\x93\xAC";  // U+0315 of class 232, U+1E4EC of class 220
  EXPECT_EQ(Normalizer::nfc().normalized(marks), marks);
}

TEST_F(TokenizerCharacters, WhatWouldDependOnALibraryIsRefusedByName) {
  const auto message = [](const char* expression) {
    return std::string(error_of([&] { Pattern::regex(expression, "FILE"); }).what());
  };
  EXPECT_EQ(message(R"(\p{Age=6.0}+)"),
            R"(FILE: \p{Age=6.0} is no property of Unicode 16 that is known here)");
  EXPECT_EQ(message(R"([\P{InBasicLatin}])"),
            R"(FILE: \P{InBasicLatin} is no property of Unicode 16 that is known here)");
  EXPECT_EQ(message("[[:foo:]]"), "FILE: [:foo:] is no property of Unicode 16 that is known here");
  EXPECT_EQ(message(R"(a\X)"),
            R"(FILE: \X is not supported: it depends on the version of Unicode of libonig)");
  EXPECT_EQ(message(R"((?iW:\w))"),
            "FILE: (?iW is not supported: it depends on the version of Unicode of libonig");
  EXPECT_TRUE(message(R"(\p{L)").starts_with("FILE: ")) << message(R"(\p{L)");
  EXPECT_TRUE(message(R"(a\)").starts_with("FILE: ")) << message(R"(a\)");
  EXPECT_TRUE(message(R"([\d)").starts_with("FILE: ")) << message(R"([\d)");
}

}  // namespace
}  // namespace rz
