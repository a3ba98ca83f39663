#pragma once
/// What surrounds the passes of an update: loss scale, learning rates, the optimizer, updates that are
/// skipped.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "sharding/config/ds_config.h"
#include "sharding/config/lr_schedule.h"
#include "sharding/engine/reports/step_report.h"
#include "sharding/engine/reports/update_losses.h"
#include "sharding/optim/loss_scaler.h"
#include "sharding/optim/optimizer.h"
#include "sharding/strategy/strategy.h"

namespace rz {

/// Errc::invalid_argument for a schedule that check(LrSchedule) refuses, and for one of a momentum that the
/// optimizer does not have.
void check(const LrSchedule&, const Optimizer&);

/// Sets the rates of all groups from a schedule, their betas if it cycles them and the group has some, or
/// their momentum. A constant schedule and ReduceLrOnPlateau set none, so that a loop may set them by hand.
class ScheduledRates {
 public:
  /// The base rates are those that the optimizer has now. Errc::invalid_argument as check().
  ScheduledRates(LrSchedule, const Optimizer&);

  /// The rates and betas after `step` steps of the schedule.
  void apply(std::int64_t step, Optimizer&) const;
  /// Of ReduceLrOnPlateau: counts a metric, and reduces the rates of the optimizer. Errc::invalid_argument
  /// for another schedule.
  void step(double metric, Optimizer&);
  /// Empty unless the schedule is ReduceLrOnPlateau.
  const std::optional<PlateauState>& plateau() const { return plateau_; }
  /// Nothing for another schedule.
  void set_plateau(const PlateauState&);
  /// False if a loop may set the rates by hand.
  bool scheduled() const;
  /// By group.
  const std::vector<double>& base_rates() const { return base_rates_; }

 private:
  LrSchedule schedule_;
  std::vector<double> base_rates_;
  std::optional<PlateauState> plateau_;
};

/// Makes the updates of a strategy by a configuration.
class TrainingStep {
 public:
  TrainingStep(Strategy&, std::unique_ptr<Optimizer>, LrSchedule, ScheduleUnit, const DsConfig&);

  /// Before the first pass of an update: loss scale and rates. On a device it also counts the update, for
  /// kernels that read the number.
  void set_scale_and_rates(const Stream&);
  /// After set_scale_and_rates(): the update was dropped.
  void cancel();
  /// After Strategy::clip_and_step() or a replay of it: what it did. Adjusts the loss scale. The report is
  /// complete, and the parameters are as before, at Errc::diverged: a loss was not finite; or the gradients
  /// were not, and the configuration does not skip such updates; or max_skipped_updates were skipped in a
  /// row; or the loss scale cannot fall further. The culprit is the rank whose loss is not finite, if there
  /// is one such rank. Collective.
  void complete(const Stream&, StepReport&, const UpdateLosses&, Communicator&);

  Optimizer& optimizer() { return *optimizer_; }
  /// Counts an epoch, for schedules by epoch.
  void end_epoch() { ++epochs_; }
  /// ScheduledRates::step().
  void step_scheduler(double metric) { rates_.step(metric, *optimizer_); }
  double loss_scale() const { return scaler_ ? scaler_->scale() : 1; }
  const ScheduledRates& rates() const { return rates_; }

  /// What changes from update to update, besides the optimizer; for checkpoints.
  struct State {
    std::int64_t epochs = 0;
    std::optional<LossScaler::State> scaler;
    std::optional<PlateauState> plateau;
    std::int64_t skipped_in_a_row = 0;  ///< up to the last update
    bool operator==(const State&) const = default;
  };
  State state() const;
  /// A scaler, or a plateau, that only one of both has keeps its state.
  void set_state(const State&);

 private:
  /// The update was skipped because no rank has counted a term.
  void skip_without_terms(StepReport&) const;

  Strategy& strategy_;
  std::unique_ptr<Optimizer> optimizer_;
  ScheduledRates rates_;
  ScheduleUnit schedule_unit_;
  std::int64_t epochs_ = 0;
  std::optional<LossScaler> scaler_;  // f16 only, of parameters or autocast
  bool skip_overflow_;
  bool counted_ = false;      // on a device: set_scale_and_rates() has counted the update in the optimizer
  std::int64_t max_skipped_;  // in a row; 0: any number
  std::int64_t skipped_ = 0;  // in a row, up to the last update
};

}  // namespace rz
