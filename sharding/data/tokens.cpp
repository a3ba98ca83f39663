#include "sharding/data/tokens.h"

#include <fcntl.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "comm/core/error.h"
#include "comm/os/fd.h"
#include "sharding/io/checksum.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {

namespace fs = std::filesystem;
static_assert(std::endian::native == std::endian::little, "token files are little-endian");

namespace {

/// Tokens of one file.
struct TokenFile {
  std::string path;
  UniqueFd fd;
  std::uint64_t header = 0;  // bytes before the first token
  std::uint64_t begin = 0, count = 0;
  unsigned width = 2;  // bytes of a token

  void read_bytes(std::uint64_t at, std::span<std::byte> out) const {
    while (!out.empty()) {
      const ssize_t n = ::pread(fd.get(), out.data(), out.size(), static_cast<off_t>(at));
      if (n < 0 && errno == EINTR) continue;
      require(n > 0, Errc::io, path, ": cannot be read at byte ", at, ": ",
              n < 0 ? std::strerror(errno) : "it ends there");
      at += static_cast<std::uint64_t>(n), out = out.subspan(static_cast<std::size_t>(n));
    }
  }
  /// Up to 4096 tokens from the one `at` of this file on.
  void read_tokens(std::uint64_t at, std::span<std::int32_t> out) const {
    if (width == 4) return read_bytes(header + 4 * at, std::as_writable_bytes(out));
    std::array<std::uint16_t, 4096> words;
    read_bytes(header + 2 * at, std::as_writable_bytes(std::span(words).first(out.size())));
    std::copy_n(words.begin(), out.size(), out.begin());
  }
};

/// The first fields of the header of llm.c files.
struct LlmcHeader {
  std::int32_t magic, version, tokens;
};
constexpr std::uint64_t llmc_header_bytes = 256 * sizeof(std::int32_t);
constexpr std::int32_t llmc_uint16 = 20240520, llmc_uint32 = 20240801;

void read_llmc_header(TokenFile& f, const LlmcHeader& header, std::uint64_t file_bytes) {
  const auto refuse = [&](const auto&... why) { fail(Errc::config, f.path, ": llm.c's header ", why...); };
  f.header = llmc_header_bytes, f.width = header.magic == llmc_uint32 ? 4 : 2;
  // Llama 3's tokens have 7.
  if (header.version != 1 && !(f.width == 4 && header.version == 7))
    refuse("has version ", header.version, "; only version 1 is supported");
  if (file_bytes < llmc_header_bytes) refuse("of ", llmc_header_bytes, " bytes is cut off");
  const std::uint64_t held = (file_bytes - llmc_header_bytes) / f.width;
  if (header.tokens < 0 || static_cast<std::uint64_t>(header.tokens) != held)
    refuse("promises ", header.tokens, " tokens, and the file holds ", held, "; it is cut off or damaged");
}

/// The text after 'KEY': in the header of a .npy file, up to one of `ends`.
std::string npy_field(const std::string& path, const std::string& header, const std::string& key,
                      const char* ends) {
  const auto at = header.find("'" + key + "':");
  const auto begin = at == header.npos ? at : header.find_first_not_of(" '(", at + key.size() + 3);
  require(begin != header.npos, Errc::config, path, ": the header of NumPy has no ", key);
  return escaped(header.substr(begin, header.find_first_of(ends, begin) - begin));
}

/// numpy.lib.format: the magic, the version, the length of a dict in Python's words, and the dict.
void read_npy_header(TokenFile& f, const std::string& front, std::uint64_t file_bytes) {
  const auto byte = [&](std::size_t i) { return std::uint64_t{static_cast<unsigned char>(front[i])}; };
  const bool is_long = front.size() > 12 && byte(6) > 1;
  const std::uint64_t start = is_long ? 12 : 10;
  require(front.size() > start, Errc::config, f.path, ": the header of NumPy is cut off");
  const std::uint64_t length = byte(8) | byte(9) << 8 | (is_long ? byte(10) << 16 | byte(11) << 24 : 0);
  require(start + length <= front.size(), Errc::config, f.path, ": the header of NumPy has ", length,
          " bytes; it is cut off or damaged");
  const std::string header = front.substr(start, length);
  const std::string type = npy_field(f.path, header, "descr", "',[");
  require(type == "<u2" || type == "<u4", Errc::config, f.path, ": NumPy's dtype is '", type,
          "'; tokens are uint16 ('<u2') or uint32 ('<u4'): save tokens.astype(numpy.uint16)");
  f.header = start + length, f.width = type == "<u2" ? 2 : 4;
  const std::string shape = npy_field(f.path, header, "shape", ")");
  std::uint64_t count = 0;
  const auto [end, problem] = std::from_chars(shape.data(), shape.data() + shape.size(), count);
  const std::string rest(end, shape.data() + shape.size());
  require(problem == std::errc() && (rest == "," || rest.empty()), Errc::config, f.path,
          ": NumPy's shape is (", shape, "); give tokens in one dimension");
  require(count == (file_bytes - f.header) / f.width && (file_bytes - f.header) % f.width == 0, Errc::config,
          f.path, ": NumPy's header promises ", count, " tokens, and the file holds ",
          (file_bytes - f.header) / f.width, "; it is cut off or damaged");
}

/// Looks at up to 64 Ki words of a file without a header, which may be of another kind than it is read as.
void check_evidence(const TokenFile& f, std::uint64_t file_bytes) {
  std::vector<std::uint16_t> words(std::min<std::uint64_t>(file_bytes / 2, 1 << 16));
  f.read_bytes(0, std::as_writable_bytes(std::span(words)));
  const std::string_view bytes(reinterpret_cast<const char*>(words.data()), words.size() * 2);
  for (const std::string_view magic :
       {"PK\x03\x04", "\x89HDF", "PAR1", "\x1f\x8b", "\x28\xb5\x2f\xfd", "ARROW1"})
    require(!bytes.starts_with(magic), Errc::config, f.path,
            ": begins as an archive or a table does, and not as tokens; give tokens as .npy, or as uint16 "
            "without a header");
  if (words.size() < 32) return;
  const bool is_text = std::ranges::all_of(bytes,
                                           [](char c) {
                                             return (static_cast<unsigned char>(c) >= ' ' && c != 127) ||
                                                    c == '\n' || c == '\t' || c == '\r';
                                           }) &&
                       is_utf8(bytes.substr(0, bytes.find_last_of(" \n")));
  require(!is_text, Errc::config, f.path, ": is text, not tokens; give it as --data, or tokenize it first");
  if (f.width != 2) return;
  // The upper halves of wider numbers: a vocabulary has less than 256 Ki tokens.
  constexpr std::uint16_t max_upper = 3;
  std::uint16_t even = 0, odd = 0;
  std::size_t even_beyond = 0, odd_beyond = 0;
  for (std::size_t i = 0; i + 1 < words.size(); i += 2) {
    even = std::max(even, words[i]), odd = std::max(odd, words[i + 1]);
    even_beyond += words[i] > max_upper, odd_beyond += words[i + 1] > max_upper;
  }
  const std::size_t many = words.size() / 8;  // a few words prove nothing
  require(!(odd_beyond == 0 && even_beyond >= many), Errc::config, f.path,
          ": looks like tokens of four bytes or more, read as uint16: every other word is at most ", odd,
          "; give --tokens-dtype uint32 (from_file(…, \"uint32\")), or uint16 if they are");
  require(!(even_beyond == 0 && odd_beyond >= many), Errc::config, f.path,
          ": looks like big-endian numbers or floats, read as uint16: every other word is at most ", even,
          "; give little-endian tokens");
}

TokenFile open_token_file(const std::string& path, const std::string& dtype) {
  TokenFile f{.path = path, .fd = {}};
  // O_NONBLOCK: the open of a named pipe would wait for a writer.
  f.fd = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  require(static_cast<bool>(f.fd), Errc::config, path, ": cannot be opened: ", std::strerror(errno));
  struct stat info {};
  require(::fstat(f.fd.get(), &info) == 0 && S_ISREG(info.st_mode), Errc::config, path,
          ": not a regular file; give tokens as little-endian uint16");
  const auto bytes = static_cast<std::uint64_t>(info.st_size);
  std::string front(std::min<std::uint64_t>(bytes, 1 << 16), '\0');
  f.read_bytes(0, std::as_writable_bytes(std::span(front)));
  LlmcHeader llmc{};
  if (bytes >= sizeof llmc) std::memcpy(&llmc, front.data(), sizeof llmc);
  const bool is_npy = front.starts_with("\x93NUMPY"),
             is_llmc = !is_npy && (llmc.magic == llmc_uint16 || llmc.magic == llmc_uint32);
  if (is_npy) {
    read_npy_header(f, front, bytes);
  } else if (is_llmc) {
    read_llmc_header(f, llmc, bytes);
  } else {
    f.width = dtype == "uint32" ? 4 : 2;
    require(bytes % f.width == 0, Errc::config, path, ": ", bytes,
            f.width == 2 ? " bytes is an odd length; tokens are little-endian uint16, two bytes each"
                         : " bytes are no whole number of uint32, four bytes each");
    if (dtype != "uint16") check_evidence(f, bytes);
  }
  require(dtype == "auto" || (f.width == 4) == (dtype == "uint32"), Errc::config, path,
          ": its header says uint", 8 * f.width, " where ", dtype, " is expected");
  f.count = (bytes - f.header) / f.width;
  return f;
}

/// The files of a folder or pattern, in the order of their names; else the path itself. Of several, with
/// commas between them, in their order.
std::vector<std::string> token_files(const std::string& path) {
  std::error_code ignored;
  std::vector<std::string> files;
  if (const auto comma = path.find(','); comma != path.npos && !fs::exists(path, ignored)) {
    files = token_files(path.substr(0, comma));
    const std::vector<std::string> others = token_files(path.substr(comma + 1));
    files.insert(files.end(), others.begin(), others.end());
    return files;
  }
  if (fs::is_directory(path, ignored)) {
    for (fs::directory_iterator it(path, ignored), end; !ignored && it != end; it.increment(ignored))
      if (it->path().extension() == ".bin" || it->path().extension() == ".npy")
        files.push_back(it->path().string());
    require(!files.empty(), Errc::config, path,
            ": not a regular file, and no folder with tokens, which are *.bin or *.npy");
  } else if (path.find_first_of("*?[") != path.npos && !fs::exists(path, ignored)) {
    glob_t found{};
    if (::glob(path.c_str(), 0, nullptr, &found) == 0)
      files.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    ::globfree(&found);
    require(!files.empty(), Errc::config, path, ": no file has such a name");
  } else {
    files.push_back(path);
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace

struct Tokens::State {
  std::string name;
  std::uint64_t count = 0;
  std::string text;              // bytes, from from_text()
  std::vector<TokenFile> files;  // from from_file()

  /// Reads tokens that may lie in several files.
  void read(std::uint64_t begin, std::span<std::int32_t> out) const {
    auto f = std::ranges::upper_bound(files, begin, {}, &TokenFile::begin) - 1;
    for (; !out.empty(); ++f) {
      const auto n =
          static_cast<std::size_t>(std::min<std::uint64_t>(out.size(), f->begin + f->count - begin));
      f->read_tokens(begin - f->begin, out.first(n));
      begin += n, out = out.subspan(n);
    }
  }
};

Tokens Tokens::from_file(const std::string& path, const std::string& dtype) {
  require(dtype == "auto" || dtype == "uint16" || dtype == "uint32", Errc::config, "the dtype of tokens is '",
          dtype, "'; give auto, uint16 or uint32");
  auto state = std::make_shared<State>();
  state->name = path;
  for (const std::string& file : token_files(path)) {
    state->files.push_back(open_token_file(file, dtype));
    state->files.back().begin = state->count;
    state->count += state->files.back().count;
  }
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
    const bool is_folder = fs::is_directory(path);
    require(is_folder || fs::is_regular_file(path), Errc::config, path,
            ": is a pipe or a device, which several ranks cannot read; write the text to a file");
    state->text = is_folder ? text_below(path, outputs) : text_in(path);
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
  constexpr std::size_t part_tokens = 4096;
  for (std::size_t done = 0; done < out.size();) {
    const std::size_t n = std::min(part_tokens, out.size() - done);
    const auto part = out.subspan(done, n);
    if (state_->files.empty()) {
      for (std::size_t i = 0; i < n; ++i)
        part[i] = static_cast<unsigned char>(state_->text[begin + done + i]);
    } else {
      state_->read(begin + done, part);
    }
    require_in_vocabulary(begin + done, part);
    done += n;
  }
}

void Tokens::require_in_vocabulary(std::uint64_t begin, std::span<const std::int32_t> tokens) const {
  const auto wrong = std::ranges::find_if(
      tokens, [&](std::int32_t t) { return static_cast<std::uint64_t>(t) >= vocabulary_; });
  if (wrong == tokens.end()) return;
  fail(Errc::config, name(), ": token ", static_cast<std::uint32_t>(*wrong), " at position ",
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

std::uint64_t checksum(const Tokens& tokens) {
  constexpr std::size_t piece = 1 << 16;
  std::vector<std::int32_t> read(piece);
  Checksum checksum;
  for (const Range part : parts_of_checksum(tokens.count(), piece))
    for (std::size_t at = part.begin; at < part.end; at += piece) {
      const std::span<std::int32_t> some = std::span(read).first(std::min(piece, part.end - at));
      tokens.read(at, some);
      checksum.add(std::as_bytes(some));
    }
  return checksum.value();
}

TokenDataset::TokenDataset(Tokens tokens, std::size_t seq_len)
    : tokens_(std::move(tokens)), seq_len_(seq_len), samples_(tokens_.samples(seq_len)) {}

std::vector<Field> TokenDataset::fields() const {
  return {{"inputs", DType::i32, {seq_len_}}, {"targets", DType::i32, {seq_len_}}};
}

void TokenDataset::read(std::uint64_t index, BatchRows& to, std::size_t row) const {
  std::vector<std::int32_t> sample(seq_len_ + 1);
  tokens_.read(index * seq_len_, sample);
  std::copy_n(sample.begin(), seq_len_, to.row<std::int32_t>("inputs", row).begin());
  std::copy_n(sample.begin() + 1, seq_len_, to.row<std::int32_t>("targets", row).begin());
}

}  // namespace rz
