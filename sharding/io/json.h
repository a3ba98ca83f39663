#pragma once
/// Parser and reader for JSON input. The parser is strict about structure (duplicate keys are errors, depth
/// is bounded) and accepts common extensions of configuration files where requested. Errors name the file and
/// the key path in one line; control characters and invalid UTF-8 are printed as \xNN.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace rz {

/// `relaxed` also accepts // , # and /* */ comments and trailing commas, and reads Python's Infinity as the
/// text "inf".
enum class JsonDialect { strict, relaxed };

/// The whole text must be one value. Errc::config, "FILE: …", for bad syntax (with line and column), a zero
/// byte, a duplicate key (with both lines), or nesting beyond 64 levels.
nlohmann::json parse_json(std::string_view text, const std::string& file, JsonDialect);

/// Reads a whole file. Errc::config, "FILE: …", if it cannot be read or is longer than `max` bytes.
std::string read_text_file(const std::string& path, std::size_t max = std::size_t{16} << 20);

/// An object of a parsed document, and its key path. Refers to the document, which must outlive it. Every
/// error is Errc::config and starts with "FILE: key.path: ". An absent key yields the default; the
/// `required_…` functions throw.
class JsonObject {
 public:
  /// Errc::config unless `node` is a JSON object.
  JsonObject(const nlohmann::json& node, std::string file, std::string path = {});

  /// True if the key is present, even with value null.
  bool has(std::string_view key) const;
  std::vector<std::string> keys() const;
  const nlohmann::json& at(std::string_view key) const;  ///< the key must be present

  /// Accepts 1e9 and 8.0 as integers.
  std::int64_t integer(std::string_view key, std::int64_t absent, std::int64_t min, std::int64_t max) const;
  std::int64_t required_integer(std::string_view key, std::int64_t min, std::int64_t max) const;
  double number(std::string_view key, double absent, double min, double max) const;
  bool boolean(std::string_view key, bool absent) const;
  std::string text(std::string_view key, const std::string& absent) const;
  JsonObject object(std::string_view key) const;

  const std::string& file() const { return file_; }
  const std::string& path() const { return path_; }
  std::string path(std::string_view key) const;  ///< "zero_optimization.stage"
  /// Throws Errc::config, "FILE: key.path: what"; "FILE: what" if the path is empty.
  [[noreturn]] void fail_at(std::string_view key, const std::string& what) const;

 private:
  const nlohmann::json* node_;
  std::string file_, path_;
};

/// A value for use in a message: `"auto"`, `[1,2]`; truncated if it is long.
std::string to_display(const nlohmann::json&);

}  // namespace rz
