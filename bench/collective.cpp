#include "bench/collective.h"

#include "comm/core/error.h"

namespace rz::bench {

const Collective& collective_from_name(std::string_view name) {
  for (const Collective* c : {&all_reduce, &reduce_scatter, &all_gather, &broadcast, &reduce, &alltoall,
                              &alltoallv, &scatter, &gather, &sendrecv})
    if (c->name == name) return *c;
  fail(Errc::config, "no bench for the collective '", name, "'");
}

}  // namespace rz::bench
