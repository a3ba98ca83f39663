#pragma once
/// The values of all keys after a configuration was read, each with its origin.

#include <functional>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "comm/core/error.h"
#include "sharding/config/key_spec.h"
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

/// What is wrong with a configuration, so that one answer has all of it.
class ConfigErrors {
 public:
  /// The most important come first.
  enum class Kind { unknown_key, value, unsupported, combination };

  /// Adds the error that `read` throws, if it throws one, and returns whether it did not. `path`: the value
  /// that is then wrong, or "".
  template <class F>
  bool collect(Kind kind, const std::string& path, const F& read) {
    try {
      read();
      return true;
    } catch (const Error& e) {
      add(kind, path, e);
      return false;
    }
  }
  void add(Kind, const std::string& path, const Error&);
  bool empty() const { return errors_.empty(); }
  /// Whether a value at one of the paths, or in such a section, is wrong.
  bool has_wrong(std::initializer_list<std::string_view> paths) const;
  /// Throws the errors as one, a line each; nothing if there are none. Errc::unsupported if all are.
  void throw_all() const;

 private:
  struct Entry {
    Kind kind;
    Error error;
  };
  std::vector<Entry> errors_;
  std::vector<std::string> wrong_;
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
/// Errc::unsupported for a refused key. They are collected, and a wrong value is then the default, or null.
class SettingsReader {
 public:
  /// `origins`: of values at paths that are not the file's own, or have another spelling there.
  SettingsReader(std::string file, ArgumentSource source, std::map<std::string, std::string> origins,
                 Settings& settings, ConfigErrors& errors)
      : file_(std::move(file)),
        source_(std::move(source)),
        origins_(std::move(origins)),
        settings_(settings),
        errors_(errors) {}

  void read(const nlohmann::json& document);
  /// About keys without effect, and keys that are not applied yet.
  std::vector<std::string> warnings() const;

 private:
  void read_object(const JsonObject&, const ObjectSpec&);
  void refuse_unknown_keys(const JsonObject&, const ObjectSpec&);
  void read_section(const JsonObject&, const KeySpec&);
  void read_key(const JsonObject&, const ObjectSpec&, const KeySpec&);
  void read_auto(const JsonObject&, const ObjectSpec&, const KeySpec&);
  void read_absent(const JsonObject&, const ObjectSpec&, const KeySpec&);
  void require_agreement(const JsonObject&, const KeySpec&, const nlohmann::json& value) const;
  void apply_treatment(const JsonObject&, const KeySpec&, const nlohmann::json& value);
  void add(const JsonObject&, const KeySpec&, nlohmann::json value, std::string origin, bool given);

  std::string file_;
  ArgumentSource source_;
  std::map<std::string, std::string> origins_;
  Settings& settings_;
  ConfigErrors& errors_;
  std::vector<std::string> warnings_, unused_;
};

/// The value in the form of its table, as pydantic has it: numbers, and true and false, may be in quotes.
/// `path`: that of the object around. Errc::config if it has another form.
nlohmann::json checked_value(const nlohmann::json& value, const KeySpec&, const std::string& file,
                             const std::string& path);
/// A text that is a number, true or false as that, and any other value as it is.
nlohmann::json without_quotes(const nlohmann::json&);
/// The default. Errc::config if the key is required.
nlohmann::json default_value(const JsonObject&, const KeySpec&);

}  // namespace rz::ds
