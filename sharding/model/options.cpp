#include "sharding/model/options.h"

#include <array>
#include <cmath>

#include "comm/core/error.h"

namespace rz {

const char* name(OffloadDevice device) { return device == OffloadDevice::none ? "none" : "cpu"; }

void check(const OffloadOptions& options, const char* key) {
  require(options.ratio >= 0 && options.ratio <= 1, Errc::invalid_argument, key, ": ratio is ", options.ratio,
          ", expected 0 to 1");
}

void check(const WireFormat& format) {
  const DType type = format.communication_data_type.value_or(DType::f32);
  require(type == DType::f32 || type == DType::bf16 || type == DType::f16, Errc::invalid_argument,
          "communication_data_type is ", name(type), "; choose f32, bf16 or f16");
  const double factor = format.gradient_predivide_factor;
  require(factor > 0 && std::isfinite(factor), Errc::invalid_argument, "gradient_predivide_factor is ",
          factor, ", expected a finite number above 0");
}

namespace {
constexpr std::array strategy_names{"ddp", "zero1", "zero2", "zero3"};
}  // namespace

const char* name(StrategyKind kind) { return strategy_names[static_cast<std::size_t>(kind)]; }

StrategyKind strategy_from_name(std::string_view text) {
  for (std::size_t i = 0; i < strategy_names.size(); ++i)
    if (text == strategy_names[i]) return static_cast<StrategyKind>(i);
  fail(Errc::config, "unknown strategy \"", text, "\"; choose ddp, zero1, zero2 or zero3");
}

const char* name(UnusedParameterPolicy choice) {
  return choice == UnusedParameterPolicy::pytorch ? "pytorch" : "deepspeed";
}

UnusedParameterPolicy unused_parameter_policy_from_name(std::string_view text) {
  for (const UnusedParameterPolicy choice :
       {UnusedParameterPolicy::pytorch, UnusedParameterPolicy::deepspeed})
    if (text == name(choice)) return choice;
  fail(Errc::config, "unknown choice for unused parameters \"", text, "\"; choose pytorch or deepspeed");
}

}  // namespace rz
