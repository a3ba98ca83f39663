// docs/configuration.md.

#include <sstream>
#include <utility>
#include <vector>

#include "comm/core/error.h"
#include "sharding/config/arguments.h"
#include "sharding/config/ds_config.h"
#include "sharding/config/keys.h"

namespace rz {
namespace {

using ds::KeySpec;
using ds::ObjectSpec;

constexpr const char* introduction =
    R"(# Keys of a DeepSpeed configuration

Generated from the tables `sharding/config/*_keys.cpp`; a test compares it with them. Names and defaults are those of
DeepSpeed 0.19. The file is JSON with comments (`//`, `#`, `/* */`), trailing commas, and integers like 1e9. Numbers,
true and false may be in quotes, as in pydantic, and steps_per_print may be Infinity. Unknown and duplicate keys are
errors. Numbers must be finite in f32. One answer has all errors of a file, a line each.

An engine without a configuration, and `train_lm` without `--config`, read that of the variable `RZ_CONFIG`: the path of
a file, or the JSON itself, which begins with `{`. `rzrun --config_file X.yaml` sets it from Accelerate's file.

An item is a key, with its default in brackets. It does what it does in DeepSpeed; one that is not applied yet is read,
with a warning if it is given. Lines below the items list the other keys:

- no effect: on results or memory here
- always so: the default is the only behaviour; a warning if another is wanted
- refused: an error with the reason, unless the value is the default or as harmless

"auto" stands for the argument in the brackets, as in Hugging Face's Trainer; any other "auto" in a section is the
default, as in DeepSpeed. Arguments are fields of `TrainingArguments`, and [flags](#flags).

Old spellings (`cpu_offload`, `cpu_offload_param`, `bfloat16`, `fp16_enabled`, `fp32_allreduce`,
`load_universal_checkpoint`, `stage3_gather_fp16_weights_on_model_save`, true or false for `zero_optimization`) are
accepted with a warning; keys that begin with `stage3_` may be written without it.
)";

constexpr const char* flags_introduction = R"(
## Flags

Of `parse_arguments()` and `train_lm`, whose `--help` says what each flag sets; `plan` has those that change memory and
traffic. `-` may stand for `_`, and a flag without a value may have true or false behind it. `--deepspeed FILE`, or
`--deepspeed --deepspeed_config FILE`, names the configuration, and `--seed N` the seed. `--local_rank N` must be that
of the launcher.
)";

/// Adds a word at the end of a text of lines of at most 120 columns; `indent` begins a new line.
void add_word(std::string& text, const std::string& word, const char* indent = "") {
  const std::size_t line = text.size() - (text.rfind('\n') + 1);
  if (line + 1 + word.size() > 118)
    text += concat("\n", indent);
  else
    text += ' ';
  text += word;
}

std::string key_item(const KeySpec& k) {
  const std::string fallback = k.is_required() ? "required" : concat("`", k.initial().dump(), "`");
  const std::string_view automatic = k.meaning_of_auto();
  std::string text =
      concat("- `", k.key, "` (", fallback, automatic.empty() ? "" : ", \"auto\": ", automatic, ")");
  std::istringstream words(concat(k.treatment == Treatment::unused ? "not applied yet: " : "", k.note));
  if (*k.note != '\0') text += ':';
  for (std::string word; words >> word;) add_word(text, word, "  ");
  return text + "\n";
}

bool has_item(const KeySpec& k) {
  return k.kind != ds::Kind::object &&
         (k.treatment == Treatment::applied || k.treatment == Treatment::unused);
}

/// "No effect: `a`, `b`.", without a line if there are none.
template <class Filter>
std::string listed_keys(const char* heading, const ObjectSpec& o, const Filter& is_listed) {
  std::string text;
  for (const KeySpec& k : o.keys) {
    if (!is_listed(k)) continue;
    if (text.empty())
      text = concat("\n", heading, ":");
    else
      text += ',';
    const bool is_noted = k.kind == ds::Kind::object && *k.note != '\0';
    add_word(text, concat("`", k.key, "`", is_noted ? concat(" (", k.note, ")") : ""));
  }
  return text.empty() ? "" : text + ".\n";
}

std::string heading(const ObjectSpec& o) {
  const std::string_view path = o.path;
  if (path.empty()) return "The whole";
  return concat("`", path, "`", *o.variant == '\0' ? "" : " of ", o.variant);
}

/// What stands below the heading.
std::string lists_of_keys(const ObjectSpec& o) {
  std::string items;
  for (const KeySpec& k : o.keys)
    if (has_item(k)) items += key_item(k);
  const auto has = [](Treatment treatment) {
    return [treatment](const KeySpec& k) { return k.kind != ds::Kind::object && k.treatment == treatment; };
  };
  return concat(items.empty() ? "" : "\n", items,
                listed_keys("Sections", o, [](const KeySpec& k) { return k.kind == ds::Kind::object; }),
                listed_keys("No effect", o, has(Treatment::accepted)),
                listed_keys("Always so", o, has(Treatment::always)),
                listed_keys("Refused", o, has(Treatment::refused)));
}

}  // namespace

std::string configuration_document() {
  std::vector<std::pair<std::string, std::string>> sections;  // headings and what stands below them
  for (const ObjectSpec& o : ds::objects()) {
    const std::string below = lists_of_keys(o);
    if (!sections.empty() && sections.back().second == below)
      sections.back().first += concat(", ", heading(o));
    else
      sections.emplace_back(heading(o), below);
  }
  std::string out = introduction;
  for (const auto& [title, below] : sections) out += concat("\n## ", title, "\n", below);
  out += flags_introduction;
  std::string flags;
  for (const ArgumentSpec& a : argument_specs()) {
    if (a.group == ArgumentGroup::derived) continue;
    flags += flags.empty() ? "\nFlags:" : ",";
    add_word(flags, concat("`--", a.name, a.value.empty() ? "" : " ", a.value, "`"));
  }
  return out + flags + ".\n";
}

}  // namespace rz
