/// Collectives on a tape: gradients of the sum of all ranks' losses, against differences.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "autograd_lite/ops.h"
#include "sharding/parallel/collectives.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

constexpr std::size_t columns = 2;

float noise(int rank, std::size_t i, int stream) {
  const auto k =
      (static_cast<std::size_t>(rank) * 131 + i * 17 + static_cast<std::size_t>(stream) * 7919 + 3) *
      2654435761u % 1000003u;
  return static_cast<float>(k) / 700001.0f - 0.7f;
}

using Operator = std::function<Var(Tape&, Var, Communicator&)>;

/// x on a rank, with one element of one rank moved.
struct Moved {
  int rank = -1;
  std::size_t element = 0;
  float by = 0;
};

struct Result {
  double loss;  ///< summed over the ranks
  std::vector<float> gradient;
};

/// The loss is mse to targets that differ on every rank.
Result run(const Operator& op, std::size_t rows, const Moved& moved, Communicator& comm) {
  Tape tape;
  const Tensor x = Tensor::empty({rows, columns});
  for (std::size_t i = 0; i < x.count(); ++i) x.data<float>()[i] = noise(comm.rank(), i, 1);
  if (moved.rank == comm.rank()) x.data<float>()[moved.element] += moved.by;
  const Var in = tape.variable(x), out = op(tape, in, comm);
  const Tensor target = Tensor::empty(tape.value(out).shape());
  for (std::size_t i = 0; i < target.count(); ++i) target.data<float>()[i] = noise(comm.rank(), i, 2);
  const Var loss = nn::mse(tape, out, target);
  Result result{*tape.value(loss).data<float>(), {}};
  tape.backward(loss);
  const Tensor d = tape.grad(in);
  result.gradient.assign(d.data<float>(), d.data<float>() + d.count());
  comm.all_reduce(Buffer(&result.loss, 1)).wait();
  return result;
}

/// `rows` of x by rank.
void expect_adjoint(const Operator& op, const std::vector<std::size_t>& rows) {
  constexpr float h = 1.0f / 16;  // the loss is quadratic: central differences are exact except for rounding
  const int ranks = static_cast<int>(rows.size());
  lab::group(ranks, [&](Communicator& comm) {
    const std::size_t own = rows[static_cast<std::size_t>(comm.rank())];
    const Result here = run(op, own, {}, comm);
    for (int r = 0; r < ranks; ++r)
      for (std::size_t i = 0; i < rows[static_cast<std::size_t>(r)] * columns; ++i) {
        const double up = run(op, own, {r, i, h}, comm).loss, down = run(op, own, {r, i, -h}, comm).loss;
        if (r == comm.rank()) {
          EXPECT_NEAR(here.gradient[i], (up - down) / (2 * h), 2e-5) << r << ' ' << i;
        }
      }
  });
}

class Functional : public testing::TestWithParam<int> {
 protected:
  std::vector<std::size_t> all(std::size_t rows) const {
    return std::vector<std::size_t>(static_cast<std::size_t>(GetParam()), rows);
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Functional, testing::Values(1, 2, 3));

TEST_P(Functional, AllReduceIsItsOwnAdjoint) {
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg})
    expect_adjoint([op](Tape& t, Var x, Communicator& c) { return functional::all_reduce(t, x, c, op); },
                   all(2));
}

TEST_P(Functional, ReduceScatterIsTheAdjointOfAllGather) {
  expect_adjoint([](Tape& t, Var x, Communicator& c) { return functional::all_gather(t, x, c); }, all(2));
  expect_adjoint([](Tape& t, Var x, Communicator& c) { return functional::reduce_scatter(t, x, c); },
                 all(2 * static_cast<std::size_t>(GetParam())));
}

/// x[rows, columns] as two blocks, which are gathered or divided along their rows.
TEST_P(Functional, AnotherDimensionIsDividedInEachBlock) {
  const auto n = static_cast<std::size_t>(GetParam());
  const auto blocks = [](std::size_t rows) { return Shape{2, rows / 2, columns}; };
  expect_adjoint(
      [&](Tape& t, Var x, Communicator& c) {
        return functional::all_gather(t, nn::reshape(t, x, blocks(4)), c, 1);
      },
      all(4));
  expect_adjoint(
      [&](Tape& t, Var x, Communicator& c) {
        return functional::reduce_scatter(t, nn::reshape(t, x, blocks(4 * n)), c, -2);
      },
      all(4 * n));
  lab::group(GetParam(), [&](Communicator& comm) {
    Tape tape;
    const Tensor x = Tensor::empty({2, 1, 1});
    x.data<float>()[0] = static_cast<float>(comm.rank()),
    x.data<float>()[1] = static_cast<float>(10 + comm.rank());
    const Tensor out = tape.value(functional::all_gather(tape, tape.constant(x), comm, -2));
    EXPECT_EQ(out.shape(), Shape({2, n, 1}));
    for (std::size_t i = 0; i < 2 * n; ++i)
      EXPECT_EQ(out.data<float>()[i], static_cast<float>(i < n ? i : 10 + i - n));
  });
}

/// Each rank multiplies x, which all have, by a factor of its own; they hold one loss of the sum.
TEST_P(Functional, RanksThatShareALayerHoldOneLoss) {
  const int n = GetParam();
  lab::group(n, [&](Communicator& comm) {
    const auto loss_at = [&](std::size_t element, float by, std::vector<float>* gradient) {
      Tape tape;
      const Tensor x = Tensor::empty({3, columns}), factor = Tensor::empty({3, columns}),
                   target = Tensor::empty({3, columns});
      for (std::size_t i = 0; i < x.count(); ++i) {
        x.data<float>()[i] = noise(0, i, 1) + (i == element ? by : 0);
        factor.data<float>()[i] = noise(comm.rank(), i, 2), target.data<float>()[i] = noise(0, i, 3);
      }
      const Var in = tape.variable(x), whole = functional::replicate(tape, in, comm);
      const Var sum = functional::combine(tape, nn::mul(tape, whole, tape.constant(factor)), comm);
      const Var loss = nn::mse(tape, sum, target);
      const double value = *tape.value(loss).data<float>();
      tape.backward(loss);
      const Tensor d = tape.grad(in);
      if (gradient) gradient->assign(d.data<float>(), d.data<float>() + d.count());
      return value;
    };
    std::vector<float> gradient;
    loss_at(0, 0, &gradient);
    constexpr float h = 1.0f / 16;
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      const double difference = (loss_at(i, h, nullptr) - loss_at(i, -h, nullptr)) / (2 * h);
      EXPECT_NEAR(gradient[i], difference, 2e-5) << i;
    }
    std::vector<float> first = gradient;
    comm.broadcast(Buffer(first.data(), first.size()), 0).wait();
    EXPECT_EQ(gradient, first) << "the same bits";
  });
}

/// The last rank begins its sum only when the others have run what they deferred beside theirs.
TEST_P(Functional, WhatALayerDefersRunsBesideTheSumOfItsInput) {
  const int n = GetParam();
  std::atomic<int> deferred{0};
  lab::group(n, [&](Communicator& comm) {
    for (const bool gathers : {false, true}) {
      Tape tape;
      Tensor x = Tensor::empty({1, columns});
      std::fill_n(x.data<float>(), x.count(), 1.0f);
      const Var in = tape.variable(x);
      CountedGroup group(comm);
      group.overlaps = true;
      const Var whole =
          gathers ? functional::all_gather(tape, in, group, 0) : functional::replicate(tape, in, group);
      const Var out = tape.record(tape.value(whole), {whole}, [&, whole](Tape& t, const Tensor& d) {
        if (comm.rank() == n - 1)
          while (deferred < (n - 1) * (gathers ? 2 : 1)) std::this_thread::yield();
        t.accumulate_grad(whole, d);
        ASSERT_TRUE(t.can_defer(whole));
        t.defer([&](Tape&) { ++deferred; });
      });
      tape.backward(nn::mse(tape, out, Tensor::empty(tape.value(out).shape())));
      comm.barrier().wait();
      if (comm.rank() == n - 1) --deferred;  // its own
      comm.barrier().wait();
    }
  });
  EXPECT_EQ(deferred, 2 * (n - 1));
}

TEST_P(Functional, ReduceIsTheAdjointOfBroadcast) {
  for (int root = 0; root < GetParam(); ++root)
    expect_adjoint([root](Tape& t, Var x, Communicator& c) { return functional::broadcast(t, x, root, c); },
                   all(2));
}

/// Rank s sends (s + 2 d + 1) % 3 rows to rank d: the two directions differ.
TEST_P(Functional, AllToAllGoesTheSameWayBack) {
  const auto n = static_cast<std::size_t>(GetParam());
  std::vector<std::size_t> rows(n);
  for (std::size_t s = 0; s < n; ++s)
    for (std::size_t d = 0; d < n; ++d) rows[s] += (s + 2 * d + 1) % 3;
  const Operator op = [](Tape& t, Var x, Communicator& c) {
    std::vector<std::size_t> send, receive;
    for (int other = 0; other < c.size(); ++other) {
      send.push_back(static_cast<std::size_t>(c.rank() + 2 * other + 1) % 3);
      receive.push_back(static_cast<std::size_t>(other + 2 * c.rank() + 1) % 3);
    }
    return functional::all_to_all(t, x, send, receive, c);
  };
  expect_adjoint(op, rows);
}

TEST(FunctionalErrors, AreNamed) {
  auto c = Communicator::connect(0, 1, memory_store());
  Tape t;
  const Var x = t.variable(Tensor::zeros({4, 2})), scalar = t.variable(Tensor::zeros({}));
  EXPECT_EQ(test::error_of([&] { functional::all_reduce(t, x, c, ReduceOp::max); }).code(),
            Errc::unsupported);
  EXPECT_EQ(test::error_of([&] { functional::all_gather(t, scalar, c); }).code(), Errc::invalid_argument);
  EXPECT_STREQ(test::error_of([&] { functional::all_to_all(t, x, {3}, {3}, c); }).what(),
               "functional::all_to_all: 3 rows are sent, but the input has 4");
  EXPECT_EQ(test::error_of([&] {
              functional::all_to_all(t, x, {4, 0}, {4}, c);
            }).code(),
            Errc::invalid_argument);
}

}  // namespace
}  // namespace rz
