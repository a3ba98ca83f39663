#pragma once
/// Interface of the data-parallel strategies. DDP and ZeRO-1, ZeRO-2 and ZeRO-3 present the same interface to
/// a training loop.
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
/// Loss: a micro-batch has one weight on each rank: the number of terms (targets that are not ignored) of the
/// first nn::Loss that is propagated in it, or 1 if all of its losses are scalars. Each of its losses enters
/// as its own mean over the micro-batch times that weight, and an update divides by the sum of the weights of
/// all micro-batches and ranks. So one loss is the mean over all terms of all micro-batches and ranks,
/// however many each has; backward(a) and backward(b) of the same micro-batch are backward(a + b); and a
/// scalar has the same factor in every update. Where the first loss has no term, the micro-batch adds nothing
/// on this rank. Norms and updates read gradients so; in between, they are sums over a constant,
/// UpdateSettings::set_expected_terms(). begin_backward() and Tape::backward() know of no weights: their
/// gradients are means over the ranks, and an update has passes of one of the two ways.
///
/// Determinism: all strategies produce the same parameters, losses and norms, bit for bit, for any bucket
/// size and with overlap on or off, for any number of passes per update and wherever they synchronise. This
/// holds if the communicator is deterministic. On a mesh with several copies of the model, gradients are
/// summed over the ranks of a copy and then over the copies: other bits than in one sum, unless the order is
/// pairwise and a copy has a power of two of ranks.
///
/// A tp group: each rank has parts of some parameters (Parameter::part) and the others whole. Norms count
/// each element once, and the terms of a loss, which is that of all ranks of the group, once.
///
/// Accumulation: a pass that does not synchronise adds to the local gradients of this rank. The next pass
/// that synchronises reduces the sum once. This needs no extra memory in ddp and zero1. In zero2 and zero3
/// whole gradients (4Ψ bytes) are held from the first such pass to the reduction. To pay in communication
/// instead, synchronise every pass (finish_gradients after each); the means are then accumulated where they
/// are updated: in zero2 and zero3 in the shards, in ddp and zero1 in a copy (4Ψ, 4Ψ/ranks) until
/// zero_grad().
///
/// Parameters: those with requires_grad = false when the strategy is constructed are frozen. They have no
/// gradient and no optimizer state. To freeze others later, construct a new strategy: Errc::invalid_argument
/// names a parameter that was frozen in between. A parameter unused in the loss of this rank contributes
/// zeros, or is an error (StrategyOptions::find_unused_parameters). A parameter unused on all ranks since
/// zero_grad() has a zero gradient; the update skips it, as in PyTorch, or applies the zero gradient, as in
/// DeepSpeed (StrategyOptions::unused_parameters). A parameter shared by several scopes counts once.
///
/// Consistency: ranks are replicas. In the first reduced pass, and in the first one after values().fill(),
/// they compare all values that more than one rank holds. In zero3, where one rank of a copy of the model
/// holds each value, they compare the first elements of each parameter as fill() received them. In each
/// update they compare optimizers, their options and rates: those of step() and clip_and_step() in the sums
/// over the ranks that these make anyway, on a device those of next_update(). Errc::mismatch names what
/// differs and, as culprit, the first rank that differs from the majority, if there is one; gradients are
/// then dropped as by zero_grad().
///
/// Errors: after an exception between zero_grad() and finish_gradients() (in forward, in backward, out of
/// memory), reset the tape and call cancel_update(). finish_gradients() of the other ranks throws
/// Errc::cancelled. Training continues with zero_grad().
///
/// Mixed precision (StrategyOptions::precision): values are imported and exported in f32, to and from the
/// masters. To keep small gradients in the range of f16, backward() multiplies losses by
/// UpdateSettings::set_loss_scale(). sharding/optim/loss_scaler.h chooses the factor;
/// StepPolicy::skip_overflow skips updates whose gradients overflowed.
///
/// CUDA: if the communicator is on a CUDA device, parameters, gradients and state are on it too, unless they
/// are offloaded, and all work runs on the streams passed in (default: the stream of the tape). The host
/// waits for the device only in gradient_norm(), clip_gradients() and outcome(), and in finish_gradients()
/// for the hosts of the other ranks, unless the pass is captured. An update, from zero_grad() to
/// clip_and_step(), can be captured in a graph (comm/device/graph.h) if capturable(). The graph can be
/// replayed while shapes and the set of used parameters stay the same; call next_update() and
/// agree_on_replay() before each replay and outcome() after it. Learning rate, loss scale, expected terms,
/// policy and the number of terms may change. Run three updates without capture first, so that memory and
/// buckets settle. Capture again after any other use of the strategy.
///
/// Thread safety: one thread per rank. Between begin_backward and the end of finish_gradients the
/// communicator must not be used for anything else; in zero3 also not during a forward pass. Errors of the
/// communicator propagate. Destroying a strategy with reductions in flight aborts the communicator.
/// Destroying one with a prefetch in flight waits up to 5 s for it, then aborts.

#include <memory>

#include "../../autograd_lite/nn/module.h"
#include "../../autograd_lite/ops.h"
#include "../../autograd_lite/tape.h"
#include "../model/memory_report.h"
#include "../parallel/mesh.h"
#include "../parallel/traffic.h"
#include "logging_data.h"
#include "no_sync.h"
#include "parameter_values.h"
#include "strategy_options.h"

namespace rz {

class Optimizer;
class OptimizerState;
struct ShardingPlan;

/// Trains the parameters of a module on the ranks of a mesh. A plan chooses the parts of which a
/// strategy is composed.
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
  /// the ranks. Errc::unsynchronised if the last pass did not synchronise. Errc::cancelled if a rank called
  /// cancel_update() instead; culprit() is that rank, and gradients are dropped as by zero_grad(). So they
  /// are if a pass broke a rule of find_unused_parameters or static_graph
  /// (sharding/strategy/pass_rules.h).
  void finish_gradients(const Stream& = {});
  /// Cancels the update on every rank, after an error before the end of finish_gradients(). The rank that
  /// failed calls it in place of finish_gradients(), which then throws on the others. All reductions still
  /// run, so that the ranks stay in step; their results are dropped as by zero_grad(). Does nothing after
  /// finish_gradients() has dropped the update, until the next zero_grad() or forward pass. In zero3, and
  /// with buffers that are broadcast, other passes communicate too: this rank then makes the collectives that
  /// the update before made, or in the first update those of `passes` passes that run the scopes of the
  /// module in their order. If the other ranks make others, the error is Errc::mismatch, and the group is
  /// unusable, as after an error of the communicator.
  void cancel_update(const Stream& = {}, int passes = 1);
  /// Call before each launch of a graph that contains an update, after next_update() and its capture:
  /// exchanges what finish_gradients() cannot exchange in a graph, and throws what it throws if a rank has
  /// called cancel_replay() or optimizers differ. One all_reduce of 12 bytes in host memory. Collective.
  void agree_on_replay(const Optimizer&);
  /// Cancels the update where the other ranks call agree_on_replay().
  void cancel_replay();
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
  /// Whether every rank has dropped the update, since finish_gradients() threw, and no other one has begun.
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
