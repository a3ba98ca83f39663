#include "comm/core/error.h"
#include "sharding/config/typed.h"

namespace rz {
namespace ds {
namespace {

std::optional<DType> dtype_at(const Settings& s, const char* path) {
  const nlohmann::json& value = s.at(path);
  if (value.is_null()) return std::nullopt;
  return value == "fp16" ? DType::f16 : value == "bf16" ? DType::bf16 : DType::f32;
}

LossScaleOptions loss_scale_options(const Settings& s) {
  LossScaleOptions o;
  o.fixed = s.number("fp16.loss_scale");
  o.initial_power = static_cast<int>(s.integer("fp16.initial_scale_power"));
  o.window = s.integer("fp16.loss_scale_window");
  o.hysteresis = static_cast<int>(s.integer("fp16.hysteresis"));
  o.consecutive_hysteresis = s.boolean("fp16.consecutive_hysteresis");
  o.minimum = s.number("fp16.min_loss_scale");
  return o;
}

/// Gradients are accumulated in the dtype of the parameters, as in DeepSpeed, unless the key sets another.
DType gradient_dtype(const Settings& s, DType parameters, const std::string& file) {
  const DType type = dtype_at(s, "data_types.grad_accum_dtype").value_or(parameters);
  require(type == DType::f32 || type == parameters, Errc::config, file,
          ": data_types.grad_accum_dtype: gradients in ", name(type), " of a model in ", name(parameters),
          "; choose ", name(parameters), parameters == DType::f32 ? "" : " or fp32");
  return type;
}

std::optional<DType> autocast_dtype(const Settings& s, const std::string& file) {
  if (!s.boolean("torch_autocast.enabled")) return std::nullopt;
  const DType type = dtype_at(s, "torch_autocast.dtype").value_or(DType::bf16);
  require(type != DType::f32, Errc::config, file,
          ": torch_autocast.dtype: is f32; choose bf16 or fp16, or disable torch_autocast");
  return type;
}

}  // namespace

PrecisionConfig typed_precision(const Settings& s, const std::string& file) {
  const bool half = s.boolean("fp16.enabled"), brain = s.boolean("bf16.enabled");
  require(!half || !brain, Errc::config, file, ": fp16: is enabled, and bf16 too; enable one of them");
  PrecisionConfig p;
  p.parameters = half ? DType::f16 : brain ? DType::bf16 : DType::f32;
  const DType named = dtype_at(s, "data_types.param_dtype").value_or(p.parameters);
  require(named == p.parameters, Errc::config, file, ": data_types.param_dtype: is ", name(named),
          ", but fp16 and bf16 make it ", name(p.parameters), "; remove the key");
  p.gradients = gradient_dtype(s, p.parameters, file);
  p.communication = dtype_at(s, "communication_data_type");
  p.auto_cast = half && s.boolean("fp16.auto_cast");
  p.autocast = autocast_dtype(s, file);
  if (half)
    p.loss_scale = loss_scale_options(s);
  else if (p.autocast == DType::f16)
    p.loss_scale.rule = LossScaleRule::grad_scaler;  // DeepSpeed uses torch's here
  p.skip_overflow = p.scales_loss() || (brain && s.boolean("bf16.check_grad_overflow"));
  p.prescale_gradients = s.boolean("prescale_gradients");
  p.gradient_predivide_factor = s.number("gradient_predivide_factor");
  return p;
}

}  // namespace ds

}  // namespace rz
