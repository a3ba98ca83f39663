#pragma once
/// Reports of updates, and a JSON line per update in a file.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "../parallel/traffic.h"

namespace rz::lm {

struct UpdateReport {
  std::uint64_t step = 0;  ///< from 0
  double loss = 0;         ///< mean over the global batch
  double grad_norm = 0;    ///< before clipping
  double lr = 0;
  double tokens_per_second = 0;  ///< of all ranks
  double step_ms = 0;
  /// Waited for communication on this rank; NaN in a graph replay, where it cannot be measured.
  double exposed_comm_ms = 0;
  double loss_scale = 0;            ///< f16 only; 0: no loss scaling
  bool skipped = false;             ///< the update was skipped
  bool without_terms = false;       ///< because no rank has counted a target; else for gradients not finite
  std::optional<double> eval_loss;  ///< if the model was evaluated after this update
  std::string diverged{};           ///< why the run ends with this update; empty: it does not
  MeshTraffic sent{};               ///< collectives of this rank; none in a graph replay
};

/// One line without newline; 17 significant digits for loss and norm. Values that are not finite become null.
std::string to_json(const UpdateReport&);

/// Errc::diverged unless `diverged` is empty, with it, loss and norm, and a remedy.
void require_finite(const UpdateReport&);

class MetricsLog {
 public:
  /// Writes nothing if `path` is empty. Errc::io if the file cannot be created. `first_step`: of a run that
  /// is resumed; lines of earlier steps stay, those of later ones are removed.
  explicit MetricsLog(const std::string& path, std::uint64_t first_step = 0);
  void write(const UpdateReport&);

 private:
  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

}  // namespace rz::lm
