#include "sharding/io/json.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

using nlohmann::json;
constexpr int max_depth = 64;

std::string cut(std::string text, std::size_t max) {
  if (text.size() <= max) return text;
  while (max > 0 && (static_cast<unsigned char>(text[max]) & 0xc0) == 0x80)
    --max;  // do not cut within a character
  return text.substr(0, max) + "…";
}

/// The parser takes a zero byte for the end of the text and would ignore everything after it.
void refuse_zero_bytes(std::string_view text, const std::string& file) {
  const auto zero = text.find('\0');
  require(zero == std::string_view::npos, Errc::config, escaped(file), ": not valid JSON: byte ", zero + 1,
          " is zero");
}

/// Replaces comments and trailing commas by spaces, and Infinity by a text, so that positions in messages
/// stay correct.
class Relaxer {
 public:
  explicit Relaxer(std::string_view text) : text_(text) {}

  std::string run() {
    while (at_ < text_.size()) step();
    return std::move(text_);
  }

 private:
  bool ahead(std::string_view what) const { return text_.compare(at_, what.size(), what) == 0; }

  void step() {
    const char c = text_[at_];
    if (c == '"') return skip_string();
    if (c == '#' || ahead("//")) return blank_until("\n", false);
    if (ahead("/*")) return blank_until("*/", true);
    if ((c == 'I' || c == '-') && quote_infinity()) return;
    if ((c == '}' || c == ']') && comma_ != none) text_[comma_] = ' ';
    if (!std::isspace(static_cast<unsigned char>(c))) {
      // A comma behind no value stays, so that the parser reports it.
      comma_ = c == ',' && last_ != ',' && last_ != '{' && last_ != '[' ? at_ : none;
      last_ = c;
    }
    ++at_;
  }

  /// Python's Infinity becomes the text "inf". False if there is none here.
  bool quote_infinity() {
    const std::string_view sign = text_[at_] == '-' ? "-" : "";
    const std::size_t length = sign.size() + 8;
    const auto is_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
    if (text_.compare(at_ + sign.size(), 8, "Infinity") != 0 || is_word(last_)) return false;
    if (at_ + length < text_.size() && is_word(text_[at_ + length])) return false;
    std::string quoted = concat('"', sign, "inf\"");
    quoted.resize(length, ' ');
    text_.replace(at_, length, quoted);
    return true;
  }

  void skip_string() {
    comma_ = none;
    last_ = '"';
    for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_)
      if (text_[at_] == '\\') ++at_;
    if (at_ < text_.size()) ++at_;
  }

  void blank_until(std::string_view end, bool end_too) {
    // An unterminated comment is kept, so that the parser reports it.
    const auto found = text_.find(end, at_ + (end_too ? 2 : 0));
    if (found == std::string::npos && end_too) return void(at_ = text_.size());
    const auto stop = found == std::string::npos ? text_.size() : found + (end_too ? end.size() : 0);
    for (; at_ < stop; ++at_)
      if (text_[at_] != '\n') text_[at_] = ' ';
  }

  static constexpr auto none = std::string::npos;
  std::string text_;
  std::size_t at_ = 0, comma_ = none;
  char last_ = '{';  // the last character that is no space or comment
};

/// Length of the string literal at the front of `text`, quotes included.
std::size_t literal_length(std::string_view text) {
  std::size_t at = 1;
  for (; at < text.size() && text[at] != '"'; ++at)
    if (text[at] == '\\') ++at;
  return std::min(at + 1, text.size());
}

/// The line, from 1, of key number `index` of valid JSON without comments, in the order of the text.
int line_of_key(std::string_view text, std::size_t index) {
  for (std::size_t at = text.find('"'); at < text.size(); at = text.find('"', at)) {
    const std::size_t end = at + literal_length(text.substr(at));
    const std::size_t next = text.find_first_not_of(" \t\r\n", end);
    if (next < text.size() && text[next] == ':' && index-- == 0)
      return 1 + static_cast<int>(std::ranges::count(text.substr(0, at), '\n'));
    at = end;
  }
  return 0;
}

/// Parser callback that throws on a duplicate key, and on nesting that is too deep.
class DuplicateKeyDetector {
 public:
  DuplicateKeyDetector(const std::string& file, std::string_view text) : file_(file), text_(text) {}

  bool operator()(int depth, json::parse_event_t event, json& parsed) {
    require(depth <= max_depth, Errc::config, escaped(file_), ": nested more than ", max_depth,
            " levels deep");
    if (event == json::parse_event_t::object_start) seen_.emplace_back();
    if (event == json::parse_event_t::object_end) seen_.pop_back();
    if (event == json::parse_event_t::key) see(parsed.get_ref<const std::string&>());
    return true;
  }

 private:
  void see(const std::string& key) {
    const auto [first, is_new] = seen_.back().emplace(key, keys_);
    if (!is_new)
      fail(Errc::config, escaped(concat(file_, ": line ", line_of_key(text_, keys_), ": key '", cut(key, 100),
                                        "' is given twice in one object, first on line ",
                                        line_of_key(text_, first->second), "; remove one")));
    ++keys_;
  }

  const std::string& file_;
  std::string_view text_;
  std::size_t keys_ = 0;                                  // read so far
  std::vector<std::map<std::string, std::size_t>> seen_;  // of the objects around; each key's number
};

std::string without_prefix(std::string what) {
  const auto end = what.find("] ");
  return cut(end == std::string::npos ? what : what.substr(end + 2), 240);
}

}  // namespace

json parse_json(std::string_view text, const std::string& file, JsonDialect dialect) {
  refuse_zero_bytes(text, file);
  const std::string relaxed = dialect == JsonDialect::relaxed ? Relaxer(text).run() : std::string();
  if (dialect == JsonDialect::relaxed) text = relaxed;
  try {
    return json::parse(text.begin(), text.end(), DuplicateKeyDetector(file, text));
  } catch (const json::exception& e) {
    fail(Errc::config, escaped(concat(file, ": not valid JSON: ", without_prefix(e.what()))));
  }
}

std::string read_text_file(const std::string& path, std::size_t max) {
  std::error_code ignored;  // fopen() would wait for a writer
  require(std::filesystem::symlink_status(path, ignored).type() != std::filesystem::file_type::fifo,
          Errc::config, path, ": is a named pipe; give a regular file");
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  require(file != nullptr, Errc::config, path, ": cannot be opened: ", std::strerror(errno));
  std::string text;
  char block[1 << 16];
  while (const std::size_t n = std::fread(block, 1, sizeof block, file.get())) {
    text.append(block, n);
    require(text.size() <= max, Errc::config, path, ": longer than ", human_bytes(max));
  }
  require(!std::ferror(file.get()), Errc::config, path, ": cannot be read: ", std::strerror(errno));
  return text;
}

JsonObject::JsonObject(const json& node, std::string file, std::string path)
    : node_(&node), file_(std::move(file)), path_(std::move(path)) {
  require(node.is_object(), Errc::config, escaped(file_), ": ", escaped(path_), path_.empty() ? "" : ": ",
          "expected an object { … }, found ", to_display(node));
}

bool JsonObject::has(std::string_view key) const { return node_->contains(key); }

std::vector<std::string> JsonObject::keys() const {
  std::vector<std::string> names;
  for (const auto& [key, value] : node_->items()) names.push_back(key);
  return names;
}

const json& JsonObject::at(std::string_view key) const { return *node_->find(key); }

std::string JsonObject::path(std::string_view key) const {
  return escaped(concat(path_, path_.empty() ? "" : ".", key));
}

void JsonObject::fail_at(std::string_view key, const std::string& what) const {
  const std::string at = path(key);
  fail(Errc::config, escaped(concat(file_, at.empty() ? "" : ": ", at, ": ", what)));
}

double JsonObject::number(std::string_view key, double absent, double min, double max) const {
  if (!has(key)) return absent;
  const json& value = at(key);
  if (!value.is_number()) fail_at(key, concat("expected a number, found ", to_display(value)));
  const auto x = value.get<double>();
  if (!(x >= min && x <= max))
    fail_at(key, concat("must be from ", min, " to ", max, ", found ", to_display(value)));
  return x;
}

std::int64_t JsonObject::integer(std::string_view key, std::int64_t absent, std::int64_t min,
                                 std::int64_t max) const {
  if (!has(key)) return absent;
  const json& value = at(key);
  const bool whole = value.is_number() && value.get<double>() == std::floor(value.get<double>());
  if (!whole) fail_at(key, concat("expected a whole number, found ", to_display(value)));
  const auto refuse = [&] {
    fail_at(key, concat("must be from ", min, " to ", max, ", found ", to_display(value)));
  };
  // Doubles do not tell 2^63 from the largest number below it.
  std::int64_t n = 0;
  if (value.is_number_integer()) {
    n = value.get<std::int64_t>();
    if (value.is_number_unsigned() && value.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max())
      refuse();
  } else {
    const auto x = value.get<double>();
    if (!(x >= -0x1p63 && x < 0x1p63)) refuse();
    n = static_cast<std::int64_t>(x);
  }
  if (n < min || n > max) refuse();
  return n;
}

std::int64_t JsonObject::required_integer(std::string_view key, std::int64_t min, std::int64_t max) const {
  if (!has(key)) fail_at(key, "missing; give a whole number");
  return integer(key, 0, min, max);
}

bool JsonObject::boolean(std::string_view key, bool absent) const {
  if (!has(key)) return absent;
  if (!at(key).is_boolean()) fail_at(key, concat("expected true or false, found ", to_display(at(key))));
  return at(key).get<bool>();
}

std::string JsonObject::text(std::string_view key, const std::string& absent) const {
  if (!has(key)) return absent;
  if (!at(key).is_string()) fail_at(key, concat("expected a text in quotes, found ", to_display(at(key))));
  return at(key).get<std::string>();
}

JsonObject JsonObject::object(std::string_view key) const {
  if (!has(key)) fail_at(key, "missing; give an object { … }");
  return JsonObject(at(key), file_, path(key));
}

std::string to_display(const json& value) {
  return cut(escaped(value.dump(-1, ' ', false, json::error_handler_t::replace)), 60);
}

}  // namespace rz
