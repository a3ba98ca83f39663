/// Every strategy against one process that sees the whole batch, on exact data: no tolerance.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "comm/core/error.h"
#include "sharding/strategy.h"
#include "tests/support/ranks.h"
#include "tests/support/toy_model.h"

namespace rz {
namespace {

using test::run_ranks;
using test::ToyModel;

constexpr StrategyKind kinds[] = {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2,
                                  StrategyKind::zero3};
constexpr int steps = 3;

/// Small dyadic numbers, never 0.
float initial_value(std::size_t parameter, std::size_t i) {
  return static_cast<float>(static_cast<int>((parameter * 5 + i) % 8) - 4 + (i % 8 < 4 ? 0.5 : 1)) / 4;
}
/// The datum of a sample; summed over 1, 2, 3 or 4 ranks it can be divided by their number exactly.
float datum(std::size_t parameter, std::size_t i, int sample, int step) {
  return static_cast<float>((parameter + i + static_cast<std::size_t>(sample * 3 + step)) % 3) * 12;
}
bool uses_sometimes(int rank, int step) { return (rank + step) % 2 == 0; }

/// What one process would have after `steps` updates with SGD, in double, where all of it is exact.
struct Reference {
  std::vector<std::vector<double>> values;
  std::vector<double> losses, norms;
};
Reference reference(int ranks, int micro_batches) {
  Reference ref;
  ToyModel model(initial_value);
  for (const Parameter* p : model.parameters())
    ref.values.emplace_back(p->value.data<float>(), p->value.data<float>() + p->count());
  for (int step = 0; step < steps; ++step) {
    double loss = 0, square = 0;
    for (std::size_t p = 0; p < ref.values.size(); ++p) {
      const Parameter& parameter = model[p];
      if (parameter.name == "never") continue;
      const double factor = parameter.name == "tied" ? 3 : 1;
      for (std::size_t i = 0; i < ref.values[p].size(); ++i) {
        double x = 0;
        for (int r = 0; r < ranks; ++r)
          for (int m = 0; m < micro_batches; ++m)
            if (parameter.name != "sometimes" || uses_sometimes(r, step))
              x += factor * datum(p, i, r * micro_batches + m, step);
        x /= ranks * micro_batches;
        double& w = ref.values[p][i];
        loss += 0.5 * x * w * w;
        if (!parameter.requires_grad) continue;
        square += x * w * x * w;
        w -= x * w / 64;
      }
    }
    ref.losses.push_back(loss);
    ref.norms.push_back(std::sqrt(square));
  }
  return ref;
}

struct Run {
  int ranks = 1, micro_batches = 1;
  bool synchronise_always = false;
  StrategyOptions options{};
};

/// Trains on one rank and checks it against the reference.
void train(StrategyKind kind, const Run& run, Communicator& comm, const Reference& ref) {
  ToyModel model([&](std::size_t p, std::size_t i) { return comm.rank() == 0 ? initial_value(p, i) : -77; });
  Tape tape;
  const auto strategy = make_strategy(kind, model, comm, run.options);
  strategy->attach(tape);
  const auto sgd = make_sgd({.learning_rate = 1.0 / 64});
  for (int step = 0; step < steps; ++step) {
    strategy->zero_grad();
    double loss = 0;
    for (int m = 0; m < run.micro_batches; ++m) {
      const int sample = comm.rank() * run.micro_batches + m;
      const Var l = model.loss(
          tape, [&](std::size_t p, std::size_t i) { return datum(p, i, sample, step); },
          uses_sometimes(comm.rank(), step));
      loss += *tape.value(l).data<float>();
      strategy->begin_backward(run.synchronise_always || m + 1 == run.micro_batches);
      tape.backward(l, 1.0f / static_cast<float>(run.micro_batches));
      tape.reset();
      if (run.synchronise_always) strategy->finish_gradients();
    }
    if (!run.synchronise_always) strategy->finish_gradients();
    comm.all_reduce(Buffer(&loss, 1)).wait();
    ASSERT_EQ(loss / (run.ranks * run.micro_batches), ref.losses[static_cast<std::size_t>(step)])
        << "step " << step;
    ASSERT_EQ(strategy->gradient_norm(), ref.norms[static_cast<std::size_t>(step)]) << "step " << step;
    strategy->step(*sgd);
  }
  const auto parameters = model.parameters();
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const Tensor value = strategy->full_value(*parameters[p]);
    for (std::size_t i = 0; i < parameters[p]->count(); ++i)
      ASSERT_EQ(value.data<float>()[i], ref.values[p][i]) << parameters[p]->name << '[' << i << ']';
  }
}

void expect_like_one_process(const Run& run) {
  const Reference ref = reference(run.ranks, run.micro_batches);
  for (const StrategyKind kind : kinds)
    run_ranks(run.ranks, [&](int rank, std::shared_ptr<Store> store) {
      SCOPED_TRACE(str(name(kind), " on rank ", rank, " of ", run.ranks));
      auto comm = Communicator::connect(rank, run.ranks, std::move(store));
      train(kind, run, comm, ref);
    });
}

class Strategies : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Strategies, testing::Values(1, 2, 3, 4));

TEST_P(Strategies, TrainLikeOneProcess) { expect_like_one_process({.ranks = GetParam()}); }

TEST_P(Strategies, SmallBucketsAndNoOverlap) {
  expect_like_one_process({.ranks = GetParam(), .options = {.first_bucket_bytes = 256, .bucket_bytes = 600}});
  expect_like_one_process(
      {.ranks = GetParam(), .options = {.first_bucket_bytes = 256, .bucket_bytes = 600, .overlap = false}});
}

TEST_P(Strategies, AccumulationWithoutSynchronisingIsExact) {
  expect_like_one_process({.ranks = GetParam(), .micro_batches = 4});
}

TEST_P(Strategies, AccumulationThatSynchronisesEachTimeIsExact) {
  expect_like_one_process({.ranks = GetParam(), .micro_batches = 4, .synchronise_always = true});
}

TEST_P(Strategies, PrefetchDepthDoesNotMatter) {
  for (const int depth : {0, 2, 9})
    expect_like_one_process({.ranks = GetParam(), .options = {.prefetch_scopes = depth}});
}

// ---- the same bits, on data where every rounding shows

struct Outcome {
  std::vector<float> values;
  std::vector<double> losses, norms;
  bool operator==(const Outcome&) const = default;
};

Outcome train_on_random_data(StrategyKind kind, Communicator& comm, const StrategyOptions& options) {
  const auto noise = [](std::size_t p, std::size_t i, int seed) {
    std::minstd_rand random(
        static_cast<unsigned>(p * 1000 + i + static_cast<std::size_t>(seed) * 100000 + 1));
    random.discard(3);
    return static_cast<float>(random()) / 1e9f - 1;
  };
  ToyModel model([&](std::size_t p, std::size_t i) { return noise(p, i, 99); });
  Tape tape;
  const auto strategy = make_strategy(kind, model, comm, options);
  strategy->attach(tape);
  const auto adamw = make_adamw({.learning_rate = 0.05, .weight_decay = 0.1});
  Outcome out;
  for (int step = 0; step < 4; ++step) {
    strategy->zero_grad();
    const Var loss = model.loss(
        tape, [&](std::size_t p, std::size_t i) { return noise(p, i, step * 8 + comm.rank()); },
        uses_sometimes(comm.rank(), step));
    out.losses.push_back(*tape.value(loss).data<float>());
    strategy->begin_backward();
    tape.backward(loss);
    tape.reset();
    strategy->finish_gradients();
    out.norms.push_back(strategy->clip_gradients(0.3));
    strategy->step(*adamw);
  }
  for (const Parameter* p : model.parameters()) {
    const Tensor value = strategy->full_value(*p);
    out.values.insert(out.values.end(), value.data<float>(), value.data<float>() + value.count());
  }
  return out;
}

TEST_P(Strategies, GiveTheSameBitsWhateverTheStrategyBucketsAndOverlap) {
  run_ranks(GetParam(), [&](int rank, std::shared_ptr<Store> store) {
    auto comm = Communicator::connect(rank, GetParam(), std::move(store));
    const Outcome expected = train_on_random_data(StrategyKind::ddp, comm, {});
    EXPECT_GT(expected.norms[0], 0.3);  // so that clipping takes part
    for (const StrategyKind kind : kinds)
      for (const StrategyOptions& options :
           {StrategyOptions{}, StrategyOptions{.first_bucket_bytes = 4, .bucket_bytes = 4},
            StrategyOptions{
                .first_bucket_bytes = 300, .bucket_bytes = 900, .overlap = false, .rebuild = false}})
        EXPECT_TRUE(train_on_random_data(kind, comm, options) == expected)
            << name(kind) << " on rank " << rank;
  });
}

// ---- what goes wrong is said

struct Fixture {
  explicit Fixture(StrategyKind kind)
      : comm(Communicator::connect(0, 1, memory_store())), strategy(make_strategy(kind, model, comm)) {
    strategy->attach(tape);
  }
  void pass(bool synchronise) {
    const Var loss = model.loss(tape, [](std::size_t, std::size_t) { return 1.0f; });
    strategy->begin_backward(synchronise);
    tape.backward(loss);
    tape.reset();
  }
  Errc error_of(const std::function<void()>& f, const std::string& word) {
    try {
      f();
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
      return e.code();
    }
    ADD_FAILURE() << "no error, expected one with " << word;
    return Errc::system;
  }
  ToyModel model{initial_value};
  Communicator comm;
  Tape tape;
  std::unique_ptr<Strategy> strategy;
  std::unique_ptr<Optimizer> sgd = make_sgd({});
};

TEST(Strategy, StepWithUnsynchronisedGradientsIsAnError) {
  for (const StrategyKind kind : kinds) {
    Fixture f(kind);
    const auto step = [&] { f.strategy->step(*f.sgd); };
    EXPECT_EQ(f.error_of(step, "step() with unsynchronised gradients: no backward"), Errc::unsynchronised);
    f.pass(false);
    EXPECT_EQ(f.error_of(step, "begin_backward(true)"), Errc::unsynchronised);
    EXPECT_EQ(f.error_of([&] { f.strategy->finish_gradients(); }, "finish_gradients()"),
              Errc::unsynchronised);
    EXPECT_EQ(f.error_of([&] { f.strategy->gradient_norm(); }, "gradient_norm()"), Errc::unsynchronised);
    {
      const Strategy::NoSync no_sync(*f.strategy);
      f.pass(true);
      EXPECT_EQ(f.error_of(step, "begin_backward(true)"), Errc::unsynchronised);
    }
    f.pass(true);
    EXPECT_EQ(f.error_of(step, "finish_gradients()"), Errc::unsynchronised);
    EXPECT_EQ(f.error_of([&] { f.strategy->zero_grad(); }, "zero_grad()"), Errc::invalid_argument);
    f.strategy->finish_gradients();
    step();
    f.strategy->zero_grad();
    EXPECT_EQ(f.error_of(step, "no backward"), Errc::unsynchronised);
  }
}

TEST(Strategy, BackwardWithoutBeginIsAnError) {
  Fixture f(StrategyKind::zero2);
  const auto pass = [&] {
    f.tape.backward(f.model.loss(f.tape, [](std::size_t, std::size_t) { return 1.0f; }));
  };
  EXPECT_EQ(f.error_of(pass, "begin_backward()"), Errc::invalid_argument);
}

TEST(Strategy, AnotherOptimizerIsAnError) {
  Fixture f(StrategyKind::ddp);
  f.pass(true);
  f.strategy->finish_gradients();
  f.strategy->step(*make_adam({}));
  EXPECT_EQ(f.error_of([&] { f.strategy->step(*make_sgd({.momentum = 0.9})); }, "one optimizer"),
            Errc::invalid_argument);
}

TEST(Strategy, NamesRoundTrip) {
  for (const StrategyKind kind : kinds) EXPECT_EQ(strategy_from_name(name(kind)), kind);
  EXPECT_THROW(strategy_from_name("zero4"), Error);
}

TEST(Strategy, RanksWithDifferentModelsLearnWhichParameterDiffers) {
  run_ranks(3, [](int rank, std::shared_ptr<Store> store) {
    auto comm = Communicator::connect(rank, 3, std::move(store));
    ToyModel model(initial_value);
    if (rank == 2) model[3].shape = {2, 5}, model[3].value = Tensor::zeros({2, 5});
    try {
      make_strategy(StrategyKind::ddp, model, comm);
      ADD_FAILURE() << "no error on rank " << rank;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::mismatch);
      EXPECT_EQ(e.culprit(), 2);
      EXPECT_NE(std::string(e.what()).find("first.bias [10] on rank 0 and first.bias [2, 5] on rank 2"),
                std::string::npos)
          << e.what();
    }
  });
}

// ---- parameters in and out

TEST_P(Strategies, FillAndVisitCoverEveryElementOnce) {
  for (const StrategyKind kind : kinds)
    run_ranks(GetParam(), [&](int rank, std::shared_ptr<Store> store) {
      auto comm = Communicator::connect(rank, GetParam(), std::move(store));
      ToyModel model({});
      const auto strategy = make_strategy(kind, model, comm);
      std::size_t stored = 0;
      strategy->fill_parameters([&](const Parameter& p, Range r, float* out) {
        stored += r.count();
        for (std::size_t i = r.begin; i < r.end; ++i) *out++ = initial_value(model.index(p.name), i);
      });
      std::size_t total = 0;
      for (const Parameter* p : model.parameters()) total += p->count();
      if (kind != StrategyKind::zero3) {
        EXPECT_EQ(stored, total);
      }

      std::vector<std::vector<float>> seen;
      for (const Parameter* p : model.parameters()) seen.emplace_back(p->count());
      strategy->visit_owned([&](const Parameter& p, Range r, const float* value) {
        const std::size_t index = model.index(p.name);
        for (std::size_t i = r.begin; i < r.end; ++i) {
          EXPECT_EQ(*value++, initial_value(index, i));
          seen[index][i] += 1;
        }
      });
      for (auto& counts : seen) {
        comm.all_reduce(Buffer(counts.data(), counts.size())).wait();
        EXPECT_EQ(counts, std::vector<float>(counts.size(), 1));
      }
      const auto parameters = model.parameters();
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        const Tensor whole = strategy->full_value(*parameters[p]);
        for (std::size_t i = 0; i < parameters[p]->count(); ++i)
          ASSERT_EQ(whole.data<float>()[i], initial_value(p, i)) << parameters[p]->name;
      }
    });
}

}  // namespace
}  // namespace rz
