#pragma once
/// What is known of every key of a DeepSpeed configuration, honoured or not, and what a configuration that
/// uses it is told.

#include <span>
#include <string>
#include <vector>

#include "sharding/io/json.h"

namespace rz::ds {

/// What becomes of a known key.
enum class KeyRule {
  supported,            ///< read elsewhere
  ignored,              ///< changes no result: accepted with a warning
  always_on,            ///< true is what is done anyway; other values are harmless
  one_of,               ///< accepted with one of `values`, else not supported yet
  unsupported_feature,  ///< an object that may say "enabled": true, which is not supported yet
  unsupported_device,   ///< an object whose "device" must be "none"
  deprecated,           ///< accepted with a warning that says what to write instead
};

struct KeySpec {
  const char* key;
  KeyRule rule;
  const char* values = "";  ///< only: a JSON list; obsolete: the advice
};

/// The tables, an object of the configuration each.
std::span<const KeySpec> top_keys();
std::span<const KeySpec> zero_keys();
std::span<const KeySpec> optimizer_keys();
std::span<const KeySpec> adam_keys();
std::span<const KeySpec> sgd_keys();
std::span<const KeySpec> fp16_keys();
std::span<const KeySpec> bf16_keys();
std::span<const KeySpec> data_types_keys();
std::span<const KeySpec> ringzero_keys();

/// Judges the keys of one object by its table.
class KeyValidator {
 public:
  KeyValidator(std::string file, std::vector<std::string>& warnings)
      : file_(std::move(file)), warnings_(warnings) {}
  /// Errc::config for an unknown key, with the nearest known one; Errc::unsupported for what would change
  /// results or memory and is not done; warnings for the rest.
  void validate(const JsonObject&, std::span<const KeySpec>);

 private:
  [[noreturn]] void refuse(const JsonObject&, const std::string& key, const std::string& value,
                           const std::string& advice) const;
  void warn(const JsonObject&, const char* key, const std::string& what);
  void apply(const JsonObject&, const KeySpec&);
  void apply_one_of(const JsonObject&, const KeySpec&) const;
  void apply_feature(const JsonObject&, const char* key) const;
  void apply_device(const JsonObject&, const char* key) const;

  std::string file_;
  std::vector<std::string>& warnings_;
};

}  // namespace rz::ds
