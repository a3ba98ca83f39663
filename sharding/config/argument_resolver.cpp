#include "sharding/config/argument_resolver.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <variant>

#include "comm/core/error.h"
#include "sharding/config/argument_flags.h"

namespace rz::ds {
namespace {

using nlohmann::json;

template <class T>
json or_null(const std::optional<T>& value) {
  return value ? json(*value) : json();
}

/// Beta 1 and beta 2 if one of them is given.
json betas_of(const TrainingArguments& a) {
  if (!a.adam_beta1 && !a.adam_beta2) return {};
  return {a.adam_beta1.value_or(0.9), a.adam_beta2.value_or(0.999)};
}

/// Trainer's strategy "no" prevails over a number.
json steps_of(const std::optional<std::string>& strategy, const std::optional<std::int64_t>& steps) {
  if (strategy == "no") return 0;
  return strategy == "steps" ? json(steps.value_or(500)) : or_null(steps);
}

/// The value of the flag of that name. Null if it is not given.
json value_of(const TrainingArguments& a, Argument argument) {
  switch (argument) {
    case Argument::betas:
      return betas_of(a);
    case Argument::fp16:
      return a.precision ? json(*a.precision == DType::f16) : json();
    case Argument::bf16:
      return a.precision ? json(*a.precision == DType::bf16) : json();
    case Argument::save_steps:
      return steps_of(a.save_strategy, a.save_steps);
    case Argument::eval_steps:
      return steps_of(a.eval_strategy, a.eval_steps);
    case Argument::schedule_steps:
      return {};
    default:
      break;
  }
  const auto flag = std::ranges::find(argument_flags(), name(argument), &ArgumentFlag::name);
  if (flag == argument_flags().end()) return {};
  return std::visit(
      [&](const auto field) {
        if constexpr (std::is_same_v<decltype(field), const std::monostate>)
          return json();
        else
          return or_null(a.*field);
      },
      flag->field);
}

/// Hugging Face's default; null if there is none.
json default_of(Argument argument) {
  switch (argument) {
    case Argument::learning_rate:
      return 5e-5;
    case Argument::betas:
      return {0.9, 0.999};
    case Argument::epsilon:
      return 1e-8;
    case Argument::weight_decay:
    case Argument::warmup_min_lr:
      return 0.0;
    case Argument::warmup_steps:
      return 1;
    case Argument::max_grad_norm:
      return 1.0;
    case Argument::fp16:
    case Argument::bf16:
      return false;
    default:
      return {};
  }
}

}  // namespace

std::optional<ArgumentValue> ArgumentResolver::given(Argument argument) {
  if (argument == Argument::warmup_steps && arguments_.warmup_ratio) return warmup_by_ratio();
  json value = value_of(arguments_, argument);
  if (value.is_null()) return std::nullopt;
  used_.insert(argument);
  return ArgumentValue{std::move(value), concat(name(argument), " (", arguments_.origin, ")")};
}

std::optional<ArgumentValue> ArgumentResolver::automatic(Argument argument) {
  if (auto found = given(argument)) {
    // Hugging Face writes 1 for no warm-up; DeepSpeed takes both for 2.
    if (argument == Argument::warmup_steps && found->value == 0) found->value = 1;
    return found;
  }
  switch (argument) {
    case Argument::schedule_steps:
      return automatic(Argument::total_steps);
    case Argument::train_batch_size:
    case Argument::micro_batch_size:
    case Argument::accumulation:
      return ArgumentValue{json(), "from the other batch sizes"};
    case Argument::warmup_max_lr:
      return max_rate();
    case Argument::total_steps:
      return total_steps();
    case Argument::reduce_bucket_size:
    case Argument::prefetch_bucket_size:
    case Argument::persistence_threshold:
      return by_hidden_size(argument);
    default:
      break;
  }
  json value = default_of(argument);
  if (value.is_null()) return std::nullopt;
  return ArgumentValue{std::move(value), "Hugging Face's default"};
}

/// The rate of the optimizer, which was read before the scheduler.
std::optional<ArgumentValue> ArgumentResolver::max_rate() {
  if (const Settings::Entry* rate = settings_.find("optimizer.params.lr"))
    return ArgumentValue{rate->value, "optimizer.params.lr"};
  return automatic(Argument::learning_rate);
}

/// Schedules read their total before the warm-up; one without a total counts with the updates of the run.
std::optional<ArgumentValue> ArgumentResolver::warmup_by_ratio() {
  require(!arguments_.warmup_steps, Errc::config, "warmup_steps and warmup_ratio (", arguments_.origin,
          ") exclude each other");
  const Settings::Entry* entry = settings_.find("scheduler.params.total_num_steps");
  const auto total =
      entry ? std::optional(ArgumentValue{entry->value, ""}) : automatic(Argument::total_steps);
  require(total.has_value(), Errc::config, file_, ": scheduler.params.warmup_num_steps: warmup_ratio (",
          arguments_.origin, ") needs the updates of the run; give total_steps or max_steps");
  ratio_used_ = true;
  const auto steps = std::ceil(*arguments_.warmup_ratio * total->value.get<double>());
  return ArgumentValue{static_cast<std::int64_t>(steps), concat("warmup_ratio (", arguments_.origin, ")")};
}

std::optional<ArgumentValue> ArgumentResolver::total_steps() const {
  if (!facts_.updates) return std::nullopt;
  if (errors_.has_wrong(
          {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}))
    return ArgumentValue{1, "unknown"};  // the configuration is refused
  const BatchSizes sizes =
      resolve_batch(with_batch_defaults(batch_of(settings_), settings_), facts_.ranks, file_);
  return ArgumentValue{facts_.updates(sizes), "the updates of the run"};
}

std::optional<ArgumentValue> ArgumentResolver::by_hidden_size(Argument argument) const {
  if (!facts_.hidden_size) return std::nullopt;
  const std::int64_t h = *facts_.hidden_size;
  const std::int64_t value = argument == Argument::reduce_bucket_size     ? h * h
                             : argument == Argument::prefetch_bucket_size ? h * h * 9 / 10
                                                                          : 10 * h;
  return ArgumentValue{value, concat("hidden size ", h)};
}

void ArgumentResolver::require_all_used(ConfigErrors& errors) const {
  const auto require_used = [&](bool used, const char* argument) {
    errors.collect(ConfigErrors::Kind::combination, "", [&] {
      require(used, Errc::config, file_, ": the configuration has no key for ", argument, " (",
              arguments_.origin, "); add its section, or leave it out");
    });
  };
  require_used(arguments_.warmup_ratio.value_or(0) == 0 || ratio_used_, "warmup_ratio");
  for (int i = 1; i <= static_cast<int>(Argument::early_stopping_threshold); ++i) {
    const auto argument = static_cast<Argument>(i);
    const json value = value_of(arguments_, argument);
    const bool no_warmup = argument == Argument::warmup_steps && value == 0;
    if (!value.is_null() && !no_warmup) require_used(used_.contains(argument), name(argument));
  }
}

BatchConfig batch_of(const Settings& s) {
  return {s.optional_integer("train_batch_size"), s.optional_integer("train_micro_batch_size_per_gpu"),
          s.optional_integer("gradient_accumulation_steps")};
}

BatchConfig with_batch_defaults(BatchConfig batch, const Settings& s) {
  constexpr std::int64_t hugging_face_micro = 8;
  const auto is_auto = [&](const char* key) { return s.find(key)->origin.starts_with("auto"); };
  if (!batch.train && !batch.micro &&
      (is_auto("train_batch_size") || is_auto("train_micro_batch_size_per_gpu")))
    batch.micro = hugging_face_micro;
  return batch;
}

}  // namespace rz::ds
