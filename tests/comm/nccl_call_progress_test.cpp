// Runs: pure

// The rank for which an NCCL group waits.

#include <gtest/gtest.h>

#include "comm/backends/nccl/call_progress.h"

namespace rz::nccl {
namespace {

using AllProgress = std::vector<std::optional<CallProgress>>;

/// A rank that has made the same collective `called` times.
CallProgress at(std::uint64_t called, std::uint64_t issued, std::uint64_t begun) {
  CallProgress s{.issued = issued, .started = begun, .sent = {0, 0, 0}, .received = {0, 0, 0}};
  while (s.called < called) s.add("all_reduce sum of 10 f32");
  return s;
}

Failure culprit_of_collective(const AllProgress& all) {
  return find_culprit(0, {.collective = 4}, all, Errc::timeout);
}

TEST(NcclCallProgress, TheRankFurthestBehindIsTheCulprit) {
  const CallProgress there = at(5, 5, 5), queued = at(5, 5, 4), within = at(5, 4, 4), elsewhere = at(4, 4, 4);
  EXPECT_EQ(culprit_of_collective({there, there, there}).culprit, -1);
  EXPECT_EQ(culprit_of_collective({there, queued, there}).culprit, 1);
  EXPECT_EQ(culprit_of_collective({queued, within, there}).culprit, 1);
  EXPECT_EQ(culprit_of_collective({queued, within, elsewhere}).culprit, 2);
  const Failure unresponsive = culprit_of_collective({elsewhere, std::nullopt, elsewhere});
  EXPECT_EQ(unresponsive.culprit, 1);
  EXPECT_EQ(unresponsive.reason,
            "rank 0 has not called it, its last was 'all_reduce sum of 10 f32'; rank 1 sends no reply; "
            "rank 2 has not called it, its last was 'all_reduce sum of 10 f32'");
  EXPECT_EQ(culprit_of_collective({there, elsewhere, elsewhere}).culprit, 1) << "the first of equals";
  EXPECT_EQ(culprit_of_collective({within, within, within}).culprit, -1) << "none waits for another";
}

TEST(NcclCallProgress, AnotherCallIsAMismatch) {
  CallProgress other = at(4, 5, 5);
  other.add("all_reduce max of 10 f32");
  const Failure f = culprit_of_collective({at(5, 5, 5), std::nullopt, other});
  EXPECT_EQ(f.code, Errc::mismatch);
  EXPECT_EQ(f.culprit, 2);
}

TEST(NcclCallProgress, ARankThatDidNotReachItsStreamIsTheCulprit) {
  CallProgress came = at(2, 2, 2), late = at(2, 2, 2);
  came.waited_streams = 7;
  late.waited_streams = 6;
  const Failure f = find_culprit(0, {.stream = 6}, AllProgress{came, came, late}, Errc::timeout);
  EXPECT_EQ(f.culprit, 2);
  EXPECT_EQ(f.reason, "rank 2 has waited for its stream 6 times, not 7, so it may not have run its graph");
  EXPECT_EQ(find_culprit(0, {.stream = 6}, AllProgress{came, came, came}, Errc::timeout).culprit, -1);
}

TEST(NcclCallProgress, SurvivesTheStore) {
  CallProgress s = at(40, 39, 38);
  s.waited_streams = 3;
  s.sent = {1, 0, 2};
  const auto read = CallProgress::parse(s.serialize());
  ASSERT_TRUE(read);
  EXPECT_EQ(read->serialize(), s.serialize());
  EXPECT_EQ(read->called, 40U);
  EXPECT_EQ(read->waited_streams, 3U);
  EXPECT_EQ(read->sent, s.sent);
  EXPECT_EQ(read->descriptions.size(), CallProgress::max_descriptions);
  for (const char* damaged : {"", "1 2 3\n\n\n", "1 2 3 x\n\n\n", "1 2 3 4\n"})
    EXPECT_FALSE(CallProgress::parse(damaged)) << damaged;
}

}  // namespace
}  // namespace rz::nccl
