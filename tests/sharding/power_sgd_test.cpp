/// PowerSGD against its algorithm in float64 (Vogels et al., arXiv:1905.13727, algorithm 1 and 2).
#include "sharding/model/power_sgd.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "comm/core/error.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

constexpr std::size_t rows = 24, columns = 40, bias = 5;
constexpr std::size_t element_count = rows * columns + bias;

/// A matrix and a vector whose gradients are given numbers.
class Given final : public Module {
 public:
  Given() {
    register_parameter(weight_, "weight", {rows, columns});
    register_parameter(bias_, "bias", {bias});
    weight_.value = Tensor::zeros(weight_.shape);
    bias_.value = Tensor::zeros(bias_.shape);
  }
  Var loss(Tape& tape, const float* gradients) {
    return in_scope(tape, [&] {
      return term(tape, term(tape, tape.variable(Tensor::zeros({})), weight_, gradients), bias_,
                  gradients + rows * columns);
    });
  }

 private:
  static Var term(Tape& tape, Var sum, Parameter& p, const float* gradients) {
    const Var w = tape.parameter(p);
    return tape.record(Tensor::zeros({}), {sum, w}, [sum, w, gradients](Tape& t, const Tensor& d_out) {
      const Tensor grad = t.grad_target(w).tensor;
      std::copy_n(gradients, grad.count(), grad.data<float>());
      t.accumulate_grad(sum, d_out);
    });
  }
  Parameter weight_, bias_;
};

using Numbers = std::vector<float>;

/// Of a rank in an update.
Numbers random_gradients(int rank, int update) {
  std::mt19937 random(static_cast<unsigned>(100 * update + rank));
  std::normal_distribution<float> normal;
  Numbers out(element_count);
  for (float& x : out) x = normal(random);
  return out;
}

/// One rank that trains with a hook; next() returns what the update subtracted from the values.
struct Training {
  Training(Communicator& comm, std::shared_ptr<CommunicationHook> hook)
      : strategy(make_strategy(StrategyKind::ddp, model, comm, {.communication_hook = std::move(hook)})) {
    strategy->attach(tape);
  }
  Numbers next(const Numbers& gradients) {
    for (Parameter* p : model.parameters()) std::fill_n(p->value.data<float>(), p->count(), 0.0f);
    strategy->zero_grad();
    strategy->begin_backward();
    tape.backward(model.loss(tape, gradients.data()));
    tape.reset();
    strategy->finish_gradients();
    Numbers out;
    for (const Parameter* p : model.parameters())
      for (std::size_t i = 0; i < p->count(); ++i) out.push_back(p->grad.data<float>()[i]);
    strategy->step(*sgd);
    return out;
  }
  Given model;
  Tape tape;
  std::unique_ptr<Strategy> strategy;
  std::unique_ptr<Optimizer> sgd = make_sgd({});
};

Numbers exact_mean(int ranks, int update) {
  std::vector<double> sum(element_count);
  for (int r = 0; r < ranks; ++r) {
    const Numbers g = random_gradients(r, update);
    for (std::size_t i = 0; i < element_count; ++i) sum[i] += double{g[i]};
  }
  Numbers out;
  for (const double s : sum) out.push_back(static_cast<float>(s / ranks));
  return out;
}

// ---- float64

using Matrix = std::vector<double>;  // row-major

void orthogonalize(Matrix& p, std::size_t n, std::size_t r) {
  for (std::size_t k = 0; k < r; ++k) {
    for (std::size_t b = 0; b < k; ++b) {
      double dot = 0;
      for (std::size_t i = 0; i < n; ++i) dot += p[i * r + b] * p[i * r + k];
      for (std::size_t i = 0; i < n; ++i) p[i * r + k] -= dot * p[i * r + b];
    }
    double norm = 0;
    for (std::size_t i = 0; i < n; ++i) norm += p[i * r + k] * p[i * r + k];
    for (std::size_t i = 0; i < n; ++i) p[i * r + k] /= std::sqrt(norm);
  }
}

/// The m x n matrix of a rank in an update.
using MatrixOf = std::function<Matrix(int rank, int update)>;

Matrix weight_gradient(int rank, int update) {
  const Numbers g = random_gradients(rank, update);
  return {g.begin(), g.begin() + rows * columns};
}

/// All ranks of a group at once, whose first factor q is given.
struct Reference {
  Reference(int ranks, std::size_t r, Matrix q, std::size_t m = rows, std::size_t n = columns,
            MatrixOf matrix = weight_gradient)
      : r(r),
        m(m),
        n(n),
        matrix(std::move(matrix)),
        q(std::move(q)),
        errors(static_cast<std::size_t>(ranks), Matrix(m * n)) {}

  Matrix next(int update, bool feedback) {
    std::vector<Matrix> inputs;
    for (std::size_t k = 0; k < errors.size(); ++k) {
      inputs.push_back(matrix(static_cast<int>(k), update));
      if (feedback)
        for (std::size_t i = 0; i < m * n; ++i) inputs[k][i] += errors[k][i];
    }
    Matrix mean(m * n), p(m * r), approximation(m * n);
    for (const Matrix& input : inputs)
      for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += input[i] / static_cast<double>(inputs.size());
    for (std::size_t i = 0; i < m; ++i)
      for (std::size_t j = 0; j < n; ++j)
        for (std::size_t k = 0; k < r; ++k) p[i * r + k] += mean[i * n + j] * q[j * r + k];
    orthogonalize(p, m, r);
    std::fill(q.begin(), q.end(), 0.0);
    for (std::size_t i = 0; i < m; ++i)
      for (std::size_t j = 0; j < n; ++j)
        for (std::size_t k = 0; k < r; ++k) q[j * r + k] += mean[i * n + j] * p[i * r + k];
    for (std::size_t i = 0; i < m; ++i)
      for (std::size_t j = 0; j < n; ++j)
        for (std::size_t k = 0; k < r; ++k) approximation[i * n + j] += p[i * r + k] * q[j * r + k];
    for (std::size_t k = 0; k < errors.size(); ++k)
      for (std::size_t i = 0; i < m * n; ++i) errors[k][i] = inputs[k][i] - approximation[i];
    return approximation;
  }

  std::size_t r, m, n;
  MatrixOf matrix;
  Matrix q;
  std::vector<Matrix> errors;
};

/// The factor from which a hook with seed 0 starts, by the formula in power_sgd.cpp: SplitMix64 of a counter.
Matrix start_factor(std::size_t r, std::size_t n = columns) {
  Matrix q;
  for (std::uint64_t i = 0; i < n * r; ++i) {
    std::uint64_t z = (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    q.push_back(static_cast<double>((z ^ (z >> 31)) >> 40) / (1 << 23) - 1);
  }
  orthogonalize(q, n, r);
  return q;
}

TEST(PowerSgd, FollowsItsAlgorithmInFloat64) {
  for (const int ranks : {1, 2, 3})
    for (const bool feedback : {true, false})
      lab::group(ranks, [&](Communicator& comm) {
        Training t(comm, make_power_sgd({.matrix_approximation_rank = 2,
                                         .start_iter = 2,
                                         .use_error_feedback = feedback,
                                         .min_compression_rate = 1}));
        Reference reference(ranks, 2, start_factor(2));
        for (int update = 0; update < 8; ++update) {
          const Numbers got = t.next(random_gradients(comm.rank(), update));
          const Numbers mean = exact_mean(ranks, update);
          for (std::size_t i = update < 2 ? 0 : rows * columns; i < element_count; ++i)
            ASSERT_NEAR(got[i], mean[i], 1e-6) << "exact: the first updates, and the vector, at " << i;
          if (update < 2) continue;
          const Matrix expected = reference.next(update, feedback);
          for (std::size_t i = 0; i < expected.size(); ++i)
            ASSERT_NEAR(got[i], expected[i], 2e-5) << "update " << update << ", element " << i;
        }
      });
}

/// The bucket is bias, padding, weight, and padding to a multiple of 64 elements per rank.
TEST(PowerSgd, BatchedFollowsItsAlgorithmInFloat64) {
  for (const int ranks : {1, 2, 3})
    for (const std::size_t rank_of_factors : {1, 3})
      lab::group(ranks, [&](Communicator& comm) {
        Training t(comm,
                   make_batched_power_sgd(
                       {.matrix_approximation_rank = static_cast<int>(rank_of_factors), .start_iter = 2}));
        const std::size_t count = ranks == 3 ? 1152 : 1024, side = ranks == 3 ? 34 : 32;
        ASSERT_EQ(t.strategy->logging_data().bucket_bytes, std::vector<std::size_t>{4 * count});
        Reference reference(ranks, rank_of_factors, start_factor(rank_of_factors, side), side, side,
                            [side](int r, int update) {
                              const Numbers g = random_gradients(r, update);
                              Matrix square(side * side);
                              std::copy(g.begin() + rows * columns, g.end(), square.begin());
                              std::copy_n(g.begin(), rows * columns, square.begin() + 64);
                              return square;
                            });
        for (int update = 0; update < 6; ++update) {
          const Traffic before = t.strategy->traffic().total();
          const Numbers got = t.next(random_gradients(comm.rank(), update));
          if (update < 2) continue;
          const Matrix expected = reference.next(update, true);
          for (std::size_t i = 0; i < rows * columns; ++i) ASSERT_NEAR(got[i], expected[64 + i], 2e-5) << i;
          for (std::size_t i = 0; i < bias; ++i) ASSERT_NEAR(got[rows * columns + i], expected[i], 2e-5) << i;
          EXPECT_EQ(t.strategy->traffic().total().all_reduce.bytes - before.all_reduce.bytes,
                    4 * 2 * side * rank_of_factors);
        }
      });
}

/// A mean of rank 2 is restored by two factors.
TEST(PowerSgd, AMeanOfLowRankIsExact) {
  lab::group(2, [](Communicator& comm) {
    Training t(comm, make_power_sgd({.matrix_approximation_rank = 2, .start_iter = 2}));
    Numbers gradients(element_count), mean(element_count);
    for (std::size_t i = 0; i < rows * columns; ++i) {
      const auto of_rank = [&](int r) {
        return std::cos(static_cast<double>(i / columns) + r) *
               std::sin(0.1 * static_cast<double>(i % columns) + r);
      };
      gradients[i] = static_cast<float>(of_rank(comm.rank()));
      mean[i] = static_cast<float>((of_rank(0) + of_rank(1)) / 2);
    }
    for (int update = 0; update < 4; ++update) {
      const Numbers got = t.next(gradients);
      for (std::size_t i = 0; i < element_count; ++i) ASSERT_NEAR(got[i], mean[i], 2e-6) << update;
    }
  });
}

TEST(PowerSgd, RanksHaveTheSameBitsAndSendTheFactors) {
  lab::group(3, [](Communicator& comm) {
    for (const bool warm : {true, false}) {
      Training t(comm, make_power_sgd({.matrix_approximation_rank = 3, .start_iter = 2, .warm_start = warm}));
      for (int update = 0; update < 4; ++update) {
        const Traffic before = t.strategy->traffic().total();
        Numbers got = t.next(random_gradients(comm.rank(), update));
        Numbers of_first = got;
        comm.broadcast(Buffer(of_first.data(), of_first.size()), 0).wait();
        EXPECT_EQ(got, of_first);
        const CallCount& after = t.strategy->traffic().total().all_reduce;
        const std::size_t factors = 4 * ((rows + columns) * 3 + bias);
        if (update < 2) continue;
        EXPECT_EQ(after.calls - before.all_reduce.calls, 2u);
        EXPECT_EQ(after.bytes - before.all_reduce.bytes, factors);
      }
    }
  });
}

TEST(PowerSgd, ParametersThatGainTooLittleAreExact) {
  lab::group(2, [](Communicator& comm) {
    constexpr double rate = double{rows * columns} / (rows + columns);
    for (const double limit : {rate * 1.01, rate * 0.99}) {
      Training t(comm, make_power_sgd({.start_iter = 2, .min_compression_rate = limit}));
      Numbers got;
      for (int update = 0; update < 3; ++update) got = t.next(random_gradients(comm.rank(), update));
      EXPECT_EQ(std::abs(got[0] - exact_mean(2, 2)[0]) < 1e-6, limit > rate);
    }
  });
}

TEST(PowerSgd, WhatCannotWorkIsRefused) {
  auto comm = Communicator::connect(0, 1, memory_store());
  const auto refused = [&](StrategyKind kind, const StrategyOptions& options) {
    return test::error_of([&] {
      Given model;
      make_strategy(kind, model, comm, options);
    });
  };
  for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3}) {
    const Error e = refused(kind, {.communication_hook = make_power_sgd({})});
    EXPECT_EQ(e.code(), Errc::unsupported);
    EXPECT_NE(std::string(e.what()).find("which only ddp has"), std::string::npos) << e.what();
  }
  EXPECT_EQ(refused(StrategyKind::ddp,
                    {.wire = {.prescale_gradients = true}, .communication_hook = make_power_sgd({})})
                .code(),
            Errc::invalid_argument);
  EXPECT_THROW(make_power_sgd({.matrix_approximation_rank = 0}), Error);
  EXPECT_THROW(make_power_sgd({.start_iter = 1}), Error);
  EXPECT_THROW(make_power_sgd({.min_compression_rate = 0}), Error);
}

}  // namespace
}  // namespace rz
