#include "sharding/huggingface/byte_tokenizer.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "sharding/io/durable_file.h"
#include "sharding/io/json.h"

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

void write_tokenizer_file(const fs::path& path, const std::string& text) {
  DurableFile file(path.string());
  file.write(text);
  file.commit();
}

}  // namespace

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

void save_byte_tokenizer(const std::string& folder, std::size_t positions) {
  const ordered_json config{{"tokenizer_class", "PreTrainedTokenizerFast"},
                            {"model_max_length", positions},
                            {"clean_up_tokenization_spaces", false}};
  write_tokenizer_file(fs::path(folder) / "tokenizer.json", byte_tokenizer_json());
  write_tokenizer_file(fs::path(folder) / "tokenizer_config.json", config.dump(1) + "\n");
}

void remove_byte_tokenizer(const std::string& folder) {
  const fs::path tokenizer = fs::path(folder) / "tokenizer.json";
  if (!fs::exists(tokenizer) || read_text_file(tokenizer.string()) != byte_tokenizer_json()) return;
  fs::remove(tokenizer);
  fs::remove(fs::path(folder) / "tokenizer_config.json");
}

}  // namespace rz
