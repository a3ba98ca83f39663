#include <array>

#include "comm/core/error.h"
#include "sharding/config/typed.h"

namespace rz {

namespace {
constexpr std::array hook_names{"no", "fp16", "bf16", "power_sgd", "batched_power_sgd"};
}

const char* name(DdpConfig::CommHook hook) { return hook_names[static_cast<std::size_t>(hook)]; }

namespace ds {
namespace {

using CommHook = DdpConfig::CommHook;

CommHook hook_named(const std::string& text, const std::string& file) {
  for (std::size_t i = 0; i < hook_names.size(); ++i)
    if (text == hook_names[i]) return static_cast<CommHook>(i);
  fail(Errc::config, file, ": ringzero.comm_hook: unknown choice \"", text,
       "\"; choose no, fp16, bf16, power_sgd or batched_power_sgd");
}

bool is_power_sgd(CommHook hook) {
  return hook == CommHook::power_sgd || hook == CommHook::batched_power_sgd;
}

/// DeepSpeed's key of the same meaning gets the same value.
bool finds_unused_parameters(Settings& s, const std::string& file) {
  const char* const path = "zero_optimization.ignore_unused_parameters";
  const bool ignores = s.boolean(path);
  const auto& value = s.at("ringzero.find_unused_parameters");
  if (value.is_null()) return ignores;
  const bool finds = value.get<bool>();
  require(finds == ignores || !s.find(path)->given, Errc::config, file,
          ": ringzero.find_unused_parameters: is ", finds, ", but ", path, " is ", ignores,
          "; remove one of them");
  if (finds != ignores) s.replace(path, finds, "ringzero.find_unused_parameters");
  return finds;
}

CommStateOption comm_state_option(const Settings& s) {
  const auto at = [](const char* key) { return concat("ringzero.comm_state_option.", key); };
  return {.matrix_approximation_rank = static_cast<int>(s.integer(at("matrix_approximation_rank"))),
          .start_power_sgd_iter = s.integer(at("start_powerSGD_iter")),
          .min_compression_rate = s.number(at("min_compression_rate")),
          .use_error_feedback = s.boolean(at("use_error_feedback")),
          .warm_start = s.boolean(at("warm_start")),
          .random_seed = static_cast<std::uint64_t>(s.integer(at("random_seed")))};
}

void check_hook(CommHook hook, const PrecisionConfig& p, const std::string& file) {
  if (hook == CommHook::no) return;
  const bool has_wire = p.communication || p.prescale_gradients || p.gradient_predivide_factor != 1;
  require(!has_wire, Errc::config, file, ": ringzero.comm_hook: ", name(hook),
          " forms the means itself; remove communication_data_type, prescale_gradients and "
          "gradient_predivide_factor");
  require(!is_power_sgd(hook) || p.gradients == DType::f32, Errc::config, file,
          ": ringzero.comm_hook: ", name(hook), " needs gradients in f32, found ", name(p.gradients),
          "; set data_types.grad_accum_dtype to fp32");
}

JoinConfig join(const Settings& s) {
  return {.enable = s.boolean("ringzero.join.enable"),
          .divide_by_initial_world_size = s.boolean("ringzero.join.divide_by_initial_world_size"),
          .throw_on_early_termination = s.boolean("ringzero.join.throw_on_early_termination")};
}

}  // namespace

DdpConfig typed_ddp(Settings& s, const PrecisionConfig& precision, const std::string& file) {
  DdpConfig d;
  d.find_unused_parameters = finds_unused_parameters(s, file);
  d.static_graph = s.boolean("ringzero.static_graph");
  d.broadcast_buffers = s.boolean("ringzero.broadcast_buffers");
  d.comm_hook = hook_named(s.text("ringzero.comm_hook"), file);
  check_hook(d.comm_hook, precision, file);
  if (s.has_section("ringzero.comm_state_option")) {
    require(is_power_sgd(d.comm_hook), Errc::config, file,
            ": ringzero.comm_state_option: is of power_sgd and batched_power_sgd, but comm_hook is ",
            name(d.comm_hook), "; set comm_hook, or remove the section");
    d.comm_state_option = comm_state_option(s);
  }
  if (s.has_section("ringzero.join")) d.join = join(s);
  return d;
}

}  // namespace ds
}  // namespace rz
