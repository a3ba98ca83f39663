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
///       double norm = strategy->clip_gradients(1.0, stream);             // before clipping
///       strategy->step(*optimizer, stream);                              // every rank has the new
///       parameters
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
/// One that no loss reached on this rank contributes zeros, and one that none reached on any rank has a
/// gradient of zero (momentum and weight decay still act on it). Parameters shared by several scopes count
/// once.
///
/// On a CUDA device (the communicator's) parameters, gradients and state live there, and everything runs in
/// the streams that are passed, by default the tape's; the host waits in gradient_norm() and clip_gradients()
/// only.
///
/// Driven by one thread a rank. Between begin_backward and the end of finish_gradients the communicator must
/// not be used for anything else, nor in zero3 while a forward pass runs. Errors of the communicator pass
/// through. A strategy that is destroyed with reductions in flight aborts the communicator; one with a
/// prefetch in flight waits for it, for at most 5 s, and then aborts.

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "autograd_lite/module.h"
#include "autograd_lite/tape.h"
#include "comm/bucket_scheduler.h"
#include "comm/communicator.h"
#include "sharding/memory_report.h"
#include "sharding/optimizer.h"
#include "sharding/partition.h"

namespace rz {

enum class StrategyKind { ddp, zero1, zero2, zero3 };
const char* name(StrategyKind);
/// Errc::config names the choices.
StrategyKind strategy_from_name(std::string_view);

struct StrategyOptions {
  std::size_t first_bucket_bytes = std::size_t{1} << 20;  ///< cap of the bucket that is reduced first
  std::size_t bucket_bytes = std::size_t{25} << 20;  ///< cap of the others; zero3 reduces by scope instead
  bool overlap = true;  ///< false: everything is reduced in finish_gradients; nothing is fetched ahead
  bool rebuild = true;  ///< ddp: buckets follow the order in which gradients became ready in the first step
  int prefetch_scopes = 1;  ///< zero3: scopes gathered ahead of their use, forward and backward
  /// Which parameters weight decay applies to; empty: those of two or more dimensions.
  std::function<bool(const Parameter&)> decays;
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
  void attach(Tape&);
  /// Comes before each backward pass. `synchronise`: the pass's gradients are reduced over the ranks, with
  /// whatever passes before it left. All ranks pass the same.
  void begin_backward(bool synchronise = true);
  /// Comes after each backward pass that synchronises: all reductions are done, gradients are means over the
  /// ranks. Errc::unsynchronised if the last pass did not synchronise.
  void finish_gradients(const Stream& = {});
  /// Square root of the sum of squares of all gradients, each parameter once. Exact but for the rounding of
  /// squares, so the same bits whatever the strategy. Collective. Errc::unsynchronised as step().
  double gradient_norm(const Stream& = {});
  /// Scales gradients, in the coming step(), by max_norm / (norm + 1e-6) if that is below 1, as
  /// torch.nn.utils.clip_grad_norm_. Returns the norm before. Collective.
  double clip_gradients(double max_norm, const Stream& = {});
  /// Updates the parameters; afterwards every rank sees the new ones. Collective. Errc::unsynchronised unless
  /// finish_gradients() came after the last backward pass.
  void step(Optimizer&, const Stream& = {});
  /// Forgets the gradients; nothing is filled with zeros. All ranks call it.
  void zero_grad();

  // ---- parameters in and out, never more than a scope or a bucket at a time
  using Fill = std::function<void(const Parameter&, Range elements, float* out)>;
  /// Calls fill for the elements that this rank stores (ddp, zero1, zero2: all; zero3: its parts), to load or
  /// initialise without ever holding the model. Ranks must write the same values. Not collective.
  virtual void fill_parameters(const Fill&) = 0;
  using Visit = std::function<void(const Parameter&, Range elements, const float* value)>;
  /// The parts of the parameters that this rank answers for: over all ranks, each element exactly once.
  virtual void visit_owned(const Visit&) const = 0;
  /// The whole of a parameter, to be read and dropped soon. Collective in zero3; not while a pass runs.
  virtual Tensor full_value(const Parameter&, const Stream& = {}) = 0;

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

  /// The elements of a bucket that this rank updates: their range, their values and reduced gradients.
  struct Updated {
    Range range;
    Tensor values, gradients;
  };

  /// Checks that all ranks have the same model, and takes rank 0's values of it.
  Strategy(StrategyKind, Module&, Communicator&, StrategyOptions);
  /// To be called once by the constructor of a strategy.
  void set_layout(BucketLayout);

  /// Called before a gradient of the bucket is written or reduced: Parameter::grad of its members must be
  /// defined.
  virtual void provide_gradients(int bucket) = 0;
  /// Starts the reduction of a bucket, whose gradients are complete and whose padding is zero.
  virtual Work reduce(int bucket, const Stream&) = 0;
  /// A pass begins, after what begin_backward() decides.
  virtual void pass_begins() {}
  /// A member's gradient is about to be written for the first time in a pass.
  virtual void gradient_begins(int member);
  /// A member's gradient is complete in a pass that synchronises.
  virtual void gradient_ready(int member, const Stream&);
  /// All reductions have ended.
  virtual void settle_gradients(const Stream&) {}
  /// Another pass follows one that was reduced, without zero_grad() between.
  virtual void reopen_gradients(const Stream&) {}
  virtual void forget_gradients() {}
  virtual Updated updated(int bucket) = 0;
  /// Tells the other ranks the new values of what updated() named.
  virtual Work publish(int /*bucket*/, const Stream&) { return {}; }
  virtual void after_step(const Stream&) {}
  virtual void enter(const Scope&, Pass) {}
  virtual void leave(const Scope&, Pass) {}

  virtual void count_memory(MemoryReport&) const = 0;

  // ---- what strategies share
  /// The first thing a strategy's destructor does: ends reductions in flight, whose memory is about to go,
  /// and waits, for 5 s at most, for what a device still does with it.
  void abandon() noexcept;
  Communicator& communicator() const { return communicator_; }
  const StrategyOptions& options() const { return options_; }
  const std::vector<Parameter*>& members() const { return members_; }
  const std::vector<Parameter*>& frozen() const { return frozen_; }
  const BucketLayout& layout() const { return scheduler_->layout(); }
  BucketScheduler& scheduler() { return *scheduler_; }
  int member_of(const Parameter&) const;  ///< -1: frozen
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
  /// What the caller gave, or the tape's where the model is on a device and the caller named no stream of it.
  const Stream& device_stream(const Stream& given) const;
  void require_reduced(const char* call) const;
  void make_state(const Optimizer&);
  void update_bucket(int bucket, const Optimizer&, const Stream&);

  StrategyKind kind_;
  Communicator& communicator_;
  StrategyOptions options_;
  Stream stream_;
  std::vector<Parameter*> members_, frozen_;
  std::unordered_map<const Parameter*, int> member_of_;
  std::unique_ptr<BucketScheduler> scheduler_;
  std::vector<std::vector<Tensor>> optimizer_state_;  // [state][bucket], of the updated range
  Tensor norm_words_;                                 // of the gradient norm on a device
  State state_ = State::none;
  int no_sync_ = 0;
  double clip_ = 1;
  std::chrono::nanoseconds exposed_{}, last_exposed_{};
};

std::unique_ptr<Strategy> make_strategy(StrategyKind, Module&, Communicator&, StrategyOptions = {});

}  // namespace rz
