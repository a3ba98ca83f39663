#pragma once
/// A connected group of ranks in one test: each rank is a thread, as run_ranks() has it.

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "comm/communicator.h"
#include "tests/support/ranks.h"

namespace rz::lab {

using OptionsOfRank = std::function<CommOptions(int rank)>;
using Body = std::function<void(Communicator&)>;

/// A character for each rank, the same for those of one host.
inline OptionsOfRank on_hosts(const std::string& hosts, const CommOptions& options = {}) {
  return [=](int rank) {
    CommOptions mine = options;
    mine.host_id = hosts[static_cast<std::size_t>(rank)];
    return mine;
  };
}

inline void group(int ranks, const OptionsOfRank& options, const Body& body) {
  test::run_ranks(ranks, [&](int rank, std::shared_ptr<Store> store) {
    Communicator comm = Communicator::connect(rank, ranks, std::move(store), options(rank));
    body(comm);
  });
}
inline void group(int ranks, const CommOptions& options, const Body& body) {
  group(ranks, OptionsOfRank([&](int) { return options; }), body);
}
inline void group(int ranks, const Body& body) { group(ranks, CommOptions{}, body); }
inline void group(const std::string& hosts, const CommOptions& options, const Body& body) {
  group(static_cast<int>(hosts.size()), on_hosts(hosts, options), [&](Communicator& comm) {
    SCOPED_TRACE(hosts);
    body(comm);
  });
}

}  // namespace rz::lab
