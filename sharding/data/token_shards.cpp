#include "sharding/data/token_shards.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "comm/core/error.h"
#include "comm/os/fd.h"
#include "sharding/io/checksum.h"
#include "sharding/io/disk.h"
#include "sharding/io/file.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

constexpr const char* index_format = "ringzero.tokens";
constexpr std::int64_t max_tokens = std::numeric_limits<std::int64_t>::max();

TokensIndex::Shard shard_of(const nlohmann::json& node, const std::string& file, std::size_t number) {
  const JsonObject shard(node, file, concat("shards[", number, "]"));
  TokensIndex::Shard s{shard.text("file", ""),
                       static_cast<std::uint64_t>(shard.required_integer("tokens", 1, max_tokens))};
  const bool is_name = !s.file.empty() && s.file.find('/') == s.file.npos && escaped(s.file) == s.file;
  if (!is_name || s.file.starts_with(".")) shard.fail_at("file", "expected the name of a file of the folder");
  return s;
}

}  // namespace

std::optional<TokensIndex> read_tokens_index(const std::string& folder) {
  TokensIndex index{.path = (fs::path(folder) / "index.json").string()};
  if (!path_exists(index.path)) return std::nullopt;
  const nlohmann::json document = parse_json(read_text_file(index.path), index.path, JsonDialect::strict);
  const JsonObject o(document, index.path);
  if (o.text("format", "") != index_format)
    o.fail_at("format", concat("expected \"", index_format, "\": this is no index of tokens"));
  const auto number = [&](const char* key, std::int64_t min) {
    return static_cast<std::uint64_t>(o.required_integer(key, min, max_tokens));
  };
  if (number("version", 1) != 1) o.fail_at("version", "only version 1 is supported");
  const auto checksum = parse_checksum(o.text("tokenizer", ""));
  if (!checksum) o.fail_at("tokenizer", "expected 16 hexadecimal digits");
  index.tokenizer = *checksum;
  index.vocab_size = number("vocab_size", 1), index.documents = number("documents", 1);
  index.tokens = number("tokens", 1);
  if (o.has("eos_token_id") && !o.at("eos_token_id").is_null())
    index.eos_token_id = static_cast<std::int32_t>(
        o.required_integer("eos_token_id", 0, std::numeric_limits<std::int32_t>::max()));
  index.dtype = o.text("dtype", "");
  if (index.dtype != "uint16" && index.dtype != "uint32") o.fail_at("dtype", "expected uint16 or uint32");
  if (!o.has("shards") || !o.at("shards").is_array()) o.fail_at("shards", "expected a list of files");
  std::uint64_t tokens = 0;
  for (const nlohmann::json& node : o.at("shards")) {
    index.shards.push_back(shard_of(node, index.path, index.shards.size()));
    if (index.shards.back().tokens > index.tokens - tokens)
      o.fail_at("shards", concat("have more tokens than the ", index.tokens, " of the index"));
    tokens += index.shards.back().tokens;
  }
  if (tokens != index.tokens)
    o.fail_at("tokens", concat("is ", index.tokens, ", and the shards have ", tokens));
  return index;
}

namespace {

enum class ShardFormat { llmc, npy, bin };

std::string shard_header(ShardFormat format, bool wide, std::uint64_t tokens) {
  if (format == ShardFormat::bin) return {};
  if (format == ShardFormat::llmc) {
    // The magic number, the version, and the number of tokens. llm.c reads wide ones as Llama 3's.
    std::array<std::int32_t, 256> words{wide ? 20240801 : 20240520, wide ? 7 : 1,
                                        static_cast<std::int32_t>(tokens)};
    return {reinterpret_cast<const char*>(words.data()), sizeof words};
  }
  constexpr std::size_t length = 128, front = 10;
  std::string header = std::string("\x93NUMPY\1\0", 8) + static_cast<char>(length - front) + '\0';
  header +=
      concat("{'descr': '", wide ? "<u4" : "<u2", "', 'fortran_order': False, 'shape': (", tokens, ",), }");
  header.resize(length - 1, ' ');
  return header + '\n';
}

/// A file whose header is known at its end.
class ShardFile {
 public:
  ShardFile(std::string path, std::size_t header_bytes) : path_(std::move(path)) {
    fd_ = UniqueFd(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (!fd_) fail_on_disk(path_, "cannot be written");
    write(std::string(header_bytes, '\0'), 0);
  }
  void append(std::string_view bytes) { write(bytes, size_); }
  void finish(std::string_view header) {
    const std::uint64_t size = size_;
    write(header, 0);
    size_ = size;
    if (::fsync(fd_.get()) != 0) fail_on_disk(path_, "cannot be finished");
    fd_.close();
  }

 private:
  void write(std::string_view bytes, std::uint64_t at) {
    while (!bytes.empty()) {
      const ssize_t n = ::pwrite(fd_.get(), bytes.data(), bytes.size(), static_cast<off_t>(at));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail_on_disk(path_, "cannot be written");
      bytes.remove_prefix(static_cast<std::size_t>(n)), at += static_cast<std::uint64_t>(n);
    }
    size_ = std::max(size_, at);
  }

  std::string path_;
  UniqueFd fd_;
  std::uint64_t size_ = 0;
};

ShardFormat shard_format(const std::string& name) {
  require(name == "llmc" || name == "npy" || name == "bin", Errc::config, "the format of shards is '", name,
          "'; choose llmc, npy or bin");
  return name == "llmc" ? ShardFormat::llmc : name == "npy" ? ShardFormat::npy : ShardFormat::bin;
}

bool is_wide(const std::string& dtype, std::uint64_t vocab_size) {
  constexpr std::uint64_t max_narrow = 65536;
  require(dtype == "auto" || dtype == "uint16" || dtype == "uint32", Errc::config, "the dtype of tokens is '",
          dtype, "'; give auto, uint16 or uint32");
  require(dtype != "uint16" || vocab_size <= max_narrow, Errc::config, "--dtype uint16: a vocabulary of ",
          vocab_size, " tokens needs uint32");
  return dtype == "uint32" || vocab_size > max_narrow;
}

/// The name of a folder that may be written.
std::string free_folder(const std::string& path) {
  std::error_code ignored;
  const bool is_free = !path_exists(path) || (is_folder(path) && fs::is_empty(path, ignored) && !ignored);
  require(!path.empty() && is_free, Errc::config, path,
          ": exists already, and is not an empty folder; choose another name, or remove it");
  return path;
}

}  // namespace

struct TokenShards::State {
  State(const std::string& path, std::uint64_t vocabulary, const TokenShardsOptions& o)
      : format(shard_format(o.format)),
        wide(is_wide(o.dtype, vocabulary)),
        shard_size(o.shard_size),
        folder(free_folder(path)) {
    index.vocab_size = vocabulary, index.dtype = wide ? "uint32" : "uint16";
  }

  void open() {
    char name[64];
    std::snprintf(name, sizeof name, "tokens_%06zu%s", index.shards.size(),
                  format == ShardFormat::npy ? ".npy" : ".bin");
    index.shards.push_back({name, 0});
    file.emplace((fs::path(folder.folder()) / name).string(), shard_header(format, wide, 0).size());
  }
  void finish_shard() {
    if (!file) return;
    file->finish(shard_header(format, wide, index.shards.back().tokens));
    file.reset();
  }

  const ShardFormat format;
  const bool wide;
  const std::uint64_t shard_size;
  DurableFolder folder;
  TokensIndex index;
  std::optional<ShardFile> file;  // the last shard
};

TokenShards::TokenShards(const std::string& folder, std::uint64_t vocab_size, const TokenShardsOptions& o) {
  require(o.shard_size > 0 && o.shard_size <= std::numeric_limits<std::int32_t>::max(), Errc::config,
          "--shard-size: ", o.shard_size, " tokens; give 1 to 2147483647");
  state_ = std::make_unique<State>(folder, vocab_size, o);
}

TokenShards::~TokenShards() = default;

const std::string& TokenShards::folder() const { return state_->folder.folder(); }

void TokenShards::write(std::span<const std::int32_t> tokens) {
  State& s = *state_;
  while (!tokens.empty()) {
    if (!s.file) s.open();
    std::uint64_t& held = s.index.shards.back().tokens;
    const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(tokens.size(), s.shard_size - held));
    if (s.wide) {
      s.file->append({reinterpret_cast<const char*>(tokens.data()), n * sizeof(std::int32_t)});
    } else {
      const std::vector<std::uint16_t> narrow(tokens.begin(),
                                              tokens.begin() + static_cast<std::ptrdiff_t>(n));
      s.file->append({reinterpret_cast<const char*>(narrow.data()), n * sizeof(std::uint16_t)});
    }
    held += n, s.index.tokens += n, tokens = tokens.subspan(n);
    if (held == s.shard_size) s.finish_shard();
  }
}

TokensIndex TokenShards::commit(TokensIndex about) {
  State& s = *state_;
  require(s.index.tokens > 0, Errc::config, "there is no text, and nothing to write");
  s.finish_shard();
  about.vocab_size = s.index.vocab_size, about.dtype = s.index.dtype;
  about.tokens = s.index.tokens, about.shards = s.index.shards;
  nlohmann::ordered_json shards = nlohmann::ordered_json::array();
  for (const TokensIndex::Shard& shard : about.shards)
    shards.push_back({{"file", shard.file}, {"tokens", shard.tokens}});
  nlohmann::ordered_json index{{"format", index_format},
                               {"version", 1},
                               {"tokenizer", checksum_text(about.tokenizer)},
                               {"vocab_size", about.vocab_size},
                               {"eos_token_id", nullptr},
                               {"documents", about.documents},
                               {"tokens", about.tokens},
                               {"dtype", about.dtype},
                               {"shards", std::move(shards)}};
  if (about.eos_token_id) index["eos_token_id"] = *about.eos_token_id;
  write_durably((fs::path(folder()) / "index.json").string(), index.dump(1) + "\n");
  s.folder.commit();
  return about;
}

}  // namespace rz
