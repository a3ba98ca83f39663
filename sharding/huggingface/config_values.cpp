#include "sharding/huggingface/config_values.h"

#include "comm/core/error.h"

namespace rz {
namespace {

using Scaling = ops::RotaryOptions::Scaling;

const char* name_of(Scaling s) {
  switch (s) {
    case Scaling::none:
      return "default";
    case Scaling::linear:
      return "linear";
    case Scaling::dynamic:
      return "dynamic";
    case Scaling::llama3:
      return "llama3";
  }
  return "";
}

Scaling scaling_of(const JsonObject& o) {
  const char* const key = o.has("rope_type") || !o.has("type") ? "rope_type" : "type";
  const std::string text = o.text(key, "default");
  for (const Scaling s : {Scaling::none, Scaling::linear, Scaling::dynamic, Scaling::llama3})
    if (text == name_of(s)) return s;
  o.fail_at(key, concat("must be \"default\", \"linear\", \"dynamic\" or \"llama3\", found \"", text, '"'));
}

/// `o`: rope_scaling or rope_parameters.
void read_scaling(const JsonObject& o, ops::RotaryOptions& rope, std::size_t positions) {
  constexpr double largest = 1e9;
  rope.scaling = scaling_of(o);
  if (rope.scaling == Scaling::none) return;
  if (!is_given(o, "factor")) o.fail_at("factor", "missing");
  rope.factor = o.number("factor", 1, 1, largest);
  const bool llama3 = rope.scaling == Scaling::llama3;
  if (llama3)
    for (const char* key : {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
      if (!is_given(o, key)) o.fail_at(key, "missing");
  rope.low_freq_factor = o.number("low_freq_factor", 1, 0, largest);
  rope.high_freq_factor = o.number("high_freq_factor", 4, 0, largest);
  if (llama3 && rope.high_freq_factor <= rope.low_freq_factor)
    o.fail_at("high_freq_factor", concat("must be more than low_freq_factor, ", rope.low_freq_factor));
  rope.original_max_position_embeddings = llama3
                                              ? size_at(o, "original_max_position_embeddings", max_positions)
                                          : rope.scaling == Scaling::dynamic ? positions
                                                                             : 0;
}

}  // namespace

RopeConfig rope_of(const JsonObject& o, std::size_t positions, RopeConfig rope) {
  if (is_given(o, "rope_parameters"))
    rope.options.theta = o.object("rope_parameters").number("rope_theta", rope.options.theta, 1, max_theta);
  for (const char* key : {"rope_scaling", "rope_parameters"})
    if (is_given(o, key)) {
      const JsonObject of = o.object(key);
      read_scaling(of, rope.options, positions);
      rope.partial_rotary_factor = of.number("partial_rotary_factor", rope.partial_rotary_factor, 0, 1);
    }
  return rope;
}

nlohmann::ordered_json scaling_json(const ops::RotaryOptions& rope) {
  if (rope.scaling == Scaling::none) return nullptr;
  nlohmann::ordered_json o{{"rope_type", name_of(rope.scaling)}, {"factor", rope.factor}};
  if (rope.scaling == Scaling::llama3) {
    o["low_freq_factor"] = rope.low_freq_factor;
    o["high_freq_factor"] = rope.high_freq_factor;
    o["original_max_position_embeddings"] = rope.original_max_position_embeddings;
  }
  return o;
}

void refuse_quantization(const JsonObject& o) {
  if (is_given(o, "quantization_config"))
    o.fail_at("quantization_config", "quantized weights are not read; give those in f32, f16 or bf16");
}

}  // namespace rz
