#include "sharding/config/argument_flags.h"

#include <algorithm>
#include <charconv>

#include "comm/core/error.h"

namespace rz {
namespace {

using A = TrainingArguments;
using FlagGroup = ArgumentGroup;

template <class T>
T parse_number(const ArgumentFlag& flag, std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(error == std::errc() && end == text.data() + text.size(), Errc::config, "--", flag.name, " ", text,
          ": expected ", std::is_integral_v<T> ? "an integer" : "a number");
  const auto number = static_cast<double>(value);
  require(number >= flag.min && number <= flag.max, Errc::config, "--", flag.name, " ", text,
          ": must be from ", flag.min, " to ", flag.max);
  return value;
}

/// A share of the schedule below 1, as in Trainer.
void set_warmup_steps(A& a, const ArgumentFlag& flag, std::string_view value) {
  const auto number = parse_number<double>(flag, value);
  if (number > 0 && number < 1) {
    a.warmup_ratio = number;
  } else {
    a.warmup_steps = parse_number<std::int64_t>(flag, value);
  }
}

bool is_true(std::string_view word) { return word == "true" || word == "True" || word == "1"; }
bool is_false(std::string_view word) { return word == "false" || word == "False" || word == "0"; }

bool parse_bool(const ArgumentFlag& flag, std::string_view value) {
  require(is_true(value) || is_false(value), Errc::config, "--", flag.name, " ", value,
          ": expected true or false");
  return is_true(value);
}

void check_word(const ArgumentFlag& flag, std::string_view value) {
  if (flag.words.empty()) return;
  for (std::string_view left = flag.words; !left.empty();) {
    const std::string_view word = left.substr(0, left.find(' '));
    if (word == value) return;
    left.remove_prefix(std::min(left.size(), word.size() + 1));
  }
  fail(Errc::config, "--", flag.name, " ", value, ": choose one of ", flag.words);
}

/// A value of the type of the field.
template <class T>
T parse_value(const ArgumentFlag& flag, std::string_view value) {
  if constexpr (std::is_same_v<T, bool>) {
    return parse_bool(flag, value);
  } else if constexpr (std::is_same_v<T, std::string>) {
    check_word(flag, value);
    return std::string(value);
  } else {
    return parse_number<T>(flag, value);
  }
}
template <class T>
void set_field(A& a, const ArgumentFlag& flag, std::optional<T> A::*field, std::string_view value) {
  a.*field = parse_value<T>(flag, value);
}
void set_field(A&, const ArgumentFlag&, std::monostate, std::string_view) {}

void set_value(A& a, const ArgumentFlag& flag, std::string_view value) {
  if (flag.set) return flag.set(a, flag, value);
  std::visit([&](const auto field) { set_field(a, flag, field, value); }, flag.field);
}

void set_dtype(A& a, DType precision) {
  require(!a.precision || a.precision == precision, Errc::config,
          "--bf16, --fp16 and --precision exclude each other");
  a.precision = precision;
}
void set_precision(A& a, const ArgumentFlag& flag, std::string_view value) {
  check_word(flag, value);
  set_dtype(a, dtype_from_name(value));
}
void set_bf16(A& a, const ArgumentFlag& flag, std::string_view value) {
  if (parse_bool(flag, value)) set_dtype(a, DType::bf16);
}
void set_fp16(A& a, const ArgumentFlag& flag, std::string_view value) {
  if (parse_bool(flag, value)) set_dtype(a, DType::f16);
}

/// A strategy of Trainer: its interval is the flag `steps`.
void check_steps_strategy(const ArgumentFlag& flag, std::string_view value, std::string_view steps) {
  require(value != "epoch", Errc::config, "--", flag.name, " epoch: not supported; give --", steps,
          " N, the updates of an epoch");
  check_word(flag, value);
}
void set_save_strategy(A& a, const ArgumentFlag& flag, std::string_view value) {
  check_steps_strategy(flag, value, "save_steps");
  a.save_strategy = value;
}
void set_eval_strategy(A& a, const ArgumentFlag& flag, std::string_view value) {
  check_steps_strategy(flag, value, "eval_steps");
  a.eval_strategy = value;
}

constexpr double max_size = 1 << 20, max_updates = 0x1p40;

constexpr ArgumentFlag table[] = {
    {FlagGroup::configuration, "train_batch_size", "N", "train_batch_size: samples of an update",
     &A::train_batch_size, 1, max_updates},
    {FlagGroup::configuration, "per_device_train_batch_size", "N",
     "train_micro_batch_size_per_gpu: samples of a pass on a rank", &A::per_device_train_batch_size, 1,
     max_size},
    {FlagGroup::configuration, "gradient_accumulation_steps", "N", "Passes of an update",
     &A::gradient_accumulation_steps, 1, max_size},
    {FlagGroup::configuration,
     "precision",
     "DTYPE",
     "f32, bf16 or f16: the sections bf16 and fp16",
     {},
     0,
     0,
     "f32 bf16 f16",
     set_precision},
    {FlagGroup::configuration, "bf16", "", "The same as --precision bf16", {}, 0, 0, "", set_bf16},
    {FlagGroup::configuration, "fp16", "", "The same as --precision f16", {}, 0, 0, "", set_fp16},
    {FlagGroup::configuration, "learning_rate", "X",
     "optimizer.params.lr; without a section optimizer: AdamW with this rate", &A::learning_rate},
    {FlagGroup::configuration, "adam_beta1", "X", "optimizer.params.betas, the first", &A::adam_beta1},
    {FlagGroup::configuration, "adam_beta2", "X", "optimizer.params.betas, the second", &A::adam_beta2},
    {FlagGroup::configuration, "adam_epsilon", "X", "optimizer.params.eps", &A::adam_epsilon},
    {FlagGroup::configuration, "weight_decay", "X", "optimizer.params.weight_decay", &A::weight_decay},
    {FlagGroup::configuration, "max_grad_norm", "X", "gradient_clipping; 0: no clipping", &A::max_grad_norm},
    {FlagGroup::configuration, "lr_scheduler_type", "NAME",
     "Without a section scheduler: linear, cosine, constant, constant_with_warmup or reduce_lr_on_plateau; "
     "with a warm-up DeepSpeed's WarmupDecayLR, WarmupCosineLR or WarmupLR, else torch's LinearLR or "
     "CosineAnnealingLR",
     &A::lr_scheduler_type, 0, 0, "linear cosine constant constant_with_warmup reduce_lr_on_plateau"},
    {FlagGroup::configuration, "warmup_steps", "N",
     "scheduler.params.warmup_num_steps; below 1: as warmup_ratio; default 0", &A::warmup_steps, 0,
     max_updates, "", set_warmup_steps},
    {FlagGroup::configuration, "warmup_ratio", "X", "The same, as a share of the updates of the schedule",
     &A::warmup_ratio, 0, 1},
    {FlagGroup::configuration, "total_steps", "N",
     "scheduler.params.total_num_steps; \"auto\" is the updates of the run without it", &A::total_steps, 1,
     max_updates},
    {FlagGroup::configuration, "gradient_checkpointing", "",
     "activation_checkpointing.partition_activations: blocks compute their activations again in backward",
     &A::gradient_checkpointing},
    {FlagGroup::configuration, "dataloader_drop_last", "", "dataloader_drop_last", &A::dataloader_drop_last},
    {FlagGroup::configuration, "ddp_comm_hook", "NAME",
     "ringzero.comm_hook: no, fp16, bf16, power_sgd or batched_power_sgd; not with ZeRO", &A::ddp_comm_hook,
     0, 0, "no fp16 bf16 power_sgd batched_power_sgd"},
    {FlagGroup::configuration, "ddp_find_unused_parameters", "BOOL", "ringzero.find_unused_parameters",
     &A::ddp_find_unused_parameters},
    {FlagGroup::configuration, "ddp_static_graph", "BOOL", "ringzero.static_graph", &A::ddp_static_graph},
    {FlagGroup::configuration, "ddp_broadcast_buffers", "BOOL", "ringzero.broadcast_buffers",
     &A::ddp_broadcast_buffers},
    {FlagGroup::loop, "max_steps", "N", "Updates of the run", &A::max_steps, -1, max_updates},
    {FlagGroup::loop, "num_train_epochs", "X",
     "Passes over the data: train_gpt makes them; else the loop of the program does, and no schedule counts "
     "them",
     &A::num_train_epochs},
    {FlagGroup::loop, "logging_steps", "N", "steps_per_print: updates between lines of progress",
     &A::logging_steps, 1, max_updates},
    {FlagGroup::checkpoint, "output_dir", "DIR", "Folder of the checkpoints", &A::output_dir},
    {FlagGroup::checkpoint, "resume_from_checkpoint", "DIR",
     "Begin with the last checkpoint of this folder, or of the output folder for true",
     &A::resume_from_checkpoint},
    {FlagGroup::checkpoint, "save_strategy", "NAME", "no, or steps (every 500 updates without --save_steps)",
     &A::save_strategy, 0, 0, "no steps", set_save_strategy},
    {FlagGroup::checkpoint, "save_steps", "N", "Save every N updates; 0: not by number", &A::save_steps, 0,
     max_updates},
    {FlagGroup::checkpoint, "save_minutes", "M", "Save when the last checkpoint is M minutes old",
     &A::save_minutes, 0, max_updates},
    {FlagGroup::checkpoint, "save_total_limit", "K", "Keep the last K checkpoints; 0: all",
     &A::save_total_limit, 0, max_updates},
    {FlagGroup::checkpoint, "async_save", "", "Write checkpoints while training goes on", &A::async_save},
    {FlagGroup::checkpoint, "eval_strategy", "NAME", "no, or steps (every 500 updates without --eval_steps)",
     &A::eval_strategy, 0, 0, "no steps", set_eval_strategy},
    {FlagGroup::checkpoint, "eval_steps", "N", "Evaluate every N updates; 0: never", &A::eval_steps, 0,
     max_updates},
    {FlagGroup::checkpoint, "metric_for_best_model", "NAME", "The metric that decides on the best checkpoint",
     &A::metric_for_best_model},
    {FlagGroup::checkpoint, "greater_is_better", "BOOL", "Whether the best metric is the greatest",
     &A::greater_is_better},
    {FlagGroup::checkpoint, "load_best_model_at_end", "", "Load the model of the best checkpoint at the end",
     &A::load_best_model_at_end},
    {FlagGroup::checkpoint, "early_stopping_patience", "N",
     "Stop after N evaluations in a row without improvement", &A::early_stopping_patience, 1, max_updates},
    {FlagGroup::checkpoint, "early_stopping_threshold", "X", "What an improvement must exceed",
     &A::early_stopping_threshold},
};

constexpr std::pair<std::string_view, std::string_view> without_counterpart[] = {
    {"ddp_bucket_cap_mb", "zero_optimization.reduce_bucket_size, in elements, does it"},
    {"dataloader_num_workers", "loaders have their own options"},
    {"dataloader_prefetch_factor", "loaders have their own options"},
    {"fsdp", "zero_optimization.stage 3 shards like it"},
    {"fsdp_config", "zero_optimization.stage 3 shards like it"},
    {"full_determinism", "runs are deterministic without it"},
    {"label_smoothing_factor", "cross_entropy() has an option"},
    {"logging_dir", "csv_monitor.output_path does it"},
    {"optim", "write optimizer.type to the DeepSpeed configuration"},
    {"per_device_eval_batch_size", "evaluation has the size of a training batch, or that of its loader"},
    {"report_to", "csv_monitor writes files, and there is no other reporter"},
    {"torch_compile", "there is nothing to compile"},
};

}  // namespace

std::span<const ArgumentFlag> argument_flags() { return table; }

std::string argument_name(std::string_view word) {
  std::string name(word.substr(0, word.find('=')));
  name.erase(0, name.find_first_not_of('-'));
  std::ranges::replace(name, '-', '_');
  return name;
}

const ArgumentFlag* find_argument_flag(std::string_view word) {
  if (!word.starts_with("--")) return nullptr;
  std::string name = argument_name(word);
  if (name == "evaluation_strategy") name = "eval_strategy";  // older name
  const auto found = std::ranges::find(table, name, &ArgumentFlag::name);
  return found == std::end(table) ? nullptr : &*found;
}

std::size_t set_argument(TrainingArguments& a, const ArgumentFlag& flag, std::span<const char* const> words,
                         std::size_t at) {
  const std::string_view word = words[at];
  const std::size_t equals = word.find('=');
  ArgumentFlag given = flag;
  given.name = word.substr(2, equals == word.npos ? equals : equals - 2);  // for messages, as it was written
  if (equals != word.npos) {
    set_value(a, given, word.substr(equals + 1));
    return at + 1;
  }
  const std::string_view next = at + 1 < words.size() ? words[at + 1] : "";
  if (flag.value.empty() && !is_true(next) && !is_false(next)) {
    set_value(a, given, "true");
    return at + 1;
  }
  require(at + 1 < words.size() && !next.starts_with("--"), Errc::config, "--", given.name,
          ": a value is missing");
  set_value(a, given, next);
  return at + 2;
}

std::string describe_argument_flags(ArgumentGroup group, char dash,
                                    const std::function<bool(const ArgumentFlag&)>& shown) {
  constexpr std::size_t column = 34;
  std::string out;
  for (const ArgumentFlag& flag : table) {
    if (flag.group != group || (shown && !shown(flag))) continue;
    std::string name(flag.name);
    std::ranges::replace(name, '_', dash);
    std::string line = concat("  --", name, flag.value.empty() ? "" : " ", flag.value);
    if (line.size() >= column) {
      out += line + "\n";
      line.clear();
    }
    line.resize(column, ' ');
    out += concat(line, flag.help, "\n");
  }
  return out;
}

std::string_view no_argument_flag(std::string_view word) {
  const std::string name = argument_name(word);
  for (const auto& [flag, reason] : without_counterpart)
    if (flag == name) return reason;
  return "";
}

}  // namespace rz
