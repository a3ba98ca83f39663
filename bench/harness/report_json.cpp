#include "bench/harness/report.h"
#include "bench/harness/variables.h"
#include "bench/support/bench_main.h"
#include "bench/support/numbers.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"

namespace rz::bench {
namespace {

/// The rest of the environment may contain secrets.
Json environment_json() {
  Json list = Json::array();
  for (const std::string_view name : reportable_variables())
    if (const auto value = environment_variable(std::string(name))) list.push_back(concat(name, "=", *value));
  return list;
}

Json devices_json(const std::vector<DeviceLine>& devices) {
  Json list = Json::array();
  for (const auto& d : devices)
    list.push_back({{"rank", d.rank},
                    {"group", 0},
                    {"pid", d.pid},
                    {"hostname", d.host},
                    {"device", d.local_rank},
                    {"device_hex", format("%04x:%02x:%02x", d.pci_domain, d.pci_bus, d.pci_device)},
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
          {"aggregated_iterations", o.aggregated},
          {"grouped", o.grouped()},
          {"validation", o.checks},
          {"graph", o.graph},
          {"blocking_collectives", o.blocking != 0},
          {"per_iter_timing", o.per_iteration},
          {"per_iter_skip", o.skipped},
          {"local_register", o.registered},
          {"unalign", o.misalign},
          {"devices", devices_json(devices)}};
}

}  // namespace

std::string json_text(const Collective& c, const Options& o, const Results& r) {
  Json j{{"version", 3},
         {"collective", c.name},
         {"start_time", r.start_time},
         {"args", o.arguments},
         {"env", environment_json()},
         {"nccl_version", "ringzero " RZ_VERSION},
         {"config", config_json(o, r.devices)},
         {"results", Json::array()},
         {"out_of_bounds", {{"count", r.failed_checks}, {"okay", r.failed_checks == 0}}},
         {"average_bus_bandwidth", {{"bandwidth", r.average_bus_bandwidth()}, {"okay", "unchecked"}}},
         {"errors", Json::array()},
         {"end_time", r.end_time}};
  for (const auto& row : r.rows) j["results"].push_back(row_json(row));
  if (r.failed_checks) j["errors"].push_back(concat(r.failed_checks, " checks found wrong results"));
  if (r.min_bandwidth) j["average_bus_bandwidth"]["okay"] = !r.too_slow();
  if (r.too_slow())
    j["errors"].push_back(concat("the average bus bandwidth is below ", enough_bandwidth,
                                 " of NCCL_TESTS_MIN_BW=", *r.min_bandwidth));
  if (!r.error.empty()) j["errors"].push_back(r.error);
  return j.dump(2, ' ', false, Json::error_handler_t::replace) + '\n';
}

}  // namespace rz::bench
