#pragma once
/// The values of all keys after a configuration was read, each with its origin.

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "sharding/config/keys/key_spec.h"
#include "sharding/io/json.h"

namespace rz::ds {

/// Values by path, in the order in which they were read.
class Settings {
 public:
  struct Entry {
    std::string path;
    const KeySpec* key;
    nlohmann::json value;
    std::string origin;
    bool given;  ///< not a default
  };

  void add(Entry entry) { entries_.push_back(std::move(entry)); }
  /// Replaces the value at a path that was read.
  void replace(std::string_view path, nlohmann::json value, std::string origin);
  const std::vector<Entry>& entries() const { return entries_; }
  /// Null if the key was not read: it belongs to a section that is absent.
  const Entry* find(std::string_view path) const;
  /// True for a section with values.
  bool has_section(std::string_view path) const;

  /// The value at a path that was read.
  const nlohmann::json& at(std::string_view path) const;
  double number(std::string_view path) const { return at(path).get<double>(); }
  std::int64_t integer(std::string_view path) const { return at(path).get<std::int64_t>(); }
  bool boolean(std::string_view path) const { return at(path).get<bool>(); }
  std::string text(std::string_view path) const { return at(path).get<std::string>(); }
  /// Nothing for null.
  std::optional<double> optional_number(std::string_view path) const;
  std::optional<std::int64_t> optional_integer(std::string_view path) const;

 private:
  std::vector<Entry> entries_;
};

struct ArgumentValue {
  nlohmann::json value;
  std::string origin;
};

/// What the run knows of arguments.
struct ArgumentSource {
  /// The argument, if it was given.
  std::function<std::optional<ArgumentValue>(Argument)> given;
  /// What "auto" stands for; nothing if that is unknown.
  std::function<std::optional<ArgumentValue>(Argument)> automatic;
};

/// Reads a configuration by the tables. Errors are Errc::config, "FILE: key.path: reason; remedy", or
/// Errc::unsupported for a refused key.
class SettingsReader {
 public:
  SettingsReader(std::string file, ArgumentSource source, std::map<std::string, std::string> old_paths,
                 Settings& settings)
      : file_(std::move(file)),
        source_(std::move(source)),
        old_paths_(std::move(old_paths)),
        settings_(settings) {}

  void read(const nlohmann::json& document);
  /// About keys without effect, and keys that are not applied yet.
  std::vector<std::string> warnings() const;

 private:
  void read_object(const JsonObject&, const ObjectSpec&);
  void read_section(const JsonObject&, const KeySpec&);
  void read_key(const JsonObject&, const ObjectSpec&, const KeySpec&);
  void read_auto(const JsonObject&, const ObjectSpec&, const KeySpec&);
  void read_absent(const JsonObject&, const KeySpec&);
  void require_agreement(const JsonObject&, const KeySpec&, const nlohmann::json& value) const;
  void apply_treatment(const JsonObject&, const KeySpec&, const nlohmann::json& value);
  void add(const JsonObject&, const KeySpec&, nlohmann::json value, std::string origin, bool given);

  std::string file_;
  ArgumentSource source_;
  std::map<std::string, std::string> old_paths_;
  Settings& settings_;
  std::vector<std::string> warnings_, unused_;
};

/// The value of a key in the form of its table. Errc::config if it has another form.
nlohmann::json checked_value(const JsonObject&, const KeySpec&);
/// The default. Errc::config if the key is required.
nlohmann::json default_value(const JsonObject&, const KeySpec&);

}  // namespace rz::ds
