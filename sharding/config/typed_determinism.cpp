#include <bit>

#include "comm/core/error.h"
#include "sharding/config/typed.h"

namespace rz::ds {
namespace {

constexpr const char* deterministic_key = "ringzero.deterministic";

/// A wire format would round sums of as many micro-batches as a rank has.
void check_wire(const PrecisionConfig& p, const std::string& file) {
  const auto refuse = [&](const char* key, const std::string& found, const char* remedy) {
    fail(Errc::config, file, ": ", deterministic_key,
         ": world_size_invariant needs sums of gradients in f32, ", "found ", key, " ", found, "; ", remedy);
  };
  if (p.gradients != DType::f32)
    refuse("data_types.grad_accum_dtype", name(p.gradients), "set data_types.grad_accum_dtype to fp32");
  if (p.communication.value_or(DType::f32) != DType::f32)
    refuse("communication_data_type", name(*p.communication), "remove it, or set it to fp32");
  if (p.prescale_gradients) refuse("prescale_gradients", "true", "remove it");
  if (p.gradient_predivide_factor != 1)
    refuse("gradient_predivide_factor", concat(p.gradient_predivide_factor), "remove it");
}

}  // namespace

bool typed_world_size_invariant(const Settings& s, const DsConfig& c, int ranks) {
  if (s.text(deterministic_key) != "world_size_invariant") return false;
  require(std::has_single_bit(static_cast<unsigned>(ranks)), Errc::config, c.file, ": ", deterministic_key,
          ": world_size_invariant needs 1, 2, 4, 8, … ranks, found ", ranks,
          "; start as many, or remove the key");
  check_wire(c.precision, c.file);
  require(c.ddp.comm_hook == DdpConfig::CommHook::no, Errc::config, c.file, ": ", deterministic_key,
          ": world_size_invariant sums gradients in an order of its own, but ringzero.comm_hook is ",
          name(c.ddp.comm_hook), "; remove one of them");
  require(!s.has_section("ringzero.join") || !c.ddp.join.enable, Errc::config, c.file, ": ",
          deterministic_key,
          ": world_size_invariant has equally many micro-batches on all ranks; remove ringzero.join");
  return true;
}

}  // namespace rz::ds
