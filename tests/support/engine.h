#pragma once
/// A small net, its data, and a configuration: of tests that train with an engine.

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "sharding/engine/engine.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/world.h"

namespace rz::test::engine {

constexpr std::size_t in = 6, hidden = 16, classes = 5;

struct Net : Module {
  nn::Linear fc1{*this, "fc1", in, hidden}, fc2{*this, "fc2", hidden, classes};
  nn::Dropout drop{*this, "drop", 0.2};
  Var operator()(Tape& t, const Tensor& x) { return fc2(t, drop(t, nn::gelu(t, fc1(t, x)))); }
};

/// Samples that are a function of their number. Every fifth target is ignored.
struct Batch {
  Tensor x, y;
};

inline Batch batch(std::uint64_t number, std::size_t rows) {
  Batch b{Tensor::empty({rows, in}), Tensor::empty({rows}, DType::i32)};
  for (std::size_t i = 0; i < rows; ++i) {
    const std::uint64_t sample = number * rows + i;
    double total = 0;
    for (std::size_t c = 0; c < in; ++c) {
      const double x = random_uniform(3, "x", sample * in + c) - 0.5;
      b.x.data<float>()[i * in + c] = static_cast<float>(x);
      total += x * static_cast<double>(c + 1);
    }
    b.y.data<std::int32_t>()[i] =
        sample % 5 == 4 ? -100 : static_cast<std::int32_t>(std::abs(std::lround(total * 3)) % classes);
  }
  return b;
}

/// The micro-batches of a rank, one after another.
struct Batches {
  int rank, ranks;
  std::size_t rows;
  std::uint64_t made = 0;
  std::vector<Batch> live{4};
  Batch& next() {
    Batch& to = live[made % live.size()];
    to = batch(made++ * static_cast<std::uint64_t>(ranks) + static_cast<std::uint64_t>(rank), rows);
    return to;
  }
};

inline std::string config(int stage, const std::string& more = "") {
  return concat(R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3,
                    "gradient_clipping": 0.5,
                    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
                    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 12, "warmup_num_steps": 4,
                                  "warmup_max_lr": 0.02}},
                    "zero_optimization": {"stage": )",
                stage, R"(, "stage3_param_persistence_threshold": 0})", more, "}");
}

inline std::vector<float> values_of(Strategy& strategy, Module& module) {
  std::vector<float> out;
  for (const Parameter* p : module.parameters()) {
    const Tensor value = strategy.values().whole(*p);
    out.insert(out.end(), value.data<float>(), value.data<float>() + value.count());
  }
  return out;
}

inline EngineOptions options(std::string config) {
  return {.config = std::move(config), .seed = 7, .log = nullptr};
}

inline void in_world(int ranks, const std::function<void(World&)>& body) { lab::world(ranks, body); }

}  // namespace rz::test::engine
