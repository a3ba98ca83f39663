#pragma once
/// Runs as a picture.

#include <string>
#include <vector>

#include "tools/report/runs.h"

namespace rz::report {

struct ChartOptions {
  std::string title;
  double smoothing = 0.6;    ///< of smoothed(); what was measured is drawn paler behind; 0: neither
  bool logarithmic = false;  ///< axes of loss and norm
};

/// An SVG of its own: loss with evaluations, norm, learning rate, tokens/s and exposed communication by
/// update, a colour for each run. Outliers of loss and norm are marked by triangles; they do not decide on
/// the axes, and stand at the edge if they are beyond.
std::string draw(const std::vector<Run>&, const ChartOptions&);

/// Round numbers, 1, 2 or 5 times a power of ten apart, about `count` of them from `low` to `high`, which
/// may lie between two of them.
std::vector<double> linear_ticks(double low, double high, int count);

}  // namespace rz::report
