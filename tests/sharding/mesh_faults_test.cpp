// Runs: long

/// A rank of a mesh dies: every other rank names it, by its number among all ranks, in bounded time, whether
/// it shares a group with it or not.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/nn/init.h"
#include "comm/core/error.h"
#include "sharding/optim/optimizers.h"
#include "sharding/parallel/parallelize.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"
#include "tests/support/toy_training.h"

namespace rz {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

enum class Phase { forward, backward, update };
const char* name(Phase p) {
  return p == Phase::forward ? "forward" : p == Phase::backward ? "backward" : "update";
}

struct Death {
  StrategyKind kind;
  MeshSizes mesh;
  int rank;
  Phase phase;
  std::string transport = "auto";
};

/// Trains until the rank dies in its third update.
void train(const Death& death, Communicator& comm, const std::function<void()>& die) {
  const Mesh mesh(comm, death.mesh);
  test::Replica replica(death.kind, mesh);
  for (int update = 0; update < 100'000; ++update) {
    const bool dies = comm.rank() == death.rank && update == 2;
    if (dies && death.phase == Phase::backward) replica.model.in_backward = die;
    replica.strategy->zero_grad();
    const Var loss = replica.model.loss(replica.tape, [&](std::size_t p, std::size_t) {
      if (dies && death.phase == Phase::forward && p == 6) die();
      return 1.0f;
    });
    replica.strategy->begin_backward();
    replica.tape.backward(loss);
    replica.tape.reset();
    replica.strategy->finish_gradients();
    if (dies && death.phase == Phase::update) die();
    replica.strategy->step(*replica.optimizer);
  }
}

/// The same with layers that the ranks of a tp group share: in each phase the others wait for its part of
/// them.
void train_shared(const Death& death, Communicator& comm, const std::function<void()>& die) {
  const Mesh mesh(comm, death.mesh);
  Gpt2Config config;
  config.n_layer = 2, config.n_head = 2, config.n_embd = 16, config.n_positions = 8, config.vocab_size = 11;
  Gpt2 model(config);
  parallelize(model, model.parallel_plan(), mesh);
  const auto strategy = make_strategy(death.kind, model, mesh);
  strategy->values().fill([](const Parameter& p, Range elements, float* out) {
    init_slice(p, {out, elements.count()}, elements.begin, 1);
  });
  const auto optimizer = make_sgd({.learning_rate = 0.01});
  Tape tape;
  strategy->attach(tape);
  const Tensor tokens = Tensor::zeros({2, 8}, DType::i32);
  for (int update = 0; update < 100'000; ++update) {
    const auto reach = [&](Phase phase) {
      if (comm.rank() == death.rank && update == 2 && death.phase == phase) die();
    };
    strategy->zero_grad();
    reach(Phase::forward);
    const nn::Loss loss = model.forward(tape, tokens, tokens).loss;
    reach(Phase::backward);
    strategy->backward(tape, loss);
    tape.reset();
    strategy->finish_gradients();
    reach(Phase::update);
    strategy->clip_and_step(*optimizer, {.max_norm = 1});
  }
}

using Training = std::function<void(const Death&, Communicator&, const std::function<void()>& die)>;

void expect_named(const Death& death, const Training& train_until = train) {
  SCOPED_TRACE(concat(rz::name(death.kind), " on ", describe(death.mesh), ", rank ", death.rank, " in ",
                      name(death.phase), " over ", death.transport));
  const int ranks = death.mesh.ranks();
  const auto endings = test::run_processes(ranks, [&](int rank, std::shared_ptr<Store> store) {
    CommOptions options;
    options.transport = death.transport;
    Communicator comm = Communicator::connect(rank, ranks, store, options);
    const auto die = [&] {
      store->set("died", std::to_string(Clock::now().time_since_epoch().count()));
      raise(SIGKILL);
    };
    const Error error = test::error_of([&] { train_until(death, comm, die); });
    const Clock::time_point now = Clock::now();
    const auto died =
        Clock::time_point(Clock::duration(std::stoll(store->get("died", Deadline::after(60s)))));
    EXPECT_EQ(error.code(), Errc::peer_lost) << error.what();
    EXPECT_EQ(error.culprit(), death.rank) << error.what();
    EXPECT_NE(std::string(error.what()).find(concat("rank ", death.rank)), std::string::npos) << error.what();
    EXPECT_LT(std::chrono::duration<double>(now - died).count(), 5) << error.what();
    store->set("saw/" + std::to_string(rank), "");
    for (int r = 0; r < ranks; ++r)
      if (r != death.rank) store->get("saw/" + std::to_string(r), Deadline::after(60s));
  });
  for (int r = 0; r < ranks; ++r)
    if (r == death.rank)
      EXPECT_EQ(endings[static_cast<std::size_t>(r)].signal, SIGKILL);
    else
      EXPECT_EQ(endings[static_cast<std::size_t>(r)].exit_code, 0)
          << "rank " << r << ": " << endings[static_cast<std::size_t>(r)].error;
}

/// Of the others, one shares the shards with it, one the replica, and one nothing but the mesh.
TEST(MeshFaults, AKilledRankIsNamedOnAllRanks) {
  for (const Phase phase : {Phase::forward, Phase::backward, Phase::update})
    for (const int rank : {0, 3}) expect_named({StrategyKind::zero3, {2, 2}, rank, phase});
}

TEST(MeshFaults, OverSocketsToo) {
  for (const Phase phase : {Phase::forward, Phase::backward, Phase::update})
    expect_named({StrategyKind::zero3, {2, 2}, 3, phase, "tcp"});
  expect_named({StrategyKind::zero1, {2, 2}, 1, Phase::backward, "tcp"});
}

TEST(MeshFaults, InOtherStages) {
  for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2})
    expect_named({kind, {2, 2}, 2, Phase::backward});
}

TEST(MeshFaults, WhereRanksShareLayers) {
  for (const Phase phase : {Phase::forward, Phase::backward, Phase::update}) {
    expect_named({StrategyKind::zero3, {1, 2, 2}, 1, phase}, train_shared);
    expect_named({StrategyKind::ddp, {2, 1, 2}, 2, phase}, train_shared);
  }
}

/// The first rank that throws leaves its groups; the others must not name it.
TEST(MeshFaults, ARankThatLeavesAfterTheFailureIsNotNamed) {
  const auto endings = test::run_processes(4, [&](int rank, std::shared_ptr<Store> store) {
    Communicator comm = Communicator::connect(rank, 4, store, {});
    const Error error = test::error_of([&] {
      train({StrategyKind::zero3, {2, 2}, 3, Phase::backward}, comm, [] { raise(SIGKILL); });
    });
    EXPECT_EQ(error.culprit(), 3) << error.what();
  });
  for (int r = 0; r < 3; ++r)
    EXPECT_EQ(endings[static_cast<std::size_t>(r)].exit_code, 0)
        << endings[static_cast<std::size_t>(r)].error;
}

TEST(MeshFaults, AnAbortNamesTheRankOfTheMesh) {
  test::expect_processes(4, [&](int rank, std::shared_ptr<Store> store) {
    Communicator comm = Communicator::connect(rank, 4, store, {});
    const Error error = test::error_of([&] {
      train({StrategyKind::zero3, {2, 2}, 2, Phase::forward}, comm, [&] {
        comm.abort("no more data");
        fail(Errc::aborted, "no more data");
      });
    });
    EXPECT_EQ(error.code(), Errc::aborted);
    if (rank != 2) {
      EXPECT_EQ(error.culprit(), 2) << error.what();
    }
  });
}

/// All groups of a mesh wait in the end for a rank that is stopped: it is named, and not a rank that waits
/// for it in another group.
void expect_stopped_named(const Death& stop, const Training& train_until) {
  SCOPED_TRACE(concat(rz::name(stop.kind), " on ", describe(stop.mesh), ", rank ", stop.rank, " in ",
                      name(stop.phase), " over ", stop.transport));
  constexpr auto timeout = 1500ms;
  const int ranks = stop.mesh.ranks(), waker = stop.rank == 0 ? 1 : 0;
  test::expect_processes(ranks, [&](int rank, std::shared_ptr<Store> store) {
    CommOptions options;
    options.transport = stop.transport;
    options.timeout = timeout;
    Communicator comm = Communicator::connect(rank, ranks, store, options);
    store->set(concat("pid/", rank), std::to_string(getpid()));
    bool stopped = false;
    const Error error = test::error_of([&] {
      train_until(stop, comm, [&] {
        if (std::exchange(stopped, true)) return;
        store->set("stopped", std::to_string(Clock::now().time_since_epoch().count()));
        raise(SIGSTOP);
      });
    });
    const Clock::time_point now = Clock::now();
    EXPECT_EQ(error.code(), Errc::timeout) << error.what();
    EXPECT_EQ(error.culprit(), stop.rank) << error.what();
    if (rank == stop.rank) return;
    EXPECT_NE(std::string(error.what()).find(concat("rank ", stop.rank)), std::string::npos) << error.what();
    const auto at =
        Clock::time_point(Clock::duration(std::stoll(store->get("stopped", Deadline::after(60s)))));
    EXPECT_LT(now - at, timeout + 6s) << error.what();
    store->set(concat("saw/", rank), "");
    if (rank != waker) return;
    for (int r = 0; r < ranks; ++r)
      if (r != stop.rank) store->get(concat("saw/", r), Deadline::after(60s));
    kill(std::stoi(store->get(concat("pid/", stop.rank), Deadline::after(60s))), SIGCONT);
  });
}

TEST(MeshFaults, AStoppedRankIsNamedOnAllRanks) {
  expect_stopped_named({StrategyKind::zero3, {2, 2}, 3, Phase::backward}, train);
  expect_stopped_named({StrategyKind::zero3, {1, 2, 2}, 1, Phase::backward, "tcp"}, train_shared);
}

/// One rank of a group makes another call than the others: found by ranks of this group, thrown by all.
TEST(MeshFaults, OtherCallsInAGroupAreNamedByRanksOfTheMesh) {
  for (const auto& [transport, n] :
       {std::pair("auto", std::size_t{300'000}), std::pair("tcp", std::size_t{2})})
    lab::group(6, {.transport = transport}, [&, transport = transport, n = n](Communicator& comm) {
      const Mesh mesh(comm, {1, 2, 3});
      std::vector<float> x(n);
      const Error error = test::error_of([&] {
        for (int call = 0; call < 100'000; ++call) {
          if (comm.rank() == 4 && call == 3)
            mesh.tp()->barrier().wait();
          else if (comm.rank() >= 3)
            mesh.tp()->all_reduce({x.data(), n}).wait();
          else
            mesh.data().barrier().wait();
        }
      });
      EXPECT_EQ(error.code(), Errc::mismatch) << error.what();
      EXPECT_EQ(error.culprit(), 4) << error.what();
      EXPECT_TRUE(std::string(error.what())
                      .starts_with("rank 4: in the group of the ranks 3, 4, 5, numbered from 0: mismatched "
                                   "collectives: rank 1 called barrier"))
          << error.what();
    });
}

}  // namespace
}  // namespace rz
