#include "tools/report/chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "comm/core/text.h"

namespace rz::report {
namespace {

// Okabe and Ito's colours, which people with any kind of colour vision tell apart, then two more.
constexpr std::array colours = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                "#56b4e9", "#e69f00", "#8c6bb1", "#4d4d4d"};
constexpr const char *ink = "#1f2933", *pale_ink = "#6b7785", *grid_colour = "#e6eaef",
                     *axis_colour = "#9aa5b1";

constexpr double panel_left = 76, panel_right = 24, panel_gap = 72, page_width = 1200;
constexpr double tall = 340, low = 190;

std::string xml(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '"')
      out += "&quot;";
    else if (static_cast<unsigned char>(c) >= 0x20)
      out += c;
  }
  return out;
}

std::string at(double x) { return rounded(std::round(x * 100) / 100, 8); }

std::string text(double x, double y, const std::string& words, const char* anchor, int size,
                 const char* colour, const char* more = "") {
  return concat("<text x=\"", at(x), "\" y=\"", at(y), "\" font-size=\"", size, "\" text-anchor=\"", anchor,
                "\" fill=\"", colour, "\"", more, ">", xml(words), "</text>\n");
}

std::string line(double x1, double y1, double x2, double y2, const char* colour) {
  return concat("<line x1=\"", at(x1), "\" y1=\"", at(y1), "\" x2=\"", at(x2), "\" y2=\"", at(y2),
                "\" stroke=\"", colour, "\"/>\n");
}

/// 12k, 1.5M, 0.002.
std::string tick_text(double x) {
  const double size = std::abs(x);
  if (size >= 1e6) return concat(rounded(x / 1e6, 4), "M");
  if (size >= 1e4) return concat(rounded(x / 1e3, 4), "k");
  return rounded(x, 4);
}

/// 1, 2 and 5 times the powers of ten from `low` to `high`; powers alone if these are many.
std::vector<double> log_ticks(double low_end, double high_end) {
  std::vector<double> all;
  const auto first = static_cast<int>(std::floor(std::log10(low_end)));
  const auto last = static_cast<int>(std::ceil(std::log10(high_end)));
  for (int power = first; power <= last; ++power)
    for (const double m : {1.0, 2.0, 5.0}) {
      const double tick = m * std::pow(10, power);
      if ((m > 1 && last - first > 3) || tick < low_end * (1 - 1e-9) || tick > high_end * (1 + 1e-9))
        continue;
      all.push_back(tick);
    }
  return all.size() >= 4 ? all : linear_ticks(low_end, high_end, 5);
}

/// From values to a coordinate.
struct Axis {
  double low, high, begin, end;
  bool logarithmic = false;
  double operator()(double v) const {
    const auto scale = [&](double x) { return logarithmic ? std::log(std::max(x, 1e-300)) : x; };
    return begin + (scale(v) - scale(low)) / (scale(high) - scale(low)) * (end - begin);
  }
};

struct Panel {
  const char* title;
  double Update::*value;
  bool from_zero, marks, logarithmic;
  double left, top, width, height;
};

struct Series {
  const Run* run;
  const char* colour;
  std::vector<double> values{}, smooth{}, evals{};
  std::vector<std::size_t> outliers{};
};

/// Whether any series has a value that can be drawn.
struct Extent {
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();
  void add(double x, bool positive) {
    if (!std::isfinite(x) || (positive && x <= 0)) return;
    low = std::min(low, x), high = std::max(high, x);
  }
  bool empty() const { return low > high; }
};

/// The extent of all values but the outliers.
Extent extent_of(const std::vector<Series>& all, const Panel& panel) {
  Extent extent;
  for (const Series& s : all) {
    for (std::size_t i = 0; i < s.values.size(); ++i)
      if (!std::ranges::binary_search(s.outliers, i)) extent.add(s.values[i], panel.logarithmic);
    for (const double x : s.evals) extent.add(x, panel.logarithmic);
  }
  if (extent.empty()) return extent;
  if (panel.logarithmic) {
    extent.low /= 1.05, extent.high *= 1.05;
    return extent;
  }
  if (panel.from_zero) extent.low = std::min(extent.low, 0.0);
  const double size = extent.high - extent.low;
  const double margin = size > 0 ? 0.05 * size : std::max(0.05 * std::abs(extent.high), 1e-12);
  if (!panel.from_zero || extent.low < 0) extent.low -= margin;
  extent.high += margin;
  return extent;
}

/// At most two points a pixel: the lowest and the highest of its values, so that no peak is lost.
std::string path_of(const Run& run, const std::vector<double>& values, const Axis& x, const Axis& y,
                    double top, double bottom) {
  std::string path;
  bool pen = false;
  std::size_t i = 0;
  const auto draw_to = [&](std::size_t k) {
    const double height = std::clamp(y(values[k]), top, bottom);
    path += concat(pen ? "L" : "M", at(x(run.updates[k].step)), " ", at(height));
    pen = true;
  };
  while (i < values.size()) {
    if (!std::isfinite(values[i])) {
      pen = false;
      ++i;
      continue;
    }
    const double pixel = std::floor(x(run.updates[i].step));
    std::size_t lowest = i, highest = i;
    for (; i < values.size() && std::isfinite(values[i]) && std::floor(x(run.updates[i].step)) == pixel;
         ++i) {
      if (values[i] < values[lowest]) lowest = i;
      if (values[i] > values[highest]) highest = i;
    }
    draw_to(std::min(lowest, highest));
    if (lowest != highest) draw_to(std::max(lowest, highest));
  }
  return path;
}

std::string curve(const std::string& path, const char* colour, double width, double opacity,
                  const char* more) {
  if (path.empty()) return "";
  return concat("<path d=\"", path, "\" fill=\"none\" stroke=\"", colour, "\" stroke-width=\"", at(width),
                "\" stroke-opacity=\"", at(opacity), "\" stroke-linejoin=\"round\" stroke-linecap=\"round\"",
                more, "/>\n");
}

std::string grid(const Panel& p, const Axis& x, const Axis& y) {
  const double bottom = p.top + p.height, right = p.left + p.width;
  std::string out = text(p.left, p.top - 14, p.title, "start", 14, ink, " font-weight=\"600\"");
  const auto ticks =
      p.logarithmic ? log_ticks(y.low, y.high) : linear_ticks(y.low, y.high, p.height > 250 ? 7 : 4);
  for (const double tick : ticks) {
    out += line(p.left, y(tick), right, y(tick), grid_colour);
    out += text(p.left - 10, y(tick) + 4, tick_text(tick), "end", 11, pale_ink);
  }
  for (const double tick : linear_ticks(x.low, x.high, static_cast<int>(p.width / 110))) {
    out += line(x(tick), bottom, x(tick), bottom + 5, axis_colour);
    out += text(x(tick), bottom + 20, tick_text(tick), "middle", 11, pale_ink);
  }
  out += line(p.left, bottom, right, bottom, axis_colour);
  return out + text(right, bottom + 38, "update", "end", 11, pale_ink);
}

/// Triangles; those beyond the axis stand at its edge.
std::string marks_of(const Series& s, const Axis& x, const Axis& y, const Panel& p) {
  std::string out;
  for (const std::size_t i : s.outliers) {
    const double value = s.values[i], step = s.run->updates[i].step;
    const double centre = x(step);
    const double height =
        std::isfinite(value) ? std::clamp(y(value), p.top + 7, p.top + p.height) : p.top + 7;
    out += concat("<path d=\"M", at(centre - 5), " ", at(height + 4), "L", at(centre), " ", at(height - 5),
                  "L", at(centre + 5), " ", at(height + 4), "Z\" fill=\"", s.colour,
                  "\" stroke=\"white\"><title>update ", step, ": ",
                  std::isfinite(value) ? rounded(value, 6) : "not finite", "</title></path>\n");
  }
  return out;
}

std::string evaluations_of(const Series& s, const Axis& x, const Axis& y) {
  std::string path, dots;
  for (std::size_t i = 0; i < s.evals.size(); ++i) {
    if (!std::isfinite(s.evals[i])) continue;
    const std::string cx = at(x(s.run->updates[i].step)), cy = at(y(s.evals[i]));
    path += concat(path.empty() ? "M" : "L", cx, " ", cy);
    dots += concat("<circle cx=\"", cx, "\" cy=\"", cy, "\" r=\"3.6\" fill=\"white\" stroke=\"", s.colour,
                   "\" stroke-width=\"1.8\"><title>evaluation after update ", s.run->updates[i].step, ": ",
                   rounded(s.evals[i], 6), "</title></circle>\n");
  }
  return curve(path, s.colour, 1.4, 0.9, " stroke-dasharray=\"5 4\"") + dots;
}

/// Outliers have the value before them, so that the smooth curve shows the course beside them.
std::vector<double> without_outliers(const Series& s) {
  std::vector<double> values = s.values;
  for (const std::size_t i : s.outliers)
    if (i > 0 && std::isfinite(values[i])) values[i] = values[i - 1];
  return values;
}

std::string draw_panel(const Panel& p, const std::vector<Run>& runs, double smoothing) {
  std::vector<Series> all;
  Extent steps;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    Series s{.run = &runs[r], .colour = colours[r % colours.size()], .values = column(runs[r], p.value)};
    if (p.marks) s.outliers = outliers(s.values);
    s.smooth = smoothing > 0 ? smoothed(without_outliers(s), smoothing) : s.values;
    if (p.value == &Update::loss) s.evals = column(runs[r], &Update::eval_loss);
    for (const Update& u : runs[r].updates) steps.add(u.step, false);
    all.push_back(std::move(s));
  }
  const Extent extent = extent_of(all, p);
  const double bottom = p.top + p.height;
  if (extent.empty())
    return text(p.left, p.top - 14, p.title, "start", 14, ink, " font-weight=\"600\"") +
           text(p.left + p.width / 2, p.top + p.height / 2, "no values", "middle", 12, pale_ink);
  const double first = std::min(steps.low, 1.0), last = std::max(steps.high, first + 1);
  const Axis x{first, last, p.left, p.left + p.width};
  const Axis y{extent.low, extent.high, bottom, p.top, p.logarithmic};
  std::string out = grid(p, x, y);
  for (const Series& s : all) {
    if (smoothing > 0) out += curve(path_of(*s.run, s.values, x, y, p.top, bottom), s.colour, 1, 0.28, "");
    out += curve(path_of(*s.run, s.smooth, x, y, p.top, bottom), s.colour, 1.9, 1, "");
  }
  for (const Series& s : all) out += marks_of(s, x, y, p) + evaluations_of(s, x, y);
  return out;
}

/// A run a line of swatches, in rows that fit the page.
std::string legend(const std::vector<Run>& runs, double& y) {
  std::string out;
  double x = panel_left;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const double width = 44 + 7.2 * static_cast<double>(runs[r].name.size());
    if (x + width > page_width - panel_right && x > panel_left) x = panel_left, y += 22;
    out += concat("<line x1=\"", at(x), "\" y1=\"", at(y - 4), "\" x2=\"", at(x + 22), "\" y2=\"", at(y - 4),
                  "\" stroke=\"", colours[r % colours.size()],
                  "\" stroke-width=\"3\" stroke-linecap=\"round\"/>\n");
    out += text(x + 30, y, runs[r].name, "start", 13, ink);
    x += width + 14;
  }
  return out;
}

/// What the marks of this picture mean.
std::string key_of(const std::vector<Run>& runs, const ChartOptions& o) {
  std::string words;
  const auto add = [&](const std::string& what) { words += concat(words.empty() ? "" : "  ·  ", what); };
  const auto any = [&](double Update::*value, const auto& test) {
    return std::ranges::any_of(runs, [&](const Run& run) { return test(column(run, value)); });
  };
  const auto has_values = [](const std::vector<double>& v) {
    return std::ranges::any_of(v, [](double x) { return std::isfinite(x); });
  };
  const auto has_outliers = [](const std::vector<double>& v) { return !outliers(v).empty(); };
  if (any(&Update::eval_loss, has_values)) add("○ evaluation");
  if (any(&Update::loss, has_outliers) || any(&Update::grad_norm, has_outliers)) add("▲ outlier");
  if (o.smoothing > 0) add(concat("smoothed by ", rounded(o.smoothing, 3), ", measured values paler"));
  return words;
}

}  // namespace

std::vector<double> linear_ticks(double low_end, double high_end, int count) {
  if (!(high_end > low_end)) return {low_end};
  const double rough = (high_end - low_end) / std::max(count, 1);
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double m : {1.0, 2.0, 5.0})
    if (m * power >= rough * 0.999) {
      step = m * power;
      break;
    }
  std::vector<double> all;
  const auto first = static_cast<std::int64_t>(std::ceil(low_end / step - 1e-9));
  const auto last = static_cast<std::int64_t>(std::floor(high_end / step + 1e-9));
  for (std::int64_t k = first; k <= last; ++k) all.push_back(static_cast<double>(k) * step);
  return all;
}

std::string draw(const std::vector<Run>& runs, const ChartOptions& o) {
  double y = 72;
  std::string body = text(panel_left, 40, o.title, "start", 20, ink, " font-weight=\"700\"");
  body += text(page_width - panel_right, 40, key_of(runs, o), "end", 12, pale_ink);
  body += legend(runs, y);
  const double whole = page_width - panel_left - panel_right;
  const double half = (whole - panel_gap - panel_right) / 2,
               second = panel_left + half + panel_gap + panel_right;
  double top = y + 48;
  const auto add = [&](const char* title, double Update::*value, bool from_zero, bool marks, double left,
                       double width, double height) {
    const Panel p{title, value, from_zero, marks, o.logarithmic && marks, left, top, width, height};
    body += draw_panel(p, runs, o.smoothing);
  };
  add("Loss", &Update::loss, false, true, panel_left, whole, tall);
  top += tall + 88;
  add("Norm of the gradients", &Update::grad_norm, true, true, panel_left, half, low);
  add("Learning rate", &Update::lr, true, false, second, half, low);
  top += low + 88;
  add("Tokens per second", &Update::tokens_per_second, true, false, panel_left, half, low);
  add("Exposed communication, ms per update", &Update::exposed_comm_ms, true, false, second, half, low);
  const std::string width = at(page_width), height = at(top + low + 60);
  return concat("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", width, "\" height=\"", height,
                "\" viewBox=\"0 0 ", width, " ", height,
                "\" font-family=\"Inter, Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif\" "
                "role=\"img\">\n<title>",
                xml(o.title), "</title>\n<rect width=\"", width, "\" height=\"", height,
                "\" fill=\"white\"/>\n", body, "</svg>\n");
}

}  // namespace rz::report
