#pragma once
/// How a model is spread over the ranks of a group: the seam under which DDP and ZeRO-1, 2 and 3 are the same
/// to a training loop.
///
///     auto strategy = make_strategy(StrategyKind::zero3, model, comm);   // every rank
///     strategy->attach(tape);
///     for (each update) {
///       strategy->zero_grad();
///       for (int m = 0; m < accumulation; ++m) {
///         Var loss = model.loss(tape, …);                                // hooks gather what it needs
///         strategy->begin_backward(m + 1 == accumulation);               // reduce with the last one only
///         tape.backward(loss, 1.0f / accumulation);
///         tape.reset();
///       }
///       strategy->finish_gradients(stream);                              // means over the ranks
///       strategy->clip_and_step(*optimizer, {.max_norm = 1}, stream);    // parameters are new everywhere
///       double norm = strategy->outcome(*optimizer, stream).norm;        // before clipping
///     }
///
/// Every strategy makes the same parameters, losses and norms, bit for bit, for any bucket size and with
/// overlap on or off, if the communicator is deterministic and each update is one backward pass.
///
/// One meaning of accumulation everywhere: a pass that does not synchronise adds to this rank's own
/// gradients; the next pass that does reduces all of it once. What that costs: nothing in ddp and zero1; in
/// zero2 and zero3 whole gradients (4Ψ bytes) from the first such pass to the reduction. To pay in
/// communication instead, synchronise with every pass (finish_gradients after each): means are then added up
/// in the shards.
///
/// Parameters: those with requires_grad = false when the strategy is made are frozen: no gradient, no state.
/// To freeze others later, make a new strategy: Errc::invalid_argument names one that was frozen since.
/// One that no loss reached on this rank contributes zeros. One that no loss reached on any rank since
/// zero_grad() has a gradient of zero and is skipped by the update, as in PyTorch, or updated by that zero,
/// as in DeepSpeed (StrategyOptions::unused_parameters). Parameters shared by several scopes count once.
///
/// Ranks are replicas: with the first reduced pass, and with the first after fill_parameters(), they compare
/// all values that several of them hold; in zero3, where each value is held once, what a part of each
/// parameter was filled with. With the first update they compare what their optimizers are. Errc::mismatch
/// names what differs, and the rank.
///
/// After an exception between zero_grad() and finish_gradients() (a forward, a backward, memory), reset the
/// tape and call cancel_update(); training goes on with zero_grad().
///
/// In mixed precision (StrategyOptions::precision) values go in and out in f32, from and to the masters. To
/// keep small gradients in f16's range, multiply losses by a factor (Tape::backward(loss, factor)) that
/// set_loss_scale() knows too; sharding/optim/loss_scaler.h chooses it, and StepPolicy::skip_overflow leaves
/// out what was too much.
///
/// On a CUDA device (the communicator's) parameters, gradients and state live there, and everything runs in
/// the streams that are passed, by default the tape's; the host waits for the device in gradient_norm(),
/// clip_gradients() and outcome() only, and in finish_gradients() for the other ranks' hosts, unless the pass
/// is captured. So an update, from zero_grad() to clip_and_step(), can be captured in a graph
/// (comm/device/graph.h) where the communicator's operations can be, and run again while shapes, loss scale,
/// policy and the parameters that losses reach stay: next_update() comes before each run, outcome() after it.
/// Three updates that are not captured come first, in which memory and buckets settle. After anything else
/// was done with the strategy, capture anew.
///
/// Driven by one thread a rank. Between begin_backward and the end of finish_gradients the communicator must
/// not be used for anything else, nor in zero3 while a forward pass runs. Errors of the communicator pass
/// through. A strategy that is destroyed with reductions in flight aborts the communicator; one with a
/// prefetch in flight waits for it, for at most 5 s, and then aborts.

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

enum class StrategyKind { ddp, zero1, zero2, zero3 };
const char* name(StrategyKind);
/// Errc::config names the choices.
StrategyKind strategy_from_name(std::string_view);

/// The same on every rank: Errc::mismatch names the option and the rank that differs.
struct StrategyOptions {
  std::size_t first_bucket_bytes = std::size_t{1} << 20;  ///< cap of the bucket that is reduced first
  std::size_t bucket_bytes = std::size_t{25} << 20;  ///< cap of the others; zero3 reduces by scope instead
  bool overlap = true;  ///< false: each reduction is waited for where it begins; nothing is fetched ahead
  bool rebuild = true;  ///< ddp: buckets follow the order in which gradients became ready in the first step
  Precision precision;
  int prefetch_scopes = 1;  ///< zero3: scopes gathered ahead of their use, forward and backward
  /// Which parameters weight decay applies to, called once for each; empty: those of two or more dimensions.
  std::function<bool(const Parameter&)> decays;
  UnusedParameterPolicy unused_parameters = UnusedParameterPolicy::pytorch;
};

/// Abstract; the public part is the same for all strategies.
class Strategy {
 public:
  virtual ~Strategy();
  Strategy(const Strategy&) = delete;
  Strategy& operator=(const Strategy&) = delete;

  StrategyKind kind() const;

  // ---- a step
  /// Installs the hooks that the strategy lives by. The tape must not run after the strategy has gone.
  /// Errc::invalid_argument if it serves another strategy that lives.
  void attach(Tape&);
  /// Comes before each backward pass. `synchronise`: the pass's gradients are reduced over the ranks, with
  /// whatever passes before it left. All ranks pass the same.
  void begin_backward(bool synchronise = true);
  /// Comes after each backward pass that synchronises: all reductions are done, gradients are means over the
  /// ranks. Errc::unsynchronised if the last pass did not synchronise, or if a rank called cancel_update()
  /// instead: culprit() is that rank, gradients are forgotten as by zero_grad().
  void finish_gradients(const Stream& = {});
  /// After an error before the end of finish_gradients(): gives the update up on every rank. A rank calls it
  /// in place of finish_gradients(), which then throws on the others. All reductions are made, so that the
  /// ranks stay in step, and their results are forgotten as by zero_grad(). In zero3, where passes
  /// communicate too, ranks must have failed at the same operator: if others have gathered since, the error
  /// is Errc::mismatch, and the group is lost, as it is after an error of the communicator.
  void cancel_update(const Stream& = {});
  /// The factor that losses are multiplied by from now on: gradients carry it until norms and updates take it
  /// out. All ranks give the same. Errc::invalid_argument unless it is positive and finite.
  void set_loss_scale(double);
  /// Square root of the sum of squares of all gradients, each parameter once. Exact but for the rounding of
  /// squares, so the same bits whatever the strategy. Collective. Errc::unsynchronised as step().
  double gradient_norm(const Stream& = {});
  /// Scales gradients, in the coming step(), by max_norm / (norm + 1e-6) if that is below 1, as
  /// torch.nn.utils.clip_grad_norm_. Returns the norm before. Collective.
  double clip_gradients(double max_norm, const Stream& = {});
  /// Updates the parameters; afterwards every rank sees the new ones. Collective. Errc::unsynchronised unless
  /// finish_gradients() came after the last backward pass.
  void step(Optimizer&, const Stream& = {});
  struct StepPolicy {
    double max_norm = 0;         ///< as clip_gradients(); 0: none
    bool skip_overflow = false;  ///< a norm that is not finite leaves the update out, on every rank alike
  };
  /// clip_gradients() and step() in one; on a device the host does not wait. Collective.
  void clip_and_step(Optimizer&, const StepPolicy&, const Stream& = {});
  struct Outcome {
    double norm = 0;  ///< before clipping
    bool skipped = false;
  };
  /// Of the last clip_and_step(), or of a graph's last run of it; on a device it waits, as
  /// Communicator::synchronize(). An update that was left out does not count in the optimizer. Once an
  /// update.
  Outcome outcome(Optimizer&, const Stream& = {});
  /// On a device, before an update or a graph's run of one: counts it in the optimizer and writes what the
  /// optimizer makes of its number and learning rate to where the device reads it.
  void next_update(Optimizer&, const Stream& = {});
  /// Forgets the gradients; nothing is filled with zeros. All ranks call it.
  void zero_grad();

  // ---- parameters in and out, never more than a scope or a bucket at a time
  using Fill = std::function<void(const Parameter&, Range elements, float* out)>;
  /// Calls fill for the elements that this rank stores (ddp, zero1, zero2: all; zero3: its parts, and the
  /// first 64 of each parameter, to be compared), to load or initialise without ever holding the model. Ranks
  /// must write the same values. Not collective.
  void fill_parameters(const Fill&);
  using Visit = std::function<void(const Parameter&, Range elements, const float* value)>;
  /// The parts of the parameters that this rank answers for: over all ranks, each element exactly once.
  void visit_owned(const Visit&) const;
  /// The whole of a parameter in f32, to be read and dropped soon. Collective; not while a pass runs.
  Tensor full_value(const Parameter&, const Stream& = {});

  // ---- figures
  MemoryReport memory() const;
  /// Seconds of the last finished step that the calling thread waited for communication: gathers, reductions,
  /// and what step() exchanged.
  double exposed_seconds() const;

  /// While one lives, passes do not synchronise, whatever begin_backward() is told.
  class NoSync {
   public:
    explicit NoSync(Strategy& strategy) : strategy_(strategy) { ++strategy_.no_sync_; }
    ~NoSync() { --strategy_.no_sync_; }
    NoSync(const NoSync&) = delete;

   private:
    Strategy& strategy_;
  };

 protected:
  // ---- the seam: what a strategy decides. Members are the trainable parameters, in the order of first use;
  // they lie in buckets, which are reduced, updated and published one by one.

  /// The elements of a bucket that this rank updates, updated_range(): the values that the model sees, and
  /// the reduced gradients.
  struct Updated {
    Tensor values, gradients;
  };

  /// Checks that all ranks have the same model and options, and takes rank 0's values of it.
  Strategy(StrategyKind, Module&, Communicator&, StrategyOptions);
  /// To be called once by the constructor of a strategy.
  void set_layout(BucketLayout);

  /// Called before a gradient of the bucket is written or reduced: Parameter::grad of its members must be
  /// defined.
  virtual void ensure_gradient_storage(int bucket) = 0;
  /// Starts the reduction of a bucket, whose gradients are complete and whose padding is zero.
  virtual Work reduce(int bucket, const Stream&) = 0;
  /// A pass begins, after what begin_backward() decides.
  virtual void on_backward_begin() {}
  /// A member's gradient is about to be written for the first time in a pass.
  virtual void on_gradient_begin(int member);
  /// A member's gradient is complete in a pass that synchronises.
  virtual void on_gradient_ready(int member, const Stream&);
  /// All reductions have ended.
  virtual void finish_reductions(const Stream&) {}
  /// Another pass follows one that was reduced, without zero_grad() between.
  virtual void carry_gradients(const Stream&) {}
  virtual void drop_gradients() {}
  virtual Updated updated(int bucket) const = 0;
  /// Tells the other ranks the new values of what updated() named.
  virtual Work publish(int /*bucket*/, const Stream&) { return {}; }
  virtual void after_step(const Stream&) {}
  virtual void enter(const Scope&, Pass) {}
  virtual void leave(const Scope&, Pass) {}

  /// fill_parameters() for the values that the model sees.
  virtual void fill_values(const Fill&) = 0;
  /// visit_owned() for the frozen parameters.
  virtual void visit_frozen(const Visit&) const = 0;
  /// As the model sees it, whole.
  virtual Tensor unsharded_value(const Parameter&) = 0;

  virtual void count_memory(MemoryReport&) const = 0;

  // ---- what strategies share
  /// The first thing a strategy's destructor does: ends reductions in flight, whose memory is about to go,
  /// and waits, for 5 s at most, for what a device still does with it.
  void abort_in_flight() noexcept;
  Communicator& communicator() const { return communicator_; }
  const StrategyOptions& options() const { return options_; }
  const Precision& precision() const { return options_.precision; }
  /// Memory of the communicator's for what lives for a part of a step.
  TransientMemory& transient() { return transient_; }
  const std::vector<Parameter*>& members() const { return members_; }
  const std::vector<Parameter*>& frozen() const { return frozen_; }
  const BucketLayout& layout() const { return scheduler_->layout(); }
  BucketScheduler& scheduler() { return *scheduler_; }
  int member_of(const Parameter&) const;  ///< -1: frozen
  /// Of a bucket: all of it in ddp, this rank's part in the others.
  Range updated_range(int bucket) const;
  bool synchronising() const { return state_ == State::reducing; }
  BucketOptions bucket_options() const;
  /// Waits, and counts the time as exposed.
  void wait_exposed(const Work&, const Stream&);
  /// The tape's.
  const Stream& stream() const { return stream_; }
  /// Puts members into other buckets; optimizer state moves along. Only while updated() names whole buckets.
  void change_layout(BucketLayout);

 private:
  enum class State { none, local, reducing, reduced };

  void abort_reductions() noexcept;
  Work launch(int bucket, const Stream&);
  /// What the caller gave, or the tape's if the caller named none: no stream of the device, or on the host
  /// one of a single thread, whose results are those of the tape's team.
  const Stream& device_stream(const Stream& given) const;
  void require_same_options();
  void require_same_values();
  void record_filled_values(const Fill&);
  void require_trainable(const char* call) const;
  void reduce_all(const Stream&, bool cancelled);
  void reset_gradients();
  bool skipped(int member) const;
  void decide_updates();
  /// Where the device reads the constants of members that missed so many updates; `first` is one of them.
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
  std::vector<Fact> filled_;          // zero3: what fill_parameters() was given, as far as all ranks see it
  std::vector<bool> decays_;          // [member]
  std::vector<std::int64_t> missed_;  // [member], updates that skipped it
  // Of one update; here, so that a step allocates nothing.
  std::vector<MemberUpdate> updates_;  // [member]
  std::vector<MemberRun> runs_;
  std::vector<UpdateSpan> spans_;
  std::vector<Work> published_;
  std::unique_ptr<PassAgreement> agreement_;
  std::unique_ptr<BucketScheduler> scheduler_;
  TransientMemory transient_;
  int gathered_bucket_ = -1;  // of the masters in gathered_, which the last full_value() gathered
  Tensor gathered_;
  std::vector<Tensor> masters_;                       // [bucket], of the updated range; none unless mixed
  std::vector<std::vector<Tensor>> optimizer_state_;  // [state][bucket], of the updated range
  Tensor norm_words_;                                 // of the gradient norm on a device
  Tensor device_outcome_;                             // StepOutcome on a device
  Tensor constants_;                                  // of the optimizer on a device, see constants_slot()
  std::size_t constants_stride_ = 0;
  bool same_optimizer_ = false;     // on every rank
  bool constants_current_ = false;  // constants_ are those of the coming update
  StepOutcome outcome_;             // on the host
  State state_ = State::none;
  int no_sync_ = 0;
  double loss_scale_ = 1, clip_factor_ = 1;
  std::chrono::nanoseconds exposed_{}, last_exposed_{};
  std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);  // for tapes
};

std::unique_ptr<Strategy> make_strategy(StrategyKind, Module&, Communicator&, StrategyOptions = {});

}  // namespace rz
