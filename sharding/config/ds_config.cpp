#include "sharding/config/ds_config.h"

#include <algorithm>
#include <cctype>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <tuple>

#include "comm/core/error.h"
#include "sharding/config/ds_keys.h"
#include "sharding/io/json.h"

namespace rz {
namespace {

using nlohmann::json;

/// Removes values of "auto" (Hugging Face leaves them to the runtime), so that the defaults apply.
void drop_auto(json& node, const std::string& path, DsConfig& config) {
  for (auto it = node.begin(); it != node.end();) {
    const std::string here = path + (path.empty() ? "" : ".") + it.key();
    if (it->is_object()) drop_auto(*it, here, config);
    if (*it == "auto") {
      config.warnings.push_back(
          concat(config.file, ": ", here, ": \"auto\" is taken as if it were not given"));
      it = node.erase(it);
    } else {
      ++it;
    }
  }
}

constexpr double unbounded = std::numeric_limits<double>::max();

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

void read_adam(const JsonObject& params, OptimizerConfig& o) {
  o.eps = params.number("eps", o.eps, 0, unbounded);
  if (!params.has("betas")) return;
  const json& betas = params.at("betas");
  const auto valid = [](const json& b) {
    return b.is_number() && b.get<double>() >= 0 && b.get<double>() < 1;
  };
  if (!betas.is_array() || betas.size() != 2 || !valid(betas[0]) || !valid(betas[1]))
    params.fail_at("betas", concat("expected two numbers from 0 to below 1, found ", to_display(betas)));
  o.beta1 = betas[0].get<double>();
  o.beta2 = betas[1].get<double>();
}

void read_sgd(const JsonObject& params, OptimizerConfig& o) {
  o.momentum = params.number("momentum", 0, 0, unbounded);
  o.nesterov = params.boolean("nesterov", false);
  if (o.nesterov && o.momentum == 0) params.fail_at("nesterov", "needs a momentum above 0");
}

OptimizerConfig::Type read_type(const JsonObject& optimizer, const std::string& file) {
  const std::string type = optimizer.text("type", "");
  const std::string low = lower(type);
  if (low == "adamw") return OptimizerConfig::Type::adamw;
  if (low == "adam") return OptimizerConfig::Type::adam;
  if (low == "sgd") return OptimizerConfig::Type::sgd;
  if (type.empty()) optimizer.fail_at("type", "missing; choose Adam, AdamW or SGD");
  for (const char* later : {"lion", "lamb", "adagrad", "muon", "onebitadam", "zerooneadam", "onebitlamb"})
    if (low == later)
      fail(Errc::unsupported, file, ": ", optimizer.path("type"), ": not supported in this build yet: ", type,
           "; choose Adam, AdamW or SGD");
  optimizer.fail_at("type", concat("unknown optimizer \"", type, "\"; choose Adam, AdamW or SGD"));
}

void read_optimizer(const JsonObject& root, ds::KeyValidator& validator, DsConfig& config) {
  if (!root.has("optimizer")) {
    config.warnings.push_back(concat(config.file, ": optimizer: not given; AdamW with lr 0.001 is used"));
    return;
  }
  const JsonObject optimizer = root.object("optimizer");
  validator.validate(optimizer, ds::optimizer_keys());
  OptimizerConfig& o = config.optimizer;
  o.type = read_type(optimizer, config.file);
  if (!optimizer.has("params")) return;
  const JsonObject params = optimizer.object("params");
  const bool sgd = o.type == OptimizerConfig::Type::sgd;
  validator.validate(params, sgd ? ds::sgd_keys() : ds::adam_keys());
  o.lr = params.number("lr", o.lr, 0, unbounded);
  o.weight_decay = params.number("weight_decay", 0, 0, unbounded);
  if (sgd) return read_sgd(params, o);
  read_adam(params, o);
  params.boolean("torch_adam", false);
  // As in DeepSpeed: "Adam" decouples weight decay unless adam_w_mode is off; "AdamW" always does.
  const bool decoupled = params.boolean("adam_w_mode", true) || o.type == OptimizerConfig::Type::adamw;
  if (o.type == OptimizerConfig::Type::adam && decoupled && o.weight_decay != 0 && !params.has("adam_w_mode"))
    config.warnings.push_back(
        concat(config.file, ": ", optimizer.path("type"),
               ": Adam decays weights as AdamW does; \"adam_w_mode\": false adds the decay to "
               "the gradient instead"));
  o.type = decoupled ? OptimizerConfig::Type::adamw : OptimizerConfig::Type::adam;
}

void read_fp16(const JsonObject& fp16, DsConfig& config) {
  LossScaleOptions& o = config.loss_scale;
  o.fixed = fp16.number("loss_scale", o.fixed, 0, unbounded);
  o.initial_power = static_cast<int>(fp16.integer("initial_scale_power", o.initial_power, 0, 32));
  o.window = fp16.integer("loss_scale_window", o.window, 1, std::int64_t{1} << 40);
  o.hysteresis = static_cast<int>(fp16.integer("hysteresis", o.hysteresis, 1, 1 << 20));
  o.consecutive_hysteresis = fp16.boolean("consecutive_hysteresis", o.consecutive_hysteresis);
  o.minimum = fp16.number("min_loss_scale", o.minimum, 0, unbounded);
  if (o.minimum == 0) fp16.fail_at("min_loss_scale", "is 0, expected more");
}

/// The dtype in `key`, or `absent` if there is none.
DType read_dtype(const JsonObject& object, const char* key, DType absent) {
  if (!object.has(key) || object.at(key).is_null()) return absent;
  const std::string text = lower(object.text(key, ""));
  if (text == "fp32" || text == "float32") return DType::f32;
  if (text == "fp16" || text == "float16" || text == "half") return DType::f16;
  if (text == "bf16" || text == "bfloat16") return DType::bf16;
  object.fail_at(key, concat("unknown type \"", text, "\"; choose fp32, fp16 or bf16"));
}

/// Gradients are accumulated in the dtype of the parameters, as in DeepSpeed, unless data_types sets another.
/// They are reduced in the dtype in which they are accumulated.
void read_gradient_dtype(const JsonObject& root, ds::KeyValidator& validator, DsConfig& config) {
  Precision& p = config.precision;
  p.gradients = p.parameters;
  if (root.has("data_types") && !root.at("data_types").is_null()) {
    const JsonObject types = root.object("data_types");
    validator.validate(types, ds::data_types_keys());
    p.gradients = read_dtype(types, "grad_accum_dtype", p.parameters);
    if (p.gradients != DType::f32 && p.gradients != p.parameters)
      types.fail_at("grad_accum_dtype",
                    concat("gradients in ", name(p.gradients), " of a model in ", name(p.parameters),
                           "; choose ", name(p.parameters), " or fp32"));
  }
  const DType exchanged = read_dtype(root, "communication_data_type", p.gradients);
  if (exchanged != p.gradients)
    fail(Errc::unsupported, config.file, ": ", root.path("communication_data_type"),
         ": not supported in this build yet: ", name(exchanged), " for gradients in ", name(p.gradients),
         "; remove the key, or set data_types.grad_accum_dtype alike");
}

void read_precision(const JsonObject& root, ds::KeyValidator& validator, DsConfig& config) {
  const auto enabled = [&](const char* key, std::span<const ds::KeySpec> keys) {
    if (!root.has(key) || root.at(key).is_null()) return false;
    const JsonObject object = root.object(key);
    validator.validate(object, keys);
    return object.boolean("enabled", false);
  };
  const char* const bf16 = root.has("bfloat16") ? "bfloat16" : "bf16";  // older spelling
  const bool half = enabled("fp16", ds::fp16_keys()), brain = enabled(bf16, ds::bf16_keys());
  if (half && brain) root.fail_at("fp16", concat("is enabled, and ", bf16, " too; enable one of them"));
  if (half) {
    config.precision.parameters = DType::f16;
    config.skip_overflow = true;
    read_fp16(root.object("fp16"), config);
  } else if (brain) {
    config.precision.parameters = DType::bf16;
    config.skip_overflow = root.object(bf16).boolean("check_grad_overflow", false);
  }
  read_gradient_dtype(root, validator, config);
}

void read_ringzero(const JsonObject& root, ds::KeyValidator& validator, DsConfig& config) {
  if (!root.has("ringzero")) return;
  const JsonObject own = root.object("ringzero");
  validator.validate(own, ds::ringzero_keys());
  config.decay_one_dimensional = own.boolean("decay_one_dimensional", config.decay_one_dimensional);
  const char* const key = "unused_parameters";
  const std::string choice = own.text(key, name(config.unused_parameters));
  if (choice != name(UnusedParameterPolicy::pytorch) && choice != name(UnusedParameterPolicy::deepspeed))
    own.fail_at(key, concat("unknown choice \"", choice, "\"; choose pytorch or deepspeed"));
  config.unused_parameters = unused_parameter_policy_from_name(choice);
}

std::optional<std::int64_t> read_size(const JsonObject& root, const char* key, int bits = 20) {
  if (!root.has(key)) return std::nullopt;
  return root.integer(key, 0, 1, std::int64_t{1} << bits);
}

}  // namespace

const char* name(OptimizerConfig::Type type) {
  switch (type) {
    case OptimizerConfig::Type::adam:
      return "Adam";
    case OptimizerConfig::Type::adamw:
      return "AdamW";
    case OptimizerConfig::Type::sgd:
      return "SGD";
  }
  return "?";
}

DsConfig parse_ds_config(std::string_view text, const std::string& file) {
  DsConfig config;
  config.file = file;
  json document = parse_json(text, file, JsonDialect::relaxed);
  if (document.is_object()) drop_auto(document, "", config);
  const JsonObject root(document, file);
  ds::KeyValidator validator(file, config.warnings);
  validator.validate(root, ds::top_keys());
  config.train_batch_size = read_size(root, "train_batch_size", 40);
  config.train_micro_batch_size_per_gpu = read_size(root, "train_micro_batch_size_per_gpu");
  config.gradient_accumulation_steps = read_size(root, "gradient_accumulation_steps");
  config.gradient_clipping = root.number("gradient_clipping", 0, 0, unbounded);
  config.drop_last = root.boolean("dataloader_drop_last", false);
  read_optimizer(root, validator, config);
  read_precision(root, validator, config);
  read_ringzero(root, validator, config);
  if (root.has("zero_optimization")) {
    const JsonObject zero = root.object("zero_optimization");
    validator.validate(zero, ds::zero_keys());
    config.zero_stage = static_cast<int>(zero.integer("stage", 0, 0, 3));
    if (!zero.has("overlap_comm") || !zero.at("overlap_comm").is_null())
      config.overlap_comm = zero.boolean("overlap_comm", true);
  }
  return config;
}

DsConfig read_ds_config(const std::string& path) { return parse_ds_config(read_text_file(path), path); }

namespace {

/// whole / parts; throws unless the division is exact. `key` is the configuration key to blame in the
/// message.
std::int64_t divide(const DsConfig& c, const char* key, std::int64_t whole, const std::string& parts_text,
                    std::int64_t parts) {
  const std::int64_t below = whole / parts * parts;
  require(whole % parts == 0, Errc::config, c.file, ": ", key, ": ", whole,
          " cannot be shared out evenly over ", parts_text, "; use ", below > 0 ? concat(below, " or ") : "",
          below + parts, ", or another number of ranks");
  return whole / parts;
}

}  // namespace

BatchSizes resolve_batch(const DsConfig& c, int ranks) {
  const auto& [train, micro, accumulation] =
      std::tie(c.train_batch_size, c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps);
  const std::string world = concat(ranks, ranks == 1 ? " rank" : " ranks");
  if (train && micro) {
    const std::int64_t parts = *micro * ranks;
    const std::string text = concat(world, " × train_micro_batch_size_per_gpu ", *micro);
    if (!accumulation) return {*train, *micro, divide(c, "train_batch_size", *train, text, parts)};
    require(*train == parts * *accumulation, Errc::config, c.file, ": train_batch_size: ", *train, " is not ",
            text, " × gradient_accumulation_steps ", *accumulation, " = ", parts * *accumulation,
            "; remove one of the three, or make them agree");
    return {*train, *micro, *accumulation};
  }
  if (train) {
    const std::int64_t steps = accumulation.value_or(1);
    const std::string text = steps == 1 ? world : concat(world, " × gradient_accumulation_steps ", steps);
    return {*train, divide(c, "train_batch_size", *train, text, steps * ranks), steps};
  }
  require(micro.has_value(), Errc::config, c.file,
          ": train_batch_size: missing; give train_batch_size or train_micro_batch_size_per_gpu");
  const std::int64_t steps = accumulation.value_or(1);
  return {*micro * steps * ranks, *micro, steps};
}

namespace {

void add_precision(const DsConfig& c, nlohmann::ordered_json& all) {
  const LossScaleOptions& o = c.loss_scale;
  if (c.precision.parameters == DType::f16)
    all["fp16"] = {{"enabled", true},
                   {"loss_scale", o.fixed},
                   {"initial_scale_power", o.initial_power},
                   {"loss_scale_window", o.window},
                   {"hysteresis", o.hysteresis},
                   {"consecutive_hysteresis", o.consecutive_hysteresis},
                   {"min_loss_scale", o.minimum}};
  if (c.precision.parameters == DType::bf16)
    all["bf16"] = {{"enabled", true}, {"check_grad_overflow", c.skip_overflow}};
  if (c.precision.mixed())
    all["data_types"] = {{"grad_accum_dtype", c.precision.gradients == DType::f32   ? "fp32"
                                              : c.precision.gradients == DType::f16 ? "fp16"
                                                                                    : "bf16"}};
}

}  // namespace

std::string resolved_json(const DsConfig& c, const BatchSizes& batch) {
  const OptimizerConfig& o = c.optimizer;
  nlohmann::ordered_json params{{"lr", o.lr}, {"weight_decay", o.weight_decay}};
  if (o.type == OptimizerConfig::Type::sgd) {
    params["momentum"] = o.momentum;
    params["nesterov"] = o.nesterov;
  } else {
    params["betas"] = {o.beta1, o.beta2};
    params["eps"] = o.eps;
    params["adam_w_mode"] = o.type == OptimizerConfig::Type::adamw;
  }
  nlohmann::ordered_json all{
      {"train_batch_size", batch.train},
      {"train_micro_batch_size_per_gpu", batch.micro},
      {"gradient_accumulation_steps", batch.accumulation},
      {"gradient_clipping", c.gradient_clipping},
      {"dataloader_drop_last", c.drop_last},
      {"optimizer", {{"type", name(o.type)}, {"params", params}}},
      {"zero_optimization", {{"stage", c.zero_stage}, {"overlap_comm", c.overlap_comm}}},
      {"ringzero",
       {{"decay_one_dimensional", c.decay_one_dimensional},
        {"unused_parameters", name(c.unused_parameters)}}},
  };
  add_precision(c, all);
  return all.dump(2) + "\n";
}

}  // namespace rz
