#pragma once
/// Tables of all keys of a DeepSpeed configuration, supported or not, and the validator that applies them.

#include <span>
#include <string>
#include <vector>

#include "sharding/io/json.h"

namespace rz::ds {

/// How a known key is handled.
enum class KeyRule {
  supported,            ///< read by ds_config.cpp
  ignored,              ///< does not change results: accepted with a warning
  always_on,            ///< true is the behaviour of this library; other values are harmless
  one_of,               ///< one of `values` is accepted; other values are not supported yet
  unsupported_feature,  ///< an object; "enabled": true is not supported yet
  unsupported_device,   ///< an object; "device" must be "none"
  deprecated,           ///< accepted with a warning that names the replacement
};

struct KeySpec {
  const char* key;
  KeyRule rule;
  const char* values = "";  ///< one_of: a JSON list; deprecated: the advice
};

/// One table per object of the configuration.
std::span<const KeySpec> top_keys();
std::span<const KeySpec> zero_keys();
std::span<const KeySpec> optimizer_keys();
std::span<const KeySpec> adam_keys();
std::span<const KeySpec> sgd_keys();
std::span<const KeySpec> fp16_keys();
std::span<const KeySpec> bf16_keys();
std::span<const KeySpec> data_types_keys();
std::span<const KeySpec> ringzero_keys();

/// Validates the keys of one object against its table.
class KeyValidator {
 public:
  KeyValidator(std::string file, std::vector<std::string>& warnings)
      : file_(std::move(file)), warnings_(warnings) {}
  /// Errc::config for an unknown key, with the nearest known one. Errc::unsupported for a value that would
  /// change results or memory and is not supported. Appends warnings for the rest.
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
