// Calls that World and Engine make for a program are recorded with the program's line.

#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <string_view>

#include "comm/core/text.h"
#include "comm/flight_entry.h"
#include "comm/os/flight_recorder.h"
#include "sharding/engine/engine.h"
#include "tests/lab/training.h"
#include "tests/support/folder.h"

namespace rz {
namespace {

/// The lines of the calls that this rank makes in `body`, in all of its groups.
std::set<std::string> lines_of(int rank, const std::function<void()>& body) {
  std::uint32_t first = 0;
  std::set<std::string> found;
  const auto each = [&](const auto& use) {
    const flight::File& file = *flight::file_of_process();
    const flight::SteadyRows steady;
    for (const flight::Row& row : file.row)
      if (row.used == 1 && row.owner == rank)
        for (const flight::Call& c : row.collective.call)
          if (const auto call = flight::entry_of(c)) use(*call, file.site[call->site - 1]);
  };
  each([&](const auto& call, const auto&) { first = std::max(first, call.call.origin.order); });
  body();
  each([&](const auto& call, const flight::Site& site) {
    const std::string_view path = site.file;
    if (call.call.origin.order > first)
      found.insert(concat(path.substr(path.rfind('/') + 1), ":", site.line.load()));
  });
  return found;
}

std::set<std::string> here(int line) { return {concat("call_sites_test.cpp:", line)}; }

TEST(CallSites, OfWorldAreTheProgramsLines) {
  lab::world(2, [](World& world) {
    const auto lines = [&](const auto& body) { return lines_of(world.rank(), body); };
    EXPECT_EQ(lines([&] { world.reduce(1.0); }), here(__LINE__));
    EXPECT_EQ(lines([&] { world.reduce(Mean{}); }), here(__LINE__));
    EXPECT_EQ(lines([&] { world.wait_for_everyone(); }), here(__LINE__));
    EXPECT_EQ(lines([&] { world.ranks_per_node(); }), here(__LINE__));
    EXPECT_EQ(lines([&] { world.new_communicator(); }), here(__LINE__));
    EXPECT_EQ(lines([&] { world.gather(Tensor::zeros({2})); }), here(__LINE__));
  });
}

TEST(CallSites, OfEngineAreTheProgramsLines) {
  test::Folder folder;
  lab::world(2, [&](World& world) {
    const auto lines = [&](const auto& body) { return lines_of(world.rank(), body); };
    lab::Mlp net;
    auto engine = initialize(world, net, lab::options(lab::config(1)));
    for (std::uint64_t update = 0; update < 2; ++update)
      for (std::uint64_t m = 0; m < 3; ++m) {
        const Batch b = lab::batch(m * 2 + static_cast<std::uint64_t>(world.rank()));
        const nn::Loss loss = net(engine.tape(), b);
        const auto backward = lines([&] { engine.backward(loss); });
        if (m == 2 || !backward.empty()) {
          EXPECT_EQ(backward, here(__LINE__ - 2));
        }
        const auto step = lines([&] { engine.step(); });
        EXPECT_EQ(step, m == 2 ? here(__LINE__ - 1) : std::set<std::string>());
      }
    EXPECT_EQ(lines([&] { engine.loss(); }), here(__LINE__));
    EXPECT_EQ(lines([&] { engine.save_checkpoint(folder / "run"); }), here(__LINE__));
    EXPECT_EQ(lines([&] { engine.load_checkpoint(folder / "run"); }), here(__LINE__));
    EXPECT_EQ(lines([&] { engine.mean({}); }), here(__LINE__));
  });
}

}  // namespace
}  // namespace rz
