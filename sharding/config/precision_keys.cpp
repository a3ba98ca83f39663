// Keys of the sections about number formats.

#include "sharding/config/keys.h"

namespace rz::ds {
namespace {

using enum Kind;
constexpr const char* f32_masters = "masters and optimizer states are in f32";

constexpr KeySpec fp16[] = {
    applied<&Draft::half>("enabled", "parameters, activations and gradients in f16, masters in f32")
        .from("fp16"),
    accepted("auto_cast", boolean, "false", "a linear layer always converts its input"),
    applied<&LossScaleOptions::fixed>("loss_scale", "constant factor of losses; 0: dynamic"),
    applied<&LossScaleOptions::initial_power>("initial_scale_power", "the factor begins with 2 to this power")
        .within(0, 127),
    applied<&LossScaleOptions::window>("loss_scale_window",
                                       "updates without overflow before the factor doubles")
        .within(1, 1ull << 40),
    applied<&LossScaleOptions::hysteresis>("hysteresis", "overflows before the factor is halved")
        .within(1, 1 << 20),
    applied<&LossScaleOptions::consecutive_hysteresis>("consecutive_hysteresis",
                                                       "an update without overflow restores the hysteresis"),
    applied<&LossScaleOptions::minimum>("min_loss_scale", "lowest factor").within(1e-300, unbounded),
    refused("fp16_master_weights_and_grads", "false", "[false]", f32_masters),
};
constexpr KeySpec bf16[] = {
    applied<&Draft::brain>("enabled", "parameters, activations and gradients in bf16, masters in f32")
        .from("bf16"),
    applied<&Draft::check_grad_overflow>(
        "check_grad_overflow", "skip an update whose gradients are not finite; false: report divergence"),
    accepted("immediate_grad_update", "false", "gradients are always added as they are produced"),
    refused("bf16_master_weights_and_grads", "false", "[false]", f32_masters),
    refused("bf16_optimizer_states", "false", "[false]", f32_masters),
};
constexpr KeySpec data_types[] = {
    applied<&Draft::grad_accum_dtype>(
        "grad_accum_dtype", "gradients are accumulated and reduced in it; null: the dtype of the parameters"),
    applied<&Draft::param_dtype>("param_dtype", "must agree with fp16 and bf16"),
    refused("buffer_dtype", "null", "[null]", "buffers keep their dtype"),
    refused("keep_in_fp32_modules", "null", "[null, []]", "all parameters have one dtype"),
};
constexpr KeySpec amp[] = {
    refused("enabled", "false", "[false]", "Apex is obsolete; use bf16 or fp16"),
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
    applied<&Draft::autocasts>("enabled", "products are computed in `dtype`, as with torch.autocast"),
    applied<&Draft::autocast_dtype>("dtype",
                                    "bf16 or fp16, whose losses are scaled; null: bf16, as torch on a CPU"),
    unused("lower_precision_safe_modules", any, "null",
           "DeepSpeed sends values and gradients of these (null: linear layers and convolutions) in 16 bits; "
           "here values are gathered in f32, and communication_data_type decides for gradients"),
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
