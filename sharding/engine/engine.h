#pragma once
/// Training and inference of a model as a DeepSpeed configuration describes it.
///
///     rz::run_entrypoint([](rz::World& world) {
///       Net net;  // any module (autograd_lite/nn/module.h)
///       rz::Engine engine = rz::initialize(world, net, {.config = "ds.json"});
///       rz::Loader train = engine.loader(dataset);
///       for (rz::Batch& b : train) {
///         rz::Tape& t = engine.tape();
///         engine.backward(rz::nn::cross_entropy(t, net(t, b["x"]), b["y"]));
///         engine.step();  // updates after the last micro-batch of an update
///       }
///     });
///
/// The configuration decides on batch sizes, accumulation, optimizer, learning rates, precision, loss
/// scaling, clipping, and what is sharded (docs/configuration.md). A model without values is initialised from
/// the seed; one with values starts from those of rank 0.
///
/// Losses: an nn::Loss is a sum of terms, and knows their number; any other scalar has none
/// (docs/guide/own_loss.md). A micro-batch has one weight on each rank: the number of terms of the first
/// nn::Loss that is propagated in it, or 1 if all of its losses are scalars. Each of its losses enters as its
/// own mean times that weight, and an update divides by the sum of the weights of all micro-batches and
/// ranks. So one loss is the mean over the terms of all of them; backward(a) and backward(b) before one
/// step() are backward(a + b); a scalar beside another loss has the same factor in every update.
///
/// Several engines may exist in a process, each with a communicator of its own. Every rank makes the same
/// calls in the same order. One thread per rank.
///
/// Errors: after one on any rank, wherever it comes from, every rank calls cancel_update() and goes on with
/// the next update: the others get Errc::cancelled, with the rank that failed as culprit(), in the call in
/// which they wait. A lost rank (Errc::peer_lost) ends training.
///
/// The last parameter of functions that communicate is the line that calls them (comm/core/call_site.h);
/// leave it out.
///
/// This header includes what most training programs use: layers, datasets, World and spawn().

#include <chrono>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "../../autograd_lite/losses.h"
#include "../../autograd_lite/nn/containers.h"
#include "../../autograd_lite/nn/image_layers.h"
#include "../../autograd_lite/nn/init.h"
#include "../../autograd_lite/nn/layers.h"
#include "../../autograd_lite/nn/module.h"
#include "../../autograd_lite/ops.h"
#include "../../autograd_lite/tape.h"
#include "../../comm/core/call_site.h"
#include "../config/ds_config.h"
#include "../data/dataset.h"
#include "../data/iterable_dataset.h"
#include "../data/loader.h"
#include "../huggingface/pretrained_weights.h"
#include "../model/memory_report.h"
#include "../parallel/world.h"
#include "../strategy/no_sync.h"
#include "checkpoints/checkpoint_options.h"
#include "checkpoints/training_checkpoints.h"
#include "engine_options.h"
#include "parse_arguments.h"
#include "reports/step_report.h"

namespace rz {

class Strategy;

class Engine {
 public:
  Engine(const Engine&) = delete;
  /// Prints a line, on rank 0 and unless the engine is destroyed because of an exception or of a stop on
  /// request, if the last micro-batches have filled no update: they are dropped.
  ~Engine();

  // ---- training
  /// Records the forward passes of this rank. Valid as long as the engine.
  Tape& tape();
  /// Propagates a loss, an nn::Loss or any scalar of the tape, and discards what the tape has recorded:
  /// handles become invalid. In the last micro-batch of an update the gradients are reduced over the ranks.
  /// Several losses may be propagated before one step(); their gradients add up. Errc::invalid_argument
  /// without an optimizer, for a tensor that is no scalar, and for a loss with terms after a scalar of the
  /// same micro-batch, which has entered with weight 1: propagate that with terms first, or their sum.
  /// Errc::unsynchronised after a backward() that failed, until cancel_update().
  void backward(const nn::Loss&, CallSite = CallSite::current());
  /// Call after the backward() of each micro-batch. In the last one of an update it updates the parameters
  /// and returns true. Errc::unsynchronised inside NoSync, and after a backward() that failed. Errc::mismatch
  /// on every rank, and the update is dropped, if learning rates or other options of the optimizer differ
  /// over the ranks. Errc::diverged on every rank if a loss is not finite, if the gradients are not and the
  /// configuration does not skip such updates, or if ringzero.max_skipped_updates were skipped in a row: the
  /// parameters are as before the update, and the culprit is the rank whose loss is not finite, if it is one.
  /// An update for which no rank has counted a term is skipped.
  bool step(CallSite = CallSite::current());
  /// One update: takes each micro-batch from `batches.next()` right before forward(tape, batch), which
  /// returns its loss, an nn::Loss or any scalar as a Var, and does what backward() and step() do. On a
  /// device, once updates are identical, they run as a CUDA graph: `forward` is then not called, so it must
  /// do nothing but record, and batches must be in the same memory each time, as those of loader() are. All
  /// micro-batches are then taken before the first forward: Errc::invalid_argument if two are one object, or
  /// if a batch of a Loader has other shapes than those in the graph. If a signal or the end of the
  /// allocation stops the run between two micro-batches, the update is dropped as if it had not begun:
  /// should_stop() then is true. That needs a loop that calls should_stop(), and no graph.
  template <class Batches, class Forward>
  const StepReport& train_batch(Batches& batches, const Forward& forward, CallSite = CallSite::current());
  /// True in the last micro-batch of an update.
  bool is_gradient_accumulation_boundary();
  /// Decides in place of the count of micro-batches; nullopt: the count decides again.
  void set_gradient_accumulation_boundary(std::optional<bool>);
  /// Drops the update in progress on every rank, wherever each of them is: gradients, losses, the count of
  /// micro-batches, a forced boundary. The next one has the dropout of the one that was dropped, and loaders
  /// of loader() continue behind the last batch that any rank has taken, or failed to read. World::renew() of
  /// world(), whose errors it has, and Strategy::drop_update(), which ends training after an error in the
  /// midst of step(). Collective.
  void cancel_update(CallSite = CallSite::current());
  /// While one lives, no gradients are reduced, and step() and train_batch() are errors.
  using NoSync = rz::NoSync;
  /// Ranks with different numbers of batches.
  class Join;

  // ---- data
  /// Batches of this rank's share of a dataset, of the micro-batch size of the configuration. Every rank has
  /// the same number of them. Batches of one update are valid at a time. Errc::config if the configuration
  /// has no batch size and the options have none.
  Loader loader(std::shared_ptr<const Dataset>, const EngineLoaderOptions& = {});
  /// Batches of this rank's samples of a stream; EngineLoaderOptions::buffer_size in place of `shuffle`.
  Loader loader(std::shared_ptr<const IterableDataset>, const EngineLoaderOptions& = {});
  template <class D>
  requires std::derived_from<D, Dataset> || std::derived_from<D, IterableDataset> Loader
  loader(D dataset, const EngineLoaderOptions& o = {}) {
    using Base = std::conditional_t<std::derived_from<D, Dataset>, Dataset, IterableDataset>;
    return loader(std::shared_ptr<const Base>(std::make_shared<D>(std::move(dataset))), o);
  }
  /// The rows of all ranks for a batch, without its padding, on the host, in the order of ranks: each sample
  /// of an epoch once, if the loader does not drop any. Rows have one shape on all ranks: ragged fields are
  /// padded to Collation::Padding::max_length. Collective. Errors are thrown on every rank, and name one:
  /// Errc::mismatch if shapes differ, Errc::invalid_argument if the batch has another number of rows.
  Tensor gather_for_metrics(const Batch&, const Tensor& rows, CallSite = CallSite::current());

  // ---- evaluation
  /// Returns body(tape) with the model in evaluation mode and nothing recorded, then discards the tape. Not
  /// between a forward pass and its backward(). In stage 3 every rank calls it, since values are gathered.
  template <class F>
  auto evaluate(const F& body);

  // ---- checkpoints (docs/guide/checkpoints.md)
  /// Saves all that a run needs to go on: parameters in f32, optimizer states, schedule, loss scale, the
  /// seeds of dropout, the positions of the loaders, and values of the caller's. Every rank writes its own
  /// part to DIR/TAG, a folder that all ranks share. The checkpoint appears complete, or not at all, whenever
  /// a process or the machine ends. Between two micro-batches it has the state before the update in progress,
  /// which begins anew when the run is resumed. Collective. Errc::mismatch shows the tags of all ranks if
  /// they differ; nothing is then written. Errc::io names what cannot be written. Errc::diverged names a
  /// parameter or a state of the optimizer that is not finite: nothing is saved, and what was saved before
  /// stays. Errors of an asynchronous save are thrown by a later step(), on every rank.
  void save_checkpoint(const std::string& dir, const SaveCheckpointOptions& = {},
                       CallSite = CallSite::current());
  /// Restores it in any strategy, precision and number of ranks. With the same number of ranks and
  /// micro-batches the run goes on with the same bits. nullopt if DIR has no checkpoint. Collective. What
  /// does not fit is Errc::config or Errc::io in one line, and nothing is loaded; neither is a checkpoint of
  /// DeepSpeed, whose weights load_model() reads.
  std::optional<LoadedCheckpoint> load_checkpoint(const std::string& dir, const LoadCheckpointOptions& = {},
                                                  CallSite = CallSite::current());
  /// Waits until an asynchronous save is complete. Collective.
  void wait_for_checkpoint(CallSite = CallSite::current());
  /// Saves, evaluates and resumes by the section "ringzero.checkpoint".
  TrainingCheckpoints& checkpoints();
  /// Call after each update: saves if that section, a signal or the end of an allocation requires it, and
  /// returns whether the run is to stop; TrainingCheckpoints::should_stop(), or TrainingArguments::max_steps
  /// were made. Collective.
  bool should_stop(CallSite = CallSite::current());
  /// For loaders that loader() has not made, and other sources of batches (StatefulLoader): attached ones
  /// have their positions saved and restored.
  const std::shared_ptr<LoaderPositions>& loader_positions() const;

  // ---- files
  /// Writes the parameters to a safetensors file, in f32, and the persistent buffers of rank 0; see
  /// save_weights(). Collective.
  void save_model(const std::string& path, CallSite = CallSite::current());
  /// Reads them again, on any number of ranks and in any stage, or other weights of open_tensors(): a
  /// state dict of PyTorch, a folder of Hugging Face, a checkpoint of DeepSpeed or of an engine, of which it
  /// reads parameters and buffers alone. Errc::config lists what does not fit. Returns the names that are
  /// missing and unexpected, and prints them to EngineOptions::log. Not collective.
  PretrainedWeights load_model(const std::string& path, const LoadOptions& = {});
  /// Reads a part of the model, such as its backbone; the other parameters keep their values.
  PretrainedWeights load_model(Module& part, const std::string& path, const LoadOptions& = {});
  /// Writes the adapter of LoRA to a folder, as PEFT's save_pretrained(); save_model() writes the model with
  /// the adapter merged. sharding/huggingface/adapter.h has the errors. Collective.
  void save_adapter(const std::string& folder, CallSite = CallSite::current());
  /// Reads an adapter of PEFT or of save_adapter(), in any stage, and nothing else. Not collective.
  PretrainedWeights load_adapter(const std::string& folder, const LoadOptions& = {});

  // ---- reports
  /// The sum and the number of terms of a loss on this rank; its mean is value(). A scalar, which the tape
  /// holds, is one term: call before backward(). On a device this waits for the stream.
  Mean item(const nn::Loss&) const;
  /// f64 [2], {sum, number of terms}, as of nn::accuracy(). Errc::invalid_argument for other tensors.
  Mean item(const Tensor& sum_count) const;
  /// The mean over the terms of the losses of all ranks, e.g. item() of each batch of an evaluation. Their
  /// sums are exact, so it does not depend on which rank has which batch. NaN without terms. Collective.
  double mean(std::span<const Mean> losses, CallSite = CallSite::current());
  /// What the last update did.
  const StepReport& report();
  /// Mean loss of the last update over the terms of all ranks, where a scalar loss is one term; NaN if there
  /// are no terms. Collective.
  double loss(CallSite = CallSite::current());
  /// Writes a value of the program's own to csv_monitor and tensorboard, if the configuration enables them,
  /// after the samples so far. Tags have parts, "Eval/accuracy"; those of the engine are Train/Samples/… and,
  /// for what TrainingCheckpoints::record() receives, Eval/Samples/…. Rank 0 writes; on other ranks it does
  /// nothing. Errc::io.
  void add_scalar(const std::string& tag, double value);
  /// The lines of wall_clock_breakdown and memory_breakdown that are due after the last update, and the
  /// report of flops_profiler on it, on rank 0; else empty. EngineOptions::log has them too.
  std::string breakdown();
  /// The table of comms_logger: for each collective and size of the updates so far its number, latencies on
  /// this rank and bandwidths; empty unless the configuration enables it. The end of the engine prints it to
  /// EngineOptions::log.
  std::string log_summary() const;
  /// Updates so far, skipped ones included.
  std::int64_t global_steps();

  /// Ends every operation of this engine, and of World::communicator(), on every rank, as
  /// Communicator::abort().
  void abort(const std::string& reason) noexcept;

  /// Memory that this rank holds now; sharding/engine/training_plan.h predicts it.
  MemoryUse memory();

  // ---- parts
  const DsConfig& config() const;
  World& world() const;
  /// The ranks by what they share: mesh().data() has those with other data, and this rank's number among
  /// them. For calls of the engine; those of a program of one's own need communicators of their own.
  const Mesh& mesh() const;
  const Stream& stream() const;
  /// sharding/strategy/strategy.h
  Strategy& strategy();
  /// Its rates may be set by hand between updates, unless there is a schedule. Errc::invalid_argument if the
  /// engine has no optimizer.
  Optimizer& optimizer();
  /// Counts an epoch, for schedules by epoch.
  void end_epoch();
  /// Gives ReduceLROnPlateau a metric, e.g. mean() of an evaluation; torch's scheduler.step(metrics). It is
  /// the mean of the values of all ranks, which are equal after mean(). Call it between two updates: the
  /// rates change for the next one. Collective. Errc::invalid_argument for another schedule.
  void lr_scheduler_step(double metric, CallSite = CallSite::current());

 private:
  friend Engine initialize(World&, Module&, EngineOptions, CallSite);
  Engine(World&, Module&, DsConfig, EngineOptions);

  /// Whether train_batch() takes all micro-batches of an update before the first forward.
  bool takes_all_batches();
  /// Errc::invalid_argument if two are one object.
  static void require_distinct(std::vector<const void*> batches);
  /// Errc::invalid_argument if the updates run as a graph and a batch has other shapes than those in it.
  void require_shapes_of_graph(std::span<const Batch* const>);
  /// One update; nothing if the run is stopped between two micro-batches and `stoppable`.
  void run_update(const std::function<nn::Loss(std::size_t)>& forward,
                  std::chrono::steady_clock::time_point start, bool stoppable);
  /// Returns the model.
  Module& begin_evaluation();

  struct State;
  std::unique_ptr<State> state_;
};

/// Creates an engine for the parameters of the module, which must outlive it, as must the world. Prints the
/// resolved configuration, and resumes a run by "ringzero.checkpoint". Collective. Errc::config if the
/// configuration is wrong, Errc::mismatch if it differs over the ranks; errors of the
/// mesh are those of resolved() and parallelize(), Errc::config.
Engine initialize(World&, Module&, EngineOptions = {}, CallSite = CallSite::current());

/// Finds out which ranks still have data; a rank without takes part in the updates of the others:
///
///     rz::Engine::Join join(engine);
///     for (auto b = batches.begin(); join.next(b != batches.end());) {
///       if (join.active()) {
///         engine.backward(loss_of(*b++));
///       } else {
///         join.backward_without_data();
///       }
///       engine.step();
///     }
///
/// As PyTorch's join(), with the options of the section "ringzero.join". Every rank has at least one batch
/// before the first update. One thread per rank. In stage 3 passes gather values on all ranks: run a rank
/// without data on a batch of which all targets are ignored (-100) instead.
class Engine::Join {
 public:
  /// The engine must outlive this object. Errc::unsupported in stage 3 and with tp, and
  /// Errc::invalid_argument without an optimizer, unless the configuration disables join.
  explicit Join(Engine&);
  ~Join();
  Join(const Join&) = delete;

  /// Call before each micro-batch. Returns whether any rank has data; whether this one has if the
  /// configuration disables join. Errc::mismatch on all ranks if one has no batch before the first update,
  /// or, with throw_on_early_termination, later. Collective.
  bool next(bool has_data, CallSite = CallSite::current());
  /// Whether this rank has data, as passed to next().
  bool active() const;
  /// In place of Engine::backward() where active() is false.
  void backward_without_data();
  /// What multiplies a loss without terms, before backward().
  float loss_factor() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// ---- templates

template <class Batches, class Forward>
const StepReport& Engine::train_batch(Batches& batches, const Forward& forward, CallSite site) {
  const OuterSite outer(site);
  using Batch = std::remove_reference_t<decltype(batches.next())>;
  const auto start = std::chrono::steady_clock::now();
  std::vector<Batch*> all;  // a graph needs all of them before it is captured
  if (takes_all_batches()) {
    for (std::int64_t m = 0; m < config().sizes.accumulation; ++m) all.push_back(&batches.next());
    require_distinct({all.begin(), all.end()});
    if constexpr (std::is_same_v<Batch, rz::Batch>) require_shapes_of_graph(all);
  }
  const auto loss_of = [&](std::size_t m) -> nn::Loss {
    Batch& batch = all.empty() ? batches.next() : *all[m];
    static_assert(
        std::is_convertible_v<decltype(forward(tape(), batch)), nn::Loss>,
        "train_batch(): forward(tape, batch) returns the loss of the micro-batch: an nn::Loss, or a "
        "scalar as an rz::Var, e.g. nn::mean(tape, values); of several losses, their sum");
    return forward(tape(), batch);
  };
  run_update(loss_of, start, all.empty());
  return report();
}

template <class F>
auto Engine::evaluate(const F& body) {
  const EvalMode mode(begin_evaluation());
  const Tape::NoGrad no_grad(tape());
  struct Reset {
    Tape& tape;
    ~Reset() { tape.reset(); }
  } reset{tape()};
  return body(tape());
}

}  // namespace rz
