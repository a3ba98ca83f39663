#include "sharding/strategy/logging_data.h"

#include "comm/core/text.h"

namespace rz {

namespace {

template <class List, class F>
std::string joined(const List& list, const F& text) {
  std::string out;
  for (const auto& item : list) out += concat(out.empty() ? "" : ", ", text(item));
  return out.empty() ? "none" : out;
}

const char* yes_or_no(bool x) { return x ? "yes" : "no"; }

std::string milliseconds(double seconds) { return concat(seconds * 1e3, " ms"); }

}  // namespace

std::string describe(const LoggingData& d) {
  return concat(
      "strategy: ", d.strategy, "\nrank: ", d.rank, " of ", d.world_size, "\nmesh: ", describe(d.mesh),
      "\nbackend: ", d.backend, "\ngradients: ", name(d.gradients), "\nbuckets: ", d.bucket_bytes.size(),
      " (", joined(d.bucket_bytes, human_bytes), ")", "\nrebuilt buckets: ", yes_or_no(d.rebuilt_buckets),
      "\noverlap: ", yes_or_no(d.overlap), "\nfind_unused_parameters: ", yes_or_no(d.find_unused_parameters),
      "\nstatic_graph: ", yes_or_no(d.static_graph), "\nbroadcast_buffers: ", yes_or_no(d.broadcast_buffers),
      "\ncommunication hook: ", d.communication_hook,
      "\nunused parameters: ", joined(d.unused_parameters, [](const std::string& n) { return n; }),
      "\nforward: ", milliseconds(d.forward_seconds), "\nbackward: ", milliseconds(d.backward_seconds),
      "\ncommunication: ", milliseconds(d.communication_seconds),
      "\nexposed communication: ", milliseconds(d.exposed_seconds),
      "\nsent since the start: ", human_bytes(d.traffic.sent(d.mesh)), "\n");
}

}  // namespace rz
