#pragma once
/// As group.h, each rank with its World.

#include <functional>
#include <utility>

#include "sharding/parallel/world.h"
#include "tests/lab/group.h"

namespace rz::lab {

template <class Options = CommOptions>
void world(int ranks, const Options& options, const std::function<void(World&)>& body) {
  group(ranks, options, [&](Communicator& comm) {
    World world(std::move(comm));
    body(world);
  });
}
inline void world(int ranks, const std::function<void(World&)>& body) { world(ranks, CommOptions{}, body); }

}  // namespace rz::lab
