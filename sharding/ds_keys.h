#pragma once
/// What is known of every key of a DeepSpeed configuration, honoured or not, and what a configuration that
/// uses it is told.

#include <span>
#include <string>
#include <vector>

#include "sharding/json.h"

namespace rz::ds {

/// What becomes of a known key.
enum class Rule {
  honoured,  ///< read elsewhere
  harmless,  ///< changes no result: accepted with a warning
  always,    ///< true is what is done anyway; other values are harmless
  only,      ///< accepted with one of `values`, else not supported yet
  feature,   ///< an object that may say "enabled": true, which is not supported yet
  device,    ///< an object whose "device" must be "none"
  obsolete,  ///< accepted with a warning that says what to write instead
};

struct Known {
  const char* key;
  Rule rule;
  const char* values = "";  ///< only: a JSON list; obsolete: the advice
};

/// The tables, an object of the configuration each.
std::span<const Known> top_keys();
std::span<const Known> zero_keys();
std::span<const Known> optimizer_keys();
std::span<const Known> adam_keys();
std::span<const Known> sgd_keys();
std::span<const Known> fp16_keys();
std::span<const Known> bf16_keys();
std::span<const Known> data_types_keys();
std::span<const Known> ringzero_keys();

/// Judges the keys of one object by its table.
class Judge {
 public:
  Judge(std::string file, std::vector<std::string>& warnings) : file_(std::move(file)), warnings_(warnings) {}
  /// Errc::config for an unknown key, with the nearest known one; Errc::unsupported for what would change
  /// results or memory and is not done; warnings for the rest.
  void run(const JsonObject&, std::span<const Known>);

 private:
  [[noreturn]] void refuse(const JsonObject&, const std::string& key, const std::string& value,
                           const std::string& advice) const;
  void warn(const JsonObject&, const char* key, const std::string& what);
  void apply(const JsonObject&, const Known&);
  void apply_only(const JsonObject&, const Known&) const;
  void apply_feature(const JsonObject&, const char* key) const;
  void apply_device(const JsonObject&, const char* key) const;

  std::string file_;
  std::vector<std::string>& warnings_;
};

}  // namespace rz::ds
