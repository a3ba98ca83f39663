#include "comm/core/error.h"
#include "sharding/config/typed.h"

namespace rz {

namespace {
constexpr const char* type_names[] = {"Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Lion", "Lamb", "Muon"};
}

const char* name(OptimizerConfig::Type type) { return type_names[static_cast<std::size_t>(type)]; }

namespace ds {
namespace {

using Type = OptimizerConfig::Type;

/// Reads a key if the type has it.
class OptimizerParameters {
 public:
  explicit OptimizerParameters(Settings& settings) : settings_(settings) {}

  const Settings::Entry* find(const char* key) const {
    return settings_.find(concat("optimizer.params.", key));
  }
  void read(const char* key, double& to) const {
    if (const auto* entry = find(key); entry && !entry->value.is_null()) to = entry->value.get<double>();
  }
  void read(const char* key, bool& to) const {
    if (const auto* entry = find(key)) to = entry->value.get<bool>();
  }
  void replace(const char* key, double value, const char* origin) const {
    settings_.replace(concat("optimizer.params.", key), value, origin);
  }
  bool was_given(const char* key) const {
    const auto* entry = find(key);
    return entry && entry->given;
  }

 private:
  Settings& settings_;
};

Type type_named(const std::string& text) {
  for (std::size_t i = 0; i < std::size(type_names); ++i)
    if (text == type_names[i]) return static_cast<Type>(i);
  fail(Errc::invalid_argument, "no optimizer ", text);
}

/// As in DeepSpeed: "Adam" decouples weight decay unless adam_w_mode is off; "AdamW" always does.
void read_adam(const OptimizerParameters& p, const std::string& file, OptimizerConfig& o,
               std::vector<std::string>& warnings) {
  bool decouples = true, torch = false;
  p.read("adam_w_mode", decouples);
  p.read("torch_adam", torch);
  decouples = decouples || o.type == Type::adamw;
  constexpr double torch_decay = 0.01;
  if (torch && decouples && !p.was_given("weight_decay")) {
    o.weight_decay = torch_decay;
    p.replace("weight_decay", torch_decay, "default of torch.optim.AdamW");
  }
  if (o.type == Type::adam && decouples && o.weight_decay != 0 && !p.was_given("adam_w_mode"))
    warnings.push_back(concat(file,
                              ": optimizer.type: Adam decays weights as AdamW does; \"adam_w_mode\": false "
                              "adds the decay to the gradient instead"));
  o.type = decouples ? Type::adamw : Type::adam;
}

/// Both groups have the rate lr unless they have one of their own.
void read_muon(const OptimizerParameters& p, OptimizerConfig& o) {
  p.read("lr", o.muon_lr);
  p.read("lr", o.adam_lr);
  p.read("muon_lr", o.muon_lr);
  p.read("adam_lr", o.adam_lr);
  o.lr = o.muon_lr;
  o.ns_method = p.find("ns_method")->value.get<std::string>();
}

}  // namespace

OptimizerConfig typed_optimizer(Settings& settings, const std::string& file,
                                std::vector<std::string>& warnings) {
  OptimizerConfig o;
  const OptimizerParameters p(settings);
  o.type = type_named(settings.text("optimizer.type"));
  p.read("lr", o.lr);
  p.read("eps", o.eps);
  p.read("weight_decay", o.weight_decay);
  p.read("momentum", o.momentum);
  p.read("nesterov", o.nesterov);
  p.read("dampening", o.dampening);
  p.read("amsgrad", o.amsgrad);
  p.read("maximize", o.maximize);
  p.read("alpha", o.alpha);
  p.read("centered", o.centered);
  p.read("bias_correction", o.bias_correction);
  p.read("lr_decay", o.lr_decay);
  p.read("initial_accumulator_value", o.initial_accumulator_value);
  p.read("min_coeff", o.min_coeff);
  p.read("max_coeff", o.max_coeff);
  p.read("eps_inside_sqrt", o.eps_inside_sqrt);
  if (const auto* betas = p.find("betas")) o.beta1 = betas->value[0], o.beta2 = betas->value[1];
  require(!o.nesterov || (o.momentum > 0 && o.dampening == 0), Errc::config, file,
          ": optimizer.params.nesterov: needs a momentum above 0 and no dampening");
  if (o.type == Type::adam || o.type == Type::adamw) read_adam(p, file, o, warnings);
  if (o.type == Type::muon) read_muon(p, o);
  return o;
}

}  // namespace ds
}  // namespace rz
