#pragma once
/// The values of all keys after a configuration was read, each with its origin.

#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/core/error.h"
#include "sharding/config/arguments.h"
#include "sharding/config/keys.h"
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
  /// By the order of the keys of the whole configuration.
  void sort(const ObjectSpec& whole);
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

/// What stands behind "auto", and fills keys that the file leaves out: the arguments of a run. Refers to
/// them, and they must outlive it.
class ArgumentResolver {
 public:
  ArgumentResolver(const TrainingArguments& arguments, const RunFacts& facts, const Settings& settings,
                   const ConfigErrors& errors, const std::string& file)
      : arguments_(arguments), facts_(facts), settings_(settings), errors_(errors), file_(file) {}

  /// The argument, if it was given.
  std::optional<ArgumentValue> given(std::string_view argument);
  /// What "auto" stands for; nothing if that is unknown.
  std::optional<ArgumentValue> automatic(std::string_view argument);
  const std::optional<std::int64_t>& hidden_size() const { return facts_.hidden_size; }
  /// Errors name the arguments that no key had a use for.
  void require_all_used(ConfigErrors&) const;

 private:
  std::optional<ArgumentValue> max_rate();
  std::optional<ArgumentValue> warmup_by_ratio();
  std::optional<ArgumentValue> total_steps() const;

  const TrainingArguments& arguments_;
  const RunFacts& facts_;
  const Settings& settings_;
  const ConfigErrors& errors_;
  const std::string& file_;
  std::set<std::string_view> used_;
  bool ratio_used_ = false;
};

/// Reads a configuration by the tables. Errors are Errc::config, "FILE: key.path: reason; remedy", or
/// Errc::unsupported for a refused key. They are collected, and a wrong value is then the default, or null.
class SettingsReader {
 public:
  /// `origins`: of values at paths that are not the file's own, or have another spelling there.
  SettingsReader(std::string file, ArgumentResolver& arguments, std::map<std::string, std::string> origins,
                 Settings& settings, ConfigErrors& errors)
      : file_(std::move(file)),
        arguments_(arguments),
        origins_(std::move(origins)),
        settings_(settings),
        errors_(errors) {}

  void read(const nlohmann::json& document);
  /// About keys without effect, and keys that are not applied yet.
  std::vector<std::string> warnings() const;

 private:
  void read_object(const JsonObject&, const ObjectSpec&);
  void refuse_unknown_keys(const JsonObject&, const ObjectSpec&);
  void read_value(const JsonObject&, const ObjectSpec&, const KeySpec&);
  void read_section(const JsonObject&, const KeySpec&);
  void read_key(const JsonObject&, const ObjectSpec&, const KeySpec&);
  void read_auto(const JsonObject&, const ObjectSpec&, const KeySpec&);
  void read_absent(const JsonObject&, const KeySpec&);
  nlohmann::json checked(const JsonObject&, const KeySpec&, const nlohmann::json& value) const;
  void require_agreement(const JsonObject&, const KeySpec&, const nlohmann::json& value) const;
  void apply_treatment(const JsonObject&, const KeySpec&, const nlohmann::json& value);
  void add(const JsonObject&, const KeySpec&, nlohmann::json value, std::string origin, bool given);

  std::string file_;
  ArgumentResolver& arguments_;
  std::map<std::string, std::string> origins_;
  Settings& settings_;
  ConfigErrors& errors_;
  std::vector<std::string> warnings_, unused_;
};

/// Rewrites a configuration to today's keys, with a warning for each old one; keys of stage 3 get their
/// prefix without a warning. Returns today's path → its origin, "file, as OLD.PATH". It is an error if both
/// are given.
std::map<std::string, std::string> rename_old_spellings(nlohmann::json& document, const std::string& file,
                                                        std::vector<std::string>& warnings, ConfigErrors&);

/// Derives values that follow from several keys, which are set before. Adds errors of combinations, but none
/// of a section with a wrong value, so that no error follows from another. Derived values enter the settings.
void complete(Draft&, Settings&, const RunFacts&, ConfigErrors&);

struct ConfiguredMesh {
  MeshSizes sizes;         ///< without "auto"
  bool is_default = true;  ///< all ranks shard because no key says otherwise
};
/// The sizes that keys of the mesh, and those of others with its meaning, state. Errc::config, which begins
/// with `file`, if they contradict each other or do not fit.
ConfiguredMesh mesh_of(const Settings&, const RunFacts&, const std::string& file);
/// The sizes of a mesh that is not the default enter the settings.
void show_mesh(const MeshSizes&, Settings&);

/// The batch sizes among the settings, with Hugging Face's micro batch of 8 if "auto" cannot be derived from
/// another size.
BatchConfig batch_of(const Settings&);
/// Two of the three sizes determine the third. Train or micro alone imply accumulation 1. Errc::config, which
/// begins with `file`, if they do not divide exactly, with the numbers and the nearest that do; or if
/// accumulation alone, or none of the three, is given. `mesh`: without "auto".
BatchSizes resolve_batch(const BatchConfig&, const MeshSizes&, const std::string& file);
/// "Adam" and so on.
OptimizerConfig::Type optimizer_type(const std::string& name);

}  // namespace rz::ds
