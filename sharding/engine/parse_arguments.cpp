#include "sharding/engine/parse_arguments.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/core/error.h"
#include "comm/core/text.h"

namespace rz {

namespace {

template <class T>
T parse_number(std::string_view flag, std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(error == std::errc() && end == text.data() + text.size(), Errc::config, "--", flag, " ", text,
          ": expected ", std::is_integral_v<T> ? "an integer" : "a number");
  return value;
}

void set_precision(EngineOptions& o, DType precision) {
  require(!o.arguments.precision || o.arguments.precision == precision, Errc::config,
          "--bf16 and --fp16 exclude each other");
  o.arguments.precision = precision;
}

struct ArgumentFlag {
  std::string_view name;
  bool has_value;
  void (*set)(EngineOptions&, std::string_view flag, std::string_view value);
};

template <std::optional<std::int64_t> TrainingArguments::*field>
void set_integer(EngineOptions& o, std::string_view flag, std::string_view value) {
  o.arguments.*field = parse_number<std::int64_t>(flag, value);
}
template <std::optional<double> TrainingArguments::*field>
void set_double(EngineOptions& o, std::string_view flag, std::string_view value) {
  o.arguments.*field = parse_number<double>(flag, value);
}
template <std::optional<bool> TrainingArguments::*field>
void set_bool(EngineOptions& o, std::string_view flag, std::string_view value) {
  const bool yes = value == "true" || value == "True" || value == "1";
  require(yes || value == "false" || value == "False" || value == "0", Errc::config, "--", flag, " ", value,
          ": expected true or false");
  o.arguments.*field = yes;
}
template <std::optional<std::string> TrainingArguments::*field>
void set_text(EngineOptions& o, std::string_view, std::string_view value) {
  o.arguments.*field = value;
}
void set_config(EngineOptions& o, std::string_view, std::string_view value) { o.config = value; }

using A = TrainingArguments;
constexpr ArgumentFlag argument_flags[] = {
    {"deepspeed", true, set_config},
    {"deepspeed_config", true, set_config},
    {"seed", true,
     [](EngineOptions& o, std::string_view flag, std::string_view value) {
       o.seed = parse_number<std::uint64_t>(flag, value);
     }},
    {"train_batch_size", true, set_integer<&A::train_batch_size>},
    {"per_device_train_batch_size", true, set_integer<&A::per_device_train_batch_size>},
    {"gradient_accumulation_steps", true, set_integer<&A::gradient_accumulation_steps>},
    {"learning_rate", true, set_double<&A::learning_rate>},
    {"adam_beta1", true, set_double<&A::adam_beta1>},
    {"adam_beta2", true, set_double<&A::adam_beta2>},
    {"adam_epsilon", true, set_double<&A::adam_epsilon>},
    {"weight_decay", true, set_double<&A::weight_decay>},
    {"max_grad_norm", true, set_double<&A::max_grad_norm>},
    {"warmup_steps", true, set_integer<&A::warmup_steps>},
    {"total_steps", true, set_integer<&A::total_steps>},
    {"ddp_find_unused_parameters", true, set_bool<&A::ddp_find_unused_parameters>},
    {"ddp_static_graph", true, set_bool<&A::ddp_static_graph>},
    {"ddp_broadcast_buffers", true, set_bool<&A::ddp_broadcast_buffers>},
    {"ddp_comm_hook", true, set_text<&A::ddp_comm_hook>},
    {"output_dir", true, set_text<&A::output_dir>},
    {"save_steps", true, set_integer<&A::save_steps>},
    {"save_minutes", true, set_integer<&A::save_minutes>},
    {"save_total_limit", true, set_integer<&A::save_total_limit>},
    {"async_save", true, set_bool<&A::async_save>},
    {"resume_from_checkpoint", true, set_text<&A::resume_from_checkpoint>},
    {"eval_steps", true, set_integer<&A::eval_steps>},
    {"metric_for_best_model", true, set_text<&A::metric_for_best_model>},
    {"greater_is_better", true, set_bool<&A::greater_is_better>},
    {"load_best_model_at_end", true, set_bool<&A::load_best_model_at_end>},
    {"early_stopping_patience", true, set_integer<&A::early_stopping_patience>},
    {"early_stopping_threshold", true, set_double<&A::early_stopping_threshold>},
    {"bf16", false,
     [](EngineOptions& o, std::string_view, std::string_view) { set_precision(o, DType::bf16); }},
    {"fp16", false,
     [](EngineOptions& o, std::string_view, std::string_view) { set_precision(o, DType::f16); }},
};

const ArgumentFlag& find_flag(std::string_view word) {
  std::string name(word.substr(0, word.find('=')));
  require(name.starts_with("--"), Errc::config, word, ": expected a flag, e.g. --deepspeed FILE");
  name.erase(0, 2);
  std::replace(name.begin(), name.end(), '-', '_');
  std::vector<std::string_view> names;
  for (const ArgumentFlag& flag : argument_flags) {
    if (flag.name == name) return flag;
    names.push_back(flag.name);
  }
  const std::string nearest = nearest_name(name, names);
  fail(Errc::config, "--", name, ": unknown flag", nearest.empty() ? "" : "; nearest: --", nearest);
}

}  // namespace

EngineOptions parse_arguments(int argc, const char* const* argv) {
  EngineOptions o;
  o.arguments.origin = "command line";
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    const ArgumentFlag& flag = find_flag(word);
    const std::size_t equals = word.find('=');
    std::string_view value;
    if (flag.has_value && equals == word.npos) {
      require(i + 1 < argc, Errc::config, "--", flag.name, ": a value is missing");
      value = argv[++i];
    } else if (equals != word.npos) {
      require(flag.has_value, Errc::config, word, ": --", flag.name, " has no value");
      value = word.substr(equals + 1);
    }
    flag.set(o, flag.name, value);
  }
  return o;
}

}  // namespace rz
