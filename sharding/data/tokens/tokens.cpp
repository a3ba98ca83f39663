#include "sharding/data/tokens/tokens.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "comm/core/error.h"
#include "sharding/io/json.h"

namespace rz {

namespace fs = std::filesystem;
static_assert(std::endian::native == std::endian::little, "token files are little-endian");

struct Tokens::State {
  std::string name;
  std::uint64_t count = 0;
  std::string text;          // bytes, from from_text()
  int file = -1;             // uint16, from from_file()
  std::uint64_t header = 0;  // bytes before the first token
  State() = default;
  State(const State&) = delete;
  ~State() {
    if (file >= 0) ::close(file);
  }

  void read_words(std::uint64_t begin, std::span<std::uint16_t> out) const {
    read_bytes(header + 2 * begin, std::as_writable_bytes(out));
  }

  void read_bytes(std::uint64_t begin, std::span<std::byte> out) const {
    auto* to = out.data();
    std::size_t left = out.size();
    for (auto at = static_cast<off_t>(begin); left > 0;) {
      const ssize_t n = ::pread(file, to, left, at);
      if (n < 0 && errno == EINTR) continue;
      require(n > 0, Errc::io, name, ": cannot be read at byte ", at, ": ",
              n < 0 ? std::strerror(errno) : "it ends there");
      to += n, at += n, left -= static_cast<std::size_t>(n);
    }
  }
};

namespace {

/// The first fields of the header of llm.c files.
struct LlmcHeader {
  std::int32_t magic, version, tokens;
};
constexpr std::uint64_t llmc_header_bytes = 256 * sizeof(std::int32_t);
constexpr std::int32_t llmc_uint16 = 20240520, llmc_uint32 = 20240801;

void check_llmc(const LlmcHeader& header, const std::string& path, std::uint64_t file_bytes) {
  const auto refuse = [&](const auto&... why) { fail(Errc::config, path, ": llm.c's header ", why...); };
  if (header.magic == llmc_uint32)
    refuse(header.magic, " begins tokens in uint32; give tokens as uint16, of a vocabulary of at most 65536");
  if (header.version != 1) refuse("has version ", header.version, "; only version 1 is supported");
  if (file_bytes < llmc_header_bytes) refuse("of ", llmc_header_bytes, " bytes is cut off");
  const std::uint64_t held = (file_bytes - llmc_header_bytes) / 2;
  if (header.tokens < 0 || static_cast<std::uint64_t>(header.tokens) != held)
    refuse("promises ", header.tokens, " tokens, and the file holds ", held, "; it is cut off or damaged");
}

}  // namespace

Tokens Tokens::from_file(const std::string& path) {
  auto state = std::make_shared<State>();
  state->name = path;
  state->file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  require(state->file >= 0, Errc::config, path, ": cannot be opened: ", std::strerror(errno));
  struct stat info {};
  require(::fstat(state->file, &info) == 0 && S_ISREG(info.st_mode), Errc::config, path,
          ": not a regular file; give tokens as little-endian uint16");
  require(info.st_size % 2 == 0, Errc::config, path, ": ", info.st_size,
          " bytes is an odd length; tokens are little-endian uint16, two bytes each");
  const auto bytes = static_cast<std::uint64_t>(info.st_size);
  if (LlmcHeader header{}; bytes >= sizeof header) {
    state->read_bytes(0, std::as_writable_bytes(std::span(&header, 1)));
    if (header.magic == llmc_uint16 || header.magic == llmc_uint32) {
      check_llmc(header, path, bytes);
      state->header = llmc_header_bytes;
    }
  }
  state->count = (bytes - state->header) / 2;
  Tokens tokens;
  tokens.state_ = std::move(state);
  return tokens;
}

namespace {

constexpr std::size_t max_text_bytes = std::size_t{1} << 30;

bool is_excluded(const fs::directory_entry& entry) {
  const std::string name = entry.path().filename().string();
  if (name.starts_with(".") || entry.is_symlink()) return true;
  if (!entry.is_directory()) return !entry.is_regular_file();
  const auto holds = [&](const char* file) { return fs::exists(entry.path() / file); };
  return name == "node_modules" || name == "__pycache__" || holds("CMakeCache.txt") || holds("CACHEDIR.TAG");
}

std::set<fs::path> absolute(std::span<const std::string> paths) {
  std::set<fs::path> out;
  for (const auto& path : paths)
    if (!path.empty()) out.insert(fs::weakly_canonical(path));
  return out;
}

std::vector<std::string> files_below(const std::string& folder, std::span<const std::string> outputs) {
  std::vector<std::string> files;
  const auto written = absolute(outputs);
  for (auto it = fs::recursive_directory_iterator(folder); it != fs::recursive_directory_iterator(); ++it) {
    const bool skip = is_excluded(*it) || written.contains(fs::weakly_canonical(it->path()));
    if (skip && it->is_directory()) it.disable_recursion_pending();
    if (!skip && it->is_regular_file()) files.push_back(it->path().string());
  }
  std::ranges::sort(files);
  return files;
}

bool is_text(const std::string& bytes) { return bytes.find('\0') == std::string::npos; }

bool is_object(std::string_view line) {
  while (!line.empty() && std::string_view(" \t\r").find(line.back()) != line.npos) line.remove_suffix(1);
  if (!line.starts_with('{') || !line.ends_with('}')) return false;
  try {
    parse_json(line, "", JsonDialect::strict);
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// Whether the file has records in JSON, by its name or by its first two lines.
bool has_records(const std::string& path, std::string_view text) {
  const std::string extension = fs::path(path).extension().string();
  for (const char* known : {".jsonl", ".ndjson"})
    if (extension == known) return true;
  const std::size_t first = text.find('\n');
  if (first == text.npos || !is_object(text.substr(0, first))) return false;
  const std::size_t second = text.find('\n', first + 1);
  return is_object(text.substr(first + 1, second - first - 1));  // to the end if there is no third line
}

[[noreturn]] void refuse_records(const std::string& path) {
  fail(Errc::config, path,
       ": holds records in JSON, whose syntax would be read as text; write their text to ",
       "a file, e.g. jq -r .text < FILE.jsonl > FILE.txt");
}

std::string text_in(const std::string& path) {
  std::string text = read_text_file(path, max_text_bytes);
  if (fs::path(path).extension() == ".json" || has_records(path, text)) refuse_records(path);
  return text;
}

std::string text_below(const std::string& folder, std::span<const std::string> outputs) {
  std::string all, records;
  for (const auto& file : files_below(folder, outputs)) {
    const std::string text = read_text_file(file, max_text_bytes);
    if (text.empty() || !is_text(text)) continue;
    if (has_records(file, text)) {
      records = file;
      continue;
    }
    all += (all.empty() ? "" : "\n") + text;
    require(all.size() <= max_text_bytes, Errc::config, folder, ": holds more than ",
            human_bytes(max_text_bytes), " of text; give a smaller folder");
  }
  if (all.empty() && !records.empty()) refuse_records(records);
  return all;
}

}  // namespace

Tokens Tokens::from_text(const std::string& path, std::span<const std::string> outputs) {
  auto state = std::make_shared<State>();
  state->name = path;
  try {
    require(fs::exists(path), Errc::config, path, ": no such file or folder; give text to train on");
    state->text = fs::is_directory(path) ? text_below(path, outputs) : text_in(path);
  } catch (const fs::filesystem_error& e) {
    fail(Errc::config, path, ": cannot be read: ", e.code().message());
  }
  require(!state->text.empty(), Errc::config, path, ": holds no text");
  state->count = state->text.size();
  Tokens tokens;
  tokens.state_ = std::move(state);
  return tokens;
}

std::uint64_t Tokens::count() const { return state_->count; }
std::string_view Tokens::text() const { return state_->text; }
const std::string& Tokens::name() const { return state_->name; }

void Tokens::read(std::uint64_t begin, std::span<std::int32_t> out) const {
  std::array<std::uint16_t, 4096> words;
  for (std::size_t done = 0; done < out.size();) {
    const std::size_t n = std::min(words.size(), out.size() - done);
    const auto part = out.subspan(done, n);
    if (state_->file < 0) {
      for (std::size_t i = 0; i < n; ++i)
        part[i] = static_cast<unsigned char>(state_->text[begin + done + i]);
    } else {
      state_->read_words(begin + done, std::span(words).first(n));
      std::copy_n(words.begin(), n, part.begin());
    }
    require_in_vocabulary(begin + done, part);
    done += n;
  }
}

void Tokens::require_in_vocabulary(std::uint64_t begin, std::span<const std::int32_t> tokens) const {
  const auto wrong = std::ranges::find_if(
      tokens, [&](std::int32_t t) { return static_cast<std::uint64_t>(t) >= vocabulary_; });
  if (wrong == tokens.end()) return;
  fail(Errc::config, name(), ": token ", *wrong, " at position ",
       begin + static_cast<std::uint64_t>(wrong - tokens.begin()),
       " is beyond the model's vocabulary (vocab_size ", vocabulary_,
       "); use the tokenizer that belongs to the model, or a larger vocab_size");
}

void Tokens::check_vocabulary() const {
  constexpr std::uint64_t part = 1 << 14, parts = 512;
  std::array<std::int32_t, part> tokens;
  const std::uint64_t in_all = (count() + part - 1) / part, looked_at = std::min(in_all, parts);
  for (std::uint64_t i = 0; i < looked_at; ++i) {
    // Covers the first and the last part, and spreads the others evenly.
    const std::uint64_t at = part * (looked_at == in_all ? i : i * (in_all - 1) / (looked_at - 1));
    read(at, std::span(tokens).first(std::min(part, count() - at)));
  }
}

std::uint64_t Tokens::samples(std::uint64_t seq_len) const {
  require(seq_len > 0, Errc::invalid_argument, name(), ": samples of no tokens");
  require(count() >= seq_len + 1, Errc::config, name(), ": ", count(),
          " tokens are too few for one sample of ", seq_len,
          " + 1; give more data, or a shorter sequence (--seq-len)");
  return (count() - 1) / seq_len;
}

}  // namespace rz
