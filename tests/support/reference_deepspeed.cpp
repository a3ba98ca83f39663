#include "tests/support/reference_deepspeed.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "sharding/io/json.h"
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

}  // namespace

DeepSpeedRun read_deepspeed_run(const std::string& path) {
  const nlohmann::json run = parse_json(read_text_file(path), path, JsonDialect::strict);
  return {.config = run.at("config").dump(),
          .lr = run.at("lr"),
          .loss = run.at("loss"),
          .grad_norm = optional_numbers(run, "grad_norm"),
          .skipped = run.at("skipped"),
          .scale = run.at("scale"),
          .loss_mean = numbers(run, "loss_mean"),
          .loss_deviation = numbers(run, "loss_deviation"),
          .norm_mean = optional_numbers(run, "norm_mean"),
          .norm_deviation = optional_numbers(run, "norm_deviation")};
}

DeepSpeedRun own_deepspeed_run(const std::string& name) {
  return read_deepspeed_run(own_folder + name + ".json");
}

std::vector<std::string> own_deepspeed_runs() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(own_folder))
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem());
  std::ranges::sort(names);
  return names;
}

int beyond_rounding(const DeepSpeedRun& run, const std::vector<double>& loss,
                    const std::vector<double>& norm) {
  const auto near = [](double value, double mean, double deviation) {
    return std::abs(value - mean) <= 5 * deviation;
  };
  int beyond = 0;
  for (std::size_t s = 0; s < run.lr.size(); ++s) {
    const bool norm_near = !run.norm_mean[s] || near(norm.at(s), *run.norm_mean[s], *run.norm_deviation[s]);
    beyond += !norm_near || !near(loss.at(s), run.loss_mean[s], run.loss_deviation[s]);
  }
  return beyond;
}

std::string shared_deepspeed_folder() {
  const fs::path path = fs::path(RZ_SOURCE_DIR) / "../shared/fixtures/deepspeed";
  return fs::exists(path) && !shared_fixture::folder().empty() ? path.string() + "/" : "";
}

}  // namespace rz::test
