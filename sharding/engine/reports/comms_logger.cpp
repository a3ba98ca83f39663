#include "sharding/engine/reports/comms_logger.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string_view>

#include "comm/core/text.h"

namespace rz {

Bandwidth bandwidth(Collective kind, std::size_t bytes, double seconds, int ranks) {
  if (seconds <= 0) return {};
  const double algorithm = static_cast<double>(bytes) / seconds;
  const double others = static_cast<double>(ranks - 1) / ranks;
  const bool whole = kind == Collective::broadcast || kind == Collective::reduce;
  return {algorithm, algorithm * (kind == Collective::all_reduce ? 2 * others : whole ? 1 : others)};
}

namespace {

std::string gigabits(double bytes_per_second) { return fixed(bytes_per_second * 8e-9, 2); }
std::string latency_ms(double seconds) { return fixed(seconds * 1e3, 3); }

/// Columns of at least 20 characters, as DeepSpeed's.
std::string table_row(std::initializer_list<std::string_view> cells) {
  std::string line;
  for (const std::string_view cell : cells) {
    line += cell;
    line.append(cell.size() < 20 ? 20 - cell.size() : 1, ' ');
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

}  // namespace

CommsLogger::CommsLogger(const MonitorConfig& config, std::string prefix, std::FILE* log)
    : config_(config), prefix_(std::move(prefix)), log_(log) {}

bool CommsLogger::is_logged(Collective kind) const {
  if (config_.comms_prof_all) return true;
  // DeepSpeed has all_gather_into_tensor and others beside all_gather.
  return std::ranges::any_of(config_.comms_prof_ops,
                             [&](const std::string& op) { return op.starts_with(name(kind)); });
}

void CommsLogger::add(const StartedCollective& c) {
  if (!is_logged(c.kind)) return;
  c.work.wait_on(c.stream);
  c.stream.synchronize();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - c.start).count();
  Times& times = times_[{c.kind, c.bytes, c.ranks}];
  ++times.count, times.seconds += seconds;
  if (!log_ || !config_.comms_verbose) return;
  const Bandwidth speed = bandwidth(c.kind, c.bytes, seconds, c.ranks);
  std::fprintf(log_, "%scomm op: %s | time (ms): %s | msg size: %s | algbw (Gbps): %s | busbw (Gbps): %s\n",
               prefix_.c_str(), name(c.kind), latency_ms(seconds).c_str(), human_bytes(c.bytes).c_str(),
               gigabits(speed.algorithm).c_str(), gigabits(speed.bus).c_str());
}

std::string CommsLogger::log_summary() const {
  std::string table = table_row({"Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)",
                                 "algbw (Gbps)", "busbw (Gbps)"});
  std::optional<Collective> last;
  for (const auto& [call, times] : times_) {
    const auto& [kind, bytes, ranks] = call;
    if (last != kind) table += concat(name(kind), "\n");
    last = kind;
    const double mean = times.seconds / static_cast<double>(times.count);
    const Bandwidth speed = bandwidth(kind, bytes, mean, ranks);
    table += table_row({"", human_bytes(bytes), concat(times.count), latency_ms(times.seconds),
                        latency_ms(mean), gigabits(speed.algorithm), gigabits(speed.bus)});
  }
  return table;
}

}  // namespace rz
