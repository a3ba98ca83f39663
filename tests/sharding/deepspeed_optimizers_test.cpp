// Runs: ci
// Not under sanitizers: /(sgd|adam_l2|adamw_decay_all)$

/// Optimizers against the losses of DeepSpeed on gpt2_tiny, where the shared fixtures lie beside the sources.
#include <gtest/gtest.h>

#include <algorithm>

#include "autograd_lite/models/gpt2.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"
#include "tests/support/reference_deepspeed.h"
#include "tests/support/rounding_bound.h"
#include "tests/support/shared_fixture.h"

namespace rz {
namespace {

namespace fixture = test::shared_fixture;
constexpr int batch = 8, samples = 160;

/// A run of the shared fixture, with the optimizer that its section describes.
struct Case {
  const char* name;
  std::function<std::unique_ptr<Optimizer>()> make;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
const Case cases[] = {
    {"sgd", [] { return make_sgd({.learning_rate = 0.1, .momentum = 0.8}); }},
    {"adam_l2",
     [] { return make_adam({.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.02}); }},
    {"adamw_decay_all",
     [] { return make_adamw({.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.05}); }},
    {"adagrad", [] { return make_adagrad({.learning_rate = 0.005, .epsilon = 1e-8}); }}};

void fill_start(Strategy& strategy) {
  const auto start = fixture::start();
  strategy.values().fill([&](const Parameter& p, Range r, float* out) {
    const auto tensor = std::ranges::find(start, p.name, &fixture::NamedTensor::name);
    ASSERT_NE(tensor, start.end()) << p.name;
    std::copy_n(tensor->values.begin() + static_cast<std::ptrdiff_t>(r.begin), r.count(), out);
  });
}

/// The samples of one rank as inputs and targets.
struct Batch {
  Batch(int update, int rank, int ranks) {
    const int own = batch / ranks, length = fixture::sequence_length;
    const Shape shape{static_cast<std::size_t>(own), static_cast<std::size_t>(length)};
    inputs = Tensor::empty(shape, DType::i32), targets = Tensor::empty(shape, DType::i32);
    const auto rows = fixture::samples(update * batch % samples + rank * own, own);
    for (int i = 0; i < own; ++i)
      for (int t = 0; t < length; ++t) {
        inputs.data<std::int32_t>()[i * length + t] =
            rows[static_cast<std::size_t>(i)][static_cast<std::size_t>(t)];
        targets.data<std::int32_t>()[i * length + t] =
            rows[static_cast<std::size_t>(i)][static_cast<std::size_t>(t) + 1];
      }
  }
  Tensor inputs, targets;
};

/// The mean losses of `updates` updates.
std::vector<double> losses_of(const Case& c, StrategyKind kind, Communicator& comm, std::size_t updates) {
  Gpt2 model({.n_layer = 4, .n_head = 4, .n_embd = 128, .n_positions = 64, .vocab_size = 256});
  const auto strategy = make_strategy(kind, model, comm);
  Tape tape;
  strategy->attach(tape);
  fill_start(*strategy);
  const auto optimizer = c.make();
  std::vector<double> losses;
  for (std::size_t s = 0; s < updates; ++s) {
    const Batch own(static_cast<int>(s), comm.rank(), comm.size());
    strategy->zero_grad();
    const auto out = model.forward(tape, own.inputs, own.targets);
    const auto sum = out.loss.read(tape.stream());
    losses.push_back(sum.sum / static_cast<double>(sum.count) / comm.size());
    strategy->backward(tape, out.loss);
    tape.reset();
    strategy->finish_gradients();
    strategy->clip_and_step(*optimizer, {.max_norm = 1});  // DeepSpeed's default
  }
  comm.all_reduce(Buffer(losses.data(), losses.size())).wait();
  return losses;
}

class DeepSpeedOptimizers : public testing::TestWithParam<Case> {};

TEST_P(DeepSpeedOptimizers, HaveTheSameLosses) {
  if (test::shared_deepspeed_folder().empty())
    GTEST_SKIP() << "the shared fixtures are not beside the sources";
  const test::DeepSpeedRun run = test::shared_deepspeed_run(GetParam().name);
  const std::pair<StrategyKind, int> runs[] = {
      {StrategyKind::ddp, 1}, {StrategyKind::zero1, 2}, {StrategyKind::zero3, 4}};
  for (const auto& [kind, ranks] : runs)
    lab::group(ranks, [&, kind = kind](Communicator& comm) {
      const auto own = losses_of(GetParam(), kind, comm, run.loss.size());
      for (std::size_t s = 0; comm.rank() == 0 && s < own.size(); ++s)
        EXPECT_NEAR(own[s], run.loss[s], test::rounding_bound(run.loss_deviation[s], 2e-6))
            << name(kind) << " on " << comm.size() << " ranks, update " << s;
    });
}

INSTANTIATE_TEST_SUITE_P(Cases, DeepSpeedOptimizers, testing::ValuesIn(cases),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace rz
