#pragma once
/// The keys of a DeepSpeed configuration as data. These tables drive the reader, the resolved configuration
/// and docs/configuration.md. Names and defaults are those of DeepSpeed 0.19.

#include <span>
#include <string_view>

namespace rz::ds {

/// Form of a value.
enum class Kind {
  boolean,
  integer,  ///< 1e9 and 8.0 too
  number,
  text,
  choice,     ///< one of `values`, in any case
  dtype,      ///< "fp32", "fp16", "bf16" and their longer names
  betas,      ///< two numbers from 0 to below 1
  per_group,  ///< a number, or a list with one for each parameter group
  integers,   ///< a list of whole numbers
  list,
  object,  ///< a section with a table of its own
  any
};

/// What is done with a key.
enum class Treatment {
  applied,   ///< does what it does in DeepSpeed
  accepted,  ///< has no effect on results or memory here
  always,    ///< the default is the only behaviour; a warning if another is wanted
  unused,    ///< read and not applied yet; a warning if it is given
  refused    ///< Errc::unsupported unless the value is harmless
};

/// The argument of a run that stands behind "auto", as in Hugging Face's Trainer, and fills a key that the
/// file leaves out.
enum class Argument {
  none,
  train_batch_size,
  micro_batch_size,
  accumulation,
  learning_rate,
  betas,
  epsilon,
  weight_decay,
  max_grad_norm,
  fp16,
  bf16,
  warmup_min_lr,
  warmup_max_lr,
  warmup_steps,
  total_steps,
  schedule_steps,  ///< total_steps, behind "auto" only
  reduce_bucket_size,
  prefetch_bucket_size,
  persistence_threshold,
  find_unused_parameters,
  static_graph,
  broadcast_buffers,
  comm_hook,
  gradient_checkpointing,
  drop_last,
  logging_steps,
  output_dir,
  save_steps,
  save_minutes,
  save_total_limit,
  async_save,
  resume_from_checkpoint,
  eval_steps,
  metric_for_best_model,
  greater_is_better,
  load_best_model_at_end,
  early_stopping_patience,
  early_stopping_threshold  ///< the last
};

/// Numbers enter arithmetic in f32, whose largest finite number is a little greater.
constexpr double unbounded = 3.4e38;

struct KeySpec {
  const char* key;
  Kind kind;
  const char* fallback;  ///< JSON; "": the key is required in its object
  Treatment treatment;
  const char* note;         ///< what is done, or the reason
  const char* values = "";  ///< JSON list: the words of a choice; the harmless values of a refused key
  double min = 0, max = unbounded;
  Argument argument = Argument::none;
  bool infinite = false;  ///< Infinity stands for the maximum

  constexpr KeySpec within(double low, double high) const {
    KeySpec k = *this;
    k.min = low, k.max = high;
    return k;
  }
  constexpr KeySpec from(Argument a) const {
    KeySpec k = *this;
    k.argument = a;
    return k;
  }
  constexpr KeySpec one_of(const char* words) const {
    KeySpec k = *this;
    k.values = words;
    return k;
  }
  constexpr KeySpec or_infinity() const {
    KeySpec k = *this;
    k.infinite = true;
    return k;
  }
};

constexpr KeySpec applied(const char* key, Kind kind, const char* fallback, const char* note) {
  return {key, kind, fallback, Treatment::applied, note};
}
constexpr KeySpec accepted(const char* key, const char* fallback, const char* note = "") {
  return {key, Kind::any, fallback, Treatment::accepted, note};
}
/// For values that an engine may report.
constexpr KeySpec accepted(const char* key, Kind kind, const char* fallback, const char* note) {
  return {key, kind, fallback, Treatment::accepted, note};
}
constexpr KeySpec always(const char* key, const char* fallback, const char* note) {
  return {key, Kind::boolean, fallback, Treatment::always, note};
}
constexpr KeySpec unused(const char* key, Kind kind, const char* fallback, const char* note) {
  return {key, kind, fallback, Treatment::unused, note};
}
/// `harmless`: a JSON list. An object is harmless too if nothing in it is enabled.
constexpr KeySpec refused(const char* key, const char* fallback, const char* harmless, const char* reason) {
  return {key, Kind::any, fallback, Treatment::refused, reason, harmless};
}
/// A section with a table of its own. `fallback`: "{}" if its defaults hold where it is absent, else "null".
constexpr KeySpec section(const char* key, const char* fallback, const char* note) {
  return {key, Kind::object, fallback, Treatment::applied, note};
}

/// An object of the configuration.
struct ObjectSpec {
  const char* path;     ///< "zero_optimization"; "" is the whole
  const char* variant;  ///< the type that has these keys: "AdamW"; "" where the keys are always the same
  std::span<const KeySpec> keys;
  /// "auto" of a key without an argument is the default here, as in DeepSpeed.
  bool auto_is_default = false;
};

/// All objects, in the order of the documentation.
std::span<const ObjectSpec> objects();
/// Null if there is none.
const ObjectSpec* find_object(std::string_view path, std::string_view variant = "");

// The parts of the table.
std::span<const ObjectSpec> general_objects();
std::span<const ObjectSpec> ringzero_objects();
std::span<const ObjectSpec> optimizer_objects();
std::span<const ObjectSpec> scheduler_objects();
std::span<const ObjectSpec> precision_objects();
std::span<const ObjectSpec> zero_objects();
std::span<const ObjectSpec> reporting_objects();

/// The name of a treatment in messages and documents.
const char* name(Treatment);
/// The argument in messages: "learning_rate".
const char* name(Argument);

/// The nearest of the keys, or "" if none is near: at most one edit (insertion, deletion, replacement or
/// swap of neighbours) for every four characters.
std::string_view nearest_key(std::string_view word, std::span<const KeySpec> keys);

}  // namespace rz::ds
