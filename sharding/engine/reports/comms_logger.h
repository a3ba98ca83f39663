#pragma once
/// The section "comms_logger": what the collectives of updates cost.

#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <tuple>

#include "sharding/config/ds_config.h"
#include "sharding/parallel/traffic.h"

namespace rz {

/// Algorithm and bus bandwidth of a collective, in bytes per second, as nccl-tests define them: algbw is the
/// larger of a rank's two buffers by the time, busbw what each link carries (doc/PERFORMANCE.md there).
struct Bandwidth {
  double algorithm = 0, bus = 0;
};
Bandwidth bandwidth(Collective, std::size_t bytes, double seconds, int ranks);

/// Waits for each collective right after its start, as DeepSpeed does, and sums up its times on this rank.
class CommsLogger {
 public:
  /// `log`: for lines with comms_verbose; null: none on this rank.
  CommsLogger(const MonitorConfig&, std::string prefix, std::FILE* log);

  void add(const StartedCollective&);
  /// A table with the columns of deepspeed.comm.log_summary(): a line for each operation and size, and
  /// number of ranks of its group, with its number, total and average latency, and mean bandwidths in Gbit/s.
  std::string log_summary() const;

 private:
  struct Times {
    std::int64_t count = 0;
    double seconds = 0;
  };
  bool is_logged(Collective) const;

  MonitorConfig config_;
  std::string prefix_;
  std::FILE* log_;
  std::map<std::tuple<Collective, std::size_t, int>, Times> times_;  // by bytes and ranks
};

}  // namespace rz
