/// Models of a user's own, registered: every strategy finds their parameters and scopes; those of two guides
/// train as PyTorch does in float64 (tests/data/guide_models).
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <vector>

#include "autograd_lite/nn/containers.h"
#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "sharding/engine/engine.h"
#include "sharding/io/json.h"
#include "sharding/optim/optimizers.h"
#include "sharding/parallel/collectives.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/gpt2_tiny.h"

// The programs of the guides, which tests/guide/CMakeLists.txt writes. What they include is included above.
#define main program
namespace text {
#include "tests/guide/encoder.cpp"
}
namespace vision {
#include "tests/guide/vision.cpp"
}
#undef main

namespace rz {
namespace {

constexpr std::size_t words = 11, channels = 8;

struct Net : Module {
  Net() {
    layers.append<nn::Linear>(channels, 2 * channels).append<nn::Gelu>();
    layers.append<nn::Linear>(2 * channels, channels);
  }
  /// The head reads the table outside of the layer that owns it.
  nn::Loss operator()(Tape& t, const Tensor& tokens, const Tensor& targets) {
    const Var x = drop(t, table(t, tokens));
    const Var y = norm.add_and_norm(t, x, layers(t, x)).norm;
    return nn::cross_entropy(
        t,
        table.in_scope(
            t, [&] { return nn::linear(t, y, t.parameter(table.weight), Var(), nn::WeightLayout::out_in); }),
        targets);
  }
  nn::Embedding table{*this, "table", words, channels, 0.5f};
  nn::Dropout drop{*this, "drop", 0.1};
  nn::Sequential layers{*this, "layers"};
  nn::LayerNorm norm{*this, "norm", channels};
};

struct Trained {
  std::vector<double> losses;
  std::vector<float> values;
  bool operator==(const Trained&) const = default;
};

Trained train(StrategyKind kind, Communicator& comm) {
  Net net;
  const auto strategy = make_strategy(kind, net, comm);
  strategy->values().fill([](const Parameter& p, Range elements, float* out) {
    init_slice(p, {out, elements.count()}, elements.begin, 1);
  });
  Tape tape;
  strategy->attach(tape);
  strategy->settings().set_expected_terms(24.0 * comm.size());
  const auto adamw = make_adamw({.learning_rate = 0.02});
  Tensor tokens = Tensor::empty({24}, DType::i32), targets = Tensor::empty({24}, DType::i32);
  for (std::size_t i = 0; i < 24; ++i) {
    tokens.data<std::int32_t>()[i] =
        static_cast<std::int32_t>((i + static_cast<std::size_t>(comm.rank())) % words);
    targets.data<std::int32_t>()[i] =
        (tokens.data<std::int32_t>()[i] * 3 + 1) % static_cast<std::int32_t>(words);
  }
  Trained out;
  for (std::uint64_t update = 0; update < 30; ++update) {
    strategy->zero_grad();
    tape.seed(update * 8 + static_cast<std::uint64_t>(comm.rank()));
    const nn::Loss loss = net(tape, tokens, targets);
    strategy->backward(tape, loss);
    out.losses.push_back(loss.read({}).sum);
    tape.reset();
    strategy->finish_gradients();
    strategy->clip_and_step(*adamw, {.max_norm = 1});
  }
  out.values = lab::values_of(*strategy, net);
  return out;
}

TEST(OwnModel, TrainsWithTheSameBitsInEveryStrategy) {
  lab::group(2, [](Communicator& comm) {
    const Trained expected = train(StrategyKind::ddp, comm);
    EXPECT_LT(expected.losses.back(), expected.losses.front() / 2);
    for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
      EXPECT_TRUE(train(kind, comm) == expected) << name(kind) << " on rank " << comm.rank();
  });
}

// ---- models of guides

constexpr std::size_t rows = 8;

/// u of tests/data/guide_models/make_expected.py.
double uniform(const std::string& name, std::size_t i) { return test::NamedUniform(name)[i]; }
std::int32_t below(std::size_t n, const std::string& name, std::size_t i) {
  return static_cast<std::int32_t>(static_cast<double>(n) * uniform(name, i));
}
void start(const Parameter& p, Range elements, float* out) {
  const double shift = p.name.find("norm") != p.name.npos && p.name.ends_with("weight") ? 1 : 0;
  for (std::size_t i = elements.begin; i < elements.end; ++i)
    *out++ = static_cast<float>(0.2 * (2 * uniform(p.name, i) - 1) + shift);
}

std::shared_ptr<const Dataset> images() {
  const Tensor image = Tensor::empty({rows, 1, vision::side, vision::side}),
               label = Tensor::empty({rows}, DType::i32);
  for (std::size_t i = 0; i < image.count(); ++i)
    image.data<float>()[i] = static_cast<float>(2 * uniform("image", i) - 1);
  for (std::size_t i = 0; i < rows; ++i)
    label.data<std::int32_t>()[i] = static_cast<std::int32_t>(i % vision::classes);
  return tensor_dataset({{"image", image}, {"class", label}});
}

std::shared_ptr<const Dataset> sentences() {
  const Tensor tokens = Tensor::empty({rows, text::length}, DType::i32),
               targets = Tensor::empty({rows, text::length}, DType::i32),
               lengths = Tensor::empty({rows}, DType::i32);
  for (std::size_t row = 0; row < rows; ++row) {
    const std::int32_t end = 1 + below(text::length, "lengths", row);
    lengths.data<std::int32_t>()[row] = end;
    for (std::size_t k = 0; k < text::length; ++k) {
      const std::size_t i = row * text::length + k;
      const bool counts = static_cast<std::int32_t>(k) < end && uniform("masked", i) < 0.3;
      tokens.data<std::int32_t>()[i] = below(text::vocabulary, "tokens", i);
      targets.data<std::int32_t>()[i] = counts ? below(text::vocabulary, "targets", i) : -100;
    }
  }
  return tensor_dataset({{"tokens", tokens}, {"lengths", lengths}, {"targets", targets}});
}

nn::Loss loss_of(text::Encoder& net, Tape& t, Batch& b) {
  return nn::cross_entropy(t, net(t, b["tokens"], b["lengths"]), b["targets"]);
}
template <class Net>
nn::Loss loss_of(Net& net, Tape& t, Batch& b) {
  return nn::cross_entropy(t, net(t, b["image"]), b["class"]);
}

struct Course {
  std::vector<double> loss, grad_norm;
  double evaluation = 0;
  bool operator==(const Course&) const = default;
};

/// Every rank must report the same.
template <class Net>
Course course(const std::shared_ptr<const Dataset>& data, std::size_t updates, int ranks, StrategyKind kind) {
  std::vector<Course> courses(static_cast<std::size_t>(ranks));
  lab::world(ranks, [&](World& world) {
    Net net;
    EngineOptions options;
    options.ds_config.emplace();
    options.ds_config->optimizer =
        OptimizerConfig{.type = OptimizerConfig::Type::sgd, .lr = 0.02, .momentum = 0.9};
    options.ds_config->sizes = {rows, static_cast<std::int64_t>(rows) / ranks, 1};
    options.ds_config->gradient_clipping = 0;
    options.strategy = kind;
    options.initial_values = start;
    options.threads = 1;
    options.log = nullptr;
    Engine engine = initialize(world, net, std::move(options));
    functional::sync_batch_norm(net, world.communicator());
    Loader loader = engine.loader(data, {.shuffle = false});
    Course& c = courses[static_cast<std::size_t>(world.rank())];
    for (std::size_t update = 0; update < updates; ++update) {
      const StepReport& report =
          engine.train_batch(loader, [&](Tape& t, Batch& b) { return loss_of(net, t, b); });
      c.grad_norm.push_back(report.grad_norm);
      c.loss.push_back(engine.loss());
    }
    const Mean own = engine.evaluate([&](Tape& t) { return engine.item(loss_of(net, t, loader.next())); });
    c.evaluation = engine.mean({&own, 1});
  });
  for (const Course& c : courses) EXPECT_TRUE(c == courses[0]);
  return courses[0];
}

template <class Net>
void expect_course_of_pytorch(const char* name, const std::shared_ptr<const Dataset>& data) {
  const std::string path = RZ_SOURCE_DIR "/tests/data/guide_models/expected.json";
  const nlohmann::json expected = parse_json(read_text_file(path), path, JsonDialect::strict).at(name);
  const std::size_t updates = expected.at("loss").size();
  for (const int ranks : {1, 2}) {
    const Course ddp = course<Net>(data, updates, ranks, StrategyKind::ddp);
    for (std::size_t i = 0; i < updates; ++i) {
      EXPECT_NEAR(ddp.loss[i], expected["loss"][i].get<double>(), 2e-6) << "update " << i;
      const double norm = expected["grad_norm"][i];
      EXPECT_NEAR(ddp.grad_norm[i], norm, 1e-5 * norm) << "update " << i;
    }
    EXPECT_NEAR(ddp.evaluation, expected["evaluation"].get<double>(), 2e-6);
    EXPECT_TRUE(course<Net>(data, updates, ranks, StrategyKind::zero3) == ddp) << ranks << " ranks";
  }
}

TEST(GuideModels, AnEncoderWithPaddingTrainsAsInPyTorch) {
  expect_course_of_pytorch<text::Encoder>("encoder", sentences());
}
TEST(GuideModels, AConvolutionalNetTrainsAsInPyTorch) {
  expect_course_of_pytorch<vision::Cnn>("cnn", images());
}
TEST(GuideModels, AVisionTransformerTrainsAsInPyTorch) {
  expect_course_of_pytorch<vision::Vit>("vit", images());
}

}  // namespace
}  // namespace rz
