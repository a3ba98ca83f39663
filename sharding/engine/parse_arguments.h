#pragma once
/// Options of an engine from a command line.

#include <span>
#include <string>
#include <vector>

#include "../config/arguments.h"
#include "engine_options.h"

namespace rz {

/// Flags have the names of DeepSpeed and of Hugging Face's TrainingArguments:
///
///     program --deepspeed ds.json --learning_rate 1e-3 --per_device_train_batch_size=8 --bf16
///
/// --deepspeed FILE, or --deepspeed_config FILE with or without --deepspeed; --seed N; --local_rank N, which
/// DeepSpeed's launcher appends and which must be that of the launcher; and those of
/// sharding/config/arguments.h. '-' may stand for '_'. A flag without a value may have true or false
/// behind it. Errc::config for a value that is missing or wrong, and for words that are no flags: a line
/// each, with the nearest flag. --help (-h) throws HelpRequest with arguments_help(), which run_entrypoint()
/// prints.
EngineOptions parse_arguments(int argc, const char* const* argv);

struct KnownArguments {
  EngineOptions options;
  /// Words that are no flags of an engine, and all behind "--": for the program's own parser. Without
  /// argv[0].
  std::vector<std::string> rest;
  bool help = false;  ///< --help or -h, which is not in `rest`
};
/// The same for a program with flags of its own. `aliases`: other names of flags.
KnownArguments parse_known_arguments(int argc, const char* const* argv,
                                     std::span<const FlagAlias> aliases = {});

/// The flags, a line each, with what they set.
std::string arguments_help();

}  // namespace rz
