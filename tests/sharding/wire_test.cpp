/// Gradients on the wire: types and factors, against float64, and the same bits for every strategy.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "comm/core/error.h"
#include "comm/core/math.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

constexpr std::size_t sizes[] = {300, 70, 1};

/// Parameters whose gradients are given numbers. The values are zero at first.
class Given final : public Module {
 public:
  Given() {
    for (const std::size_t n : sizes) {
      auto& p = *parameters_.emplace_back(std::make_unique<Parameter>());
      register_parameter(p, concat("p", n), {n});
      p.value = Tensor::zeros(p.shape);
    }
  }

  Var loss(Tape& tape, const std::vector<float>& gradients) {
    return in_scope(tape, [&] {
      Var sum = tape.variable(Tensor::zeros({}));
      const float* next = gradients.data();
      for (const auto& p : parameters_) {
        const Var w = tape.parameter(*p);
        const std::vector<float> own(next, next + p->count());
        next += p->count();
        sum = tape.record(Tensor::zeros({}), {sum, w}, [sum, w, own](Tape& t, const Tensor& d_out) {
          const auto target = t.grad_target(w);
          for (std::size_t i = 0; i < own.size(); ++i)
            target.tensor.data<float>()[i] =
                own[i] + (target.accumulate ? target.tensor.data<float>()[i] : 0);
          t.accumulate_grad(sum, d_out);
        });
      }
      return sum;
    });
  }

 private:
  std::vector<std::unique_ptr<Parameter>> parameters_;
};

constexpr std::size_t element_count() {
  std::size_t n = 0;
  for (const std::size_t s : sizes) n += s;
  return n;
}

using Gradients = std::vector<std::vector<float>>;  // by rank

Gradients random_gradients(int ranks) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  Gradients out(static_cast<std::size_t>(ranks), std::vector<float>(element_count()));
  for (auto& of_rank : out)
    for (float& g : of_rank) g = normal(random);
  return out;
}

/// The means after `passes` passes, each of which synchronises.
std::vector<float> means(StrategyKind kind, const WireFormat& wire, Communicator& comm,
                         const Gradients& gradients, Traffic* traffic = nullptr) {
  Given model;
  const auto strategy = make_strategy(kind, model, comm, {.reduce_bucket_size = 256, .wire = wire});
  Tape tape;
  strategy->attach(tape);
  strategy->zero_grad();
  strategy->begin_backward();
  const Var loss = model.loss(tape, gradients[static_cast<std::size_t>(comm.rank())]);
  tape.backward(loss);
  tape.reset();
  strategy->finish_gradients();
  if (traffic) *traffic = strategy->traffic().total();
  strategy->step(*make_sgd({.learning_rate = 1}));
  std::vector<float> out;
  for (const Parameter* p : model.parameters()) {
    const Tensor value = strategy->values().whole(*p);
    for (std::size_t i = 0; i < p->count(); ++i) out.push_back(-value.data<float>()[i]);
  }
  return out;
}

double mean(const Gradients& gradients, std::size_t i) {
  double sum = 0;
  for (const auto& g : gradients) sum += double{g[i]};
  return sum / static_cast<double>(gradients.size());
}

struct Format {
  const char* name;
  WireFormat wire;
  double epsilon;  ///< of its type
};
const Format formats[] = {
    {"f32", {}, 6e-8},
    {"f32_prescaled", {.prescale_gradients = true}, 6e-8},
    {"f32_predivided", {.gradient_predivide_factor = 3}, 6e-8},
    {"bf16", {.communication_data_type = DType::bf16}, 1.0 / 256},
    {"bf16_prescaled", {.communication_data_type = DType::bf16, .prescale_gradients = true}, 1.0 / 256},
    {"bf16_predivided", {.communication_data_type = DType::bf16, .gradient_predivide_factor = 2}, 1.0 / 256},
    {"f16", {.communication_data_type = DType::f16}, 1.0 / 2048},
    {"f16_prescaled", {.communication_data_type = DType::f16, .prescale_gradients = true}, 1.0 / 2048},
    {"f16_predivided", {.communication_data_type = DType::f16, .gradient_predivide_factor = 4}, 1.0 / 2048},
};

class Wire : public testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(Formats, Wire, testing::ValuesIn(formats),
                         [](const auto& info) { return info.param.name; });

/// Each rank's gradient is rounded once, the sum once; the factors are rounded in f32.
TEST_P(Wire, MeansAreThoseOfFloat64WithinItsRounding) {
  for (const int ranks : {1, 2, 3, 4})
    lab::group(ranks, [&](Communicator& comm) {
      const Gradients gradients = random_gradients(ranks);
      const std::vector<float> got = means(StrategyKind::ddp, GetParam().wire, comm, gradients);
      for (std::size_t i = 0; i < element_count(); ++i) {
        double magnitude = 0;
        for (const auto& g : gradients) magnitude += std::abs(double{g[i]}) / ranks;
        ASSERT_NEAR(got[i], mean(gradients, i), 2 * GetParam().epsilon * magnitude + 4 * 6e-8 * magnitude)
            << i;
      }
    });
}

TEST_P(Wire, EveryStrategyHasTheSameBits) {
  for (const int ranks : {2, 3, 4})
    lab::group(ranks, [&](Communicator& comm) {
      const Gradients gradients = random_gradients(ranks);
      const std::vector<float> ddp = means(StrategyKind::ddp, GetParam().wire, comm, gradients);
      for (const StrategyKind kind : lab::strategies)
        EXPECT_EQ(means(kind, GetParam().wire, comm, gradients), ddp) << name(kind);
    });
}

TEST_P(Wire, SmallIntegersAreExact) {
  if (GetParam().wire.gradient_predivide_factor == 3) return;  // a third is not exact
  for (const int ranks : {1, 2, 4})
    lab::group(ranks, [&](Communicator& comm) {
      Gradients gradients(static_cast<std::size_t>(ranks), std::vector<float>(element_count()));
      for (std::size_t r = 0; r < gradients.size(); ++r)
        for (std::size_t i = 0; i < element_count(); ++i)
          gradients[r][i] = static_cast<float>((i * (r + 3)) % 16) - 8;
      for (const StrategyKind kind : lab::strategies) {
        const std::vector<float> got = means(kind, GetParam().wire, comm, gradients);
        for (std::size_t i = 0; i < element_count(); ++i) ASSERT_EQ(got[i], mean(gradients, i)) << i;
      }
    });
}

TEST_P(Wire, SixteenBitsSendHalfTheBytes) {
  lab::group(2, [&](Communicator& comm) {
    const Gradients gradients = random_gradients(2);
    for (const StrategyKind kind : lab::strategies) {
      Traffic plain, wire;
      means(kind, {}, comm, gradients, &plain);
      means(kind, GetParam().wire, comm, gradients, &wire);
      const bool half = GetParam().wire.communication_data_type.has_value();
      EXPECT_EQ((half ? 2 : 1) * wire.all_reduce.bytes, plain.all_reduce.bytes);
      EXPECT_EQ((half ? 2 : 1) * wire.reduce_scatter.bytes, plain.reduce_scatter.bytes);
      EXPECT_EQ(wire.all_gather, plain.all_gather);
    }
  });
}

/// 98304 is above f16's largest number, 65504; a quarter of it is not.
TEST(WireFormat, PrescaledGradientsOverflowLess) {
  lab::group(4, [&](Communicator& comm) {
    const Gradients gradients(4, std::vector<float>(element_count(), 98'304));
    const auto first = [&](const WireFormat& wire) {
      return means(StrategyKind::zero2, wire, comm, gradients)[0];
    };
    EXPECT_EQ(first({.communication_data_type = DType::f16}), std::numeric_limits<float>::infinity());
    // The sum, 98304, overflows; f32 on the wire would not.
    EXPECT_EQ(first({.communication_data_type = DType::f16, .prescale_gradients = true}),
              std::numeric_limits<float>::infinity());
    // A quarter of a quarter: the sum is 24576 and is multiplied by 16 / 4 afterwards.
    EXPECT_EQ(first({.communication_data_type = DType::f16, .gradient_predivide_factor = 16}), 98'304);
    EXPECT_EQ(first({.prescale_gradients = true}), 98'304);
  });
}

TEST(WireFormat, ImpossibleOnesAreRefused) {
  auto comm = Communicator::connect(0, 1, memory_store());
  const auto error = [&](const WireFormat& wire) {
    return test::error_of([&] {
      Given model;
      make_strategy(StrategyKind::ddp, model, comm, {.wire = wire});
    });
  };
  EXPECT_STREQ(error({.communication_data_type = DType::i8}).what(),
               "communication_data_type is i8; choose f32, bf16 or f16");
  EXPECT_STREQ(error({.gradient_predivide_factor = 0}).what(),
               "gradient_predivide_factor is 0, expected a finite number above 0");
}

}  // namespace
}  // namespace rz
