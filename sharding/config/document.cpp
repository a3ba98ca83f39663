// docs/configuration.md.

#include "comm/core/error.h"
#include "sharding/config/argument_flags.h"
#include "sharding/config/ds_config.h"
#include "sharding/config/key_spec.h"

namespace rz {
namespace {

using ds::KeySpec;
using ds::ObjectSpec;
using ds::Treatment;

constexpr const char* introduction =
    R"(# Keys of a DeepSpeed configuration

Generated from the tables `sharding/config/*_keys.cpp`; a test compares it with them. Names and defaults are those of
DeepSpeed 0.19. The file is JSON with comments (`//`, `#`, `/* */`), trailing commas, and integers like 1e9. Numbers, and
true and false, may be in quotes, as pydantic has it, and steps_per_print may be Infinity. Unknown and duplicate keys are
errors. Numbers must be finite in f32. One answer has all errors of a file, a line each.

| what is done | |
|---|---|
| applied | does what it does in DeepSpeed |
| no effect | has no effect on results or memory here |
| always so | the default is the only behaviour; a warning if another is wanted |
| not applied yet | read, with a warning if it is given |
| refused | an error unless the value is the default or one of those named |

"auto" stands for the argument of the last column, as in Hugging Face's Trainer; any other "auto" in a section is the
default, as in DeepSpeed. Arguments are fields of `TrainingArguments`, and [flags](#flags). Old spellings (`cpu_offload`,
`cpu_offload_param`, `bfloat16`, `fp16_enabled`, `fp32_allreduce`, `load_universal_checkpoint`,
`stage3_gather_fp16_weights_on_model_save`, true or false for `zero_optimization`) are accepted with a warning; keys
that begin with `stage3_` may be written without it.
)";

constexpr const char* flags_introduction = R"(
## Flags

Of `parse_arguments()` and `train_gpt`; `plan` has those that change memory and traffic. `-` may stand for `_`, and a
flag without a value may have true or false behind it. `--deepspeed FILE`, or `--deepspeed --deepspeed_config FILE`,
names the configuration, and `--seed N` the seed. `--local_rank N` must be that of the launcher.

| flag | sets |
|---|---|
)";

/// Text for a cell of a table.
std::string cell(std::string_view text) {
  std::string out;
  for (const char c : text) out += c == '|' ? "\\|" : std::string(1, c);
  return out;
}

std::string default_cell(const KeySpec& k) {
  if (*k.fallback == '\0') return "required";
  if (k.kind == ds::Kind::object) return "section";
  return concat("`", k.fallback, "`");
}

std::string done_cell(const KeySpec& k) {
  if (k.kind == ds::Kind::object) return concat("see its section", *k.note == '\0' ? "" : "; ", cell(k.note));
  std::string done = name(k.treatment);
  if (k.treatment == Treatment::refused) done += concat(" but for `", k.values, "`");
  if (*k.note != '\0') done += concat(": ", cell(k.note));
  return done;
}

std::string row(const KeySpec& k) {
  const char* argument = k.argument == ds::Argument::none ? "" : name(k.argument);
  return concat("| `", k.key, "` | ", default_cell(k), " | ", done_cell(k), " | ", argument, " |\n");
}

std::string heading(const ObjectSpec& o) {
  const std::string_view path = o.path;
  if (path.empty()) return "The whole";
  return concat("`", path, "`", *o.variant == '\0' ? "" : " of ", o.variant);
}

}  // namespace

std::string configuration_document() {
  std::string out = introduction;
  for (const ObjectSpec& o : ds::objects()) {
    out +=
        concat("\n## ", heading(o), "\n\n| key | default | what is done | \"auto\" |\n|---|---|---|---|\n");
    for (const KeySpec& k : o.keys) out += row(k);
  }
  out += flags_introduction;
  for (const ArgumentFlag& f : argument_flags())
    out += concat("| `--", f.name, f.value.empty() ? "" : " ", f.value, "` | ", cell(f.help), " |\n");
  return out;
}

}  // namespace rz
