#pragma once
/// Interface of the data-parallel strategies. DDP and ZeRO-1, ZeRO-2 and ZeRO-3 present the same interface to
/// a training loop.
///
///     auto strategy = make_strategy(StrategyKind::zero3, model, comm);  // on every rank
///     strategy->attach(tape);
///     for (int update = 0; update < updates; ++update) {
///       strategy->zero_grad();
///       for (int m = 0; m < accumulation; ++m) {
///         const Var loss = model.loss(tape, batch(update, m));  // zero3 gathers scope by scope
///         strategy->begin_backward(m + 1 == accumulation);      // the last pass reduces
///         tape.backward(loss, 1.0f / accumulation);
///         tape.reset();
///       }
///       strategy->finish_gradients(stream);  // means over the ranks
///       strategy->clip_and_step(*optimizer, {.max_norm = 1}, stream);  // new values on every rank
///       const double norm = strategy->outcome(*optimizer, stream).norm;
///     }
///
/// Determinism: all strategies produce the same parameters, losses and norms, bit for bit, for any bucket
/// size and with overlap on or off. This holds if the communicator is deterministic and each update is one
/// backward pass.
///
/// Accumulation: a pass that does not synchronise adds to the local gradients of this rank. The next pass
/// that synchronises reduces the sum once. This needs no extra memory in ddp and zero1. In zero2 and zero3
/// whole gradients (4Ψ bytes) are held from the first such pass to the reduction. To pay in communication
/// instead, synchronise every pass (finish_gradients after each); the means are then accumulated in the
/// shards.
///
/// Parameters: those with requires_grad = false when the strategy is constructed are frozen. They have no
/// gradient and no optimizer state. To freeze others later, construct a new strategy: Errc::invalid_argument
/// names a parameter that was frozen in between. A parameter unused in the loss of this rank contributes
/// zeros. A parameter unused on all ranks since zero_grad() has a zero gradient; the update skips it, as in
/// PyTorch, or applies the zero gradient, as in DeepSpeed (StrategyOptions::unused_parameters). A parameter
/// shared by several scopes counts once.
///
/// Consistency: ranks are replicas. In the first reduced pass, and in the first one after fill_parameters(),
/// they compare all values that more than one rank holds. In zero3, where each value is held once, they
/// compare the first elements of each parameter as fill_parameters() received them. With the first update
/// they compare optimizers. Errc::mismatch names what differs, and the rank.
///
/// Errors: after an exception between zero_grad() and finish_gradients() (in forward, in backward, out of
/// memory), reset the tape and call cancel_update(). Training continues with zero_grad().
///
/// Mixed precision (StrategyOptions::precision): values are imported and exported in f32, to and from the
/// masters. To keep small gradients in the range of f16, multiply losses by a factor (Tape::backward(loss,
/// factor)) and pass the same factor to set_loss_scale(). sharding/optim/loss_scaler.h chooses the factor;
/// StepPolicy::skip_overflow skips updates whose gradients overflowed.
///
/// CUDA: if the communicator is on a CUDA device, parameters, gradients and state are on it too, and all work
/// runs on the streams passed in (default: the stream of the tape). The host waits for the device only in
/// gradient_norm(), clip_gradients() and outcome(), and in finish_gradients() for the hosts of the other
/// ranks, unless the pass is captured. An update, from zero_grad() to clip_and_step(), can be captured in a
/// graph (comm/device/graph.h) if the operations of the communicator can be. The graph can be replayed while
/// shapes, loss scale, policy and the set of used parameters stay the same; call next_update() before each
/// replay and outcome() after it. Run three updates without capture first, so that memory and buckets settle.
/// Capture again after any other use of the strategy.
///
/// Thread safety: one thread per rank. Between begin_backward and the end of finish_gradients the
/// communicator must not be used for anything else; in zero3 also not during a forward pass. Errors of the
/// communicator propagate. Destroying a strategy with reductions in flight aborts the communicator.
/// Destroying one with a prefetch in flight waits up to 5 s for it, then aborts.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "autograd_lite/module.h"
#include "autograd_lite/tape.h"
#include "comm/bucket_scheduler.h"
#include "comm/communicator.h"
#include "sharding/consistency/pass_agreement.h"
#include "sharding/consistency/rank_consistency.h"
#include "sharding/memory/memory_report.h"
#include "sharding/memory/transient_memory.h"
#include "sharding/optim/optimizer.h"
#include "sharding/optim/precision.h"
#include "sharding/optim/unused_parameters.h"
#include "sharding/strategies/partition.h"

namespace rz {

class SquareSum;

/// ZeRO stages as in Rajbhandari et al., doi:10.1109/SC41405.2020.00024; ddp shards nothing.
enum class StrategyKind { ddp, zero1, zero2, zero3 };
/// "ddp", "zero1", "zero2", "zero3".
const char* name(StrategyKind);
/// Errc::config lists the valid names.
StrategyKind strategy_from_name(std::string_view);

/// Must be equal on all ranks: Errc::mismatch names the option and the rank that differs.
struct StrategyOptions {
  std::size_t first_bucket_bytes = std::size_t{1} << 20;  ///< cap of the bucket that is reduced first
  std::size_t bucket_bytes = std::size_t{25} << 20;  ///< cap of the others; zero3 reduces by scope instead
  bool overlap = true;  ///< false: wait for each reduction where it starts, and do not prefetch
  bool rebuild = true;  ///< ddp: rebucket by the order of gradient readiness in the first step
  Precision precision;
  int prefetch_scopes = 1;  ///< zero3: scopes gathered before their use, in forward and backward
  /// Returns whether weight decay applies to a parameter; called once per parameter. Empty: parameters of two
  /// or more dimensions.
  std::function<bool(const Parameter&)> decays;
  UnusedParameterPolicy unused_parameters = UnusedParameterPolicy::pytorch;
};

/// Abstract base class. The public interface is the same for all strategies.
class Strategy {
 public:
  virtual ~Strategy();
  Strategy(const Strategy&) = delete;
  Strategy& operator=(const Strategy&) = delete;

  /// The kind passed to make_strategy().
  StrategyKind kind() const;

  // ---- one update
  /// Installs the strategy's hooks. The tape must not run after the strategy is destroyed.
  /// Errc::invalid_argument if the tape is attached to another live strategy.
  void attach(Tape&);
  /// Call before each backward pass. `synchronise`: reduce the gradients of this pass, and those accumulated
  /// before it, over the ranks. Must be equal on all ranks.
  void begin_backward(bool synchronise = true);
  /// Call after each backward pass that synchronises. Waits for all reductions; gradients are then means over
  /// the ranks. Errc::unsynchronised if the last pass did not synchronise, or if a rank called
  /// cancel_update() instead; culprit() is that rank, and gradients are dropped as by zero_grad().
  void finish_gradients(const Stream& = {});
  /// Cancels the update on every rank, after an error before the end of finish_gradients(). The rank that
  /// failed calls it in place of finish_gradients(), which then throws on the others. All reductions still
  /// run, so that the ranks stay in step; their results are dropped as by zero_grad(). In zero3, where passes
  /// communicate too, all ranks must have failed at the same operator. If other ranks have gathered since,
  /// the error is Errc::mismatch, and the group is unusable, as after an error of the communicator.
  void cancel_update(const Stream& = {});
  /// Sets the factor by which losses are multiplied from now on. Gradients contain it until norms and updates
  /// divide it out. Must be equal on all ranks. Errc::invalid_argument unless it is positive and finite.
  void set_loss_scale(double);
  /// L2 norm of all gradients, each parameter counted once. Exact but for the rounding of the squares, so all
  /// strategies return the same bits. Collective. Errc::unsynchronised as for step().
  double gradient_norm(const Stream& = {});
  /// Scales the gradients, in the next step(), by max_norm / (norm + 1e-6) if that is below 1, as
  /// torch.nn.utils.clip_grad_norm_ does. Returns the norm before clipping. Collective.
  double clip_gradients(double max_norm, const Stream& = {});
  /// Updates the parameters; afterwards every rank has the new ones. Collective. Errc::unsynchronised unless
  /// finish_gradients() was called after the last backward pass.
  void step(Optimizer&, const Stream& = {});
  /// Options of clip_and_step(); must be equal on all ranks.
  struct StepPolicy {
    double max_norm = 0;         ///< as for clip_gradients(); 0: no clipping
    bool skip_overflow = false;  ///< skip the update, on every rank alike, if the norm is not finite
  };
  /// clip_gradients() and step() in one call; on a device the host does not wait. Collective.
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
  /// constants that depend on the update number and the learning rate to device memory.
  void next_update(Optimizer&, const Stream& = {});
  /// Drops the gradients; does not write zeros. All ranks call it.
  void zero_grad();

  // ---- import and export of parameters, at most one scope or one bucket at a time
  /// Writes `elements` of the flat parameter to out[0, elements.count()), in f32.
  using Fill = std::function<void(const Parameter&, Range elements, float* out)>;
  /// Calls fill for the elements that this rank stores, to load or initialise without holding the whole
  /// model. ddp, zero1 and zero2 store all elements. zero3 stores shards; fill is also called for the first
  /// 64 elements of each parameter, which the ranks compare. All ranks must write the same values. Not
  /// collective.
  void fill_parameters(const Fill&);
  /// Reads `elements` of the flat parameter from value[0, elements.count()), in f32.
  using Visit = std::function<void(const Parameter&, Range elements, const float* value)>;
  /// Visits the elements that this rank exports. Over all ranks, each element is visited exactly once.
  void visit_owned(const Visit&) const;
  /// Returns a whole parameter in f32. Drop the tensor soon. Collective; not during a pass.
  Tensor full_value(const Parameter&, const Stream& = {});

  // ---- statistics
  /// Memory held on this rank now.
  MemoryReport memory() const;
  /// Seconds in which the calling thread waited for communication during the last finished step: gathers,
  /// reductions, and the exchanges of step().
  double exposed_seconds() const;

  /// While an object of this class lives, passes do not synchronise, whatever the argument of
  /// begin_backward().
  class NoSync {
   public:
    explicit NoSync(Strategy& strategy) : strategy_(strategy) { ++strategy_.no_sync_; }
    ~NoSync() { --strategy_.no_sync_; }
    NoSync(const NoSync&) = delete;

   private:
    Strategy& strategy_;
  };

 protected:
  // ---- interface to implement. Members are the trainable parameters in the order of first use. They lie in
  // buckets, which are reduced, updated and published one by one.

  /// The elements in updated_range() of a bucket: the values used by the model, and the reduced gradients.
  struct Updated {
    Tensor values, gradients;
  };

  /// Checks that all ranks have the same model and options, and broadcasts the values of rank 0.
  Strategy(StrategyKind, Module&, Communicator&, StrategyOptions);
  /// Called exactly once, by the constructor of a derived class.
  void set_layout(BucketLayout);

  /// Called before a gradient of the bucket is written or reduced. Must define Parameter::grad of the
  /// members.
  virtual void ensure_gradient_storage(int bucket) = 0;
  /// Starts the reduction of a bucket. Its gradients are complete and its padding is zero.
  virtual Work reduce(int bucket, const Stream&) = 0;
  /// Called at the start of a pass, after begin_backward() has set the state.
  virtual void on_backward_begin() {}
  /// Called before the gradient of a member is written for the first time in a pass.
  virtual void on_gradient_begin(int member);
  /// Called when the gradient of a member is complete in a pass that synchronises.
  virtual void on_gradient_ready(int member, const Stream&);
  /// Called after the last reduction was started; waits for all of them.
  virtual void finish_reductions(const Stream&) {}
  /// Called when another pass follows a reduced one without zero_grad() between them.
  virtual void carry_gradients(const Stream&) {}
  /// Called by zero_grad() and after a cancelled update: drops gradients and reduced shards.
  virtual void drop_gradients() {}
  /// The tensors that the update of a bucket reads and writes. Valid after finish_reductions().
  virtual Updated updated(int bucket) const = 0;
  /// Sends the new values of updated() to the other ranks.
  virtual Work publish(int /*bucket*/, const Stream&) { return {}; }
  /// Called after all buckets were updated and published.
  virtual void after_step(const Stream&) {}
  /// Called before a scope runs in forward or backward.
  virtual void enter(const Scope&, Pass) {}
  /// Called after a scope has run in forward or backward.
  virtual void leave(const Scope&, Pass) {}

  /// fill_parameters() for the values used by the model.
  virtual void fill_values(const Fill&) = 0;
  /// visit_owned() for the frozen parameters.
  virtual void visit_frozen(const Visit&) const = 0;
  /// The whole parameter, in the dtype of the model.
  virtual Tensor unsharded_value(const Parameter&) = 0;

  /// Adds the parameters and gradients held by the derived class to the report.
  virtual void count_memory(MemoryReport&) const = 0;

  // ---- services for derived classes
  /// Must be the first call of a derived destructor. Ends the reductions in flight, whose buffers are about
  /// to be freed, and waits up to 5 s for device work that still uses them.
  void abort_in_flight() noexcept;
  Communicator& communicator() const { return communicator_; }
  const StrategyOptions& options() const { return options_; }
  const Precision& precision() const { return options_.precision; }
  /// Communicator memory for buffers that live for a part of a step.
  TransientMemory& transient() { return transient_; }
  const std::vector<Parameter*>& members() const { return members_; }
  const std::vector<Parameter*>& frozen() const { return frozen_; }
  const BucketLayout& layout() const { return scheduler_->layout(); }
  BucketScheduler& scheduler() { return *scheduler_; }
  int member_of(const Parameter&) const;  ///< -1: frozen
  /// Range of the bucket that this rank updates: all of it in ddp, the shard of this rank otherwise.
  Range updated_range(int bucket) const;
  /// True in a pass whose gradients are reduced.
  bool synchronising() const { return state_ == State::reducing; }
  /// Bucket sizes and alignment for plan_member_buckets().
  BucketOptions bucket_options() const;
  /// Waits, and adds the time to the exposed communication time.
  void wait_exposed(const Work&, const Stream&);
  /// The stream of the tape.
  const Stream& stream() const { return stream_; }
  /// Moves the members to a new bucket layout; optimizer state moves with them. Requires that updated()
  /// returns whole buckets.
  void change_layout(BucketLayout);

 private:
  enum class State { none, local, reducing, reduced };

  void abort_reductions() noexcept;
  Work launch(int bucket, const Stream&);
  /// Returns `given` if it is a stream of the device, or on the host one with several threads; otherwise the
  /// stream of the tape. On the host both give the same results.
  const Stream& device_stream(const Stream& given) const;
  void require_same_options();
  void require_same_values();
  void record_filled_values(const Fill&);
  void require_trainable(const char* call) const;
  void reduce_all(const Stream&, bool cancelled);
  void reset_gradients();
  bool skipped(int member) const;
  void decide_updates();
  /// Offset of the device-side constants for members that missed `missed` updates; `first` is one such
  /// member.
  std::size_t constants_slot(std::int64_t missed, int first) const;
  void count_missed();
  void end_step();
  void drop_gathered();
  void require_reduced(const char* call) const;
  void make_masters();
  Tensor value_in_f32(const Parameter&, int member);
  void make_state(const Optimizer&);
  void require_same_optimizer(const Optimizer&, const Stream&);
  void add_squares(SquareSum&) const;
  double sum_over_ranks(const SquareSum&);
  void update_all(Optimizer&, const UpdateScale&, const Stream&);
  const Tensor& values_to_update(int bucket, const Updated&) const;
  void move_to_layout(std::vector<Tensor>& buckets, const BucketLayout& before) const;
  void update_bucket(int bucket, const Optimizer&, const UpdateScale&, const Stream&);
  void make_spans(int bucket, std::span<const MemberRun>);

  StrategyKind kind_;
  Communicator& communicator_;
  StrategyOptions options_;
  Stream stream_;
  std::vector<Parameter*> members_, frozen_;
  std::unordered_map<const Parameter*, int> member_of_;
  std::vector<Fact>
      filled_;  // zero3: hashes of the first elements of each parameter given to fill_parameters()
  std::vector<bool> decays_;          // [member]
  std::vector<std::int64_t> missed_;  // [member], updates that skipped it
  // Scratch space of one update, kept so that a step allocates nothing.
  std::vector<MemberUpdate> updates_;  // [member]
  std::vector<MemberRun> runs_;
  std::vector<UpdateSpan> spans_;
  std::vector<Work> published_;
  std::unique_ptr<PassAgreement> agreement_;
  std::unique_ptr<BucketScheduler> scheduler_;
  TransientMemory transient_;
  int gathered_bucket_ = -1;  // bucket whose masters are in gathered_, since the last full_value(); -1: none
  Tensor gathered_;
  std::vector<Tensor> masters_;  // [bucket], updated range only; empty unless mixed precision
  std::vector<std::vector<Tensor>> optimizer_state_;  // [state][bucket], updated range only
  Tensor norm_words_;                                 // device accumulator of the gradient norm
  Tensor device_outcome_;                             // StepOutcome in device memory
  Tensor constants_;  // optimizer constants in device memory, see constants_slot()
  std::size_t constants_stride_ = 0;
  bool same_optimizer_ = false;     // optimizers were compared and are equal on all ranks
  bool constants_current_ = false;  // constants_ are those of the next update
  StepOutcome outcome_;             // in host memory
  State state_ = State::none;
  int no_sync_ = 0;
  double loss_scale_ = 1, clip_factor_ = 1;
  std::chrono::nanoseconds exposed_{}, last_exposed_{};
  std::shared_ptr<const bool> alive_ =
      std::make_shared<const bool>(true);  // lets tapes detect a destroyed strategy
};

/// Creates a strategy for the parameters of the module, which must outlive it, as must the communicator.
/// Collective. Errc::mismatch if models or options differ over the ranks.
std::unique_ptr<Strategy> make_strategy(StrategyKind, Module&, Communicator&, StrategyOptions = {});

}  // namespace rz
