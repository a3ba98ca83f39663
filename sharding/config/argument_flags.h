#pragma once
/// The flags of a command line that set TrainingArguments, as data: parse_arguments(), train_gpt, plan, and
/// their help.

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "sharding/config/training_arguments.h"

namespace rz {

/// Which values a flag decides on.
enum class ArgumentGroup { configuration, loop, checkpoint };

/// The field that a flag sets, and a key of the configuration takes.
using ArgumentField =
    std::variant<std::monostate, std::optional<std::int64_t> TrainingArguments::*,
                 std::optional<double> TrainingArguments::*, std::optional<bool> TrainingArguments::*,
                 std::optional<std::string> TrainingArguments::*>;

struct ArgumentFlag {
  ArgumentGroup group;
  std::string_view name;   ///< of Hugging Face's TrainingArguments where it has the flag: "learning_rate"
  std::string_view value;  ///< in help, e.g. "N"; "": true unless the next word is true or false
  std::string_view help;
  ArgumentField field;           ///< none: `set` has the fields
  double min = 0, max = 3.4e38;  ///< of a number
  std::string_view words = "";   ///< all words that a text may be, e.g. "no fp16 bf16"; "": any
  void (*set)(TrainingArguments&, const ArgumentFlag&,
              std::string_view value) = nullptr;  ///< null: the field
};

std::span<const ArgumentFlag> argument_flags();
/// Null if there is none. `word` begins with "--"; '-' may stand for '_', and what follows '=' is its value.
const ArgumentFlag* find_argument_flag(std::string_view word);
/// Sets the field of words[at], and returns the index behind its value. Errc::config for a value that is
/// missing or wrong.
std::size_t set_argument(TrainingArguments&, const ArgumentFlag&, std::span<const char* const> words,
                         std::size_t at);
/// A line for each flag of the group that is shown. `dash`: '-' or '_' between the words of a name.
std::string describe_argument_flags(ArgumentGroup, char dash,
                                    const std::function<bool(const ArgumentFlag&)>& shown = {});

/// Why a flag of Hugging Face's Trainer has no counterpart here, and what to do instead; "" for any other.
std::string_view no_argument_flag(std::string_view word);
/// The name of the flag without dashes in front, '_' between its words, and without a value.
std::string argument_name(std::string_view word);

}  // namespace rz
