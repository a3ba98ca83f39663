#pragma once
/// How gradients become an update: weights of losses, and what follows from the norm.

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "comm/device/stream.h"
#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"
#include "sharding/optim/grad_norm.h"
#include "sharding/optim/optimizer.h"
#include "sharding/strategy/update_settings.h"
#include "tensor/kernels/scalar/optimizer_step.h"
#include "tensor/tensor.h"

namespace rz {

/// Adds the weights of the micro-batches of this rank, by the rule of Strategy. On a device they are added
/// there, in the order of the stream, so that a graph counts those of each run.
class LossTerms {
 public:
  /// What has been counted since reset(): weights of 1 alone, or terms too.
  enum class Counted { nothing, scalars, terms };

  /// Errc::invalid_argument if a loss may not follow: one with terms after a scalar of the same micro-batch,
  /// whose weight would be another.
  void require_may_follow(bool has_terms, bool same_micro_batch) const;
  /// Of a loss that follows others in its micro-batch: the weight of the micro-batch, divided by the terms of
  /// this loss; 0 without terms. A scalar in f32, undefined for 1. `sum_count`: nn::Loss::sum_count,
  /// undefined for a scalar, which has one term. `floats`, an f32 [2], and `sums`, an f64 [2], are written.
  Tensor ratio(const Tensor& sum_count, const Tensor& floats, const Tensor& sums, const Stream&);
  /// The first loss of a micro-batch was propagated: counts its weight.
  void count(const Tensor& sum_count, const Stream&);
  /// A loss was propagated: remembers whether it is finite. `value`: the loss, a scalar.
  void check(const Tensor& value, const Stream&);
  /// Whether all losses since reset() were finite. On a device unknown: true.
  bool finite() const { return finite_; }
  /// On a device: adds a NaN if a loss since reset() was not finite.
  void add_not_finite(SquareSum&) const;
  /// Counts micro-batches of weight 1.
  void add_ones(std::int64_t, const Stream&);
  /// Counts no terms.
  void add_none(const Stream&);
  /// Starts an update.
  void reset();
  Counted counted() const { return counted_; }
  /// The weights of this rank. On a device this waits for the stream.
  ExactSum read(const Stream&) const;
  /// On a device: copies the words of the sum.
  void copy_to(const Tensor& words, const Stream&) const;

 private:
  void begin(Counted, const Stream&);
  void add(const Tensor& sum_count, const Stream&);
  const Tensor& one(const Stream&);

  Counted counted_ = Counted::nothing;
  Tensor weight_;           // of the micro-batch: nn::Loss::sum_count of its first loss; undefined: 1
  bool by_scalar_ = false;  // the micro-batch began with a scalar
  bool finite_ = true;      // on the host
  ExactSum sum_;            // on the host
  Tensor words_;            // on a device: ExactLayout::words
  Tensor one_;              // {0, 1}, as nn::Loss::sum_count
  Tensor checked_;          // on a device: the sum of the losses times 0, and zeros up to norm_block
  bool checks_ = false;     // on a device: a loss was added to checked_ since reset()
};

/// Two words by which a sum over the ranks, that is made anyway, compares a hash of each of `ranks` ranks.
/// Their sums do not overflow.
std::array<std::int64_t, 2> compared_words(std::uint64_t hash, int ranks);
/// From the sums of the words: false if hashes differ, the same on every rank. By chance, once in 2^29 on two
/// ranks and in 2^24 on 4,096, hashes that differ are not noticed.
bool hashes_are_equal(const std::array<std::int64_t, 2>& sums, int ranks);

/// Decides how an update scales the gradients (number of terms of the loss, clipping, loss scale), and
/// whether it is skipped. If the gradients are on a device, the device decides.
class StepControl {
 public:
  StepControl(const ShardedModel&, Runtime&);

  UpdateSettings& settings() { return settings_; }
  /// On a device: writes the settings to its memory, where updates in a graph read them, unless they are
  /// there. Errc::invalid_argument if they would change while the stream is captured: the graph would always
  /// write the same ones.
  void write_settings(const Stream&);

  // ---- the loss
  /// Weights of the micro-batches.
  LossTerms& terms() { return terms_; }
  /// UpdateSettings::loss_gradient().
  float loss_gradient() const;
  /// The same in device memory.
  Tensor device_loss_gradient(const Stream&);

  // ---- an update
  /// L2 norm of all gradients, as means over the terms of the loss, without the loss scale. Collective.
  double norm(const Stream&);
  /// Scales the gradients of the next update that is not decided by decide(). Returns norm(). Collective.
  double clip(double max_norm, const Stream&);
  /// There are new gradients; clip() applies to earlier ones.
  void reset_clipping() { clip_factor_ = 1; }
  struct Decision {
    bool differs = false;  ///< ranks have different hashes; on a device unknown: false
    bool skip = false;     ///< on a device unknown: false
    UpdateScale scale{};
  };
  /// The scale of an update after clip(). `hash` covers all that must be equal on all ranks. Collective.
  Decision scale(std::uint64_t hash, const Stream&);
  /// Sums the squares and decides on one update. Collective; on a device the host does not wait, and ignores
  /// the hash.
  Decision decide(std::uint64_t hash, const Stream&);
  /// The last decision. On a device this waits, as Communicator::synchronize() does. Errc::invalid_argument
  /// if there is none.
  StepOutcome outcome(const Stream&);

 private:
  /// What an update on a device reads.
  struct DeviceSettings {
    StepLimits limits;
    float loss_gradient = 1;  ///< factor of Tape::backward()
    bool operator==(const DeviceSettings&) const = default;
  };
  bool is_counted() const { return terms_.counted() != LossTerms::Counted::nothing; }
  bool is_meta() const;
  /// Sums of an update: of squares, and of weights if they were counted.
  std::size_t summed() const { return is_counted() ? 2 : 1; }
  void add_squares(SquareSum&) const;
  ExactSum terms(const Stream&) const;
  /// The sums over the ranks, in one call of the communicator. False if their hashes differ, which are
  /// compared if there is one.
  bool all_reduce(std::span<ExactSum> sums, std::optional<std::uint64_t> hash);
  StepOutcome outcome_of(std::span<ExactSum, 2> sums, const StepLimits&) const;
  Decision decide_on_device(const Stream&);

  const ShardedModel& model_;
  Runtime& runtime_;
  UpdateSettings settings_;
  double clip_factor_ = 1;
  LossTerms terms_;
  std::vector<std::int64_t> exact_words_;  // kept so that an update allocates nothing
  StepOutcome outcome_;                    // in host memory
  // In device memory:
  Tensor norm_words_;       // squares of this rank
  Tensor sums_;             // squares and terms of all ranks
  Tensor device_outcome_;   // StepOutcome
  Tensor device_settings_;  // DeviceSettings
  std::optional<DeviceSettings> written_;
};

}  // namespace rz
