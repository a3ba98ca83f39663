#include <cstdlib>

#include "bench/harness/report.h"
#include "bench/support/json.h"
#include "comm/core/error.h"

namespace rz::bench {
namespace {

/// Variables included in the report. The rest of the environment may contain secrets.
constexpr const char* reported_variables[] = {
    "WORLD_SIZE",           "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "RZ_TRANSPORT",     "RZ_INTERFACE",
    "RZ_SOCKETS",           "RZ_CONGESTION",    "RZ_ALGORITHM",    "RZ_DETERMINISTIC", "RZ_REDUCTION_ORDER",
    "RZ_TIMEOUT_S",         "RZ_HOST_ID",       "RZ_ALLOW_TF32",   "SLURM_JOB_ID",     "SLURM_NTASKS",
    "OMPI_COMM_WORLD_SIZE", "RZ_TUNING"};

Json environment_json() {
  Json list = Json::array();
  for (const char* name : reported_variables)
    if (const char* value = std::getenv(name)) list.push_back(concat(name, "=", value));
  return list;
}

Json devices_json(const std::vector<DeviceLine>& devices) {
  Json list = Json::array();
  for (const auto& d : devices)
    list.push_back({{"rank", d.rank},
                    {"host", d.host},
                    {"process_id", d.pid},
                    {"device", d.local_rank},
                    {"device_info", d.processor}});
  return list;
}

Json figure_json(const Figure& f) {
  Json j{{"time", f.us}, {"alg_bw", f.alg_bw}, {"bus_bw", f.bus_bw}, {"nwrong", nullptr}};
  if (f.wrong) j["nwrong"] = *f.wrong;
  if (!f.samples.empty()) j["samples"] = f.samples;
  if (f.slowest)
    j["percentiles"] = {{"iterations", f.slowest->count},
                        {"p50", f.slowest->p50},
                        {"p99", f.slowest->p99},
                        {"worst", f.slowest->max}};
  return j;
}

Json row_json(const Row& r) {
  return {{"size", r.bytes},
          {"count", r.count},
          {"type", r.type},
          {"redop", r.op},
          {"root", r.root},
          {"out_of_place", figure_json(r.out_of_place)},
          {"in_place", figure_json(r.in_place)}};
}

Json config_json(const Options& o, const std::vector<DeviceLine>& devices) {
  return {{"nthreads", o.threads},
          {"ngpus", o.gpus},
          {"minimum_bytes", o.min_bytes},
          {"maximum_bytes", o.max_bytes},
          {"step_bytes", o.step_bytes},
          {"step_factor", o.step_factor},
          {"warmup_iters", o.warmup},
          {"iterations", o.iterations},
          {"aggregated_iters", o.aggregated},
          {"grouped", o.grouped()},
          {"validation", o.checks},
          {"graph", o.graph},
          {"blocking", o.blocking},
          {"local_register", o.registered},
          {"unalign", o.misalign},
          {"devices", devices_json(devices)}};
}

}  // namespace

void write_json(const std::string& path, const Collective& c, const Options& o, const Results& r) {
  Json j{{"version", 3},
         {"collective", c.name},
         {"start_time", r.start_time},
         {"args", o.arguments},
         {"env", environment_json()},
         {"nccl_version", "ringzero " RZ_VERSION},
         {"config", config_json(o, r.devices)},
         {"results", Json::array()},
         {"out_of_bounds", {{"count", r.failed_checks}, {"okay", r.failed_checks == 0}}},
         {"average_bus_bandwidth", {{"bandwidth", r.average_bus_bandwidth()}}},
         {"errors", Json::array()},
         {"end_time", r.end_time}};
  for (const auto& row : r.rows) j["results"].push_back(row_json(row));
  if (r.failed_checks) j["errors"].push_back(concat(r.failed_checks, " checks found wrong results"));
  write_file(path, j.dump(2));
}

}  // namespace rz::bench
