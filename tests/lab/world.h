#pragma once
/// As group.h, each rank with its World.

#include <functional>
#include <utility>

#include "sharding/parallel/world.h"
#include "tests/lab/group.h"

namespace rz::lab {

inline void world(int ranks, const OptionsOfRank& options, const std::function<void(World&)>& body) {
  group(ranks, options, [&](Communicator& comm) {
    World world(std::move(comm));
    body(world);
  });
}
inline void world(int ranks, const CommOptions& options, const std::function<void(World&)>& body) {
  world(ranks, OptionsOfRank([&](int) { return options; }), body);
}
inline void world(int ranks, const std::function<void(World&)>& body) { world(ranks, CommOptions{}, body); }

}  // namespace rz::lab
