#pragma once
/// The interface of the data-parallel strategies to a training loop: DDP and ZeRO-1, ZeRO-2 and ZeRO-3.
/// docs/guide/zero.md has what a loop may do beside this one: accumulation, parameters that are frozen or
/// unused, CUDA graphs. sharding/engine/engine.h has the weights of losses.
///
///     auto strategy = make_strategy(StrategyKind::zero3, model, comm);  // on every rank
///     strategy->attach(tape);
///     for (int update = 0; update < updates; ++update) {
///       strategy->zero_grad();
///       for (int m = 0; m < accumulation; ++m) {
///         const nn::Loss loss = model.loss(tape, batch(update, m));  // zero3 gathers scope by scope
///         strategy->backward(tape, loss, m + 1 == accumulation);     // the last pass reduces
///         tape.reset();
///       }
///       strategy->finish_gradients(stream);  // sums over the ranks
///       strategy->clip_and_step(*optimizer, {.max_norm = 1}, stream);  // new values on every rank
///       const double norm = strategy->outcome(*optimizer, stream).norm;
///     }
///
/// Determinism: if the communicator is deterministic, all strategies produce the same parameters, losses and
/// norms, bit for bit, for any bucket size, with overlap on or off, for any number of passes per update, and
/// wherever they synchronise. A mesh with several copies of the model has other bits than one copy, unless
/// the order is pairwise and a copy has a power of two of ranks.
///
/// Ranks are replicas. They compare values, optimizers, options and rates; Errc::mismatch names what differs
/// and, as culprit, the first rank that differs from the majority. Gradients are then dropped.
///
/// Errors: after an exception on this rank, reset the tape and call cancel_update(). The other ranks get
/// Errc::cancelled where they wait, and do the same. Training continues with zero_grad().
///
/// Thread safety: one thread per rank. Between begin_backward and the end of finish_gradients, and in zero3
/// during a forward pass, the communicator must not be used for anything else. Destroying a strategy with
/// reductions in flight aborts the communicator; with a prefetch in flight it waits up to 5 s, then aborts.

#include <memory>

#include "../../autograd_lite/nn/module.h"
#include "../../autograd_lite/ops.h"
#include "../../autograd_lite/tape.h"
#include "../model/memory_report.h"
#include "../model/options.h"
#include "../parallel/mesh.h"
#include "../parallel/traffic.h"
#include "logging_data.h"
#include "no_sync.h"
#include "parameter_values.h"
#include "update_settings.h"

namespace rz {

class Optimizer;
class OptimizerState;
struct ShardingPlan;

/// Trains the parameters of a module on the ranks of a mesh. A plan chooses its parts.
class Strategy {
 public:
  /// Checks that all ranks have the same model and options, and broadcasts the values of rank 0. Call
  /// make_strategy() for the plan of a kind; `kind` names any other plan in messages.
  Strategy(StrategyKind kind, const ShardingPlan&, Module&, Mesh, StrategyOptions);
  ~Strategy();
  Strategy(const Strategy&) = delete;

  /// The kind passed to make_strategy().
  StrategyKind kind() const;

  // ---- one update
  /// Loss scale, expected terms, and the policy of replayed graphs.
  UpdateSettings& settings();
  /// Work without a stream of its own follows the stream of this tape from now on. A tape may serve several
  /// strategies, each with a communicator of its own: hooks are found through the parameters.
  void attach(Tape&);
  /// Call before each Tape::backward() of a loss without a weight. `synchronise`: reduce the gradients of
  /// this pass, and those accumulated before it, over the ranks. Must be equal on all ranks.
  void begin_backward(bool synchronise = true);
  /// Runs a backward pass from a loss, an nn::Loss or any scalar of the tape, with its weight.
  /// `same_micro_batch`: the loss belongs to the micro-batch of the pass before. Errc::invalid_argument for a
  /// loss with terms after a scalar of the same micro-batch: propagate it first, or their sum. If the pass
  /// throws, only cancel_update() may follow.
  void backward(Tape&, const nn::Loss&, bool synchronise = true, bool same_micro_batch = false);
  /// Throws what backward() throws for a loss of a kind that may not follow those before it.
  void require_may_follow(bool has_terms, bool same_micro_batch);
  /// In place of begin_backward() and a pass, on a rank that has run out of data while others have not:
  /// contributes zeros, and breaks no rule of find_unused_parameters and static_graph. Its micro-batch has
  /// weight 1 if all losses of the update are scalars, whose mean is one over all ranks, and otherwise 0.
  /// sharding/strategy/join.h finds out when to call it.
  /// Errc::unsupported in zero3, where passes communicate: run the model on a batch without terms there; and
  /// with tp, where those of layers do.
  void backward_without_data(bool synchronise = true);
  /// Call after each backward pass that synchronises. Waits for all reductions; gradients are then means over
  /// the ranks. Errc::unsynchronised if the last pass did not synchronise. If a pass broke a rule of
  /// find_unused_parameters or static_graph (sharding/strategy/pass_rules.h), all ranks throw that, and
  /// gradients are dropped as by zero_grad().
  void finish_gradients(const Stream& = {});
  /// Drops the update in progress on every rank, wherever each of them is: Communicator::renew() of
  /// communicator(), and drop_update(). The first rank that calls it is the culprit of the Errc::cancelled
  /// that the others get. Reset the tape before. Collective.
  void cancel_update();
  /// The part of cancel_update() after the communicators of the mesh were renewed. Errc::mismatch on every
  /// rank if one has an error behind it in step() or clip_and_step(), which have changed values by then: load
  /// them again on all. Collective.
  void drop_update();
  /// Call before each launch of a graph that contains an update, after next_update() and its capture:
  /// exchanges what finish_gradients() cannot exchange in a graph, and throws what it throws if optimizers
  /// differ. One all_reduce of 8 bytes in host memory. Collective.
  void agree_on_replay(const Optimizer&);
  /// L2 norm of all gradients, as the update reads them, each parameter counted once. Exact except for the
  /// rounding of the squares, so all strategies return the same bits. Collective. Errc::unsynchronised as for
  /// step().
  double gradient_norm(const Stream& = {});
  /// Scales the gradients, in the next step(), by max_norm / (norm + 1e-6) if that is below 1, as
  /// torch.nn.utils.clip_grad_norm_ does. Returns the norm before clipping. Collective.
  double clip_gradients(double max_norm, const Stream& = {});
  /// Updates the parameters; afterwards every rank has the new ones. Collective. Errc::unsynchronised unless
  /// finish_gradients() was called after the last backward pass.
  void step(Optimizer&, const Stream& = {});
  using StepPolicy = UpdateSettings::Policy;
  /// clip_gradients() and step() in one call; on a device the host does not wait. Skips the update if losses
  /// were propagated by backward() and no rank has counted a term, and with skip_overflow also if a loss of
  /// backward() is not finite, which makes the norm NaN. Collective.
  void clip_and_step(Optimizer&, const StepPolicy&, const Stream& = {});
  /// Result of an update.
  struct Outcome {
    double norm = 0;  ///< before clipping
    bool skipped = false;
  };
  /// Result of the last clip_and_step(), or of the last replay of a graph that contains it. On a device it
  /// waits, as Communicator::synchronize() does. A skipped update is not counted in the optimizer. Call once
  /// per update.
  Outcome outcome(Optimizer&, const Stream& = {});
  /// On a device, call before an update or a replay of one. Counts the update in the optimizer and copies the
  /// constants of the update, which depend on its number, on learning rate, loss scale, expected terms and
  /// policy, to device memory. The optimizer must live until the update was made or dropped.
  void next_update(Optimizer&, const Stream& = {});
  /// Drops the gradients; does not write zeros. All ranks call it.
  void zero_grad();
  /// Whether a pass that is the last one of an update synchronises: no NoSync lives.
  bool synchronises() const;
  /// Whether the last pass synchronises and finish_gradients() has not ended it.
  bool reducing() const;
  /// Whether the gradients are means: after finish_gradients(), until zero_grad() or another pass.
  bool reduced() const;
  /// Whether every rank has dropped the update for what finish_gradients() threw, and no other one has begun.
  bool dropped() const;

  // ---- import and export
  /// All ranks among which it trains.
  Communicator& communicator() const;
  const Mesh& mesh() const;
  ParameterValues& values();
  const ParameterValues& values() const;
  /// sharding/strategy/optimizer_state.h
  OptimizerState& optimizer_state();
  const OptimizerState& optimizer_state() const;

  /// Whether updates can be captured in a graph: the operations of the communicator and the hook can be, and
  /// offloaded memory, if there is any, is pinned, and no ranks are threads that share a GPU.
  bool capturable() const { return reason_against_capture().empty(); }
  /// Why they cannot be, for messages; empty: they can.
  std::string reason_against_capture() const;

  // ---- statistics
  /// Memory held on this rank now.
  MemoryReport memory() const;
  /// Collectives of updates since the strategy was created, except for replays of a graph. Those of layers
  /// (MeshTraffic::tp) are counted in all passes.
  const MeshTraffic& traffic() const;
  /// Reports each collective that traffic() counts, except for control messages and replays of a graph, and
  /// each wait that exposed_seconds() counts, from now on. The time of `started` counts as such a wait.
  void observe_communication(CommunicationObserver);
  /// Seconds in which the calling thread waited for communication during the last finished step: gathers,
  /// reductions, what layers exchange, and the exchanges of step().
  double exposed_seconds() const;
  /// All of this, with buckets, options and times of passes.
  LoggingData logging_data() const;

  using NoSync = rz::NoSync;

 private:
  friend class rz::NoSync;
  struct State;
  std::unique_ptr<State> state_;
};

/// Creates a strategy for the parameters of the module, which must outlive it, as must the communicator of
/// the mesh. A Communicator converts to a mesh whose ranks all shard one copy of the model. Buffers without
/// memory get their initial values, on the device of the communicator. Collective. Errc::mismatch if models
/// or options differ over the ranks; Errc::invalid_argument if a parameter belongs to another live strategy;
/// Errc::unsupported for a communication hook with tp. Collectives of a mesh share failures: one that a rank
/// causes in any of its groups is thrown on all ranks, with its number among all.
/// When a strategy is destroyed, its parameters keep the memory that they have then.
std::unique_ptr<Strategy> make_strategy(StrategyKind, Module&, Mesh, StrategyOptions = {});

}  // namespace rz
