#include "tools/report/runs.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz::report {
namespace {

constexpr double none = std::numeric_limits<double>::quiet_NaN();
/// Axes have room for their differences and quotients.
constexpr double huge = 1e100;

double number_or_none(const JsonObject& line, const char* key) {
  if (!line.has(key) || line.at(key).is_null()) return none;
  const double value = line.number(key, none, -huge, huge);
  return std::abs(value) < 1 / huge ? 0 : value;
}

Update update_of(std::string_view text, const std::string& place) {
  const nlohmann::json document = parse_json(text, place, JsonDialect::strict);
  const JsonObject line(document, place);
  return {.step = static_cast<double>(line.required_integer("step", 0, std::int64_t{1} << 53)) + 1,
          .loss = number_or_none(line, "loss"),
          .grad_norm = number_or_none(line, "grad_norm"),
          .lr = number_or_none(line, "lr"),
          .tokens_per_second = number_or_none(line, "tokens_per_second"),
          .step_ms = number_or_none(line, "step_ms"),
          .exposed_comm_ms = number_or_none(line, "exposed_comm_ms"),
          .eval_loss = number_or_none(line, "eval_loss")};
}

std::string name_of(const std::string& path) {
  const std::filesystem::path file = std::filesystem::absolute(path);
  const bool usual = file.filename() == "metrics.jsonl" && file.parent_path().has_filename();
  return usual ? file.parent_path().filename().string() : file.stem().string();
}

std::vector<double> finite(std::vector<double> values) {
  std::erase_if(values, [](double x) { return !std::isfinite(x); });
  return values;
}

}  // namespace

Run read_run(const std::string& word) {
  const std::size_t equals = word.find('=');
  const std::string path = word.substr(0, equals);
  Run run{.name = equals == word.npos ? name_of(path) : word.substr(equals + 1), .updates = {}};
  constexpr std::size_t max_bytes = std::size_t{1} << 30;
  const std::string text = read_text_file(path, max_bytes);
  std::size_t number = 0;
  for (std::size_t begin = 0, end; (end = text.find('\n', begin)) != text.npos; begin = end + 1) {
    const std::string place = concat(escaped(path), ":", ++number);
    run.updates.push_back(update_of(std::string_view(text).substr(begin, end - begin), place));
    const std::size_t all = run.updates.size();
    require(all == 1 || run.updates[all - 2].step < run.updates.back().step, Errc::config, place, ": step ",
            run.updates.back().step - 1, " follows step ", all == 1 ? 0 : run.updates[all - 2].step - 1,
            "; give each run a file of its own");
  }
  require(!run.updates.empty(), Errc::config, escaped(path),
          ": no whole line; give a file that train_lm --metrics has written");
  return run;
}

std::vector<double> column(const Run& run, double Update::*value) {
  std::vector<double> all;
  for (const Update& u : run.updates) all.push_back(u.*value);
  return all;
}

double median(std::vector<double> values) {
  values = finite(std::move(values));
  if (values.empty()) return none;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

std::vector<std::size_t> outliers(const std::vector<double>& values) {
  constexpr std::size_t window = 50, min_window = 10;
  std::vector<std::size_t> found;
  std::vector<double> before;  // at most `window` finite values
  bool any = false;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double x = values[i];
    if (!std::isfinite(x)) {
      if (any) found.push_back(i);
      continue;
    }
    any = true;
    if (before.size() >= min_window) {
      const double middle = median(before);
      std::vector<double> deviations;
      for (const double b : before) deviations.push_back(std::abs(b - middle));
      const double limit = std::max(6 * 1.4826 * median(deviations), 0.02 * std::abs(middle));
      if (x - middle > limit) found.push_back(i);
    }
    if (before.size() == window) before.erase(before.begin());
    before.push_back(x);
  }
  return found;
}

std::vector<double> smoothed(const std::vector<double>& values, double keep) {
  std::vector<double> out;
  double sum = 0, weight = 0;
  for (const double x : values) {
    if (!std::isfinite(x)) {
      out.push_back(x);
      continue;
    }
    sum = keep * sum + (1 - keep) * x;
    weight = keep * weight + (1 - keep);
    out.push_back(sum / weight);
  }
  return out;
}

// ---- the table

namespace {

std::string or_dash(double x, int decimals) { return std::isfinite(x) ? fixed(x, decimals) : "-"; }

/// "3 (120, 121, 340)": updates, at most four of them.
std::string listed_updates(const Run& run, const std::vector<std::size_t>& at) {
  if (at.empty()) return "0";
  std::string text = concat(at.size(), " (");
  for (std::size_t i = 0; i < std::min<std::size_t>(at.size(), 4); ++i)
    text += concat(i == 0 ? "" : ", ", run.updates[at[i]].step);
  return text + (at.size() > 4 ? ", …)" : ")");
}

std::vector<std::string> row_of(const Run& run) {
  const auto last = [](const std::vector<double>& values) { return values.empty() ? none : values.back(); };
  const auto best = [](const std::vector<double>& values) {
    return values.empty() ? none : *std::ranges::min_element(values);
  };
  const auto losses = finite(column(run, &Update::loss)), evals = finite(column(run, &Update::eval_loss));
  const double speed = median(column(run, &Update::tokens_per_second));
  std::vector<double> exposed;
  for (const Update& u : run.updates) exposed.push_back(100 * u.exposed_comm_ms / u.step_ms);
  const double part = median(exposed);
  return {run.name,
          concat(run.updates.back().step),
          or_dash(last(losses), 4),
          or_dash(best(losses), 4),
          or_dash(last(evals), 4),
          or_dash(best(evals), 4),
          or_dash(speed, 0),
          std::isfinite(part) ? concat(fixed(part, 1), " %") : "-",
          listed_updates(run, outliers(column(run, &Update::loss))),
          listed_updates(run, outliers(column(run, &Update::grad_norm)))};
}

/// Characters of UTF-8.
std::size_t width_of(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

}  // namespace

std::string table_of(const std::vector<Run>& runs) {
  std::vector<std::vector<std::string>> rows{{"run", "updates", "last loss", "best loss", "last eval",
                                              "best eval", "tokens/s, median", "exposed, median",
                                              "outliers of loss", "of norm"}};
  for (const Run& run : runs) rows.push_back(row_of(run));
  std::string table;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      std::size_t width = 0;
      for (const auto& other : rows) width = std::max(width, width_of(other[c]));
      const std::string space(width - width_of(row[c]), ' ');
      const bool is_text = c == 0 || c + 2 >= row.size();
      line += concat(c == 0 ? "" : "  ", is_text ? row[c] + space : space + row[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    table += line + "\n";
  }
  return table;
}

}  // namespace rz::report
