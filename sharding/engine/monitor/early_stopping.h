#pragma once
/// The end of a training that has stopped to improve.

#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "sharding/io/json.h"

namespace rz {

/// Decides when training stops, by the rule of Hugging Face's EarlyStoppingCallback: after
/// `early_stopping_patience` evaluations in a row that are not better than the best one before by more than
/// `early_stopping_threshold`. A value that is better by less becomes the best one, but does not restart the
/// count.
class EarlyStopping {
 public:
  struct Options {
    int early_stopping_patience = 1;
    double early_stopping_threshold = 0;
    bool greater_is_better = false;  ///< false for a loss
  };
  /// Errc::config unless the patience is positive and the threshold finite and not negative.
  explicit EarlyStopping(Options);

  /// Called after every evaluation, with a metric that is equal on all ranks; true if training is to stop.
  bool update(double metric);
  bool should_stop() const { return patience_counter_ >= options_.early_stopping_patience; }

  /// What a resumed run needs: "best_metric" and "early_stopping_patience_counter".
  nlohmann::json state() const;
  /// Errc::config names the file and the key of a value that is missing or wrong; nothing is changed then.
  void load_state(const JsonObject&);

 private:
  Options options_;
  std::optional<double> best_;
  int patience_counter_ = 0;
};

}  // namespace rz
