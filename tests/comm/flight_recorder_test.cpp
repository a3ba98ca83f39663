// Runs: alone
// Not under the thread sanitizer: FlightRecorderFork FlightRecorderOfALauncher

// What the recorder keeps of calls, without a launcher: in memory of the process.

#include "comm/os/flight_recorder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/text.h"
#include "comm/flight_entry.h"
#include "comm/transport/flight_report.h"
#include "tests/support/error_of.h"
#include "tests/support/forked.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using flight::File;
using flight::Row;

/// The living row of that name, of a rank of the job.
const Row& row_of(std::string_view name, int owner) {
  const File& file = *flight::file_of_process();
  const flight::SteadyRows steady;
  for (const Row& row : file.row)
    if (row.used == 1 && row.owner == owner && name == row.name) return row;
  fail(Errc::system, "no row of ", name);
}

std::string file_and_line(const Row& row, std::uint32_t n) {
  const auto call = flight::entry_of(row.collective.call[n % flight::max_calls]);
  if (!call || call->site == 0) return "no site";
  const flight::Site& site = flight::file_of_process()->site[call->site - 1];
  return concat(std::string_view(site.file).substr(std::string_view(site.file).rfind('/') + 1), ":",
                site.line.load());
}

CommOptions named(const char* name, const char* transport = "auto") {
  CommOptions options;
  options.name = name;
  options.transport = transport;
  return options;
}

/// The first test of the file, since a process maps its file once.
TEST(FlightRecorderOfALauncher, BelongsToTheProcessAndNotToItsChildren) {
  const UniqueFd fd = flight::make_file();
  ::setenv("RZ_FLIGHT_FD", concat(fd.get()).c_str(), 1);
  auto comm = Communicator::connect(0, 1, nullptr, named("parent"));
  EXPECT_EQ(test::in_forked_child([] {
              auto own = Communicator::connect(0, 1, nullptr, named("child"));
              own.barrier().wait();
              return row_of("child", 0).collective.begun == 1;
            }),
            0);
  comm.barrier().wait();
  const auto file = flight::read_file(fd.get());
  ASSERT_NE(file, nullptr);
  EXPECT_STREQ(file->row[0].name, "parent");
  EXPECT_EQ(file->row[0].collective.begun, 1u);
  EXPECT_STREQ(file->row[1].name, "") << "the child had a row";
  ::unsetenv("RZ_FLIGHT_FD");
}

class FlightRecorder : public testing::TestWithParam<const char*> {};

TEST_P(FlightRecorder, KeepsTheLastCallsWithTheirLines) {
  test::run_ranks(2, [](int rank, auto store) {
    auto comm = Communicator::connect(rank, 2, store, named(GetParam(), GetParam()));
    std::vector<float> x(4, 1), y(2);
    const int line = __LINE__ + 1;
    for (int i = 0; i < 300; ++i) comm.all_reduce(x).wait();
    Work work = comm.reduce_scatter(x, y, ReduceOp::max);
    work.wait();
    const Row& row = row_of(GetParam(), rank);
    EXPECT_EQ(row.size, 2);
    EXPECT_EQ(row.collective.begun, 301u);
    EXPECT_EQ(row.collective.ended, 301u);
    EXPECT_EQ(file_and_line(row, 299), concat("flight_recorder_test.cpp:", line));
    EXPECT_EQ(file_and_line(row, 300), concat("flight_recorder_test.cpp:", line + 1));
    for (std::uint32_t n = 301 - flight::max_calls; n <= 300; ++n) {
      const auto entry = flight::entry_of(row.collective.call[n % flight::max_calls]);
      ASSERT_TRUE(entry);
      const CollectiveCall& call = entry->call;
      EXPECT_EQ(entry->number, n);
      EXPECT_EQ(call.origin.order, n + 1);
      EXPECT_EQ(call.kind, n < 300 ? Collective::all_reduce : Collective::reduce_scatter);
      EXPECT_EQ(call.op.kind, n < 300 ? ReduceOp::sum : ReduceOp::max);
      EXPECT_EQ(call.in.count, 4u);
      EXPECT_EQ(call.out.count, n < 300 ? 4u : 2u);
      EXPECT_EQ(call.dtype(), DType::f32);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, FlightRecorder, testing::Values("shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST(FlightRecorderSites, TheCallersLineIsNamedOnceItIsSet) {
  auto comm = Communicator::connect(0, 1, nullptr, named("outer"));
  int x = 1;
  const auto outer = [&](CallSite site = CallSite::current()) {
    const OuterSite named_here(site);
    const auto inner = [&](CallSite other = CallSite::current()) {
      const OuterSite ignored(other);
      comm.all_reduce({&x, 1}).wait();
    };
    inner();
  };
  outer();
  const int line = __LINE__ - 1;
  comm.all_reduce({&x, 1}).wait();
  const Row& row = row_of("outer", 0);
  EXPECT_EQ(file_and_line(row, 0), concat("flight_recorder_test.cpp:", line));
  EXPECT_EQ(file_and_line(row, 1), concat("flight_recorder_test.cpp:", line + 2));
}

TEST(FlightRecorderSites, CallsOfAGroupHaveTheirOwnAndMessagesToo) {
  auto comm = Communicator::connect(0, 1, nullptr, named("group"));
  std::vector<float> x(1 << 16), y(1 << 16);
  auto group = comm.group();
  group.all_reduce(x);
  group.all_reduce(y);
  const int line = __LINE__ - 1;
  group.launch().wait();
  const Row& row = row_of("group", 0);
  EXPECT_EQ(file_and_line(row, 0), concat("flight_recorder_test.cpp:", line - 1));
  EXPECT_EQ(file_and_line(row, 1), concat("flight_recorder_test.cpp:", line));
  std::vector<float> a(4), b(4);
  comm.group().all_reduce(a).all_reduce(b).launch().wait();  // coalesced: one call
  EXPECT_EQ(row.collective.begun, 3u);
  EXPECT_EQ(file_and_line(row, 2), concat("flight_recorder_test.cpp:", line + 7));
  comm.group().send(x, 0).recv(y, 0).launch().wait();
  EXPECT_EQ(row.message.begun, 2u);
  EXPECT_EQ(flight::entry_of(row.message.call[1])->call.kind, Collective::recv);
}

TEST(FlightRecorderSites, OnesThatTheTableHasNoRoomForAreLeftOut) {
  EXPECT_EQ(test::in_forked_child([] {
              for (auto& site : const_cast<File*>(flight::file_of_process())->site) site.key = 2;
              auto comm = Communicator::connect(0, 1, nullptr, named("full"));
              comm.barrier().wait();
              return file_and_line(row_of("full", 0), 0) == "no site";
            }),
            0);
}

TEST(FlightRecorderFork, TheChildHasAFileOfItsOwn) {
  auto comm = Communicator::connect(0, 1, nullptr, named("parent"));
  int x = 1;
  comm.all_reduce({&x, 1}).wait();
  EXPECT_EQ(test::in_forked_child([&] {
              if (flight::file_of_process()->row[0].used != 0) return false;
              auto own = Communicator::connect(0, 1, nullptr, named("child"));
              own.all_reduce({&x, 1}).wait();
              return row_of("child", 0).collective.begun == 1;
            }),
            0);
  EXPECT_EQ(row_of("parent", 0).collective.begun, 1u);
}

TEST(FlightRecorderRows, HaveTheMembersOfASplitGroupAsRanksOfTheJob) {
  test::run_ranks(4, [](int rank, auto store) {
    auto world = Communicator::connect(rank, 4, store, named("job"));
    auto half = world.split(rank % 2, -rank);
    auto again = half->split(0, 0);
    EXPECT_EQ(row_of("job", rank).members, 0);
    const Row& row = row_of("job/split 0/split 0", rank);
    ASSERT_EQ(row.members, 2);
    EXPECT_EQ(row.rank, rank < 2);
    EXPECT_EQ(row.member[0], 2 + rank % 2);
    EXPECT_EQ(row.member[1], rank % 2);
  });
}

TEST(FlightReport, NamesTheLineOfTheCall) {
  auto comm = Communicator::connect(0, 1, nullptr, named("alone"));
  comm.barrier().wait();
  const int line = __LINE__ - 1;
  const auto* const bytes = reinterpret_cast<const std::byte*>(flight::file_of_process());
  const std::string activity = flight::read_report({bytes, sizeof(File)}).activity;
  EXPECT_NE(activity.find(concat("barrier #0 (0 f32) of 'alone' at flight_recorder_test.cpp:", line)),
            std::string::npos)
      << activity;
}

}  // namespace
}  // namespace rz
