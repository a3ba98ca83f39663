#include <cmath>
#include <nlohmann/json.hpp>

#include "sharding/lm/updates.h"
#include "tests/lab/training.h"

namespace rz::lab {

Batch batch(std::uint64_t number, std::size_t rows, const MlpSizes& s) {
  const Tensor x = Tensor::empty({rows, s.in}), y = Tensor::empty({rows}, DType::i32);
  std::vector<std::uint64_t> samples;
  for (std::size_t row = 0; row < rows; ++row) {
    const std::uint64_t sample = samples.emplace_back(number * rows + row);
    double total = 0;
    for (std::size_t c = 0; c < s.in; ++c) {
      const double v = random_uniform(3, "x", sample * s.in + c) - 0.5;
      x.data<float>()[row * s.in + c] = static_cast<float>(v);
      total += v * static_cast<double>(c + 1);
    }
    const auto label = static_cast<std::size_t>(std::abs(std::lround(total * 3))) % s.classes;
    const bool ignored = s.ignored && sample % s.ignored == s.ignored - 1;
    y.data<std::int32_t>()[row] = ignored ? -100 : static_cast<std::int32_t>(label);
  }
  const std::vector<Field> fields{{"x", DType::f32, {s.in}}, {"y", DType::i32, {}}};
  return {std::make_shared<const std::vector<Field>>(fields), {x, y}, samples, 0};
}

std::shared_ptr<const Dataset> samples(const MlpSizes& s) {
  const Batch all = batch(0, s.samples, s);
  return tensor_dataset({{"x", all["x"]}, {"y", all["y"]}});
}

Model mlp(const MlpSizes& sizes) {
  return {.make = [=] { return std::make_unique<Mlp>(sizes); },
          .loader = [=](Engine& engine) { return engine.loader(samples(sizes)); },
          .config = R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3,
              "gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
              "scheduler": {"type": "WarmupDecayLR",
                            "params": {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_max_lr": 0.02}},
              "zero_optimization": {"stage3_param_persistence_threshold": 0}})",
          .loss = [](Module& m, Tape& t, const Batch& b) { return dynamic_cast<Mlp&>(m)(t, b); }};
}

Model language(const LanguageData& d, std::function<std::unique_ptr<LanguageModel>()> make,
               const std::string& config) {
  // Each scope is gathered anew wherever it is used.
  auto all = nlohmann::json::parse(R"({"zero_optimization": {"stage3_param_persistence_threshold": 0,
      "stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 0}})");
  all.merge_patch(nlohmann::json::parse(config));
  Model m{.make = std::move(make), .config = all.dump()};
  m.loader = [d](Engine& engine) {
    const Tokens all = Tokens::from_file(d.tokens);
    return lm::token_loader(engine, all, d.seq_len,
                            lm::batch_sampler(engine, all.samples(d.seq_len), false, 0));
  };
  m.options = [d](EngineOptions& o, Module& module) {
    o.decay = Decay::matrices;
    o.threads = 1;
    o.expected_terms = static_cast<double>(o.ds_config->sizes.train) * static_cast<double>(d.seq_len);
    if (d.weights.empty()) return;
    const auto file = std::make_shared<PretrainedWeights>(d.weights, module);
    o.initial_values = [file](const Parameter& p, Range r, float* out) { file->read(p, r, out); };
  };
  return m;
}

Model gpt(const Gpt& g) {
  Model m = language(
      {g.config.n_positions, g.weights, g.tokens}, [=] { return std::make_unique<Gpt2>(g.config); },
      concat(R"({"train_batch_size": )", g.batch,
             R"(, "gradient_accumulation_steps": 1, "gradient_clipping": )", g.clipping, R"(,
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}})",
             g.bucket ? concat(R"(, "zero_optimization": {"reduce_bucket_size": )", g.bucket, "}") : "",
             "}"));
  m.options = [g, of_all = m.options](EngineOptions& o, Module& module) {
    of_all(o, module);
    if (g.bucket) o.ds_config->strategy.first_bucket_size = g.bucket / 4;
    if (!g.weights.empty()) return;
    o.initial_values = [n = g.config.n_layer](const Parameter& p, Range r, float* out) {
      test::gpt2_tiny_weights(p, n, r, out);
    };
  };
  return m;
}

}  // namespace rz::lab
