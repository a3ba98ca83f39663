// The section "optimizer": keys of each type, and the optimizer that they make.

#include "comm/core/error.h"
#include "sharding/config/keys.h"

namespace rz {
namespace ds {
namespace {

using enum Kind;
constexpr const char* l2 = "added to the gradient, times the value";
constexpr const char* decoupled = "the value shrinks by lr · weight_decay";

constexpr KeySpec optimizer[] = {
    applied<&Draft::optimizer_type>("type",
                                    "in any case: Adam, AdamW, SGD, Adagrad, RMSprop, Lion, Lamb, Muon")
        .required(),
    section("params", "{}", "keys of the type"),
    accepted("legacy_fusion", "false"),
};

/// A key that sets `To`, with the default of `Option` in optimizers.h.
template <auto To, auto Option>
constexpr KeySpec option(const char* key, const char* note) {
  KeySpec k = applied<To>(key, note);
  k.field.initial = [](const KeySpec& spec) { return json_of(spec, decltype(class_of(Option)){}.*Option); };
  return k;
}
template <class Options>
constexpr KeySpec rate =
    option<&OptimizerConfig::lr, &Options::learning_rate>("lr", "learning rate").from("learning_rate");
template <class Options>
constexpr KeySpec epsilon =
    option<&OptimizerConfig::eps, &Options::epsilon>("eps", "added to the denominator").from("adam_epsilon");
template <class Options>
constexpr KeySpec decay(const char* note) {
  return option<&OptimizerConfig::weight_decay, &Options::weight_decay>("weight_decay", note)
      .from("weight_decay");
}
/// Two fields.
constexpr KeySpec betas_of(nlohmann::json (*initial)(const KeySpec&)) {
  KeySpec k = applied<&OptimizerConfig::beta1>("betas", "decay of the two moments").from("betas");
  k.kind = betas;
  k.field.initial = initial;
  k.field.set = [](Draft& draft, const KeySpec&, const nlohmann::json& value) {
    if (value.is_null()) return;
    draft.optimizer_params.beta1 = value[0];
    draft.optimizer_params.beta2 = value[1];
  };
  return k;
}
template <class Options>
constexpr KeySpec both_betas = betas_of([](const KeySpec&) -> nlohmann::json {
  return {Options{}.beta1, Options{}.beta2};
});
template <class Options>
constexpr KeySpec bias_correction = option<&OptimizerConfig::bias_correction, &Options::bias_correction>(
    "bias_correction", "moments are divided by 1 - beta^t");
template <class Options>
constexpr KeySpec maximize =
    option<&OptimizerConfig::maximize, &Options::maximize>("maximize", "true: updates increase the loss");

constexpr KeySpec no_amsgrad = refused("amsgrad", "false", "[false]", "this variant is not implemented");
constexpr KeySpec grad_norm =
    refused("max_grad_norm", "0", "[0]", "DeepSpeed refuses it too; write gradient_clipping");
constexpr KeySpec f32_states = always("fp32_optimizer_states", "true", "states are in f32");

constexpr KeySpec adam[] = {
    rate<AdamOptions>,
    both_betas<AdamOptions>,
    epsilon<AdamOptions>,
    decay<AdamOptions>("see adam_w_mode; with torch_adam the default of AdamW is torch's, 0.01"),
    applied<&Draft::adam_w_mode>(
        "adam_w_mode",
        "Adam: true decouples weight decay, false adds it to the gradient; AdamW always decouples"),
    applied<&Draft::torch_adam>("torch_adam", "chooses the default of weight_decay only"),
    bias_correction<AdamOptions>,
    option<&OptimizerConfig::amsgrad, &AdamOptions::amsgrad>(
        "amsgrad", "true: steps divide by the maximum of the second moments so far"),
    maximize<AdamOptions>,
    grad_norm,
    f32_states,
    accepted("set_grad_none", "true"),
    accepted("fused", "null"),
    accepted("foreach", "null"),
    accepted("capturable", "false"),
    accepted("differentiable", "false"),
};
constexpr KeySpec sgd[] = {
    rate<SgdOptions>,
    option<&OptimizerConfig::momentum, &SgdOptions::momentum>("momentum", ""),
    option<&OptimizerConfig::nesterov, &SgdOptions::nesterov>("nesterov", "needs a momentum above 0"),
    decay<SgdOptions>(l2),
    option<&OptimizerConfig::dampening, &SgdOptions::dampening>(
        "dampening", "the gradient enters the momentum times 1 - dampening, at first whole")
        .within(-unbounded, unbounded),
    maximize<SgdOptions>,
    grad_norm,
    accepted("fused", "null"),
    accepted("foreach", "null"),
    accepted("capturable", "false"),
    accepted("differentiable", "false"),
};
constexpr KeySpec adagrad[] = {
    rate<AdagradOptions>,
    epsilon<AdagradOptions>,
    decay<AdagradOptions>(l2),
    option<&OptimizerConfig::lr_decay, &AdagradOptions::lr_decay>(
        "lr_decay", "the rate is divided by 1 + (t - 1) · lr_decay"),
    option<&OptimizerConfig::initial_accumulator_value, &AdagradOptions::initial_accumulator>(
        "initial_accumulator_value", "start of the sum of squares"),
    no_amsgrad,
    maximize<AdagradOptions>,
    grad_norm,
    f32_states,
    accepted("fused", "null"),
    accepted("foreach", "null"),
    accepted("capturable", "false"),
    accepted("differentiable", "false"),
};
constexpr KeySpec rmsprop[] = {
    rate<RmspropOptions>,
    option<&OptimizerConfig::alpha, &RmspropOptions::alpha>("alpha", "decay of the mean of squares"),
    epsilon<RmspropOptions>,
    decay<RmspropOptions>(l2),
    option<&OptimizerConfig::momentum, &RmspropOptions::momentum>("momentum", ""),
    option<&OptimizerConfig::centered, &RmspropOptions::centered>(
        "centered", "true: steps divide by the variance of the gradient"),
    maximize<RmspropOptions>,
    grad_norm,
    accepted("foreach", "null"),
    accepted("capturable", "false"),
    accepted("differentiable", "false"),
};
constexpr KeySpec lion[] = {
    rate<LionOptions>, both_betas<LionOptions>,           decay<LionOptions>(decoupled), grad_norm,
    f32_states,        accepted("set_grad_none", "true"),
};
constexpr KeySpec lamb[] = {
    rate<LambOptions>,
    both_betas<LambOptions>,
    epsilon<LambOptions>,
    decay<LambOptions>("added to the update, times the value"),
    bias_correction<LambOptions>,
    option<&OptimizerConfig::min_coeff, &LambOptions::min_coeff>("min_coeff", "min trust ratio"),
    option<&OptimizerConfig::max_coeff, &LambOptions::max_coeff>("max_coeff", "max trust ratio"),
    option<&OptimizerConfig::eps_inside_sqrt, &LambOptions::eps_inside_sqrt>(
        "eps_inside_sqrt", "true: eps is added before the root is taken"),
    no_amsgrad,
    grad_norm,
};
/// AdamW of the rest has the defaults of muon_adam_options.
constexpr KeySpec muon_epsilon() {
  KeySpec k = epsilon<AdamOptions>;
  k.field.initial = [](const KeySpec&) -> nlohmann::json { return muon_adam_options.epsilon; };
  return k;
}
constexpr KeySpec muon[] = {
    applied<&Draft::muon_base_lr>("lr", "rate of both groups; null: 0.02 of matrices, 0.0003 of the rest")
        .from("learning_rate"),
    applied<&Draft::muon_lr>("muon_lr", "rate of matrices, instead of lr"),
    applied<&Draft::adam_lr>("adam_lr", "rate of the rest, instead of lr"),
    option<&OptimizerConfig::momentum, &MuonOptions::momentum>("momentum", "of matrices").within(0, 1),
    betas_of([](const KeySpec&) -> nlohmann::json {
      return {muon_adam_options.beta1, muon_adam_options.beta2};
    }),
    muon_epsilon(),
    decay<MuonOptions>(decoupled),
    accepted("ns_method", choice, "\"gram\"", "the standard iteration runs; gram differs from it by rounding")
        .one_of("[\"gram\", \"standard\"]"),
    refused("per_head_muon", "false", "[false]", "matrices are orthogonalized whole"),
    grad_norm,
};

constexpr ObjectSpec table[] = {
    {"optimizer", "", optimizer},
    {"optimizer.params", "Adam", adam},
    {"optimizer.params", "AdamW", adam},
    {"optimizer.params", "SGD", sgd},
    {"optimizer.params", "Adagrad", adagrad},
    {"optimizer.params", "RMSprop", rmsprop},
    {"optimizer.params", "Lion", lion},
    {"optimizer.params", "Lamb", lamb},
    {"optimizer.params", "Muon", muon},
};

// ---- optimizers

template <class Options>
using Make = std::unique_ptr<Optimizer> (*)(const ParameterGroups<Options>&);

template <class Options>
std::unique_ptr<Optimizer> in_groups(Make<Options> make, const Options& options, Decay decay) {
  return make(decay == Decay::all ? all_parameters(options) : matrices_and_rest(options));
}

std::unique_ptr<Optimizer> adam_by(Make<AdamOptions> make, const OptimizerConfig& o, Decay decay) {
  return in_groups<AdamOptions>(make,
                                {.learning_rate = o.lr,
                                 .beta1 = o.beta1,
                                 .beta2 = o.beta2,
                                 .epsilon = o.eps,
                                 .weight_decay = o.weight_decay,
                                 .bias_correction = o.bias_correction,
                                 .amsgrad = o.amsgrad,
                                 .maximize = o.maximize},
                                decay);
}
std::unique_ptr<Optimizer> make_adam_of(const OptimizerConfig& o, Decay decay) {
  return adam_by(make_adam, o, decay);
}
std::unique_ptr<Optimizer> make_adamw_of(const OptimizerConfig& o, Decay decay) {
  return adam_by(make_adamw, o, decay);
}
std::unique_ptr<Optimizer> make_sgd_of(const OptimizerConfig& o, Decay decay) {
  return in_groups<SgdOptions>(make_sgd,
                               {.learning_rate = o.lr,
                                .momentum = o.momentum,
                                .weight_decay = o.weight_decay,
                                .nesterov = o.nesterov,
                                .dampening = o.dampening,
                                .maximize = o.maximize},
                               decay);
}
std::unique_ptr<Optimizer> make_adagrad_of(const OptimizerConfig& o, Decay decay) {
  return in_groups<AdagradOptions>(make_adagrad,
                                   {.learning_rate = o.lr,
                                    .epsilon = o.eps,
                                    .weight_decay = o.weight_decay,
                                    .lr_decay = o.lr_decay,
                                    .initial_accumulator = o.initial_accumulator_value,
                                    .maximize = o.maximize},
                                   decay);
}
std::unique_ptr<Optimizer> make_rmsprop_of(const OptimizerConfig& o, Decay decay) {
  return in_groups<RmspropOptions>(make_rmsprop,
                                   {.learning_rate = o.lr,
                                    .alpha = o.alpha,
                                    .epsilon = o.eps,
                                    .weight_decay = o.weight_decay,
                                    .momentum = o.momentum,
                                    .centered = o.centered,
                                    .maximize = o.maximize},
                                   decay);
}
std::unique_ptr<Optimizer> make_lion_of(const OptimizerConfig& o, Decay decay) {
  return in_groups<LionOptions>(make_lion, {o.lr, o.beta1, o.beta2, o.weight_decay}, decay);
}
std::unique_ptr<Optimizer> make_lamb_of(const OptimizerConfig& o, Decay decay) {
  return in_groups<LambOptions>(make_lamb,
                                {.learning_rate = o.lr,
                                 .beta1 = o.beta1,
                                 .beta2 = o.beta2,
                                 .epsilon = o.eps,
                                 .weight_decay = o.weight_decay,
                                 .max_coeff = o.max_coeff,
                                 .min_coeff = o.min_coeff,
                                 .bias_correction = o.bias_correction,
                                 .eps_inside_sqrt = o.eps_inside_sqrt},
                                decay);
}
std::unique_ptr<Optimizer> make_muon_of(const OptimizerConfig& o, Decay) {
  return make_muon({.learning_rate = o.muon_lr, .momentum = o.momentum, .weight_decay = o.weight_decay},
                   {o.adam_lr, o.beta1, o.beta2, o.eps, o.weight_decay});
}

/// In the order of the enumerators.
constexpr struct {
  const char* name;
  std::unique_ptr<Optimizer> (*make)(const OptimizerConfig&, Decay);
} types[] = {{"Adam", make_adam_of},       {"AdamW", make_adamw_of},     {"SGD", make_sgd_of},
             {"Adagrad", make_adagrad_of}, {"RMSprop", make_rmsprop_of}, {"Lion", make_lion_of},
             {"Lamb", make_lamb_of},       {"Muon", make_muon_of}};

}  // namespace

std::span<const ObjectSpec> optimizer_objects() { return table; }

OptimizerConfig::Type optimizer_type(const std::string& name) {
  for (std::size_t i = 0; i < std::size(types); ++i)
    if (name == types[i].name) return static_cast<OptimizerConfig::Type>(i);
  fail(Errc::invalid_argument, "no optimizer ", name);
}

}  // namespace ds

const char* name(OptimizerConfig::Type type) { return ds::types[static_cast<std::size_t>(type)].name; }

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& o, Decay decay) {
  return ds::types[static_cast<std::size_t>(o.type)].make(o, decay);
}

}  // namespace rz
