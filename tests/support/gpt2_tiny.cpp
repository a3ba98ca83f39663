#include "tests/support/gpt2_tiny.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "sharding/checkpoint/safetensors.h"
#include "sharding/io/json.h"
#include "tests/support/rounding_bound.h"

namespace rz::test {

TinyCase tiny_case(const std::string& name) {
  const std::string path = RZ_SOURCE_DIR "/tests/data/gpt2_tiny/expected.json";
  const nlohmann::json node = parse_json(read_text_file(path), path, JsonDialect::strict).at(name);
  TinyCase c;
  c.config = {.n_layer = node["n_layer"],
              .n_head = node["n_head"],
              .n_embd = node["n_embd"],
              .n_positions = node["n_positions"],
              .vocab_size = node["vocab_size"],
              .tie_word_embeddings = node["tied"]};
  c.batch = node["batch"];
  c.steps = node["steps"];
  c.loss = node["float64"]["loss"].get<std::vector<double>>();
  c.grad_norm = node["float64"]["grad_norm"].get<std::vector<double>>();
  c.loss_spread = node["spread"]["loss"].get<std::vector<double>>();
  c.relative_norm_spread = node["spread"]["relative_grad_norm"].get<std::vector<double>>();
  return c;
}

void gpt2_tiny_weights(const Parameter& p, std::int64_t n_layer, Range r, float* out) {
  if (p.shape.dims() == 1) {
    std::fill_n(out, r.count(), p.name.ends_with(".weight") ? 1.0f : 0.0f);
    return;
  }
  const double std =
      p.name.ends_with("c_proj.weight") ? 0.02 / std::sqrt(2.0 * static_cast<double>(n_layer)) : 0.02;
  const NamedUniform u(p.name);
  const Box box = p.box();
  for (std::size_t i = r.begin; i < r.end; ++i)
    *out++ = static_cast<float>(std * (2 * u[p.part ? box.index(i) : i] - 1) * std::sqrt(3.0));
}

void write_tiny_start(const Gpt2Config& config, const std::string& path) {
  Gpt2 model(config);
  std::vector<SafetensorsSpec> tensors;
  for (const Parameter* p : model.parameters()) {
    tensors.push_back({p->name, {}});
    for (int i = 0; i < p->shape.dims(); ++i) tensors.back().shape.push_back(p->shape[i]);
  }
  SafetensorsWriter writer(path, tensors);
  for (const Parameter* p : model.parameters()) {
    std::vector<float> values(p->count());
    gpt2_tiny_weights(*p, config.n_layer, {0, values.size()}, values.data());
    writer.write(values);
  }
  writer.finish();
}

void expect_close(const std::vector<lm::UpdateReport>& updates, const TinyCase& c) {
  ASSERT_FALSE(updates.empty());
  for (const lm::UpdateReport& r : updates) {
    const double loss = rounding_bound(c.loss_spread[r.step], 2e-5);
    const double norm = rounding_bound(c.relative_norm_spread[r.step], 1e-4);
    EXPECT_NEAR(r.loss, c.loss[r.step], loss) << "update " << r.step;
    EXPECT_NEAR(r.grad_norm / c.grad_norm[r.step], 1, norm) << "update " << r.step;
  }
}

}  // namespace rz::test
