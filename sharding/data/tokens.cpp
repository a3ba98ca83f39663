#include "sharding/data/tokens.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include "comm/core/error.h"
#include "comm/os/fd.h"
#include "sharding/data/file_kinds.h"
#include "sharding/io/checksum.h"
#include "sharding/io/text.h"
#include "tensor/attention_ops.h"

namespace rz {

namespace fs = std::filesystem;
static_assert(std::endian::native == std::endian::little, "token files are little-endian");

namespace {

/// An integer type of files.
struct TokenType {
  const char* name;
  const char* of_numpy;
  unsigned width;  // bytes
};
constexpr TokenType token_types[] = {{"uint16", "<u2", 2}, {"uint32", "<u4", 4}, {"int16", "<i2", 2},
                                     {"int32", "<i4", 4},  {"uint64", "<u8", 8}, {"int64", "<i8", 8}};
constexpr const TokenType &uint16_tokens = token_types[0], &uint32_tokens = token_types[1];

/// Tokens of one file.
struct TokenFile {
  std::string path;
  UniqueFd fd;
  std::uint64_t header = 0;  // bytes before the first token
  std::uint64_t begin = 0, count = 0;
  const TokenType* type = &uint16_tokens;

  unsigned width() const { return type->width; }

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
    const std::string_view of_numpy = type->of_numpy;
    if (of_numpy == "<u4") return read_bytes(header + 4 * at, std::as_writable_bytes(out));
    if (of_numpy == "<u2") return read_converted<std::uint16_t>(at, out);
    if (of_numpy == "<i2") return read_converted<std::int16_t>(at, out);
    if (of_numpy == "<i4") return read_converted<std::int32_t>(at, out);
    if (of_numpy == "<u8") return read_converted<std::uint64_t>(at, out);
    read_converted<std::int64_t>(at, out);
  }
  template <class T>
  void read_converted(std::uint64_t at, std::span<std::int32_t> out) const {
    std::array<T, 4096> words;
    read_bytes(header + sizeof(T) * at, std::as_writable_bytes(std::span(words).first(out.size())));
    for (std::size_t i = 0; i < out.size(); ++i) {
      require(std::in_range<std::int32_t>(words[i]) && words[i] >= T{0}, Errc::config, path, ": token ",
              words[i], " at position ", at + i, " of the file, of ", type->name,
              ", is none: tokens are from 0 to 2147483647");
      out[i] = static_cast<std::int32_t>(words[i]);
    }
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
  f.header = llmc_header_bytes, f.type = header.magic == llmc_uint32 ? &uint32_tokens : &uint16_tokens;
  // Llama 3's tokens have 7.
  if (header.version != 1 && !(f.type == &uint32_tokens && header.version == 7))
    refuse("has version ", header.version, "; only version 1 is supported");
  if (file_bytes < llmc_header_bytes) refuse("of ", llmc_header_bytes, " bytes is cut off");
  const std::uint64_t held = (file_bytes - llmc_header_bytes) / f.width();
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
  f.header = start + length, f.type = std::ranges::find(token_types, type, &TokenType::of_numpy);
  require(
      f.type != std::end(token_types), Errc::config, f.path, ": NumPy's dtype is '", type,
      "'; tokens are little-endian integers of 2, 4 or 8 bytes: save tokens.astype(numpy.uint16), or uint32");
  const std::string shape = npy_field(f.path, header, "shape", ")");
  std::uint64_t count = 0;
  const auto [end, problem] = std::from_chars(shape.data(), shape.data() + shape.size(), count);
  const std::string rest(end, shape.data() + shape.size());
  require(problem == std::errc() && (rest == "," || rest.empty()), Errc::config, f.path,
          ": NumPy's shape is (", shape, "); give tokens in one dimension");
  require(count == (file_bytes - f.header) / f.width() && (file_bytes - f.header) % f.width() == 0,
          Errc::config, f.path, ": NumPy's header promises ", count, " tokens, and the file holds ",
          (file_bytes - f.header) / f.width(), "; it is cut off or damaged");
}

/// Looks at up to 64 Ki words of a file without a header, which may be of another kind than it is read as.
void check_evidence(const TokenFile& f, std::uint64_t file_bytes) {
  std::vector<std::uint16_t> words(std::min<std::uint64_t>(file_bytes / 2, 1 << 16));
  f.read_bytes(0, std::as_writable_bytes(std::span(words)));
  const std::string_view bytes(reinterpret_cast<const char*>(words.data()), words.size() * 2);
  constexpr std::size_t bytes_of_no_token = 3;  // two may be a token
  if (const FileKind* const kind = marked_kind(bytes, bytes_of_no_token))
    fail(Errc::config, f.path, ": begins as an archive or a table does (", kind->name,
         "), and not as tokens; give tokens as .npy, or as uint16 without a header");
  if (words.size() < 32) return;
  const bool is_text = std::ranges::all_of(bytes,
                                           [](char c) {
                                             return (static_cast<unsigned char>(c) >= ' ' && c != 127) ||
                                                    c == '\n' || c == '\t' || c == '\r';
                                           }) &&
                       is_utf8(bytes.substr(0, bytes.find_last_of(" \n")));
  require(!is_text, Errc::config, f.path,
          ": is text, not tokens; give it as --data (Tokens::from_text()), or tokenize it first");
  if (f.width() == 8) return;
  // The upper parts of wider numbers: a vocabulary has less than 256 Ki tokens, and a mask is -100.
  constexpr std::uint16_t max_upper = 3, sign = 0xffff;
  std::array<std::uint16_t, 4> max{};
  std::array<std::size_t, 4> beyond{}, other{};
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == sign && i % 4 != 0) continue;
    max[i % 4] = std::max(max[i % 4], words[i]);
    beyond[i % 4] += words[i] > max_upper, other[i % 4] += words[i] != 0;
  }
  const std::size_t many = words.size() / 8;  // a few words prove nothing
  const bool upper = beyond[1] + beyond[3] == 0, lower = beyond[0] + beyond[2] == 0;
  const auto refuse = [&](const auto&... what) { fail(Errc::config, f.path, ": looks like ", what...); };
  if (upper && std::max(max[2], max[3]) == 0 && beyond[0] >= many)
    refuse("tokens of eight bytes, read as ", f.type->name, ": every other word of four bytes is 0; ",
           "give --tokens-dtype int64 (from_file(…, \"int64\"))",
           f.width() == 2 ? ", or uint16 if they are" : "");
  if (f.width() == 4) return;
  if (upper && beyond[0] + beyond[2] >= many)
    refuse("tokens of four bytes, read as uint16: every other word is at most ", std::max(max[1], max[3]),
           "; give --tokens-dtype uint32 (from_file(…, \"uint32\")), or uint16 if they are");
  if (lower && beyond[1] + beyond[3] >= many)
    refuse("big-endian numbers or floats, read as uint16: every other word is at most ",
           std::max(max[0], max[2]), "; give little-endian tokens");
  if (other[0] == 0 && max[1] == 0 && beyond[3] >= many)
    refuse("floats of eight bytes, read as uint16: every other word of four bytes is 0; ",
           "give little-endian tokens");
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
    if (dtype != "auto") f.type = std::ranges::find(token_types, dtype, &TokenType::name);
    require(f.width() == 2 || bytes % f.width() == 0, Errc::config, path, ": ", bytes,
            " bytes are no whole number of ", f.type->name, ", ", f.width(), " bytes each");
    require(bytes % 2 == 0, Errc::config, path, ": ", bytes,
            " bytes is an odd length; tokens are little-endian ", f.type->name, ", two bytes each");
    if (dtype != "uint16") check_evidence(f, bytes);
  }
  require(dtype == "auto" || dtype == f.type->name, Errc::config, path, ": its header says ", f.type->name,
          " where ", dtype, " is expected");
  f.count = (bytes - f.header) / f.width();
  return f;
}

/// A file that is opened, and what an index states of it.
struct ExpectedFile {
  std::string path, dtype;
  std::optional<std::uint64_t> tokens{};
};

/// The files of the index of a folder, or all that are named as tokens are.
void add_folder(const std::string& folder, const std::string& dtype, std::vector<ExpectedFile>& files,
                std::vector<TokensIndex>& indices) {
  if (const std::optional<TokensIndex> index = read_tokens_index(folder)) {
    require(dtype == "auto" || dtype == index->dtype, Errc::config, index->path, ": dtype: is ", index->dtype,
            " where ", dtype, " is expected");
    for (const TokensIndex::Shard& shard : index->shards)
      files.push_back({(fs::path(folder) / shard.file).string(), index->dtype, shard.tokens});
    indices.push_back(*index);
    return;
  }
  std::error_code ignored;
  std::vector<std::string> names;
  for (fs::directory_iterator it(folder, ignored), end; !ignored && it != end; it.increment(ignored))
    if (it->path().extension() == ".bin" || it->path().extension() == ".npy")
      names.push_back(it->path().string());
  require(!names.empty(), Errc::config, folder,
          ": not a regular file, and no folder with tokens, which are *.bin or *.npy");
  std::ranges::sort(names);
  for (const std::string& name : names) files.push_back({name, dtype});
}

/// The files of a folder or pattern, in the order of their names; else the path itself. Of several, with
/// commas between them, in their order.
void add_token_files(const std::string& path, const std::string& dtype, std::vector<ExpectedFile>& files,
                     std::vector<TokensIndex>& indices) {
  std::error_code ignored;
  if (const auto comma = path.find(','); comma != path.npos && !fs::exists(path, ignored)) {
    add_token_files(path.substr(0, comma), dtype, files, indices);
    add_token_files(path.substr(comma + 1), dtype, files, indices);
  } else if (fs::is_directory(path, ignored)) {
    add_folder(path, dtype, files, indices);
  } else if (path.find_first_of("*?[") != path.npos && !fs::exists(path, ignored)) {
    for (const std::string& match : paths_matching(path)) files.push_back({match, dtype});
  } else {
    files.push_back({path, dtype});
  }
}

void require_one_tokenizer(std::span<const TokensIndex> indices) {
  for (const TokensIndex& index : indices)
    require(index.tokenizer == indices[0].tokenizer, Errc::config, index.path,
            ": its tokens are of another tokenizer than those of ", indices[0].path,
            "; make both with one tokenizer");
}

}  // namespace

struct Tokens::State {
  std::vector<std::string> left_out;
  std::string name;
  std::uint64_t count = 0;
  std::string text;               // from from_text(), and its bytes are the tokens if there are no `ids`
  std::vector<std::int32_t> ids;  // from a tokenizer
  std::vector<TokenPair> pairs;   // of them
  std::optional<std::int32_t> padding;
  std::vector<TokensIndex> indices;  // of the folders of from_file()
  std::vector<TokenFile> files;      // from from_file()

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
  require(dtype == "auto" || std::ranges::find(token_types, dtype, &TokenType::name) != std::end(token_types),
          Errc::config, "the dtype of tokens is '", dtype,
          "'; give auto, uint16 or uint32, or int16, int32, uint64 or int64");
  auto state = std::make_shared<State>();
  state->name = path;
  std::vector<ExpectedFile> files;
  add_token_files(path, dtype, files, state->indices);
  require_one_tokenizer(state->indices);
  for (const ExpectedFile& expected : files) {
    TokenFile& file = state->files.emplace_back(open_token_file(expected.path, expected.dtype));
    require(!expected.tokens || *expected.tokens == file.count, Errc::config, expected.path, ": has ",
            file.count, " tokens where the index of its folder has ", expected.tokens.value_or(0),
            "; the file is damaged, or another one");
    file.begin = state->count;
    state->count += file.count;
  }
  Tokens tokens;
  tokens.state_ = std::move(state);
  return tokens;
}

namespace {

constexpr std::uint64_t max_bytes_of_text = std::uint64_t{1} << 30;

std::vector<TextFile> small_text_files(const std::string& data, std::span<const std::string> outputs,
                                       std::vector<std::string>& left_out) {
  std::vector<TextFile> files = text_files(data, outputs, &left_out);
  std::uint64_t bytes = 0;
  for (const TextFile& file : files) bytes += file.bytes;
  require(bytes <= max_bytes_of_text, Errc::config, data, ": holds more than ",
          human_bytes(max_bytes_of_text),
          " of text, which every rank would hold; give less, or make tokens of it with the program tokenize, "
          "and give them as --tokens (Tokens::from_file())");
  return files;
}

}  // namespace

Tokens Tokens::from_text(const std::string& path, std::span<const std::string> outputs) {
  return from_text(path, TextOptions{.outputs = {outputs.begin(), outputs.end()}});
}

Tokens Tokens::from_text(const std::string& path, const TextOptions& options) {
  auto state = std::make_shared<State>();
  state->name = path;
  const std::vector<TextFile> files = small_text_files(path, options.outputs, state->left_out);
  encode_documents(files, options, true, [&](EncodedText& encoded) {
    state->text += encoded.text;
    for (TokenPair pair : encoded.pairs) {
      pair.begin += state->ids.size();
      state->pairs.push_back(pair);
    }
    state->ids.insert(state->ids.end(), encoded.tokens.begin(), encoded.tokens.end());
  });
  require(!state->text.empty(), Errc::config, path, ": holds no text");
  state->count = options.tokenizer ? state->ids.size() : state->text.size();
  if (options.tokenizer) {
    state->padding = options.tokenizer->pad_token_id();
    if (!state->padding) state->padding = end_token(options);
  }
  Tokens tokens;
  tokens.state_ = std::move(state);
  return tokens;
}

std::uint64_t Tokens::count() const { return state_->count; }
std::string_view Tokens::text() const { return state_->text; }
std::span<const std::string> Tokens::left_out() const { return state_->left_out; }
bool Tokens::has_answers() const { return !state_->pairs.empty(); }
std::span<const TokensIndex> Tokens::indices() const { return state_->indices; }

void Tokens::read_pair(std::uint64_t pair, std::span<std::int32_t> inputs,
                       std::span<std::int32_t> targets) const {
  constexpr std::int32_t ignored = -100;
  const TokenPair& p = state_->pairs.at(pair);
  const std::size_t max = inputs.size() + 1, answer = std::min<std::size_t>(p.tokens - p.prompt, max - 1);
  const std::size_t prompt = std::min<std::size_t>(p.prompt, max - answer);
  std::vector<std::int32_t> sample(max, state_->padding.value_or(0));
  read(p.begin + p.prompt - prompt, std::span(sample).first(prompt + answer));
  std::copy_n(sample.begin(), inputs.size(), inputs.begin());
  std::ranges::fill(targets, ignored);
  const std::size_t first = std::max<std::size_t>(prompt, 1);
  std::copy_n(sample.begin() + static_cast<std::ptrdiff_t>(first), prompt + answer - first,
              targets.begin() + static_cast<std::ptrdiff_t>(first - 1));
}
const std::string& Tokens::name() const { return state_->name; }

void Tokens::read(std::uint64_t begin, std::span<std::int32_t> out) const {
  constexpr std::size_t part_tokens = 4096;
  for (std::size_t done = 0; done < out.size();) {
    const std::size_t n = std::min(part_tokens, out.size() - done);
    const auto part = out.subspan(done, n);
    if (!state_->ids.empty()) {
      std::copy_n(state_->ids.begin() + static_cast<std::ptrdiff_t>(begin + done), n, part.begin());
    } else if (state_->files.empty()) {
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
       "); use the tokenizer that belongs to the model, or ",
       "a larger vocab_size for a model without trained weights");
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
  if (has_answers()) return state_->pairs.size();
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
  tokens.add_pairs(checksum);
  return checksum.value();
}

void Tokens::add_pairs(Checksum& checksum) const {
  for (const TokenPair& pair : state_->pairs) {
    checksum.add(std::as_bytes(std::span(&pair.prompt, 1)));
    checksum.add(std::as_bytes(std::span(&pair.tokens, 1)));
  }
}

TokenDataset::TokenDataset(Tokens tokens, std::size_t seq_len, std::optional<std::int32_t> document_end)
    : tokens_(std::move(tokens)),
      seq_len_(seq_len),
      samples_(tokens_.samples(seq_len)),
      document_end_(document_end) {}

std::vector<Field> TokenDataset::fields() const {
  std::vector<Field> all{{"inputs", DType::i32, {seq_len_}}, {"targets", DType::i32, {seq_len_}}};
  if (document_end_) all.push_back({"document_starts", DType::i32, {seq_len_}});
  return all;
}

void TokenDataset::read(std::uint64_t index, BatchRows& to, std::size_t row) const {
  const auto inputs = to.row<std::int32_t>("inputs", row), targets = to.row<std::int32_t>("targets", row);
  if (tokens_.has_answers()) {
    tokens_.read_pair(index, inputs, targets);
  } else {
    std::vector<std::int32_t> sample(seq_len_ + 1);
    tokens_.read(index * seq_len_, sample);
    std::copy_n(sample.begin(), seq_len_, inputs.begin());
    std::copy_n(sample.begin() + 1, seq_len_, targets.begin());
  }
  if (document_end_)
    ops::find_document_starts(to.row<std::int32_t>("document_starts", row), inputs, *document_end_);
}

}  // namespace rz
