#pragma once
/// A small GPT-2 with LoRA, trained in the laboratory.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "autograd_lite/models/language_model.h"
#include "autograd_lite/models/lora.h"
#include "autograd_lite/nn/init.h"
#include "sharding/huggingface/families.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/folder.h"

namespace rz::test {

/// What a rank has of the frozen parameters, by name.
inline std::map<std::string, std::vector<float>> frozen_values(Engine& engine, Module& model) {
  std::map<std::string, std::vector<float>> all;
  for (const Parameter* p : model.parameters()) {
    if (p->requires_grad) continue;
    const Tensor value = engine.strategy().values().whole(*p).on_host(engine.stream());
    all[p->name].assign(value.data<float>(), value.data<float>() + value.count());
  }
  return all;
}

inline Tensor logits_of(LanguageModel& model, const Tensor& tokens) {
  Tape tape;
  const Tape::NoGrad no_grad(tape);
  const Tensor value = tape.value(model.forward(tape, tokens).logits);
  const Tensor own = Tensor::empty(value.shape());
  std::copy_n(value.data<float>(), value.count(), own.data<float>());
  return own;
}

inline void expect_near(const Tensor& a, const Tensor& b, double tolerance) {
  ASSERT_EQ(a.shape(), b.shape());
  for (std::size_t i = 0; i < a.count(); ++i)
    ASSERT_NEAR(a.data<float>()[i], b.data<float>()[i], tolerance) << "element " << i;
}

inline constexpr const char* gpt2_config =
    R"({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 8, "vocab_size": 256,
        "initializer_range": 0.3, "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0})";

inline nlohmann::json training_config(const nlohmann::json& lora) {
  return {{"train_batch_size", 6},
          {"gradient_clipping", 0.5},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-2}, {"weight_decay", 0.1}}}}},
          {"ringzero", {{"lora", lora}}}};
}

class Lora : public testing::Test {
 protected:
  Lora() { folder_.put("config.json", gpt2_config); }
  /// Three updates, of the initial values of a file or of the seed.
  lab::Run run(const nlohmann::json& lora, const std::string& weights = "") const {
    return {.model = lab::language(
                {8, weights}, [path = folder_ / "config.json"] { return language_model_from_config(path); },
                training_config(lora).dump()),
            .updates = 3};
  }
  /// Saves the adapter of a run without updates.
  void save_new(const nlohmann::json& lora, const std::string& adapter) const {
    lab::Run training = run(lora);
    training.updates = 0;
    training.end = [&](Engine& engine, Module&) { engine.save_adapter(adapter); };
    lab::train(training);
  }
  std::unique_ptr<LanguageModel> model() const { return language_model_from_config(folder_ / "config.json"); }
  /// Sets all values, those of B too, so that updates have an effect.
  static void fill(LanguageModel& model) {
    allocate_parameters(model);
    init_parameters(model, 3);
    for (const auto& [name, layer] : lora_layers(model))
      for (std::size_t i = 0; i < layer->lora->b.count(); ++i)
        layer->lora->b.value.data<float>()[i] = static_cast<float>(random_uniform(5, name, i) - 0.5);
  }
  static Tensor tokens() {
    const Tensor t = Tensor::empty({2, 8}, DType::i32);
    for (std::size_t i = 0; i < 16; ++i) t.data<std::int32_t>()[i] = static_cast<std::int32_t>(37 * i % 256);
    return t;
  }

  Folder folder_;
};

inline const nlohmann::json all_paths{
    {"target_modules", {"c_attn", "mlp.c_fc", "h.*.mlp.c_proj"}}, {"r", 3}, {"lora_alpha", 5}};

}  // namespace rz::test
