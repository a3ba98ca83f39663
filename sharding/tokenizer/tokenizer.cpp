#include "sharding/tokenizer/tokenizer.h"

#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "sharding/io/durable_file.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

std::string utf8(int code) {
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
}

/// GPT-2's printable character of each byte: itself, or one from 256 on for bytes that are not printable.
ordered_json byte_vocabulary() {
  ordered_json vocabulary = ordered_json::object();
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    vocabulary[utf8(printable ? byte : next++)] = byte;
  }
  return vocabulary;
}

std::string byte_tokenizer_json() {
  const ordered_json bytes{
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  const ordered_json all{{"version", "1.0"},
                         {"truncation", nullptr},
                         {"padding", nullptr},
                         {"added_tokens", ordered_json::array()},
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
                           {"vocab", byte_vocabulary()},
                           {"merges", ordered_json::array()}}}};
  return all.dump(1) + "\n";
}

}  // namespace

struct Tokenizer::State {
  std::string json, config;
};

namespace {

std::string config_text(std::size_t model_max_length) {
  ordered_json config{{"tokenizer_class", "PreTrainedTokenizerFast"}};
  if (model_max_length > 0) config["model_max_length"] = model_max_length;
  config["clean_up_tokenization_spaces"] = false;
  return config.dump(1) + "\n";
}

}  // namespace

Tokenizer Tokenizer::bytes(std::size_t model_max_length) {
  return Tokenizer(
      std::make_shared<const State>(State{byte_tokenizer_json(), config_text(model_max_length)}));
}

Tokenizer Tokenizer::from_pretrained(const std::string& path) {
  fail(Errc::unsupported, path, ": only Tokenizer::bytes() is there yet");
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, bool) const {
  std::vector<std::int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids, bool) const {
  std::string bytes, text;
  for (const std::int32_t id : ids)
    if (id >= 0 && id < 256) bytes += static_cast<char>(id);
  for (std::string_view rest = bytes; !rest.empty();) {
    const std::size_t length = utf8_length(rest);
    text += length > 0 ? rest.substr(0, length) : "\xEF\xBF\xBD";
    rest.remove_prefix(length > 0 ? length : 1);
  }
  return text;
}

std::size_t Tokenizer::vocab_size() const { return 256; }
std::optional<std::int32_t> Tokenizer::token_to_id(std::string_view) const { return std::nullopt; }
std::string Tokenizer::id_to_token(std::int32_t) const { return {}; }
std::optional<std::int32_t> Tokenizer::bos_token_id() const { return std::nullopt; }
std::optional<std::int32_t> Tokenizer::eos_token_id() const { return std::nullopt; }
std::optional<std::int32_t> Tokenizer::pad_token_id() const { return std::nullopt; }
std::uint64_t Tokenizer::checksum() const { return 256; }

void Tokenizer::save_pretrained(const std::string& folder) const {
  write_durably((fs::path(folder) / "tokenizer.json").string(), state_->json);
  write_durably((fs::path(folder) / "tokenizer_config.json").string(), state_->config);
}

struct DecodeStream::State {
  std::string bytes;
};

DecodeStream::DecodeStream(Tokenizer, bool) : state_(std::make_unique<State>()) {}
DecodeStream::DecodeStream(DecodeStream&&) noexcept = default;
DecodeStream& DecodeStream::operator=(DecodeStream&&) noexcept = default;
DecodeStream::~DecodeStream() = default;
std::string DecodeStream::push(std::int32_t id) { return Tokenizer::bytes().decode(std::array{id}); }
std::string DecodeStream::finish() { return {}; }

void remove_byte_tokenizer(const std::string& folder) {
  const fs::path tokenizer = fs::path(folder) / "tokenizer.json";
  if (!fs::exists(tokenizer) || read_text_file(tokenizer.string()) != byte_tokenizer_json()) return;
  fs::remove(tokenizer);
  fs::remove(fs::path(folder) / "tokenizer_config.json");
}

}  // namespace rz
