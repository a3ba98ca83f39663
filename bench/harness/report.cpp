#include "bench/harness/report.h"

#include <ctime>
#include <utility>

#include "bench/harness/variables.h"
#include "bench/support/numbers.h"
#include "comm/core/text.h"

namespace rz::bench {
namespace {

std::string figure_text(const Figure& f) {
  std::string text = "  " + fit_time(f.us) + "  " + fit_bandwidth(f.alg_bw) + "  " + fit_bandwidth(f.bus_bw);
  return text + (f.wrong ? format("  %6g", static_cast<double>(*f.wrong)) : "    N/A");
}

std::string percentiles_text(const Figure& f) {
  if (!f.slowest) return "";
  return "  " + fit_time(f.slowest->p50) + "  " + fit_time(f.slowest->p99) + "  " + fit_time(f.slowest->max);
}

std::string statistics(const char* placement, const std::vector<double>& us, int skipped) {
  const Summary s = summarize(us, skipped);
  if (s.count == 0) return concat("#   ", placement, ": no iterations left\n");
  return format("#   %s: %zu iterations of rank 0, us: min %.2f p50 %.2f mean %.2f p99 %.2f max %.2f\n",
                placement, s.count, s.min, s.p50, s.mean, s.p99, s.max);
}

}  // namespace

std::string now() {
  const std::time_t t = std::time(nullptr);
  std::tm local{};
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", localtime_r(&t, &local));
  return text;
}

std::string start_lines(const Collective& c, const Options& o) {
  const bool by_factor = o.step_factor > 1;
  return concat("# ringzero version ", RZ_VERSION, " ringzero-headers=", RZ_VERSION,
                " ringzero-library=", RZ_VERSION, "\n", "# Collective test starting: ", c.name, "_perf\n") +
         format(
             "# nThread %d nGpus %d minBytes %zu maxBytes %zu step: %ld(%s) warmup iters: %d iters: %d agg "
             "iters: %d "
             "validation: %d graph: %d unalign: %d\n#\n",
             o.threads, o.gpus, o.min_bytes, o.max_bytes,
             by_factor ? static_cast<long>(o.step_factor) : static_cast<long>(o.step_bytes),
             by_factor ? "factor" : "bytes", o.warmup, o.iterations, o.aggregated, o.checks, o.graph,
             o.misalign);
}

std::string device_lines(const std::vector<DeviceLine>& devices) {
  std::string text = "# Using devices\n";
  for (const auto& d : devices)
    text += format("#  Rank %2d Group %2d Pid %6d on %10s device %2d [%04x:%02x:%02x] %s\n", d.rank, 0, d.pid,
                   d.host, d.local_rank, d.pci_domain, d.pci_bus, d.pci_device, d.processor);
  return text;
}

std::string header_lines(const Options& o) {
  constexpr const char* columns = "# %10s  %12s  %8s  %6s  %6s  %7s  %6s  %6s  %6s  %7s  %6s  %6s  %6s";
  const auto more = [&](const char* p50, const char* p99, const char* worst) {
    return o.percentiles ? format("  %7s  %7s  %7s  %7s  %7s  %7s", p50, p99, worst, p50, p99, worst) : "";
  };
  std::string text = "#\n";
  text +=
      format("# %10s  %12s  %8s  %6s  %6s           out-of-place                       in-place          ",
             "", "", "", "", "");
  if (o.percentiles) text += "        out-of-place (us)            in-place (us)    ";
  text += "\n" +
          format(columns, "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong",
                 "time", "algbw", "busbw", "#wrong") +
          more("p50", "p99", "worst") + (o.timestamps ? format("  %19s\n", "timestamp") : "\n");
  return text +
         format(columns, "(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(GB/s)",
                "(GB/s)", "") +
         more("(us)", "(us)", "(us)") + "\n";
}

std::string row_line(const Row& r) {
  return format("%12zu  %12zu  %8s  %6s  %6s", r.bytes, r.count, r.type.c_str(), r.op.c_str(),
                concat(r.root).c_str()) +
         figure_text(r.out_of_place) + figure_text(r.in_place) + percentiles_text(r.out_of_place) +
         percentiles_text(r.in_place) + (r.when.empty() ? "" : "  " + r.when) + "\n";
}

std::string sample_lines(const Row& r, int skipped) {
  return statistics("out-of-place", r.out_of_place.samples, skipped) +
         statistics("in-place", r.in_place.samples, skipped);
}

void Results::add(Row r) {
  bus_bandwidths_ += r.out_of_place.bus_bw + r.in_place.bus_bw;
  figures_ += 2;
  rows.push_back(std::move(r));
}

double Results::average_bus_bandwidth() const {
  return figures_ == 0 ? 0 : bus_bandwidths_ / static_cast<double>(figures_);
}

bool Results::too_slow() const {
  return min_bandwidth && average_bus_bandwidth() < enough_bandwidth * *min_bandwidth;
}

std::string Results::closing_lines(const Collective& c) const {
  return concat("# Out of bounds values : ", failed_checks, failed_checks ? " FAILED\n" : " OK\n") +
         format("# Avg bus bandwidth    : %g %s\n", average_bus_bandwidth(),
                !min_bandwidth ? ""
                : too_slow()   ? "FAILED"
                               : "OK") +
         concat("#\n# Collective test concluded: ", c.name, "_perf\n#\n");
}

}  // namespace rz::bench
