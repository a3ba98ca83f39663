// Runs: alone

// The files of the last calls: when they are written, and what they hold.

#include "comm/flight_dump.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"
#include "tests/support/program.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using namespace std::chrono_literals;
using test::error_of;
using test::Folder;

CommOptions world_options(std::chrono::milliseconds timeout = 30s) {
  CommOptions options;
  options.name = "world";
  options.timeout = timeout;
  return options;
}

/// Runs 4 ranks with RZ_FLIGHT, and keeps the files in the folder FLIGHT_TEST_KEEP.
void run_with_dumps(const Folder& folder, const test::RankFunction& body) {
  ::setenv("RZ_FLIGHT", (folder / "dumps").c_str(), 1);
  test::expect_processes(4, body);
  if (const char* const keep = std::getenv("FLIGHT_TEST_KEEP"))
    std::filesystem::copy(folder / "dumps", keep, std::filesystem::copy_options::recursive);
}

TEST(FlightDump, EveryRankWritesAMismatch) {
  Folder folder;
  run_with_dumps(folder, [](int rank, auto store) {
    auto world = Communicator::connect(rank, 4, store, world_options());
    std::vector<float> x(1024), all(4096);
    for (int i = 0; i < 300; ++i) world.all_reduce({x.data(), 4}).wait();
    auto half = world.split(rank / 2, 0);
    half->broadcast({x.data(), 8}, 0).wait();
    half->barrier().wait();
    const Error e = error_of([&] {
      if (rank == 2)
        world.all_gather(x, all).wait();
      else
        world.all_reduce(x).wait();
    });
    EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
    store->set(concat("ended/", rank), "");
    for (int r = 0; r < 4; ++r) store->get(concat("ended/", r), Deadline::after(30s));
  });
  for (int r = 0; r < 4; ++r) EXPECT_TRUE(std::filesystem::exists(folder / concat("dumps/flight_rank_", r)));
}

TEST(FlightDump, ARankThatDoesNotCallWritesToo) {
  Folder folder;
  run_with_dumps(folder, [](int rank, auto store) {
    auto world = Communicator::connect(rank, 4, store, world_options(1s));
    std::vector<float> x(1024);
    for (int i = 0; i < 3; ++i) world.all_reduce(x).wait();
    if (rank != 2) {
      EXPECT_EQ(error_of([&] { world.all_reduce(x).wait(); }).code(), Errc::timeout);
    }
    store->set(concat("ended/", rank), "");
    for (int r = 0; r < 4; ++r) store->get(concat("ended/", r), Deadline::after(30s));
    std::this_thread::sleep_for(2s);
  });
  for (int r = 0; r < 4; ++r) EXPECT_TRUE(std::filesystem::exists(folder / concat("dumps/flight_rank_", r)));
}

}  // namespace
}  // namespace rz
