// Keys of the sections about number formats.

#include "sharding/config/key_spec.h"

namespace rz::ds {
namespace {

using enum Kind;
constexpr const char* f32_masters = "masters and optimizer states are in f32";

constexpr KeySpec fp16[] = {
    applied("enabled", boolean, "false", "parameters, activations and gradients in f16, masters in f32")
        .from(Argument::fp16),
    applied("auto_cast", boolean, "false", "floating-point inputs are converted; a model of tokens has none"),
    applied("loss_scale", number, "0", "constant factor of losses; 0: dynamic"),
    applied("initial_scale_power", integer, "16", "the factor begins with 2 to this power").within(0, 127),
    applied("loss_scale_window", integer, "1000", "updates without overflow before the factor doubles")
        .within(1, 1ull << 40),
    applied("hysteresis", integer, "2", "overflows before the factor is halved").within(1, 1 << 20),
    applied("consecutive_hysteresis", boolean, "false", "an update without overflow restores the hysteresis"),
    applied("min_loss_scale", number, "1", "lowest factor").within(1e-300, unbounded),
    refused("fp16_master_weights_and_grads", "false", "[false]", f32_masters),
};
constexpr KeySpec bf16[] = {
    applied("enabled", boolean, "false", "parameters, activations and gradients in bf16, masters in f32")
        .from(Argument::bf16),
    applied("check_grad_overflow", boolean, "true",
            "skip an update whose gradients are not finite; false: report divergence"),
    accepted("immediate_grad_update", "false", "gradients are always added as they are produced"),
    refused("bf16_master_weights_and_grads", "false", "[false]", f32_masters),
    refused("bf16_optimizer_states", "false", "[false]", f32_masters),
};
constexpr KeySpec data_types[] = {
    applied("grad_accum_dtype", dtype, "null",
            "gradients are accumulated and reduced in it; null: the dtype of the parameters"),
    applied("param_dtype", dtype, "null", "must agree with fp16 and bf16"),
    refused("buffer_dtype", "null", "[null]", "buffers keep their dtype"),
    refused("keep_in_fp32_modules", "null", "[null, []]", "all parameters have one dtype"),
};
constexpr KeySpec amp[] = {
    refused("enabled", "false", "[false]", "Apex is obsolete; use bf16 or fp16").from(Argument::none),
    accepted("opt_level", "\"O1\""),
    accepted("keep_batchnorm_fp32", "null"),
    accepted("loss_scale", "null"),
    accepted("cast_model_outputs", "null"),
    accepted("num_losses", "1"),
    accepted("verbosity", "1"),
    accepted("min_loss_scale", "null"),
    accepted("max_loss_scale", "null"),
};
constexpr KeySpec torch_autocast[] = {
    applied("enabled", boolean, "false", "products are computed in `dtype`, as with torch.autocast"),
    applied("dtype", dtype, "null", "bf16 or fp16, whose losses are scaled; null: bf16, as torch on a CPU"),
    unused("lower_precision_safe_modules", any, "null",
           "DeepSpeed sends values and gradients of these (null: linear layers and convolutions) in 16 bits; "
           "here "
           "values are gathered in f32, and communication_data_type decides for gradients"),
};

constexpr ObjectSpec table[] = {
    {"fp16", "", fp16, true},
    {"bf16", "", bf16, true},
    {"data_types", "", data_types},
    {"amp", "", amp, true},
    {"torch_autocast", "", torch_autocast, true},
};

}  // namespace

std::span<const ObjectSpec> precision_objects() { return table; }

}  // namespace rz::ds
