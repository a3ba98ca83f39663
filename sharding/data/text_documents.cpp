#include "sharding/data/text_documents.h"

#include <fcntl.h>
#include <glob.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/os/fd.h"
#include "comm/os/thread_team.h"
#include "sharding/data/file_kinds.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t max_document_bytes = std::size_t{1} << 30;
constexpr std::string_view byte_order_mark = "\xef\xbb\xbf";

// ---- which files

bool is_excluded(const fs::path& path) {
  const std::string name = path.filename().string();
  std::error_code error;  // of a link to itself
  const auto holds = [&](const char* file) { return fs::exists(path / file, error); };
  return name.starts_with(".") || name == "node_modules" || name == "__pycache__" ||
         holds("CMakeCache.txt") || holds("CACHEDIR.TAG");
}

std::set<fs::path> absolute(std::span<const std::string> paths) {
  std::set<fs::path> out;
  for (const auto& path : paths)
    if (!path.empty()) out.insert(fs::weakly_canonical(path));
  return out;
}

std::string lower_extension(const fs::path& path) {
  std::string extension = path.extension().string();
  for (char& c : extension)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return extension;
}

bool is_named_records(const fs::path& path) {
  const std::string extension = lower_extension(path);
  return extension == ".jsonl" || extension == ".ndjson";
}

/// Files of a folder that are no text, by the reason.
class LeftOut {
 public:
  void add(const std::string& path, std::string_view reason) { all_[std::string(reason)].push_back(path); }
  const std::string* json() const {
    for (const std::string_view reason : {records_reason, json_reason})
      if (const auto found = all_.find(reason); found != all_.end()) return &found->second[0];
    return nullptr;
  }
  /// Empty if there are none.
  std::string line(const std::string& folder) const {
    if (all_.empty()) return {};
    std::size_t count = 0;
    std::string reasons;
    for (const auto& [reason, paths] : all_) {
      count += paths.size();
      reasons += concat(reasons.empty() ? "" : "; ", reason, ": ", listed(paths));
    }
    return escaped(
        concat(folder, ": ", count, count == 1 ? " file is" : " files are", " left out: ", reasons));
  }
  static constexpr std::string_view records_reason = "records in JSON (name them .jsonl, a record per line)",
                                    json_reason = "other JSON";

 private:
  std::map<std::string, std::vector<std::string>, std::less<>> all_;
};

/// The files below a folder, each once: also those behind links, and below links to folders.
class FolderFiles {
 public:
  FolderFiles(const std::string& folder, std::span<const std::string> outputs, LeftOut& left_out)
      : root_(fs::canonical(folder)), written_(absolute(outputs)), left_out_(left_out) {
    std::erase_if(written_, [&](const fs::path& path) { return is_within(root_, path); });
    enter(folder);
    // Files come before the links to them. A folder behind a link may have more links.
    while (!links_.empty()) follow(links_.extract(links_.begin()).value());
  }
  std::vector<std::string> sorted() const {
    std::vector<std::string> files;
    for (const auto& [file, name] : names_) files.push_back(name.string());
    std::ranges::sort(files);
    return files;
  }

 private:
  static bool is_within(const fs::path& path, const fs::path& folder) {
    return std::ranges::mismatch(folder, path).in1 == folder.end();
  }
  bool is_written(const fs::path& file) const {
    return std::ranges::any_of(written_, [&](const fs::path& output) { return is_within(file, output); });
  }
  void enter(const fs::path& folder) {
    if (!entered_.insert(fs::canonical(folder)).second) return;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
      if (is_excluded(entry.path())) continue;
      if (entry.is_symlink())
        links_.insert(entry.path());
      else
        add(entry.path(), fs::canonical(entry.path()));
    }
  }
  void follow(const fs::path& link) {
    std::error_code error;
    const fs::path target = fs::canonical(link, error);
    if (error) return left_out_.add(link.string(), "links to nothing");
    if (fs::is_directory(target) && (entered_.contains(target) || is_within(root_, target)))
      return left_out_.add(link.string(), "links to folders that are read already, or are around this one");
    add(link, target);
  }
  void add(const fs::path& path, const fs::path& target) {
    if (is_written(target)) return;
    if (fs::is_directory(target)) return enter(path);
    if (!fs::is_regular_file(target)) return;
    const auto [known, is_new] = names_.emplace(target, path);
    if (is_new) return;
    fs::path other = path;
    if (is_named_records(path) && !is_named_records(known->second)) std::swap(known->second, other);
    left_out_.add(other.string(), "other names of files that are read");
  }

  fs::path root_;
  std::set<fs::path> written_, entered_, links_;
  std::map<fs::path, fs::path> names_;  // of files
  LeftOut& left_out_;
};

// ---- JSON

std::string_view behind_blanks(std::string_view text) {
  return text.substr(std::min(text.size(), text.find_first_not_of(" \t\r\n")));
}

/// Whether a text may be an object with a key, or an array of objects, texts or arrays.
bool begins_as_json(std::string_view text) {
  if (!text.starts_with('{') && !text.starts_with('[')) return false;
  const std::string_view inner = behind_blanks(text.substr(1));
  return inner.starts_with('"') || (text[0] == '[' && (inner.starts_with('{') || inner.starts_with('[')));
}

/// The bytes of the object or array at the front; npos: it does not end.
std::size_t json_bytes(std::string_view text) {
  std::size_t depth = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') quoted = !quoted;
    if (quoted) {
      i += c == '\\';
      continue;
    }
    depth += c == '{' || c == '[';
    depth -= c == '}' || c == ']';
    if (depth == 0) return i + 1;
  }
  return text.npos;
}

/// What jq makes records of JSON by; nothing if the text, which may be cut, is no JSON.
std::optional<std::string> jq_filter(std::string_view text, bool is_cut) {
  using Event = nlohmann::json::parse_event_t;
  std::string key, open, filter;
  const auto look = [&](int depth, Event event, const nlohmann::json& value) {
    if (event == Event::key && depth == 1) key = value.get<std::string>();
    const bool begins_object = event == Event::object_start;
    if (!begins_object && event != Event::array_start && event != Event::value) return true;
    open.resize(static_cast<std::size_t>(depth));
    const bool is_text = event == Event::value && value.is_string();
    const bool is_word = std::ranges::all_of(key, [](char c) { return c == '_' || (c >= 'a' && c <= 'z'); });
    if (filter.empty() && (open == "[" || open == "[[") && (begins_object || is_text))
      filter = concat(open == "[" ? ".[]" : ".[][]", is_text ? " | {text: .}" : "");
    if (filter.empty() && open == "{[" && begins_object && is_word) filter = concat(".", key, "[]");
    if (event != Event::value) open += begins_object ? '{' : '[';
    return !begins_object;
  };
  try {
    std::ignore = nlohmann::json::parse(text.begin(), text.end(), look);
  } catch (const nlohmann::json::parse_error& e) {
    if (!is_cut || e.byte <= text.size()) return std::nullopt;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
  return !filter.empty() ? filter : text[0] == '{' ? "." : "";
}

/// JSON in a file that is not named as records.
struct JsonInFile {
  std::string filter;             // for jq; empty: there are no records
  bool has_record_lines = false;  // the file is one of records but for its name
};

/// `front`: all of the file, or its first bytes.
std::optional<JsonInFile> json_in(std::string_view front, bool is_cut) {
  if (front.starts_with(byte_order_mark)) front.remove_prefix(byte_order_mark.size());
  std::optional<JsonInFile> json;
  for (int values = 0; values < 2; ++values) {  // a text may begin with one
    front = behind_blanks(front);
    if (front.empty() && json) break;
    if (!begins_as_json(front)) return std::nullopt;
    const std::size_t bytes = json_bytes(front);
    if (bytes == front.npos && !is_cut) return std::nullopt;
    const std::string_view value = front.substr(0, bytes);
    const std::optional<std::string> filter = jq_filter(value, bytes == front.npos);
    if (!filter) return std::nullopt;
    const bool is_line = *filter == "." && value.find('\n') == value.npos;
    json = values == 0 ? JsonInFile{*filter, is_line} : JsonInFile{".", is_line && json->has_record_lines};
    front.remove_prefix(value.size());
  }
  return json;
}

/// A file that is read once, from its beginning.
class SequentialFile {
 public:
  explicit SequentialFile(const std::string& path)
      : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    require(static_cast<bool>(fd_), Errc::config, path, ": cannot be opened: ", std::strerror(errno));
  }
  /// Appends bytes until the text has `size` of them or the file ends; returns whether it has.
  bool fill(std::string& text, std::size_t size) {
    while (text.size() < size) {
      const std::size_t before = text.size();
      text.resize(size);
      const ssize_t n = ::read(fd_.get(), text.data() + before, size - before);
      text.resize(before + static_cast<std::size_t>(std::max<ssize_t>(n, 0)));
      if (n < 0 && errno == EINTR) continue;
      require(n >= 0, Errc::config, path_, ": cannot be read: ", std::strerror(errno));
      if (n == 0) return true;
    }
    return false;
  }

 private:
  std::string path_;
  UniqueFd fd_;
};

[[noreturn]] void refuse_json(const std::string& path, const JsonInFile& json) {
  const bool is_json = lower_extension(path) == ".json";
  require(!json.filter.empty(), Errc::config, path, ": ", is_json ? "is named .json, " : "is JSON ",
          "without records that are seen; write its texts to a file of records, {\"text\": …} in a line of ",
          "FILE.jsonl", is_json ? ", or name it .txt if it is text" : "");
  fail(Errc::config, path, ": holds records in JSON, whose syntax would be read as text; ",
       json.has_record_lines && !is_json
           ? "name the file .jsonl"
           : concat("write a record per line to a file, e.g. jq -c '", json.filter, "' ",
                    is_json ? "FILE.json" : "FILE", " > FILE.jsonl"));
}

/// What a command may write that makes text of a file.
const char* new_file(const std::string& path) {
  const fs::path name = fs::path(path).filename();
  return is_named_records(path) || is_named_records(name.stem()) ? "FILE.jsonl" : "FILE.txt";
}

/// Without a byte order mark.
constexpr FileKind little_endian{"", "UTF-16", "convert it, e.g. iconv -f utf-16le -t utf-8 FILE > "},
    big_endian{"", "UTF-16", "convert it, e.g. iconv -f utf-16be -t utf-8 FILE > "};

/// Whether the pairs of bytes are characters of a text: none is half of a surrogate pair, or a control.
bool is_utf16(std::string_view text, std::size_t high) {
  const auto unit = [&](std::size_t i) {
    return static_cast<unsigned char>(text[i + high]) << 8 | static_cast<unsigned char>(text[i + 1 - high]);
  };
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    const int now = unit(i);
    if (now < ' ' && now != '\t' && now != '\n' && now != '\r') return false;
    if (now < 0xD800 || now >= 0xE000) continue;
    i += 2;
    if (now >= 0xDC00 || (i + 1 < text.size() && (unit(i) & 0xFC00) != 0xDC00)) return false;
  }
  return true;
}

/// Number of the pairs of bytes that are a character of ASCII; `high`: the place of the higher byte.
std::size_t ascii_pairs(std::string_view text, std::size_t high) {
  std::size_t count = 0;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2)
    count += text[i + high] == 0 && static_cast<signed char>(text[i + 1 - high]) > 0;
  return count;
}

/// UTF-16 has zero bytes at blanks and letters of ASCII. In UTF-8 they are controls, of which a text has few.
const FileKind* utf16_without_mark(std::string_view front, std::uint64_t file_bytes) {
  front = front.substr(0, 4096);
  const auto zeros = static_cast<std::size_t>(std::ranges::count(front, '\0'));
  if (zeros == 0 || file_bytes % 2 != 0) return nullptr;
  if (begins_as_utf8(front) && zeros < front.size() / 4) return nullptr;
  const std::size_t little = ascii_pairs(front, 1), big = ascii_pairs(front, 0), high = little >= big;
  if (std::max(little, big) == 0 || !is_utf16(front, high)) return nullptr;
  return high == 1 ? &little_endian : &big_endian;
}

/// `left_out`: of the folder in which the file was found; nullptr: the file itself was given.
void add_file(const std::string& path, LeftOut* left_out, std::vector<TextFile>& files) {
  TextFile file{path, fs::file_size(path), is_named_records(path)};
  if (file.bytes == 0 && left_out) return;
  std::string front;
  SequentialFile(path).fill(front, std::min<std::uint64_t>(file.bytes, file.has_records ? 4096 : 8 << 20));
  const FileKind* kind = marked_kind(front);
  if (!kind) kind = utf16_without_mark(front, file.bytes);
  if (kind) {
    if (left_out) return left_out->add(path, kind->name);
    fail(Errc::config, path, ": is ", kind->name, ", not text in UTF-8; ", kind->remedy,
         kind->remedy.ends_with("> ") ? new_file(path) : "");
  }
  if (!file.has_records) {
    constexpr std::string_view zeros("\0\0\0\0", 4);  // of numbers, and of what is between fields
    if (left_out && front.find('\0') != front.npos) return left_out->add(path, "with zero bytes");
    require(front.find(zeros) == front.npos, Errc::config, path,
            ": has several zero bytes together, as no text has; leave it out, or remove them if all else is "
            "text, e.g. tr -d '\\000' < FILE > ",
            new_file(path));
    const std::string_view begin = std::string_view(front).substr(0, 1 << 16);
    if (left_out && !looks_like_text(begin) && !begins_as_utf8(begin))
      return left_out->add(path, "with bytes of no text");
    std::optional<JsonInFile> json = json_in(front, front.size() < file.bytes);
    if (!json && lower_extension(path) == ".json") json.emplace();
    if (json && !left_out) refuse_json(path, *json);
    if (json)
      return left_out->add(path, json->filter.empty() ? LeftOut::json_reason : LeftOut::records_reason);
  }
  files.push_back(std::move(file));
}

void add_path(const std::string& path, std::span<const std::string> outputs, std::vector<TextFile>& files,
              std::vector<std::string>& lines) {
  require(path != "-", Errc::config,
          "-: standard input cannot be read by several ranks, or twice; write the text to a file");
  require(fs::exists(path), Errc::config, path, ": no such file or folder; give text to train on");
  if (!fs::is_directory(path)) {
    require(fs::is_regular_file(path), Errc::config, path,
            ": is a pipe or a device, which several ranks cannot read; write the text to a file");
    return add_file(path, nullptr, files);
  }
  const std::size_t before = files.size();
  LeftOut left_out;
  for (const std::string& file : FolderFiles(path, outputs, left_out).sorted())
    add_file(file, &left_out, files);
  if (const std::string* json = left_out.json(); json && files.size() == before)
    add_file(*json, nullptr, files);
  if (std::string line = left_out.line(path); !line.empty()) lines.push_back(std::move(line));
}

// ---- blocks of files

/// Lines of a file of records, or a text or a part of it.
struct TextBlock {
  const TextFile* file = nullptr;
  std::uint64_t line = 1;  // the number of the first one
  std::string bytes;
  bool begins = true, ends = true;  // a text
};

class TextBlockReader {
 public:
  TextBlockReader(std::span<const TextFile> files, const TextOptions& options)
      : files_(files), tokenizer_(options.tokenizer ? &*options.tokenizer : nullptr) {}

  /// False at the end.
  bool next(TextBlock& block) {
    for (;;) {
      if (!file_ && !open()) return false;
      const std::size_t cut = find_cut();
      if (cut == 0) {  // the file ends
        file_.reset();
        continue;
      }
      block = {&files_[at_ - 1], line_, buffer_.substr(0, cut), begins_, ended_ && cut == buffer_.size()};
      buffer_.erase(0, cut);
      line_ += static_cast<std::uint64_t>(std::ranges::count(block.bytes, '\n'));
      begins_ = false;
      return true;
    }
  }

 private:
  static constexpr std::size_t block_bytes = std::size_t{1} << 18;

  bool open() {
    if (at_ == files_.size()) return false;
    file_.emplace(files_[at_++].path);
    buffer_.clear(), line_ = 1, begins_ = true, ended_ = false;
    drop_mark();
    return true;
  }
  void drop_mark() {
    if (!files_[at_ - 1].has_records && !tokenizer_) return;
    ended_ = file_->fill(buffer_, byte_order_mark.size());
    if (buffer_ == byte_order_mark) buffer_.clear();
  }

  /// The bytes of the next block; 0 at the end of the file.
  std::size_t find_cut() {
    const TextFile& file = files_[at_ - 1];
    for (std::size_t size = block_bytes;; size *= 2) {
      if (!ended_) ended_ = file_->fill(buffer_, size);
      if (ended_) return buffer_.size();
      const std::size_t cut = file.has_records ? buffer_.rfind('\n') + 1  // 0 if there is none
                              : tokenizer_     ? text_cut()
                                               : buffer_.size() - 1;  // what follows has not ended
      if (cut > 0) return cut;
      require(size < max_document_bytes, Errc::config, file.path, ": ", file.has_records ? "line " : "",
              file.has_records ? concat(line_, " is longer than ") : "is a document of more than ",
              human_bytes(max_document_bytes), "; divide it, e.g. into records of a .jsonl file");
    }
  }

  /// Before a line that begins with a visible character, pre-tokenizers divide a text. Whether the tokenizer
  /// does is tried. 0: nowhere.
  std::size_t text_cut() const {
    constexpr int attempts = 16;
    std::size_t at = buffer_.size() - 1;
    for (int i = 0; i < attempts && at > buffer_.size() / 2; ++i) {
      at = buffer_.rfind('\n', at - 1);
      if (at == buffer_.npos) return 0;
      const auto next = static_cast<unsigned char>(buffer_[at + 1]);
      if (next > ' ' && next < 127 && is_divided(at + 1)) return at + 1;
    }
    return 0;
  }
  bool is_divided(std::size_t cut) const {
    constexpr std::size_t context = 256;
    const auto continues = [&](std::size_t i) {
      return i < buffer_.size() && (static_cast<unsigned char>(buffer_[i]) & 0xc0) == 0x80;
    };
    std::size_t begin = cut - std::min(cut, context), end = std::min(buffer_.size() - 1, cut + context);
    while (continues(begin)) ++begin;
    while (continues(end)) --end;
    const std::string_view text = buffer_;
    const std::string_view left = text.substr(begin, cut - begin), right = text.substr(cut, end - cut);
    if (!is_utf8(left) || !is_utf8(right)) return true;  // an error of its block
    std::vector<std::int32_t> parts = tokenizer_->encode(left, false);
    const std::vector<std::int32_t> rest = tokenizer_->encode(right, false);
    parts.insert(parts.end(), rest.begin(), rest.end());
    return parts == tokenizer_->encode(text.substr(begin, end - begin), false);
  }

  std::span<const TextFile> files_;
  const Tokenizer* tokenizer_;
  std::size_t at_ = 0;  // of the next file
  std::optional<SequentialFile> file_;
  std::string buffer_;
  std::uint64_t line_ = 1;
  bool begins_ = true, ended_ = false;
};

// ---- tokens of a block

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r\n") == line.npos; }

class DocumentEncoder {
 public:
  DocumentEncoder(const TextOptions& options, bool with_text)
      : o_(options), with_text_(with_text || !options.tokenizer), end_(end_token(options)) {
    if (!o_.tokenizer) return;
    if (o_.append_eos && !end_) line_break_ = o_.tokenizer->encode("\n", false);
    beginning_ = o_.tokenizer->beginning();
  }

  EncodedText encode(const TextBlock& block) const {
    EncodedText out;
    if (block.file->has_records)
      encode_records(block, out);
    else
      encode_text(block, out);
    return out;
  }
  /// What is between documents: not behind the last one.
  void separate(EncodedText& next) const {
    if (!o_.append_eos) return;
    if (with_text_) next.text.insert(0, 1, '\n');
    if (!pairs()) next.tokens.insert(next.tokens.begin(), line_break_.begin(), line_break_.end());
  }

 private:
  bool pairs() const { return !o_.prompt_key.empty(); }

  void encode_text(const TextBlock& block, EncodedText& out) const {
    require(!pairs(), Errc::config, block.file->path,
            ": is text; prompts and answers are records in JSON, in a file named .jsonl");
    if (o_.tokenizer) check_utf8(block);
    if (block.begins) begin_document(out);
    add(block.bytes, out);
    if (block.ends) end_document(out);
  }
  [[noreturn]] static void refuse_encoding(const TextBlock& block, std::uint64_t line,
                                           std::string_view rest) {
    fail(Errc::config, escaped(block.file->path), ":", line, ": is not UTF-8: ", escaped(rest.substr(0, 1)),
         looks_like_text(block.bytes)
             ? concat("; convert the file from its encoding, e.g. iconv -f latin1 -t utf-8 FILE > ",
                      new_file(block.file->path))
             : ", and no text in another encoding, since many bytes are controls; leave the file out");
  }
  static void check_utf8(const TextBlock& block) {
    std::string_view rest = block.bytes;
    std::uint64_t line = block.line;
    while (!rest.empty()) {
      const std::size_t length = utf8_length(rest);
      if (length == 0) refuse_encoding(block, line, rest);
      line += rest[0] == '\n';
      rest.remove_prefix(length);
    }
  }

  void encode_records(const TextBlock& block, EncodedText& out) const {
    std::string_view rest = block.bytes;
    for (std::uint64_t number = block.line; !rest.empty(); ++number) {
      const std::string_view line = rest.substr(0, rest.find('\n'));
      rest.remove_prefix(std::min(rest.size(), line.size() + 1));
      if (!is_blank(line)) encode_record(line, concat(block.file->path, ":", number), out);
    }
  }
  void encode_record(std::string_view line, const std::string& place, EncodedText& out) const {
    const nlohmann::json record = parse_json(line, place, JsonDialect::strict);
    if (pairs()) return encode_pair(record, place, out);
    const std::string& text = value_of(record, o_.text_key, "--text-key KEY (TextOptions::text_key)", place);
    if (text.empty()) return;
    begin_document(out);
    add(text, out);
    end_document(out);
  }
  void encode_pair(const nlohmann::json& record, const std::string& place, EncodedText& out) const {
    const std::string& prompt =
        value_of(record, o_.prompt_key, "--prompt-key KEY (TextOptions::prompt_key)", place);
    const std::string& answer =
        value_of(record, o_.answer_key, "--answer-key KEY (TextOptions::answer_key)", place);
    require(!answer.empty(), Errc::config, escaped(place), ": ", escaped(o_.answer_key),
            ": is empty; there is nothing to learn, leave the record out");
    const std::uint64_t begin = out.tokens.size();
    const std::vector<std::int32_t> start = o_.tokenizer->encode(prompt, false);
    const auto of_template = std::span(start).first(std::min(start.size(), beginning_.size()));
    if (!std::ranges::equal(of_template, beginning_)) append(beginning_, out);  // else by a chat template
    append(start, out);
    const std::uint64_t prompt_end = out.tokens.size();
    append(o_.tokenizer->encode(answer, false), out);
    append(line_break_, out);
    end_document(out);
    const std::uint64_t tokens = out.tokens.size() - begin;
    require(
        o_.max_pair_tokens == 0 || tokens <= o_.max_pair_tokens, Errc::config, escaped(place),
        ": prompt and answer have ", tokens, " tokens, more than the ", o_.max_pair_tokens,
        " of a sample; shorten them, or let them be cut (--long-samples cut, TextOptions::max_pair_tokens)");
    out.pairs.push_back(
        {begin, static_cast<std::uint32_t>(prompt_end - begin), static_cast<std::uint32_t>(tokens)});
    if (with_text_) out.text += concat(out.documents ? "\n" : "", prompt, answer);
    ++out.documents;
  }
  static bool is_list_of_messages(const nlohmann::json& value) {
    return value.is_array() && !value.empty() && value.front().is_object();
  }
  [[noreturn]] static void refuse_messages(const std::string& key, const std::string& place) {
    fail(
        Errc::config, escaped(concat(place, ": ", key)),
        ": is a list of messages, and chat templates are not run here; write the prompt and the answer as "
        "two texts (docs/guide/texts.md), and give train_lm --prompt-key KEY --answer-key KEY (TextOptions)");
  }
  /// `remedy`: how the key is given.
  static const std::string& value_of(const nlohmann::json& record, const std::string& key, const char* remedy,
                                     const std::string& place) {
    const auto refuse = [&](const std::string& what) {
      fail(Errc::config, escaped(concat(place, ": ", what, "; give ", remedy)));
    };
    if (!record.is_object()) refuse(concat("expected an object { … }, found ", to_display(record)));
    const auto found = record.find(key);
    if (found == record.end()) {
      for (const char* usual : {"messages", "conversations"})
        if (const auto list = record.find(usual); list != record.end() && is_list_of_messages(*list))
          refuse_messages(usual, place);
      std::vector<std::string> keys;
      for (const auto& [name, value] : record.items()) keys.push_back(name);
      refuse(concat("there is no \"", key, "\" among ", keys.empty() ? "no keys" : listed(keys)));
    }
    if (is_list_of_messages(*found)) refuse_messages(key, place);
    if (!found->is_string()) refuse(concat(key, ": expected a text in quotes, found ", to_display(*found)));
    return found->get_ref<const std::string&>();
  }

  void begin_document(EncodedText& out) const {
    if (out.documents++ > 0) {
      if (with_text_ && o_.append_eos) out.text += '\n';
      append(line_break_, out);
    }
    append(beginning_, out);
  }
  void add(const std::string& text, EncodedText& out) const {
    if (with_text_) out.text += text;
    if (o_.tokenizer) append(o_.tokenizer->encode(text, false), out);
  }
  void end_document(EncodedText& out) const {
    if (end_ && (out.tokens.empty() || out.tokens.back() != *end_)) out.tokens.push_back(*end_);
  }
  static void append(const std::vector<std::int32_t>& tokens, EncodedText& out) {
    out.tokens.insert(out.tokens.end(), tokens.begin(), tokens.end());
  }

  const TextOptions& o_;
  const bool with_text_;
  const std::optional<std::int32_t> end_;
  std::vector<std::int32_t> beginning_;
  std::vector<std::int32_t> line_break_;  // between documents without an end token
};

/// The first error, in the order of the blocks, is thrown.
std::vector<EncodedText> encode_blocks(const DocumentEncoder& encoder, std::span<const TextBlock> blocks,
                                       ThreadTeam& team) {
  std::vector<EncodedText> encoded(blocks.size());
  std::vector<std::exception_ptr> errors(blocks.size());
  std::atomic<std::size_t> next{0};
  team.run([&](int) {
    for (std::size_t i; (i = next.fetch_add(1)) < blocks.size();) try {
        encoded[i] = encoder.encode(blocks[i]);
      } catch (...) {
        errors[i] = std::current_exception();
      }
  });
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
  return encoded;
}

}  // namespace

std::optional<std::int32_t> end_token(const TextOptions& o) {
  if (!o.append_eos) return std::nullopt;
  if (o.eos_token_id) return o.eos_token_id;
  return o.tokenizer ? o.tokenizer->eos_token_id() : std::nullopt;
}

std::vector<std::string> paths_matching(const std::string& pattern) {
  glob_t found{};
  std::vector<std::string> paths;
  if (::glob(pattern.c_str(), 0, nullptr, &found) == 0)
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  require(!paths.empty(), Errc::config, pattern, ": no file has such a name");
  std::ranges::sort(paths);
  return paths;
}

std::vector<TextFile> text_files(const std::string& data, std::span<const std::string> outputs,
                                 std::vector<std::string>* left_out) {
  std::vector<TextFile> files;
  std::vector<std::string> lines;
  try {
    const bool several = data.find(',') != data.npos && !fs::exists(data);
    for (const std::string& path : several ? parts_of(data, ',') : std::vector{data}) {
      const bool pattern = path.find_first_of("*?[") != path.npos && !fs::exists(path);
      for (const std::string& match : pattern ? paths_matching(path) : std::vector{path})
        add_path(match, outputs, files, lines);
    }
  } catch (const fs::filesystem_error& e) {
    fail(Errc::config, data, ": cannot be read: ", e.code().message());
  }
  require(!files.empty() || lines.empty(), Errc::config, lines.empty() ? "" : lines[0],
          "; there is no other text");
  if (left_out) left_out->insert(left_out->end(), lines.begin(), lines.end());
  return files;
}

void encode_documents(std::span<const TextFile> files, const TextOptions& o, bool with_text,
                      const std::function<void(EncodedText&)>& use) {
  require(o.prompt_key.empty() == o.answer_key.empty(), Errc::config,
          "--prompt-key and --answer-key: ", "give both, or none");
  require(
      o.prompt_key.empty() || o.text_key == TextOptions{}.text_key, Errc::config,
      "--text-key and --prompt-key exclude each other: ", "a record has a text, or a prompt and its answer");
  require(o.prompt_key.empty() || o.tokenizer, Errc::invalid_argument,
          "prompts and answers need a tokenizer");
  const DocumentEncoder encoder(o, with_text);
  TextBlockReader reader(files, o);
  ThreadTeam team(std::max(1, o.threads));
  TextProgress progress;
  for (const TextFile& file : files) progress.all_bytes += file.bytes;
  std::vector<TextBlock> blocks;
  for (bool more = true; more;) {
    blocks.clear();
    while (blocks.size() < 8 * static_cast<std::size_t>(team.size()) &&
           (more = reader.next(blocks.emplace_back())))
      progress.bytes += blocks.back().bytes.size();
    if (!more) blocks.pop_back();
    for (EncodedText& encoded : encode_blocks(encoder, blocks, team)) {
      if (encoded.documents > 0 && progress.documents > 0) encoder.separate(encoded);
      progress.documents += encoded.documents;
      progress.tokens += o.tokenizer ? encoded.tokens.size() : encoded.text.size();
      use(encoded);
    }
    if (o.on_progress) o.on_progress(progress);
  }
}

}  // namespace rz
