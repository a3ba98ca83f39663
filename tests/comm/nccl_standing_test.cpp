// Who keeps a group of NCCL's waiting.

#include <gtest/gtest.h>

#include "comm/backends/nccl/standing.h"

namespace rz::nccl {
namespace {

using Standings = std::vector<std::optional<Standing>>;

/// A rank that has called `called` times the same collective.
Standing at(std::uint64_t called, std::uint64_t issued, std::uint64_t begun) {
  Standing s{.issued = issued, .begun = begun, .sent = {0, 0, 0}, .received = {0, 0, 0}};
  while (s.called < called) s.add("all_reduce sum of 10 f32");
  return s;
}

Failure blame_of_collective(const Standings& all) { return blame(0, {.collective = 4}, all, Errc::timeout); }

TEST(NcclStanding, WhoIsFurthestBehindIsToBlame) {
  const Standing there = at(5, 5, 5), queued = at(5, 5, 4), within = at(5, 4, 4), elsewhere = at(4, 4, 4);
  EXPECT_EQ(blame_of_collective({there, there, there}).culprit, -1);
  EXPECT_EQ(blame_of_collective({there, queued, there}).culprit, 1);
  EXPECT_EQ(blame_of_collective({queued, within, there}).culprit, 1);
  EXPECT_EQ(blame_of_collective({queued, within, elsewhere}).culprit, 2);
  const Failure silent = blame_of_collective({elsewhere, std::nullopt, elsewhere});
  EXPECT_EQ(silent.culprit, 1);
  EXPECT_EQ(silent.reason,
            "rank 0 has not called it, its last was 'all_reduce sum of 10 f32'; rank 1 does not answer; "
            "rank 2 has not called it, its last was 'all_reduce sum of 10 f32'");
  EXPECT_EQ(blame_of_collective({there, elsewhere, elsewhere}).culprit, 1) << "the first of equals";
  EXPECT_EQ(blame_of_collective({within, within, within}).culprit, -1) << "none waits for another";
}

TEST(NcclStanding, AnotherCallIsAMismatch) {
  Standing other = at(4, 5, 5);
  other.add("all_reduce max of 10 f32");
  const Failure f = blame_of_collective({at(5, 5, 5), std::nullopt, other});
  EXPECT_EQ(f.code, Errc::mismatch);
  EXPECT_EQ(f.culprit, 2);
}

TEST(NcclStanding, WhoDidNotComeToItsStreamIsToBlame) {
  Standing came = at(2, 2, 2), late = at(2, 2, 2);
  came.streams = 7;
  late.streams = 6;
  const Failure f = blame(0, {.stream = 6}, Standings{came, came, late}, Errc::timeout);
  EXPECT_EQ(f.culprit, 2);
  EXPECT_EQ(f.reason, "rank 2 has waited for its stream 6 times, not 7, so it may not have run its graph");
  EXPECT_EQ(blame(0, {.stream = 6}, Standings{came, came, came}, Errc::timeout).culprit, -1);
}

TEST(NcclStanding, SurvivesTheStore) {
  Standing s = at(40, 39, 38);
  s.streams = 3;
  s.sent = {1, 0, 2};
  const auto read = Standing::of(s.text());
  ASSERT_TRUE(read);
  EXPECT_EQ(read->text(), s.text());
  EXPECT_EQ(read->called, 40U);
  EXPECT_EQ(read->streams, 3U);
  EXPECT_EQ(read->sent, s.sent);
  EXPECT_EQ(read->words.size(), Standing::most_words);
  for (const char* damaged : {"", "1 2 3\n\n\n", "1 2 3 x\n\n\n", "1 2 3 4\n"})
    EXPECT_FALSE(Standing::of(damaged)) << damaged;
}

}  // namespace
}  // namespace rz::nccl
