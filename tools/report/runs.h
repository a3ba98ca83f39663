#pragma once
/// Runs as train_lm --metrics writes them, and what stands out in them.

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace rz::report {

/// A line of metrics; NaN: absent, or null.
struct Update {
  double step = 0;  ///< counted from 1
  double loss, grad_norm, lr, tokens_per_second, step_ms, exposed_comm_ms, eval_loss;
};

struct Run {
  std::string name;
  std::vector<Update> updates;
};

/// `word`: FILE or FILE=NAME. Without a name it is that of the file, or for a metrics.jsonl that of its
/// folder. Keys that are not known are ignored, and so is a last line without an end, which is being written.
/// Errc::config in one line, "FILE:LINE: …", for anything that is no object, for a value that is no number up
/// to 1e100, and for a step that is not after the one before; also for a file without lines.
Run read_run(const std::string& word);

/// A value of each update.
std::vector<double> column(const Run&, double Update::*value);

/// Which of the values stand out upwards: those that are not finite though one before is, and those that
/// exceed the median m of the 50 finite values before (at least 10) by more than 6 times their scaled median
/// absolute deviation, 1.4826 MAD (Leys et al., doi:10.1016/j.jesp.2013.03.013), and by more than 2 % of m.
std::vector<std::size_t> outliers(const std::vector<double>&);

/// The median of the finite values; NaN if there are none.
double median(std::vector<double>);

/// Exponential moving average in which a value has the weight `keep` of what was before, without the bias of
/// its beginning, as TensorBoard smooths. Values that are not finite stay.
std::vector<double> smoothed(const std::vector<double>&, double keep);

/// A table for people: losses, speed and outliers of each run.
std::string table_of(const std::vector<Run>&);

}  // namespace rz::report
