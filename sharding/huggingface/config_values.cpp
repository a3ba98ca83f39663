#include "sharding/huggingface/config_values.h"

#include <string>
#include <vector>

#include "comm/core/error.h"
#include "sharding/io/foreign_keys.h"

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
  const char* const key = is_given(o, "rope_type") || !is_given(o, "type") ? "rope_type" : "type";
  const std::string text = is_given(o, key) ? o.text(key, "default") : "default";
  if (is_given(o, "type") && o.text("type", text) != text)
    o.fail_at("type", concat("is ", to_display(o.at("type")), ", and ", o.path("rope_type"), " \"", text,
                             "\"; give one of them"));
  for (const Scaling s : {Scaling::none, Scaling::linear, Scaling::dynamic, Scaling::llama3})
    if (text == name_of(s)) return s;
  o.fail_at(key, concat("must be \"default\", \"linear\", \"dynamic\" or \"llama3\", found \"", text, '"'));
}

/// `o`: rope_scaling or rope_parameters.
void read_scaling(const JsonObject& o, ops::RotaryOptions& rope, std::size_t positions) {
  constexpr double largest = 1e9;
  for (const std::string& key : o.keys())
    if (o.at(key).is_object()) o.fail_at(key, "all layers have the same rotation here");
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

/// rope_scaling and rope_parameters, the names of one object: those that state something.
std::vector<JsonObject> rope_objects(const JsonObject& o) {
  std::vector<JsonObject> objects;
  for (const char* key : {"rope_scaling", "rope_parameters"})
    if (is_given(o, key) && !o.at(key).empty()) objects.push_back(o.object(key));
  return objects;
}

/// The value that transformers uses, of the first of `objects` or of config.json itself. Whatever else is
/// stated must be the same.
double rope_value(const JsonObject& o, const std::vector<JsonObject>& objects, const char* key,
                  const RopeKey& in_file, double min, double max) {
  double value = in_file.absent;
  std::string place;
  if (!objects.empty() && is_given(objects[0], key)) {
    value = objects[0].number(key, value, min, max), place = objects[0].path(key) + " is ";
  } else if (is_given(o, in_file.name)) {
    value = o.number(in_file.name, value, min, max), place = o.path(in_file.name) + " is ";
  } else {
    place = concat("without ", objects.empty() ? std::string(in_file.name) : objects[0].path(key), " it is ");
  }
  const auto agree = [&](const JsonObject& of, const char* name) {
    if (!is_given(of, name)) return;
    if (const double other = of.number(name, value, min, max); other != value)
      of.fail_at(name, concat("is ", other, ", and ", place, value, "; give one value"));
  };
  agree(o, in_file.name), agree(o, key);
  for (const JsonObject& of : objects) agree(of, key);
  return value;
}

}  // namespace

RopeConfig rope_of(const JsonObject& o, std::size_t positions, const RopeKey& theta, const RopeKey& partial) {
  const std::vector<JsonObject> objects = rope_objects(o);
  RopeConfig rope;
  if (!objects.empty()) read_scaling(objects[0], rope.options, positions);
  if (objects.size() == 2) {
    ops::RotaryOptions other;
    read_scaling(objects[1], other, positions);
    if (other.scaling != Scaling::none && scaling_json(other) != scaling_json(rope.options))
      o.fail_at("rope_scaling", concat("is ", to_display(o.at("rope_scaling")), ", and rope_parameters ",
                                       to_display(o.at("rope_parameters")), "; give one of them"));
  }
  const char* const original = "original_max_position_embeddings";
  if (rope.options.scaling == Scaling::llama3 && is_given(o, original) &&
      size_at(o, original, max_positions) != rope.options.original_max_position_embeddings)
    o.fail_at(original, concat("is ", to_display(o.at(original)), ", and ", objects[0].path(original), " ",
                               rope.options.original_max_position_embeddings, "; give one value"));
  rope.options.theta = rope_value(o, objects, "rope_theta", theta, 1, max_theta);
  rope.partial_rotary_factor = rope_value(o, objects, "partial_rotary_factor", partial, 0, 1);
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

const char* spelling(const JsonObject& o, const char* name, const char* other) {
  if (is_given(o, name) && is_given(o, other) && o.at(name) != o.at(other))
    o.fail_at(other, concat("is ", to_display(o.at(other)), ", and ", o.path(name), ", another name of it, ",
                            to_display(o.at(name)), "; give one of them"));
  return is_given(o, other) && !is_given(o, name) ? other : name;
}

void check_layer_types(const JsonObject& o, const std::vector<bool>& is_sliding) {
  if (!is_given(o, "layer_types")) return;
  nlohmann::json expected = nlohmann::json::array();
  for (const bool sliding : is_sliding) expected.push_back(sliding ? "sliding_attention" : "full_attention");
  if (o.at("layer_types") != expected)
    o.fail_at("layer_types", concat("must be ", to_display(expected), " by the other keys, found ",
                                    to_display(o.at("layer_types"))));
}

void refuse_other_models(const JsonObject& o) {
  constexpr auto refused = Treatment::refused;
  static constexpr ForeignKeys keys[] = {
      {"quantization_config", refused, "quantized weights are not read; give those in f32, f16 or bf16"},
      {"pruned_heads", refused, "layers without some of their heads are not supported"},
      {"text_config", refused,
       "is the configuration of a model within another one; give it as a file of its own"}};
  refuse_keys(o, keys);
  if (is_given(o, "is_causal") && !o.boolean("is_causal", true))
    o.fail_at("is_causal", "must be true: a token is predicted from those before it");
}

}  // namespace rz
