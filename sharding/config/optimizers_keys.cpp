// Keys of the section "optimizer".

#include "sharding/config/key_spec.h"

namespace rz::ds {
namespace {

using enum Kind;
constexpr const char* l2 = "added to the gradient, times the value";
constexpr const char* decoupled = "the value shrinks by lr · weight_decay";

constexpr KeySpec optimizer[] = {
    applied("type", text, "", "in any case: Adam, AdamW, SGD, Adagrad, RMSprop, Lion, Lamb, Muon"),
    section("params", "{}", "keys of the type"),
    accepted("legacy_fusion", "false"),
};

constexpr KeySpec rate(const char* fallback) {
  return applied("lr", number, fallback, "learning rate").from(Argument::learning_rate);
}
constexpr KeySpec betas_of(const char* fallback) {
  return applied("betas", betas, fallback, "decay of the two moments").from(Argument::betas);
}
constexpr KeySpec epsilon(const char* fallback) {
  return applied("eps", number, fallback, "added to the denominator").from(Argument::epsilon);
}
constexpr KeySpec decay(const char* note) {
  return applied("weight_decay", number, "0", note).from(Argument::weight_decay);
}
constexpr KeySpec no_amsgrad = refused("amsgrad", "false", "[false]", "this variant is not implemented");
constexpr KeySpec maximize = applied("maximize", boolean, "false", "true: updates increase the loss");
constexpr KeySpec grad_norm =
    refused("max_grad_norm", "0", "[0]", "DeepSpeed refuses it too; write gradient_clipping");
constexpr KeySpec f32_states = always("fp32_optimizer_states", "true", "states are in f32");

constexpr KeySpec adam[] = {
    rate("0.001"),
    betas_of("[0.9, 0.999]"),
    epsilon("1e-08"),
    applied("weight_decay", number, "0",
            "see adam_w_mode; with torch_adam the default of AdamW is torch's, 0.01")
        .from(Argument::weight_decay),
    applied("adam_w_mode", boolean, "true",
            "Adam: true decouples weight decay, false adds it to the gradient; AdamW always decouples"),
    applied("torch_adam", boolean, "false", "chooses the default of weight_decay only"),
    applied("bias_correction", boolean, "true", "moments are divided by 1 - beta^t"),
    applied("amsgrad", boolean, "false", "true: steps divide by the maximum of the second moments so far"),
    maximize,
    grad_norm,
    f32_states,
    accepted("set_grad_none", "true"),
    accepted("fused", "null"),
    accepted("foreach", "null"),
    accepted("capturable", "false"),
    accepted("differentiable", "false"),
};
constexpr KeySpec sgd[] = {
    rate("0.001"),
    applied("momentum", number, "0", ""),
    applied("nesterov", boolean, "false", "needs a momentum above 0"),
    decay(l2),
    applied("dampening", number, "0", "the gradient enters the momentum times 1 - dampening, at first whole")
        .within(-unbounded, unbounded),
    maximize,
    grad_norm,
    accepted("fused", "null"),
    accepted("foreach", "null"),
    accepted("capturable", "false"),
    accepted("differentiable", "false"),
};
constexpr KeySpec adagrad[] = {
    rate("0.01"),
    epsilon("1e-10"),
    decay(l2),
    applied("lr_decay", number, "0", "the rate is divided by 1 + (t - 1) · lr_decay"),
    applied("initial_accumulator_value", number, "0", "start of the sum of squares"),
    no_amsgrad,
    maximize,
    grad_norm,
    f32_states,
    accepted("fused", "null"),
    accepted("foreach", "null"),
    accepted("capturable", "false"),
    accepted("differentiable", "false"),
};
constexpr KeySpec rmsprop[] = {
    rate("0.01"),
    applied("alpha", number, "0.99", "decay of the mean of squares"),
    epsilon("1e-08"),
    decay(l2),
    applied("momentum", number, "0", ""),
    applied("centered", boolean, "false", "true: steps divide by the variance of the gradient"),
    maximize,
    grad_norm,
    accepted("foreach", "null"),
    accepted("capturable", "false"),
    accepted("differentiable", "false"),
};
constexpr KeySpec lion[] = {
    rate("0.001"), betas_of("[0.9, 0.999]"),          decay(decoupled), grad_norm,
    f32_states,    accepted("set_grad_none", "true"),
};
constexpr KeySpec lamb[] = {
    rate("0.001"),
    betas_of("[0.9, 0.999]"),
    epsilon("1e-08"),
    decay("added to the update, times the value"),
    applied("bias_correction", boolean, "true", "moments are divided by 1 - beta^t"),
    applied("min_coeff", number, "0.01", "min trust ratio"),
    applied("max_coeff", number, "10.0", "max trust ratio"),
    applied("eps_inside_sqrt", boolean, "false", "true: eps is added before the root is taken"),
    no_amsgrad,
    grad_norm,
};
constexpr KeySpec muon[] = {
    applied("lr", number, "null", "rate of both groups; null: 0.02 of matrices, 0.0003 of the rest")
        .from(Argument::learning_rate),
    applied("muon_lr", number, "null", "rate of matrices, instead of lr"),
    applied("adam_lr", number, "null", "rate of the rest, instead of lr"),
    applied("momentum", number, "0.95", "of matrices").within(0, 1),
    betas_of("[0.9, 0.95]"),
    epsilon("1e-10"),
    decay(decoupled),
    applied("ns_method", choice, "\"gram\"", "Newton-Schulz iteration").one_of("[\"gram\", \"standard\"]"),
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

}  // namespace

std::span<const ObjectSpec> optimizer_objects() { return table; }

}  // namespace rz::ds
