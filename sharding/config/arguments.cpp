#include "sharding/config/arguments.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "comm/core/text.h"

namespace rz {
namespace {

using A = TrainingArguments;
using nlohmann::json;

template <class T>
T flag_value(const ArgumentSpec& flag, std::string_view text) {
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
void set_warmup_steps(A& a, const ArgumentSpec& flag, std::string_view value) {
  const auto number = flag_value<double>(flag, value);
  if (number > 0 && number < 1) {
    a.warmup_ratio = number;
  } else {
    a.warmup_steps = flag_value<std::int64_t>(flag, value);
  }
}

bool is_true(std::string_view word) { return word == "true" || word == "True" || word == "1"; }
bool is_false(std::string_view word) { return word == "false" || word == "False" || word == "0"; }

bool parse_bool(const ArgumentSpec& flag, std::string_view value) {
  require(is_true(value) || is_false(value), Errc::config, "--", flag.name, " ", value,
          ": expected true or false");
  return is_true(value);
}

void check_word(const ArgumentSpec& flag, std::string_view value) {
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
T parse_value(const ArgumentSpec& flag, std::string_view value) {
  if constexpr (std::is_same_v<T, bool>) {
    return parse_bool(flag, value);
  } else if constexpr (std::is_same_v<T, std::string>) {
    check_word(flag, value);
    return std::string(value);
  } else {
    return flag_value<T>(flag, value);
  }
}
template <class T>
void set_field(A& a, const ArgumentSpec& flag, std::optional<T> A::*field, std::string_view value) {
  a.*field = parse_value<T>(flag, value);
}
void set_field(A&, const ArgumentSpec&, std::monostate, std::string_view) {}

void set_value(A& a, const ArgumentSpec& flag, std::string_view value) {
  if (flag.set) return flag.set(a, flag, value);
  std::visit([&](const auto field) { set_field(a, flag, field, value); }, flag.field);
}

void set_dtype(A& a, DType precision) {
  require(!a.precision || a.precision == precision, Errc::config,
          "--bf16, --fp16 and --precision exclude each other");
  a.precision = precision;
}
void set_precision(A& a, const ArgumentSpec& flag, std::string_view value) {
  check_word(flag, value);
  set_dtype(a, dtype_from_name(value));
}
void set_bf16(A& a, const ArgumentSpec& flag, std::string_view value) {
  if (parse_bool(flag, value)) set_dtype(a, DType::bf16);
}
void set_fp16(A& a, const ArgumentSpec& flag, std::string_view value) {
  if (parse_bool(flag, value)) set_dtype(a, DType::f16);
}

// ---- the mesh

struct MeshArgument {
  std::string_view name;
  std::optional<std::int64_t> A::*size;
};
constexpr MeshArgument mesh_arguments[] = {
    {"replicate", &A::mesh_replicate}, {"shard", &A::mesh_shard}, {"tp", &A::mesh_tp}};
constexpr std::int64_t max_mesh_size = 1 << 20;

/// Two flags may have the same size.
void set_mesh_size(A& a, const ArgumentSpec& flag, const MeshArgument& of, std::string_view text) {
  const auto number = parse_number<std::int64_t>(text);
  require(text == "auto" || (number && *number >= 1 && *number <= max_mesh_size), Errc::config, "--",
          flag.name, " ", text, ": expected a number of ranks from 1 to ", max_mesh_size, ", or auto");
  const std::int64_t size = text == "auto" ? 0 : *number;
  std::optional<std::int64_t>& set = a.*of.size;
  require(!set || *set == size, Errc::config, "--", flag.name, ": ", of.name, " is ", text,
          ", but was given before as ", set.value_or(0) == 0 ? "auto" : std::to_string(set.value_or(0)),
          "; remove one of them");
  set = size;
  a.flags.insert_or_assign(concat("mesh_", of.name), concat("--", flag.name));
}

/// "replicate=2,shard=auto,tp=2".
void set_mesh(A& a, const ArgumentSpec& flag, std::string_view value) {
  for (const std::string& part : parts_of(value, ',')) {
    const std::size_t equals = part.find('=');
    const auto of =
        std::ranges::find(mesh_arguments, std::string_view(part).substr(0, equals), &MeshArgument::name);
    require(equals != part.npos && of != std::end(mesh_arguments), Errc::config, "--", flag.name, " ", value,
            ": '", part, "' is no dimension with a size; write replicate=2,shard=auto,tp=2");
    set_mesh_size(a, flag, *of, std::string_view(part).substr(equals + 1));
  }
}
template <std::size_t index>
void set_size_of(A& a, const ArgumentSpec& flag, std::string_view value) {
  set_mesh_size(a, flag, mesh_arguments[index], value);
}

/// A strategy of Trainer: its interval is the flag `steps`.
void check_steps_strategy(const ArgumentSpec& flag, std::string_view value, std::string_view steps) {
  require(value != "epoch", Errc::config, "--", flag.name, " epoch: not supported; give --", steps,
          " N, the updates of an epoch");
  check_word(flag, value);
}
void set_save_strategy(A& a, const ArgumentSpec& flag, std::string_view value) {
  check_steps_strategy(flag, value, "save_steps");
  a.save_strategy = value;
}
void set_eval_strategy(A& a, const ArgumentSpec& flag, std::string_view value) {
  check_steps_strategy(flag, value, "eval_steps");
  a.eval_strategy = value;
}

// ---- what keys take

template <class T>
json json_or_null(const std::optional<T>& value) {
  return value ? json(*value) : json();
}
/// Beta 1 and beta 2 if one of them is given.
json given_betas(const A& a) {
  if (!a.adam_beta1 && !a.adam_beta2) return {};
  return {a.adam_beta1.value_or(0.9), a.adam_beta2.value_or(0.999)};
}
template <DType type>
json given_dtype(const A& a) {
  return a.precision ? json(*a.precision == type) : json();
}
/// Trainer's strategy "no" prevails over a number.
json steps_of(const std::optional<std::string>& strategy, const std::optional<std::int64_t>& steps) {
  if (strategy == "no") return 0;
  return strategy == "steps" ? json(steps.value_or(500)) : json_or_null(steps);
}
json given_save_steps(const A& a) { return steps_of(a.save_strategy, a.save_steps); }
json given_eval_steps(const A& a) { return steps_of(a.eval_strategy, a.eval_steps); }

/// Names between commas are a list, and other texts one expression.
json given_target_modules(const A& a) {
  if (!a.lora_target_modules) return {};
  const std::string& text = *a.lora_target_modules;
  if (text == "all-linear" || text.find_first_of("\\()[]{}|^$?+*") != text.npos) return text;
  return parts_of(text, ',');
}

constexpr double max_size = 1 << 20, max_updates = 0x1p40;

using enum ArgumentGroup;
constexpr ArgumentSpec table[] = {
    ArgumentSpec{configuration, "train_batch_size", "N", "train_batch_size: samples of an update",
                 &A::train_batch_size}
        .within(1, max_updates),
    ArgumentSpec{configuration, "per_device_train_batch_size", "N",
                 "train_micro_batch_size_per_gpu: samples of a pass on a rank",
                 &A::per_device_train_batch_size}
        .within(1, max_size),
    ArgumentSpec{configuration, "gradient_accumulation_steps", "N", "Passes of an update",
                 &A::gradient_accumulation_steps}
        .within(1, max_size),
    ArgumentSpec{configuration, "precision", "DTYPE", "f32, bf16 or f16: the sections bf16 and fp16"}
        .one_of("f32 bf16 f16")
        .set_by(set_precision),
    ArgumentSpec{configuration, "bf16", "", "The same as --precision bf16"}
        .or_else("false")
        .called("precision")
        .set_by(set_bf16)
        .given_by(given_dtype<DType::bf16>),
    ArgumentSpec{configuration, "fp16", "", "The same as --precision f16"}
        .or_else("false")
        .called("precision")
        .set_by(set_fp16)
        .given_by(given_dtype<DType::f16>),
    ArgumentSpec{configuration, "learning_rate", "X",
                 "optimizer.params.lr; without a section optimizer: AdamW with this rate", &A::learning_rate}
        .or_else("5e-5"),
    ArgumentSpec{configuration, "adam_beta1", "X", "optimizer.params.betas, the first", &A::adam_beta1},
    ArgumentSpec{configuration, "adam_beta2", "X", "optimizer.params.betas, the second", &A::adam_beta2},
    ArgumentSpec{configuration, "adam_epsilon", "X", "optimizer.params.eps", &A::adam_epsilon}.or_else(
        "1e-8"),
    ArgumentSpec{configuration, "weight_decay", "X", "optimizer.params.weight_decay", &A::weight_decay}
        .or_else("0.0"),
    ArgumentSpec{configuration, "max_grad_norm", "X", "gradient_clipping; 0: no clipping", &A::max_grad_norm}
        .or_else("1.0"),
    ArgumentSpec{
        configuration, "lr_scheduler_type", "NAME",
        "Without a section scheduler: linear, cosine, constant, constant_with_warmup or "
        "reduce_lr_on_plateau; with a warm-up DeepSpeed's WarmupDecayLR, WarmupCosineLR or WarmupLR, else "
        "torch's LinearLR or CosineAnnealingLR",
        &A::lr_scheduler_type}
        .one_of("linear cosine constant constant_with_warmup reduce_lr_on_plateau"),
    ArgumentSpec{configuration, "warmup_steps", "N",
                 "scheduler.params.warmup_num_steps; below 1: as warmup_ratio; default 0", &A::warmup_steps}
        .within(0, max_updates)
        .or_else("1")
        .set_by(set_warmup_steps),
    ArgumentSpec{configuration, "warmup_ratio", "X", "The same, as a share of the updates of the schedule",
                 &A::warmup_ratio}
        .within(0, 1),
    ArgumentSpec{configuration, "total_steps", "N",
                 "scheduler.params.total_num_steps; \"auto\" is the updates of the run without it",
                 &A::total_steps}
        .within(1, max_updates),
    ArgumentSpec{
        configuration, "gradient_checkpointing", "",
        "activation_checkpointing.partition_activations: blocks compute their activations again in backward",
        &A::gradient_checkpointing},
    ArgumentSpec{configuration, "dataloader_drop_last", "", "dataloader_drop_last", &A::dataloader_drop_last},
    ArgumentSpec{configuration, "ddp_comm_hook", "NAME",
                 "ringzero.comm_hook: no, fp16, bf16, power_sgd or batched_power_sgd; not with ZeRO",
                 &A::ddp_comm_hook}
        .one_of("no fp16 bf16 power_sgd batched_power_sgd"),
    ArgumentSpec{configuration, "ddp_find_unused_parameters", "BOOL", "ringzero.find_unused_parameters",
                 &A::ddp_find_unused_parameters},
    ArgumentSpec{configuration, "ddp_static_graph", "BOOL", "ringzero.static_graph", &A::ddp_static_graph},
    ArgumentSpec{configuration, "ddp_broadcast_buffers", "BOOL", "ringzero.broadcast_buffers",
                 &A::ddp_broadcast_buffers},
    ArgumentSpec{configuration, "lora_target_modules", "NAMES",
                 "ringzero.lora.target_modules, without a section too: q_proj,v_proj or all-linear",
                 &A::lora_target_modules}
        .given_by(given_target_modules),
    ArgumentSpec{configuration, "lora_r", "N", "ringzero.lora.r", &A::lora_r}.within(1, max_size),
    ArgumentSpec{configuration, "lora_alpha", "X", "ringzero.lora.lora_alpha", &A::lora_alpha}.within(1e-30,
                                                                                                      3.4e38),
    ArgumentSpec{configuration, "lora_dropout", "X", "ringzero.lora.lora_dropout", &A::lora_dropout}.within(
        0, 0.999999),
    ArgumentSpec{
        configuration, "mesh", "SIZES",
        "ringzero.mesh: replicate=2,shard=auto,tp=2, ranks that copy, divide and share the layers of a "
        "model; those left out are 1, auto and 1"}
        .set_by(set_mesh),
    ArgumentSpec{configuration, "parallelism_config_dp_replicate_size", "N",
                 "ringzero.mesh.replicate, as in Accelerate"}
        .set_by(set_size_of<0>),
    ArgumentSpec{configuration, "parallelism_config_dp_shard_size", "N",
                 "ringzero.mesh.shard, as in Accelerate"}
        .set_by(set_size_of<1>),
    ArgumentSpec{configuration, "parallelism_config_tp_size", "N", "ringzero.mesh.tp, as in Accelerate"}
        .set_by(set_size_of<2>),
    ArgumentSpec{loop, "max_steps", "N", "Updates of the run", &A::max_steps}.within(-1, max_updates),
    ArgumentSpec{
        loop, "num_train_epochs", "X",
        "Passes over the data: train_lm makes them; else the loop of the program does, and no schedule "
        "counts them",
        &A::num_train_epochs},
    ArgumentSpec{loop, "logging_steps", "N", "steps_per_print: updates between lines of progress",
                 &A::logging_steps}
        .within(1, max_updates),
    ArgumentSpec{checkpoint, "output_dir", "DIR", "Folder of the checkpoints", &A::output_dir},
    ArgumentSpec{checkpoint, "resume_from_checkpoint", "DIR",
                 "Begin with the last checkpoint of this folder, or of the output folder for true",
                 &A::resume_from_checkpoint},
    ArgumentSpec{checkpoint, "save_strategy", "NAME", "no, or steps (every 500 updates without --save_steps)",
                 &A::save_strategy}
        .one_of("no steps")
        .set_by(set_save_strategy),
    ArgumentSpec{checkpoint, "save_steps", "N", "Save every N updates; 0: not by number", &A::save_steps}
        .within(0, max_updates)
        .given_by(given_save_steps),
    ArgumentSpec{checkpoint, "save_minutes", "M", "Save when the last checkpoint is M minutes old",
                 &A::save_minutes}
        .within(0, max_updates),
    ArgumentSpec{checkpoint, "save_total_limit", "K", "Keep the last K checkpoints; 0: all",
                 &A::save_total_limit}
        .within(0, max_updates),
    ArgumentSpec{checkpoint, "async_save", "", "Write checkpoints while training goes on", &A::async_save},
    ArgumentSpec{checkpoint, "eval_strategy", "NAME", "no, or steps (every 500 updates without --eval_steps)",
                 &A::eval_strategy}
        .one_of("no steps")
        .set_by(set_eval_strategy),
    ArgumentSpec{checkpoint, "eval_steps", "N", "Evaluate every N updates; 0: never", &A::eval_steps}
        .within(0, max_updates)
        .given_by(given_eval_steps),
    ArgumentSpec{checkpoint, "metric_for_best_model", "NAME",
                 "The metric that decides on the best checkpoint", &A::metric_for_best_model},
    ArgumentSpec{checkpoint, "greater_is_better", "BOOL", "Whether the best metric is the greatest",
                 &A::greater_is_better},
    ArgumentSpec{checkpoint, "load_best_model_at_end", "", "Load the model of the best checkpoint at the end",
                 &A::load_best_model_at_end},
    ArgumentSpec{checkpoint, "early_stopping_patience", "N",
                 "Stop after N evaluations in a row without improvement", &A::early_stopping_patience}
        .within(1, max_updates),
    ArgumentSpec{checkpoint, "early_stopping_threshold", "X", "What an improvement must exceed",
                 &A::early_stopping_threshold},
    ArgumentSpec{derived, "betas", "", ""}
        .or_else("[0.9, 0.999]")
        .called("adam_beta1 and adam_beta2")
        .given_by(given_betas),
    ArgumentSpec{derived, "mesh_replicate", "", "", &A::mesh_replicate}.or_else("0").called(
        "replicate of --mesh"),
    ArgumentSpec{derived, "mesh_shard", "", "", &A::mesh_shard}.or_else("0").called("shard of --mesh"),
    ArgumentSpec{derived, "mesh_tp", "", "", &A::mesh_tp}.or_else("0").called("tp of --mesh"),
    ArgumentSpec{derived, "warmup_min_lr", "", ""}.or_else("0.0").called("0"),
    ArgumentSpec{derived, "warmup_max_lr", "", ""}.called("the learning rate"),
    ArgumentSpec{derived, "schedule_steps", "", ""}.called("total_steps"),
};

constexpr std::pair<std::string_view, std::string_view> without_counterpart[] = {
    {"data_parallel_size", "--mesh shard=N does it; without it, all ranks that tp leaves"},
    {"ddp_bucket_cap_mb", "zero_optimization.reduce_bucket_size, in elements, does it"},
    {"dataloader_num_workers", "loaders have their own options"},
    {"dataloader_prefetch_factor", "loaders have their own options"},
    {"fsdp", "zero_optimization.stage 3 shards like it"},
    {"fsdp_config", "zero_optimization.stage 3 shards like it"},
    {"fsdp_reshard_after_forward",
     "stage 3 is true, stage 2 is false, and zero_optimization.zero_hpz_partition_size is a number of ranks"},
    {"full_determinism", "runs are deterministic without it"},
    {"label_smoothing_factor", "cross_entropy() has an option"},
    {"logging_dir", "tensorboard.output_path does it"},
    {"optim", "write optimizer.type to the DeepSpeed configuration"},
    {"parallelism_config_cp_size", "sequences are not divided over ranks"},
    {"parallelism_config_sp_size", "sequences are not divided over ranks"},
    {"per_device_eval_batch_size", "evaluation has the size of a training batch, or that of its loader"},
    {"report_to", "enable tensorboard or csv_monitor in the configuration"},
    {"tensor_parallel_size", "--mesh tp=N does it"},
    {"torch_compile", "there is nothing to compile"},
};

}  // namespace

std::span<const ArgumentSpec> argument_specs() { return table; }

const ArgumentSpec& argument_spec(std::string_view name) {
  const auto found = std::ranges::find(table, name, &ArgumentSpec::name);
  require(found != std::end(table), Errc::invalid_argument, "no argument ", name);
  return *found;
}

json given_value(const TrainingArguments& a, const ArgumentSpec& spec) {
  if (spec.given) return spec.given(a);
  return std::visit(
      [&](const auto field) {
        if constexpr (std::is_same_v<decltype(field), const std::monostate>)
          return json();
        else
          return json_or_null(a.*field);
      },
      spec.field);
}

std::string argument_name(std::string_view word) {
  std::string name(word.substr(0, word.find('=')));
  name.erase(0, name.find_first_not_of('-'));
  std::ranges::replace(name, '-', '_');
  return name;
}

const ArgumentSpec* find_flag(std::string_view word, std::span<const FlagAlias> aliases) {
  if (!word.starts_with("--")) return nullptr;
  std::string name = argument_name(word);
  if (name == "evaluation_strategy") name = "eval_strategy";  // older name
  if (const auto alias = std::ranges::find(aliases, name, &FlagAlias::flag); alias != aliases.end())
    name = alias->name;
  const auto found = std::ranges::find(table, name, &ArgumentSpec::name);
  return found == std::end(table) || found->group == derived ? nullptr : &*found;
}

std::size_t set_argument(TrainingArguments& a, const ArgumentSpec& spec, std::span<const char* const> words,
                         std::size_t at) {
  const std::string_view word = words[at];
  const std::size_t equals = word.find('=');
  ArgumentSpec typed = spec;
  typed.name = word.substr(2, equals == word.npos ? equals : equals - 2);  // for messages, as it was written
  a.flags.insert_or_assign(std::string(spec.name), concat("--", typed.name));
  if (equals != word.npos) {
    set_value(a, typed, word.substr(equals + 1));
    return at + 1;
  }
  const std::string_view next = at + 1 < words.size() ? words[at + 1] : "";
  if (spec.value.empty() && !is_true(next) && !is_false(next)) {
    set_value(a, typed, "true");
    return at + 1;
  }
  require(at + 1 < words.size() && !next.starts_with("--"), Errc::config, "--", typed.name,
          ": a value is missing");
  set_value(a, typed, next);
  return at + 2;
}

std::string typed_flag(const TrainingArguments& a, std::string_view name) {
  if (const auto typed = a.flags.find(std::string(name)); typed != a.flags.end()) return typed->second;
  std::string flag = concat("--", name);
  std::ranges::replace(flag, '_', '-');
  return flag;
}

std::string describe_flags(std::span<const ArgumentGroup> groups, char dash,
                           std::span<const FlagAlias> aliases) {
  constexpr const char* headings[] = {"Values of the configuration that it leaves out or calls \"auto\"",
                                      "The run", "Checkpoints and evaluation"};
  constexpr std::size_t column = 34;
  std::string out;
  const auto dashed = [&](std::string_view name) {
    std::string flag = concat("--", name);
    std::replace(flag.begin() + 2, flag.end(), '_', dash);
    return flag;
  };
  for (const ArgumentGroup group : groups) {
    out += concat(out.empty() ? "" : "\n", headings[static_cast<std::size_t>(group)], ":\n");
    for (const ArgumentSpec& spec : table) {
      if (spec.group != group) continue;
      std::string line = concat("  ", dashed(spec.name), spec.value.empty() ? "" : " ", spec.value);
      if (line.size() >= column) {
        out += line + "\n";
        line.clear();
      }
      line.resize(column, ' ');
      out += line + std::string(spec.help);
      for (const FlagAlias& alias : aliases)
        if (alias.name == spec.name) out += concat(" (also: ", dashed(alias.flag), ")");
      out += '\n';
    }
  }
  return out;
}

std::string_view no_counterpart(std::string_view word) {
  const std::string name = argument_name(word);
  for (const auto& [flag, reason] : without_counterpart)
    if (flag == name) return reason;
  return "";
}

}  // namespace rz
