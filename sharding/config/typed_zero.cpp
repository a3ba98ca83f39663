#include "comm/core/error.h"
#include "sharding/config/typed.h"

namespace rz::ds {
namespace {

OffloadConfig offload(const Settings& s, const char* key, const std::string& file) {
  using Device = OffloadConfig::Device;
  const std::string path = concat("zero_optimization.", key);
  if (!s.has_section(path)) return {};
  OffloadConfig o;
  const std::string device = s.text(path + ".device");
  o.device = device == "none" ? Device::none : device == "cpu" ? Device::cpu : Device::nvme;
  require(o.device != Device::nvme, Errc::unsupported, file, ": ", path,
          ".device: not supported in this build yet: \"nvme\"; use \"cpu\" or \"none\"");
  if (const auto* ratio = s.find(path + ".ratio")) o.ratio = ratio->value.get<double>();
  o.pin_memory = s.at(path + ".pin_memory").get<bool>();
  return o;
}

/// DeepSpeed offloads nothing below these stages.
void check_stage(const ZeroConfig& z, const std::string& file, std::vector<std::string>& warnings) {
  using Device = OffloadConfig::Device;
  const auto warn = [&](const char* key, const char* stages) {
    warnings.push_back(concat(file, ": zero_optimization.", key, ": has no effect: it needs stage ", stages,
                              ", found ", z.stage));
  };
  if (z.offload_param.device != Device::none && z.stage < 3) warn("offload_param", "3");
  if (z.offload_optimizer.device != Device::none && z.stage < 1) warn("offload_optimizer", "1, 2 or 3");
  require(z.offload_optimizer.ratio == 1 || z.stage == 3, Errc::config, file,
          ": zero_optimization.offload_optimizer.ratio: below 1 needs stage 3, found ", z.stage);
}

}  // namespace

ZeroConfig typed_zero(const Settings& s, const std::string& file, std::vector<std::string>& warnings) {
  const auto at = [](const char* key) { return concat("zero_optimization.", key); };
  ZeroConfig z;
  z.stage = static_cast<int>(s.integer(at("stage")));
  z.reduce_bucket_size = s.optional_integer(at("reduce_bucket_size"));
  z.allgather_bucket_size = s.integer(at("allgather_bucket_size"));
  if (const auto& overlap = s.at(at("overlap_comm")); !overlap.is_null())
    z.overlap_comm = overlap.get<bool>();
  z.ignore_unused_parameters = s.boolean(at("ignore_unused_parameters"));
  z.round_robin_gradients = s.boolean(at("round_robin_gradients"));
  z.sub_group_size = s.integer(at("sub_group_size"));
  z.offload_param = offload(s, "offload_param", file);
  z.offload_optimizer = offload(s, "offload_optimizer", file);
  z.prefetch_bucket_size = s.integer(at("stage3_prefetch_bucket_size"));
  z.param_persistence_threshold = s.integer(at("stage3_param_persistence_threshold"));
  z.model_persistence_threshold = s.integer(at("stage3_model_persistence_threshold"));
  z.max_live_parameters = s.integer(at("stage3_max_live_parameters"));
  z.max_reuse_distance = s.integer(at("stage3_max_reuse_distance"));
  z.gather_16bit_weights_on_model_save = s.boolean(at("stage3_gather_16bit_weights_on_model_save"));
  check_stage(z, file, warnings);
  return z;
}

}  // namespace rz::ds
