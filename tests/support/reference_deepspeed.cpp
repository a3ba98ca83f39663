#include "tests/support/reference_deepspeed.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "comm/core/text.h"
#include "sharding/io/json.h"
#include "tensor/ops.h"
#include "tests/support/shared_fixture.h"

namespace rz::test {
namespace {

namespace fs = std::filesystem;
const std::string own_folder = RZ_SOURCE_DIR "/tests/data/deepspeed/";

std::vector<double> numbers(const nlohmann::json& run, const char* key) {
  return run.contains(key) ? run.at(key).get<std::vector<double>>() : std::vector<double>();
}

std::vector<std::optional<double>> optional_numbers(const nlohmann::json& run, const char* key) {
  std::vector<std::optional<double>> out;
  if (run.contains(key))
    for (const auto& x : run.at(key)) out.push_back(x.is_null() ? std::nullopt : std::optional<double>(x));
  return out;
}

void read_spread(DeepSpeedRun& out, const nlohmann::json& from) {
  out.loss_mean = numbers(from, "loss_mean");
  out.loss_deviation = numbers(from, "loss_deviation");
  out.norm_mean = optional_numbers(from, "norm_mean");
  out.norm_deviation = optional_numbers(from, "norm_deviation");
}

double value_of(double deviation) { return deviation; }
double value_of(const std::optional<double>& deviation) { return deviation.value_or(0); }

/// The deviation of an update, or that of its neighbours and it together where it is larger.
template <typename T>
double deviation_at(const std::vector<T>& deviations, std::size_t update) {
  const std::size_t first = update == 0 ? 0 : update - 1, end = std::min(update + 2, deviations.size());
  double squares = 0;
  int count = 0;
  for (std::size_t s = first; s < end; ++s) {
    const double deviation = value_of(deviations[s]);
    squares += deviation * deviation, count += deviation > 0;
  }
  return std::max(value_of(deviations[update]), std::sqrt(squares / std::max(count, 1)));
}

}  // namespace

void round_to(DType precision, std::span<float> values) {
  const Tensor whole = Tensor::borrow(values.data(), {values.size()});
  const Tensor rounded = Tensor::empty({values.size()}, precision);
  ops::copy(rounded, whole, {});
  ops::copy(whole, rounded, {});
}

DeepSpeedRun read_deepspeed_run(const std::string& path) {
  const nlohmann::json run = parse_json(read_text_file(path), path, JsonDialect::strict);
  DeepSpeedRun out{.ranks = run.value("ranks", 1),
                   .config = run.at("config").dump(),
                   .lr = run.at("lr"),
                   .loss = run.at("loss"),
                   .grad_norm = optional_numbers(run, "grad_norm"),
                   .skipped = run.at("skipped"),
                   .scale = run.at("scale")};
  read_spread(out, run);
  return out;
}

DeepSpeedRun own_deepspeed_run(const std::string& name) {
  return read_deepspeed_run(own_folder + name + ".json");
}

DeepSpeedRun shared_deepspeed_run(const std::string& name) {
  DeepSpeedRun run = read_deepspeed_run(concat(shared_deepspeed_folder(), name, ".json"));
  const std::string spread = concat(own_folder, "spread/", name, ".json");
  read_spread(run, parse_json(read_text_file(spread), spread, JsonDialect::strict));
  return run;
}

std::vector<std::string> own_deepspeed_runs() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(own_folder))
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem());
  std::ranges::sort(names);
  return names;
}

/// Ten draws have Student's t of nine degrees of freedom: 5 is exceeded once in 1,400 comparisons, 7 once in
/// 16,000, and the runs have more than 1,000.
constexpr double bound_in_deviations = 7;

int beyond_rounding(const DeepSpeedRun& run, const std::vector<double>& loss,
                    const std::vector<double>& norm) {
  int beyond = 0;
  for (std::size_t s = 0; s < run.lr.size(); ++s) {
    const bool norm_near = !run.norm_mean[s] || std::abs(norm.at(s) - *run.norm_mean[s]) <=
                                                    bound_in_deviations * deviation_at(run.norm_deviation, s);
    const bool loss_near =
        std::abs(loss.at(s) - run.loss_mean[s]) <= bound_in_deviations * deviation_at(run.loss_deviation, s);
    beyond += !norm_near || !loss_near;
  }
  return beyond;
}

std::string shared_deepspeed_folder() {
  const fs::path path = fs::path(RZ_SOURCE_DIR) / "../shared/fixtures/deepspeed";
  return fs::exists(path) && !shared_fixture::folder().empty() ? path.string() + "/" : "";
}

}  // namespace rz::test
