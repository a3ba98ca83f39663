#pragma once
/// The laboratory of tests that train: a Model is trained as a Run says, which leaves a Trace.
///
///     EXPECT_EQ(lab::train({.strategy = StrategyKind::zero3, .ranks = 3}), lab::train({.ranks = 3}));

#include <ostream>
#include <vector>

#include "sharding/lm/update_report.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/models.h"
#include "tests/lab/world.h"

namespace rz::lab {

inline constexpr StrategyKind strategies[] = {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2,
                                              StrategyKind::zero3};

struct Run {
  Model model = mlp();
  StrategyKind strategy = StrategyKind::ddp;
  int ranks = 1;
  MeshSizes mesh = {};
  std::int64_t updates = 8;
  std::string keys = {};       ///< of the configuration: JSON without the outer braces
  bool whole_updates = false;  ///< by train_batch(), in place of backward() and step()
  /// Of the engine, whose ds_config is that of `keys`. On every rank, as the hooks.
  std::function<void(EngineOptions&)> options = {};
  OptionsOfRank comm = [](int) { return CommOptions(); };
  std::function<void(Engine&, Module&)> start = {}, each = {}, end = {};  ///< each: after an update
  /// Right before a micro-batch, counted from the start of training; unless whole_updates is set.
  std::function<void(Engine&, std::int64_t micro)> before = {};
};

/// What a run leaves on a rank.
struct Trace {
  std::vector<lm::UpdateReport> updates;
  std::vector<float> values;  ///< of all parameters, whole
};
/// The same bits, also of what is not finite; times and traffic may differ.
bool operator==(const Trace&, const Trace&);
/// A line an update, with all digits, and a hash of the values.
void PrintTo(const Trace&, std::ostream*);

/// The trace of rank 0, of threads as ranks; those of all ranks must be equal.
Trace train(const Run&);
Trace train(World&, const Run&);      ///< on a rank of a group that the caller has made
Trace train_in_every_strategy(Run);   ///< each leaves the same bits
lm::UpdateReport report_of(Engine&);  ///< of its last update

/// The configuration of a run; that of mlp().
std::string config(const Run&);
std::string config(int stage, const std::string& keys = "");
/// With a seed, without a log.
EngineOptions options(std::string config);

/// A rank's net with its engine and a loader, for loops of a test's own.
template <class Net = Mlp>
struct Trainer {
  Trainer(World& world, EngineOptions o) : engine(initialize(world, net, std::move(o))) {}
  bool pass() { return engine.backward(net(engine.tape(), loader.next())), engine.step(); }
  const StepReport& update() { return engine.train_batch(loader, std::ref(net)); }
  Net net;
  Engine engine;
  Loader loader = engine.loader(samples());
};

/// Of all parameters, whole. Collective.
std::vector<float> values_of(Strategy&, Module&, const Stream& = {});
std::vector<float> values_of(Engine&, Module&);

}  // namespace rz::lab
