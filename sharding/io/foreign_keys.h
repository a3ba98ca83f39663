#pragma once
/// Keys of a file whose form another program defines: what is done with each of them, and how their values
/// may be written. The values are JSON; a scalar of YAML is a text, since a value may be in quotes here.

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/core/text.h"
#include "sharding/io/json.h"

namespace rz {

/// What is done with a key.
enum class Treatment {
  applied,   ///< does what it does there
  accepted,  ///< has no effect on results or memory here
  always,    ///< the default is the only behaviour; a warning if another is wanted
  unused,    ///< read and not applied yet; a warning if it is given
  refused    ///< an error, unless the value is harmless
};

// ---- tables

/// Keys that are treated alike.
struct ForeignKeys {
  std::string_view names;  ///< with spaces between them
  Treatment treatment = Treatment::applied;
  std::string_view note = "";   ///< of a refused key the reason, and the remedy
  const char* harmless = "[]";  ///< JSON list: values of a refused key, besides those that are off
};

/// The keys that this one belongs to; null if it is in no row.
const ForeignKeys* find_keys(std::span<const ForeignKeys>, std::string_view name);

/// True for a value that switches nothing on: null, false, what is empty, and a list of such values.
bool is_off(const nlohmann::json&);
/// True for a value of a list in JSON, also if it is in quotes.
bool is_listed(const nlohmann::json& value, const char* list);
/// Whether a key of this row may have this value. Null: it is in no row, and may be off.
bool is_accepted(const ForeignKeys* row, const nlohmann::json& value);
/// Errc::config, "FILE: key: note", for the first key of a refused row whose value is not harmless.
void refuse_keys(const JsonObject&, std::span<const ForeignKeys>);

/// "unknown key; did you mean 'stage'?", or what to do if no name is near.
template <class Names>
std::string unknown_key(std::string_view key, const Names& names) {
  const std::string near = nearest_name(key, names);
  return near.empty() ? "unknown key; remove it" : concat("unknown key; did you mean '", near, "'?");
}

// ---- values

/// Form of a value.
enum class ValueKind {
  boolean,
  integer,  ///< 1e9 and 8.0 too
  number,
  text,
  choice,     ///< one of `values`, in any case
  dtype,      ///< "fp32", "fp16", "bf16" and their longer names
  betas,      ///< two numbers from 0 to below 1
  per_group,  ///< a number, or a list with one for each parameter group
  integers,   ///< a list of whole numbers
  object,     ///< a section with a table of its own
  any
};

/// Numbers enter arithmetic in f32, whose largest finite number is a little greater.
constexpr double unbounded = 3.4e38;

struct ValueForm {
  ValueKind kind = ValueKind::any;
  const char* values = "[]";  ///< JSON list: the words of a choice; the harmless values of a refused key
  double min = 0, max = unbounded;
  bool infinite = false;  ///< Infinity stands for the maximum
};

/// The value of a key in this form, as pydantic has it: numbers, and true and false, may be in quotes.
/// Errc::config at `key` of an object at `path` if it has another form.
nlohmann::json checked_value(const nlohmann::json& value, const ValueForm&, const std::string& key,
                             const std::string& file, const std::string& path = {});
/// A text that is a number, true or false as that, and any other value as it is.
nlohmann::json without_quotes(const nlohmann::json&);
/// The words of pydantic and YAML, in any case; nothing for another word.
std::optional<bool> truth_of(std::string_view word);
std::string lower_case(std::string);

}  // namespace rz
