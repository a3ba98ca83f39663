#pragma once
/// Options of an engine.

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../config/ds_config.h"
#include "../config/lr_schedule.h"
#include "../config/training_arguments.h"
#include "../data/dataset.h"
#include "../model/options.h"
#include "../optim/optimizer.h"
#include "../parallel/mesh.h"

namespace rz {

/// Equal on all ranks, except `log`.
struct EngineOptions {
  /// A DeepSpeed configuration: the path of a file, or JSON text if it begins with '{'. Empty: that of
  /// the variable RZ_CONFIG, in the same form, which rzrun --config_file sets; without it "{}". Without an
  /// optimizer the engine runs inference: all parameters are frozen.
  std::string config;
  std::optional<DsConfig> ds_config;  ///< instead of `config`: one that was read already
  TrainingArguments arguments;        ///< what the configuration leaves out or calls "auto"
  std::string name;                   ///< of the engine, e.g. "student", before its messages; may be empty

  std::unique_ptr<Optimizer> optimizer;   ///< instead of the configuration's section
  std::optional<LrSchedule> lr_schedule;  ///< instead of the configuration's section
  ScheduleUnit schedule_unit = ScheduleUnit::update;
  Decay decay = Decay::all;              ///< groups of the configuration's optimizer
  std::optional<StrategyKind> strategy;  ///< instead of zero_optimization.stage
  MeshSizes mesh;                        ///< default: that of the configuration; else it must agree with it
  /// Divides the layers of the module between the ranks of Mesh::tp(), and returns a line on that, as
  /// parallelize_fn of Fabric's ModelParallelStrategy. Called on every rank, also without tp, before
  /// parameters have memory. Empty: with tp, a LanguageModel has the plan of its family.
  std::function<std::string(Module&, const Mesh&)> parallelize;
  /// Changes the options that follow from the configuration; may be empty.
  std::function<void(StrategyOptions&)> configure_strategy;

  /// Writes the initial values of a model without values, as ParameterValues::fill() has it, e.g. those
  /// of PretrainedWeights; empty: init_slice() with the seed.
  FillParameter initial_values;
  /// Of initial values, dropout, and the order of samples.
  std::uint64_t seed = 0;
  /// Number of updates of the run at these batch sizes, for schedules with "auto"; empty: unknown.
  std::function<std::int64_t(const BatchSizes&)> updates;
  /// For "auto" sizes of buckets. Default: the largest smaller extent of the matrices of the model, which is
  /// the width of a transformer.
  std::optional<std::int64_t> hidden_size;
  /// Terms of an update's loss over all ranks, e.g. targets: the constant by which gradients are divided
  /// until the update knows their number. Default: those of the first micro-batches, times accumulation.
  std::optional<double> expected_terms;

  int threads = 0;          ///< per rank on the host; 0: World::threads()
  bool graph = true;        ///< train_batch() on a device: capture updates in a CUDA graph
  std::FILE* log = stdout;  ///< of rank 0: the resolved configuration, warnings, lines of progress; or null
};

/// Options of Engine::loader().
struct EngineLoaderOptions {
  std::string name;  ///< by which checkpoints know it; default: "loader 0", "loader 1", … as they are made
  /// false: in order, as for an evaluation; a loop that was left by break then begins the epoch again
  /// (LoaderOptions::restart).
  bool shuffle = true;
  std::optional<bool> drop_last;          ///< default: dataloader_drop_last
  std::optional<std::size_t> batch_size;  ///< of a rank; default: the micro-batch size
  std::optional<std::uint64_t> seed;      ///< of the order; default: that of the engine
  int num_workers = 1;                    ///< threads that read ahead; 0: none
  int prefetch_factor = 2;                ///< batches that each of them reads ahead
  /// A field of i32 that has `ignore_index` in rows that repeat samples (LoaderOptions::targets).
  std::string targets{};
  std::int32_t ignore_index = -100;
  Collation collation{};  ///< of ragged fields
  /// Of an IterableDataset: samples of a shard that are shuffled among each other
  /// (LoaderOptions::buffer_size).
  std::size_t buffer_size = 0;
};

// ---- what a configuration sets

/// The kind of zero_optimization.stage.
StrategyKind strategy_kind(const DsConfig&);
/// All keys that StrategyOptions has, for a kind, as `configure` has changed them, except for what
/// ringzero.deterministic needs. Errc::config names a key that the kind does not have.
StrategyOptions strategy_options(const DsConfig&, StrategyKind,
                                 const std::function<void(StrategyOptions&)>& configure = {});

}  // namespace rz
