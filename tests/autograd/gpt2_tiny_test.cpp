// Runs: computes

#include "tests/support/gpt2_tiny.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/nn/init.h"
#include "sharding/data/tokens.h"
#include "tests/support/rounding_bound.h"
#include "tests/support/shared_fixture.h"

/// Twenty updates of a small GPT-2 against PyTorch's float64 run.
namespace rz {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::json;

const fs::path data = fs::path(RZ_SOURCE_DIR) / "tests/data/gpt2_tiny";

json read_json(const fs::path& path) {
  std::ifstream in(path);
  return json::parse(in);
}

/// Sample i is tokens[T i … T i + T]: inputs, and the tokens one further on as targets.
struct Batch {
  explicit Batch(const Shape& shape)
      : inputs(Tensor::empty(shape, DType::i32)), targets(Tensor::empty(shape, DType::i32)) {}
  void fill(const Tokens& tokens, std::size_t update) {
    const std::size_t begin = update * inputs.count();
    tokens.read(begin, {inputs.data<std::int32_t>(), inputs.count()});
    tokens.read(begin + 1, {targets.data<std::int32_t>(), targets.count()});
  }
  Tensor inputs, targets;
};

double norm(const Tensor& t) {
  double sum = 0;
  for (std::size_t i = 0; i < t.count(); ++i) sum += double{t.data<float>()[i]} * t.data<float>()[i];
  return std::sqrt(sum);
}

double gradient_norm(Gpt2& model) {
  double sum = 0;
  for (const Parameter* p : model.parameters()) sum += norm(p->grad) * norm(p->grad);
  return std::sqrt(sum);
}

/// AdamW as the fixture's configuration has it; state in f32.
class AdamW {
 public:
  explicit AdamW(Gpt2& model) : parameters_(model.parameters()) {
    for (const Parameter* p : parameters_) {
      first_.emplace_back(p->count());
      second_.emplace_back(p->count());
    }
  }

  void step() {
    ++steps_;
    for (std::size_t k = 0; k < parameters_.size(); ++k) update(*parameters_[k], first_[k], second_[k]);
  }

 private:
  void update(Parameter& p, std::vector<float>& first, std::vector<float>& second) const {
    constexpr double lr = 1e-3, beta_1 = 0.9, beta_2 = 0.95, epsilon = 1e-8;
    const double decay = p.shape.dims() >= 2 ? 0.1 : 0;
    const double correction_1 = 1 - std::pow(beta_1, steps_), correction_2 = 1 - std::pow(beta_2, steps_);
    float* value = p.value.data<float>();
    const float* grad = p.grad.data<float>();
    for (std::size_t i = 0; i < p.count(); ++i) {
      const double g = grad[i];
      first[i] = static_cast<float>(beta_1 * first[i] + (1 - beta_1) * g);
      second[i] = static_cast<float>(beta_2 * second[i] + (1 - beta_2) * g * g);
      const double step = (first[i] / correction_1) / (std::sqrt(second[i] / correction_2) + epsilon);
      value[i] = static_cast<float>(value[i] * (1 - lr * decay) - lr * step);
    }
    p.grad_is_fresh = true;
  }

  std::vector<Parameter*> parameters_;
  std::vector<std::vector<float>> first_, second_;
  int steps_ = 0;
};

void start_by_formula(Gpt2& model) {
  allocate_parameters(model);
  for (const Parameter* p : model.parameters())
    test::gpt2_tiny_weights(*p, model.config().n_layer, {0, p->count()}, p->value.data<float>());
}

void start_of_shared_fixture(Gpt2& model) {
  allocate_parameters(model);
  for (const auto& tensor : test::shared_fixture::start()) {
    const auto parameters = model.parameters();
    const auto p = std::find_if(parameters.begin(), parameters.end(),
                                [&](const Parameter* q) { return q->name == tensor.name; });
    ASSERT_NE(p, parameters.end()) << tensor.name;
    ASSERT_EQ((*p)->count(), tensor.values.size()) << tensor.name;
    std::copy(tensor.values.begin(), tensor.values.end(), (*p)->value.data<float>());
  }
}

/// Tolerance of losses (absolute) and gradient norms (relative) at an update.
using Bounds = std::function<test::shared_fixture::Bound(std::size_t update)>;
/// Losses and gradient norms at every update; each parameter's gradient at the first one, and its value after
/// the last.
void train_and_compare(const test::TinyCase& c, Gpt2& model, const json& expected, const Bounds& bounds) {
  Tape tape(Stream::host(2));
  AdamW optimizer(model);
  Batch batch({static_cast<std::size_t>(c.batch), c.config.n_positions});
  const Tokens tokens = Tokens::from_file(test::tiny_tokens());
  for (std::size_t s = 0; s < expected.at("loss").size(); ++s) {
    batch.fill(tokens, s);
    const auto out = model.forward(tape, batch.inputs, batch.targets);
    const auto sum_and_count = out.loss.read(tape.stream());
    const double loss = sum_and_count.sum / static_cast<double>(sum_and_count.count);
    const auto bound = bounds(s);
    EXPECT_NEAR(loss, expected["loss"][s], bound.loss) << "update " << s;
    tape.backward(out.loss.sum, 1 / static_cast<float>(sum_and_count.count));
    const double relative = gradient_norm(model) / expected["grad_norm"][s].get<double>();
    EXPECT_NEAR(relative, 1, bound.relative_grad_norm) << "update " << s;
    for (const Parameter* p : model.parameters()) {
      if (s > 0) break;
      EXPECT_NEAR(norm(p->grad) / expected["grad_norm_first_step"][p->name].get<double>(), 1, 1e-5)
          << p->name;
    }
    optimizer.step();
    tape.reset();
  }
  for (const Parameter* p : model.parameters()) {
    if (p->name.ends_with("c_attn.bias")) continue;  // its key third is noise: the true gradient is zero
    EXPECT_NEAR(norm(p->value) / expected["param_norm_final"][p->name].get<double>(), 1, 1e-4) << p->name;
  }
}

class Gpt2Tiny : public testing::TestWithParam<const char*> {};

TEST_P(Gpt2Tiny, TrainingFollowsFloat64) {
  const test::TinyCase c = test::tiny_case(GetParam());
  Gpt2 model(c.config);
  start_by_formula(model);
  const json expected = read_json(data / "expected.json").at(GetParam());
  train_and_compare(c, model, expected.at("float64"), [&](std::size_t s) -> test::shared_fixture::Bound {
    return {test::rounding_bound(c.loss_spread[s], 2e-6),
            test::rounding_bound(c.relative_norm_spread[s], 2e-6)};
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, Gpt2Tiny, testing::Values("tiny", "tiny_batch12", "untied"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Gpt2TinyShared, TrainingFollowsFloat64) {
  namespace fixture = test::shared_fixture;
  if (fixture::folder().empty()) GTEST_SKIP() << "the shared fixture gpt2_tiny is not beside the sources";
  const test::TinyCase tiny = test::tiny_case("tiny");
  Gpt2 model(tiny.config);
  start_of_shared_fixture(model);
  const fixture::Expected expected = fixture::expected();
  train_and_compare(tiny, model, read_json(fs::path(fixture::folder()) / "expected.json").at("float64"),
                    [&](std::size_t update) { return fixture::bound(expected, update); });
}

}  // namespace
}  // namespace rz
