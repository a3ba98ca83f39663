#pragma once
/// Options of an engine from a command line.

#include "sharding/engine/engine_options.h"

namespace rz {

/// Flags have the names of Hugging Face's TrainingArguments:
///
///     program --deepspeed ds.json --learning_rate 1e-3 --per_device_train_batch_size=8 --bf16
///
/// --deepspeed (or --deepspeed_config) FILE, --seed N, and a flag for every field of TrainingArguments:
/// --bf16 and --fp16 for `precision`. '-' may stand for '_'. Errc::config for a word that is no flag, with
/// the nearest flag, and for a value that is missing or wrong.
EngineOptions parse_arguments(int argc, const char* const* argv);

}  // namespace rz
