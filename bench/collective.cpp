#include "bench/collective.h"

#include "comm/core/error.h"
#include "comm/tuning.h"

namespace rz::bench {

rz::Collective kind_of(const Collective& c) {
  if (c.name == "alltoall") return rz::Collective::all_to_all;
  if (c.name == "alltoallv") return rz::Collective::all_to_all_v;
  if (c.name == "sendrecv") return rz::Collective::send;
  return rz::collective_from_name(c.name);
}

const Collective& collective_from_name(std::string_view name) {
  for (const Collective* c : {&all_reduce, &reduce_scatter, &all_gather, &broadcast, &reduce, &alltoall,
                              &alltoallv, &scatter, &gather, &sendrecv})
    if (c->name == name) return *c;
  fail(Errc::config, "no bench for the collective '", name, "'");
}

}  // namespace rz::bench
