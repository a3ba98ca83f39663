#pragma once
/// The arguments of a run as data: flags of a command line, their help, what they fill in a configuration,
/// and what "auto" stands for without them. parse_arguments(), train_lm, plan, the reader of a configuration
/// and docs/configuration.md follow this table.

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "training_arguments.h"

namespace rz {

/// Which values an argument decides on.
enum class ArgumentGroup {
  configuration,
  loop,
  checkpoint,
  derived  ///< no flag: what "auto" of a key stands for, which follows from other arguments or facts
};

/// The member that an argument sets.
using ArgumentField =
    std::variant<std::monostate, std::optional<std::int64_t> TrainingArguments::*,
                 std::optional<double> TrainingArguments::*, std::optional<bool> TrainingArguments::*,
                 std::optional<std::string> TrainingArguments::*>;

struct ArgumentSpec {
  ArgumentGroup group;
  std::string_view name;   ///< of Hugging Face's TrainingArguments where it has it: "learning_rate"
  std::string_view value;  ///< in help, e.g. "N"; "": true unless the next word is true or false
  std::string_view help;
  ArgumentField field = {};      ///< none: `set` and `given` have the members
  double min = 0, max = 3.4e38;  ///< of a number
  std::string_view words = "";   ///< all words that a text may be, e.g. "no fp16 bf16"; "": any
  const char* otherwise =
      "null";  ///< JSON: what "auto" is if it is not given, as in Hugging Face; null: nothing
  std::string_view label = "";  ///< in messages about keys; "": the name
  /// Null: the member.
  void (*set)(TrainingArguments&, const ArgumentSpec&, std::string_view value) = nullptr;
  /// The value for a key; null if it is not given. Null: the member.
  nlohmann::json (*given)(const TrainingArguments&) = nullptr;

  std::string_view shown() const { return label.empty() ? name : label; }

  constexpr ArgumentSpec within(double low, double high) const {
    ArgumentSpec a = *this;
    a.min = low, a.max = high;
    return a;
  }
  constexpr ArgumentSpec one_of(std::string_view all) const {
    ArgumentSpec a = *this;
    a.words = all;
    return a;
  }
  constexpr ArgumentSpec or_else(const char* value_of_auto) const {
    ArgumentSpec a = *this;
    a.otherwise = value_of_auto;
    return a;
  }
  constexpr ArgumentSpec called(std::string_view text) const {
    ArgumentSpec a = *this;
    a.label = text;
    return a;
  }
  constexpr ArgumentSpec set_by(decltype(set) function) const {
    ArgumentSpec a = *this;
    a.set = function;
    return a;
  }
  constexpr ArgumentSpec given_by(decltype(given) function) const {
    ArgumentSpec a = *this;
    a.given = function;
    return a;
  }
};

std::span<const ArgumentSpec> argument_specs();
/// Errc::invalid_argument if there is none.
const ArgumentSpec& argument_spec(std::string_view name);
/// The value for a key; null if the argument is not given.
nlohmann::json given_value(const TrainingArguments&, const ArgumentSpec&);

/// Another name of a flag, {"resume", "resume_from_checkpoint"}.
struct FlagAlias {
  std::string_view flag, name;
};

/// The argument of a flag; null if there is none. `word` begins with "--"; '-' may stand for '_', and what
/// follows '=' is its value.
const ArgumentSpec* find_flag(std::string_view word, std::span<const FlagAlias> aliases = {});
/// Sets the member of words[at], and returns the index behind its value. Errc::config for a value that is
/// missing or wrong.
std::size_t set_argument(TrainingArguments&, const ArgumentSpec&, std::span<const char* const> words,
                         std::size_t at);
/// "--save_steps", as it was typed; else with '-' between the words of the name.
std::string typed_flag(const TrainingArguments&, std::string_view name);

/// A line for each flag of the groups, under the headings of the groups. `dash`: '-' or '_' between the words
/// of a name.
std::string describe_flags(std::span<const ArgumentGroup>, char dash, std::span<const FlagAlias> = {});
/// Why a flag of Hugging Face's Trainer has no counterpart here, and what to do instead; "" for any other.
std::string_view no_counterpart(std::string_view word);
/// The name of the flag without dashes in front, '_' between its words, and without a value.
std::string argument_name(std::string_view word);

}  // namespace rz
