#pragma once
/// What DeepSpeed 0.19.8 itself did: the runs of tests/data/deepspeed, and those of the shared fixture
/// "deepspeed", which are read alike.

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tensor/tensor.h"

namespace rz::test {

/// A run; every list has one entry for each update.
struct DeepSpeedRun {
  int ranks = 1;
  std::string config;            ///< JSON
  std::vector<double> lr, loss;  ///< loss: mean over the micro-batches and ranks
  /// Before clipping; none where DeepSpeed computes none, and of skipped updates.
  std::vector<std::optional<double>> grad_norm;
  std::vector<int> skipped;   ///< 0 or 1
  std::vector<double> scale;  ///< of the losses
  /// Mean and standard deviation over draws of rounding (tests/data/deepspeed/README.md): of runs in 16 bits,
  /// and of the shared fixtures.
  std::vector<double> loss_mean, loss_deviation;
  std::vector<std::optional<double>> norm_mean, norm_deviation;
};

/// In place: each value becomes the nearest one of the precision.
void round_to(DType precision, std::span<float> values);

DeepSpeedRun read_deepspeed_run(const std::string& path);

/// tests/data/deepspeed/NAME.json; it starts as the case "tiny" of tests/data/gpt2_tiny does.
DeepSpeedRun own_deepspeed_run(const std::string& name);
/// A run of the shared fixture, with the spread of rounding from tests/data/deepspeed/spread.
DeepSpeedRun shared_deepspeed_run(const std::string& name);
/// The names of the runs of tests/data/deepspeed, sorted.
std::vector<std::string> own_deepspeed_runs();

/// Number of updates at which the loss or the norm is beyond the bound of a run in 16 bits. Norms of skipped
/// updates do not count.
///
/// A model in 16 bits stores each activation, each gradient and each working value rounded. The sums between
/// them are in f32, in an order that is up to the implementation. Two right implementations therefore differ
/// as two draws of rounding errors do: independent ones, within a unit in the last place, which training
/// amplifies. loss_deviation and norm_deviation measure just that, by training in double with stochastic
/// rounding, whose variance is twice that of rounding to nearest. Seven deviations are the bound: DeepSpeed's
/// losses are within three, its norms within five; ours are within six with every kernel of OpenBLAS that was
/// tried. Ten draws leave a deviation uncertain by a quarter, so that of three neighbouring updates together
/// is used where it is larger.
int beyond_rounding(const DeepSpeedRun&, const std::vector<double>& loss, const std::vector<double>& norm);

/// The folder of the shared fixture, or empty if it does not lie beside the sources.
std::string shared_deepspeed_folder();

}  // namespace rz::test
