#pragma once
/// The laboratory of tests that train: a Model is trained as a Run says, which leaves a Trace.
///
///     EXPECT_EQ(lab::train({.strategy = StrategyKind::zero3, .ranks = 3}), lab::train({.ranks = 3}));

#include <ostream>

#include "autograd_lite/models/gpt2.h"
#include "sharding/engine/engine.h"
#include "sharding/lm/update_report.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/world.h"
#include "tests/support/gpt2_tiny.h"

namespace rz::lab {

// ---- what is trained: rows of one table, each with samples that are functions of their numbers

/// A module with its loss and its samples, and how it is trained.
struct Model {
  std::function<std::unique_ptr<Module>()> make;
  std::function<Loader(Engine&)> loader;
  std::string config;  ///< JSON, which Run::keys change
  /// Of a batch; a LanguageModel has its own.
  std::function<nn::Loss(Module&, Tape&, const Batch&)> loss = {};
  /// Changes the options of an engine, before Run::options.
  std::function<void(EngineOptions&, Module&)> options = {};
};

struct MlpSizes {
  std::size_t in = 6, hidden = 16, classes = 5;
  double dropout = 0.2;
  std::uint64_t samples = 96;
  std::uint64_t ignored = 5;  ///< of so many targets the last one is ignored; 0: none
};
struct Mlp : Module {
  explicit Mlp(const MlpSizes& s = {})
      : fc1(*this, "fc1", s.in, s.hidden),
        fc2(*this, "fc2", s.hidden, s.classes),
        drop(*this, "drop", s.dropout) {}
  Var operator()(Tape& t, const Tensor& x) { return fc2(t, drop(t, nn::gelu(t, fc1(t, x)))); }
  nn::Loss operator()(Tape& t, const Batch& b) { return nn::cross_entropy(t, (*this)(t, b["x"]), b["y"]); }
  nn::Linear fc1, fc2;
  nn::Dropout drop;
};
/// The first ones; y, a class or -100, follows from x.
std::shared_ptr<const Dataset> samples(const MlpSizes& = {});
/// Samples from number · rows on, of endlessly many.
Batch batch(std::uint64_t number, std::size_t rows = 4, const MlpSizes& = {});
/// In random order, three micro-batches of 4 on each rank an update; the rate rises for 4 updates, then
/// falls.
Model mlp(const MlpSizes& = {});

struct LanguageData {
  std::size_t seq_len = 0;  ///< samples of seq_len + 1 tokens, in order
  std::string weights{};    ///< a file or folder of initial values; empty: by the seed
  std::string tokens = test::tiny_tokens();
};
/// With zero3 each scope is gathered anew wherever it is used, unless the configuration says otherwise.
Model language(const LanguageData&, std::function<std::unique_ptr<LanguageModel>()> make,
               const std::string& config);

/// A GPT-2 with the initial values of tests/data/gpt2_tiny, or those of a file. The default is so small that
/// hundreds of updates are fast, in many buckets. An update is one micro-batch of each rank.
struct Gpt {
  Gpt2Config config{.n_layer = 4, .n_head = 2, .n_embd = 16, .n_positions = 8, .vocab_size = 256};
  std::int64_t batch = 4;  ///< samples of an update
  double clipping = 0.5;
  std::size_t bucket =
      1024;  ///< reduce_bucket_size, of which the first bucket has a quarter; 0: the defaults
  std::string weights{}, tokens = test::tiny_tokens();
};
Model gpt(const Gpt& = {});
inline Gpt of_case(const test::TinyCase& c) { return {c.config, c.batch, 0, 0}; }

// ---- how, and what it leaves

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
inline std::string config(int stage, const std::string& keys = "") {
  return config({.strategy = static_cast<StrategyKind>(stage), .keys = keys});
}
/// With a seed, without a log.
EngineOptions options(std::string config);

/// A rank's net with its engine and a loader, for loops of a test's own.
struct Trainer {
  Trainer(World& world, EngineOptions o) : engine(initialize(world, net, std::move(o))) {}
  bool pass() { return engine.backward(net(engine.tape(), loader.next())), engine.step(); }
  const StepReport& update() { return engine.train_batch(loader, std::ref(net)); }
  Mlp net;
  Engine engine;
  Loader loader = engine.loader(samples());
};

/// Of all parameters, whole; on the stream of the strategy. Collective.
std::vector<float> values_of(Strategy&, Module&, const Stream& = {});
inline std::vector<float> values_of(Engine& e, Module& m) { return values_of(e.strategy(), m, e.stream()); }

}  // namespace rz::lab
