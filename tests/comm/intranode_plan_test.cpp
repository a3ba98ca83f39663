// Runs: ci pure
// Not under sanitizers: CallsAreProved IntranodePlan[.]

// Plans of the intra-node engine: proved for 1 to 65 ranks, and refused if they are broken on purpose.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "tests/proof/rank_plans.h"

namespace rz {
namespace {

constexpr std::size_t KiB = 1024;
constexpr int max_ranks = 65;
constexpr Collective all_kinds[] = {
    Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather,
    Collective::broadcast,  Collective::reduce,         Collective::gather,
    Collective::scatter,    Collective::all_to_all,     Collective::barrier};

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

AllToAllVCounts counts_of(int rank, int size, std::size_t scale) {
  const auto count = [&](int from, int to) { return at((from * 7 + to * 3) % 5) * scale + at(to % 2); };
  AllToAllVCounts c;
  std::size_t sent = 0, received = 0;
  for (int r = 0; r < size; ++r) {
    c.send_counts.push_back(count(rank, r)), c.recv_counts.push_back(count(r, rank));
    c.send_offsets.push_back(sent), c.recv_offsets.push_back(received);
    sent += c.send_counts.back(), received += c.recv_counts.back() + 3;  // with gaps
  }
  return c;
}

intranode::CallCase call_of(Collective kind, std::size_t bytes, int size,
                            intranode::MemoryAccess access = intranode::MemoryAccess::staged) {
  intranode::CallCase c{
      .kind = kind, .bytes = kind == Collective::barrier ? 0 : bytes, .root = size / 2, .access = access};
  if (kind != Collective::all_to_all_v) return c;
  c.bytes = 0;
  for (int r = 0; r < size; ++r) c.counts.push_back(counts_of(r, size, bytes));
  return c;
}
intranode::CallCase two_shot(std::size_t bytes, int size, std::size_t chunk = 0) {
  intranode::CallCase c = call_of(Collective::all_reduce, bytes, size);
  c.algorithm.two_shot = true, c.algorithm.chunk = chunk;
  return c;
}

std::string proof(const std::vector<intranode::CallCase>& calls, const intranode::NodeCase& node) {
  return intranode::verify_plans(intranode::make_rank_plans(calls, node), calls, node);
}

// In any form of memory that the collective has.
bool has_access(Collective kind, intranode::MemoryAccess access) {
  if (access == intranode::MemoryAccess::staged) return true;
  if (kind == Collective::barrier || kind == Collective::all_to_all_v) return false;
  return access < intranode::MemoryAccess::single_copy || !traits(kind).reduces;
}

class Access : public testing::TestWithParam<intranode::MemoryAccess> {};
INSTANTIATE_TEST_SUITE_P(Memory, Access,
                         testing::Values(intranode::MemoryAccess::staged,
                                         intranode::MemoryAccess::staged_after_exchange,
                                         intranode::MemoryAccess::zero_copy,
                                         intranode::MemoryAccess::single_copy,
                                         intranode::MemoryAccess::single_copy_refused));

// One slot, two slots, one chunk: no bytes, less than a slot, more than one, more than two.
TEST_P(Access, SmallCallsAreProved) {
  for (int size = 1; size <= max_ranks; ++size)
    for (const bool in_place : {false, true}) {
      std::vector<intranode::CallCase> calls;
      for (const Collective kind : all_kinds)
        for (const std::size_t bytes : {0u, 1u, 57u, 300u}) {
          if (!has_access(kind, GetParam()) || (size > 20 && (in_place || bytes > 57))) continue;
          if (in_place && kind == Collective::all_to_all && GetParam() >= intranode::MemoryAccess::zero_copy)
            continue;
          calls.push_back(call_of(kind, bytes, size, GetParam()));
          calls.back().in_place = in_place;
        }
      ASSERT_EQ(proof(calls, {.size = size}), "") << size << " ranks" << (in_place ? ", in place" : "");
    }
}

// Several chunks, and staging rings that wrap within a call and between calls.
TEST_P(Access, LargeCallsAreProved) {
  for (int size = 1; size <= max_ranks; ++size) {
    const bool oversubscribed = size % 2 == 1;
    std::vector<intranode::CallCase> calls;
    for (const Collective kind : all_kinds)
      if (has_access(kind, GetParam()))
        calls.push_back(call_of(kind, (traits(kind).sends_per_rank() ? 700 * KiB / at(size) : 300 * KiB) + 13,
                                size, GetParam()));
    ASSERT_EQ(proof(calls, {.size = size, .oversubscribed = oversubscribed}), "") << size << " ranks";
  }
}

TEST(IntranodePlan, TwoShotIsProved) {
  for (int size = 1; size <= max_ranks; ++size)
    for (const std::size_t chunk : {std::size_t{0}, 20 * KiB}) {
      if (chunk && size > 17 && size < 64) continue;
      std::vector<intranode::CallCase> calls;
      for (const std::size_t bytes : {100u, 8193u, 500'001u, 900'000u}) {
        calls.push_back(two_shot(bytes, size, chunk));
        calls.back().in_place = bytes % 2;
        if (chunk) calls.back().access = intranode::MemoryAccess::staged_after_exchange;
      }
      ASSERT_EQ(proof(calls, {.size = size, .oversubscribed = chunk > 0}), "") << size << " ranks";
    }
}

TEST(IntranodePlan, AllToAllVIsProved) {
  for (int size = 1; size <= max_ranks; ++size) {
    const std::vector<intranode::CallCase> calls{call_of(Collective::all_to_all_v, 0, size),
                                                 call_of(Collective::all_to_all_v, 10, size),
                                                 call_of(Collective::all_to_all_v, 40'000 / at(size), size)};
    ASSERT_EQ(proof(calls, {.size = size}), "") << size << " ranks";
  }
}

// Steps wrap around, and slots are used again by calls of every collective.
TEST(IntranodePlan, MoreCallsThanSlotsAreProved) {
  for (const int size : {1, 2, 3, 5}) {
    std::vector<intranode::CallCase> calls;
    for (std::size_t i = 0; i < 300; ++i) {
      calls.push_back(call_of(all_kinds[i * 5 % std::size(all_kinds)], i % 7 * 20, size));
      calls.back().root = static_cast<int>(i) % size;
    }
    ASSERT_EQ(proof(calls, {.size = size, .first_step = 0xfffffff0}), "") << size << " ranks";
  }
}

// A root or a sender runs ahead, until the others must have acknowledged its slots.
TEST(IntranodePlan, MoreRootedCallsThanSlotsAreProved) {
  for (const Collective kind :
       {Collective::broadcast, Collective::scatter, Collective::gather, Collective::reduce})
    for (const std::size_t bytes : {8u, 2000u})
      EXPECT_EQ(proof(std::vector<intranode::CallCase>(300, call_of(kind, bytes, 3)), {.size = 3}), "")
          << name(kind);
}

TEST(IntranodePlan, MoreChunksThanSlotsAreProved) {
  for (const Collective kind : {Collective::broadcast, Collective::reduce, Collective::all_gather}) {
    std::vector<intranode::CallCase> calls(2, call_of(kind, 300 * 4 * KiB + 3, 3));
    for (intranode::CallCase& c : calls) c.algorithm.chunk = 4 * KiB;
    EXPECT_EQ(proof(calls, {.size = 3}), "") << name(kind);
  }
}

// ---- plans broken on purpose

// The plans of these calls on 3 ranks, changed, and what the verifier replies.
std::string broken(const std::vector<intranode::CallCase>& calls,
                   const std::function<void(std::vector<intranode::RankPlan>&)>& change,
                   const intranode::NodeCase& node = {.size = 3}) {
  std::vector<intranode::RankPlan> plans = intranode::make_rank_plans(calls, node);
  EXPECT_EQ(intranode::verify_plans(plans, calls, node), "");
  change(plans);
  return intranode::verify_plans(plans, calls, node);
}
void expect_refused(const std::string& error, int rank, const std::string& reason) {
  EXPECT_NE(error.find("rank " + std::to_string(rank) + ", "), std::string::npos) << error;
  EXPECT_NE(error.find("step"), std::string::npos) << error;
  EXPECT_NE(error.find(reason), std::string::npos) << error;
}
intranode::PlannedMove& move(intranode::RankPlan& plan, std::size_t phase, intranode::PlannedMove::Kind kind,
                             std::size_t round) {
  for (intranode::PlannedMove& m : plan.phases[phase].moves)
    if (m.kind == kind && m.round == round) return m;
  throw std::out_of_range("there is no such move");
}
constexpr intranode::PlannedMove::Kind contribute = intranode::PlannedMove::contribute,
                                       reduce = intranode::PlannedMove::reduce,
                                       read = intranode::PlannedMove::read;

TEST(BrokenIntranodePlan, ReadsAStepTooEarly) {
  const auto error = broken({two_shot(200 * KiB, 3)}, [](auto& plans) {
    for (intranode::PlannedPoll& p : move(plans[1], 0, read, 0).polls) --p.step;
  });
  expect_refused(error, 1, "is acknowledged before rank 1 has read what rank 0 published");
}

TEST(BrokenIntranodePlan, SendsAStepTooEarly) {
  const auto error = broken({call_of(Collective::all_gather, 8, 3)},
                            [](auto& plans) { ++move(plans[2], 0, contribute, 0).step; });
  expect_refused(error, 2, "does not publish the same slots");
}

TEST(BrokenIntranodePlan, AcknowledgesAStepTooEarly) {
  const auto error = broken({call_of(Collective::all_gather, 300 * KiB, 3)},
                            [](auto& plans) { ++plans[1].phases[0].acks[1].before; });
  expect_refused(error, 1, "is acknowledged before");
}

TEST(BrokenIntranodePlan, AcknowledgesBeforeTheMove) {
  const auto error =
      broken({two_shot(200 * KiB, 3)}, [](auto& plans) { --plans[2].phases[0].acks.back().after.read; });
  expect_refused(error, 2, "is acknowledged before");
}

// The ring wraps in a second call, whose first contribution waits for acknowledgements of the first call.
TEST(BrokenIntranodePlan, NeverAcknowledges) {
  const std::vector<intranode::CallCase> calls(6, call_of(Collective::all_gather, 300 * KiB, 3));
  const auto error = broken(calls, [](auto& plans) {
    for (intranode::PlannedPhase& p : plans[1].phases) p.acks.clear();
  });
  EXPECT_NE(error.find("rank 1 never acknowledges"), std::string::npos) << error;
  expect_refused(error, 0, "waits for ever");
}

// Each rank waits until the others have acknowledged the step that it has yet to send.
// A sender of a gather writes its ring where the root, rank 2, has read, and does not wait for it.
TEST(BrokenIntranodePlan, DefersAnAcknowledgementThatAWriterNeeds) {
  const std::vector<intranode::CallCase> calls(60, call_of(Collective::gather, 2 * KiB, 3));
  const auto error = broken(calls,
                            [](auto& plans) {
                              for (intranode::PlannedPhase& p : plans[2].phases)
                                p.acks.back().deferred = true;
                            },
                            {.size = 3, .ring_bytes = 16 * KiB});
  EXPECT_NE(error.find("rank 2 may defer its acknowledgement"), std::string::npos) << error;
  expect_refused(error, 0, "waits for ever");
}

TEST(BrokenIntranodePlan, AcknowledgesTooLate) {
  const std::vector<intranode::CallCase> calls(4, call_of(Collective::all_gather, 900 * KiB, 3));
  const auto error = broken(calls, [](auto& plans) {
    for (intranode::RankPlan& plan : plans)
      for (intranode::PlannedPhase& phase : plan.phases)
        phase.acks.erase(phase.acks.begin(), phase.acks.end() - 1);
  });
  EXPECT_NE(error.find("waits for ever"), std::string::npos) << error;
}

TEST(BrokenIntranodePlan, ReservesLessThanItWrites) {
  const auto error = broken({call_of(Collective::all_gather, 2 * KiB, 3)}, [](auto& plans) {
    for (intranode::RankPlan& plan : plans) move(plan, 0, contribute, 0).ring_bytes = 1 * KiB;
  });
  expect_refused(error, 0, "has not reserved");
}

TEST(BrokenIntranodePlan, ReservesOtherBytesThanItsPeers) {
  const auto error = broken({call_of(Collective::all_gather, 2 * KiB, 3)},
                            [](auto& plans) { move(plans[2], 0, contribute, 0).ring_bytes += 64; });
  expect_refused(error, 2, "reserves");
}

TEST(BrokenIntranodePlan, OverwritesBytesThatItDoesNotWaitFor) {
  const std::vector<intranode::CallCase> calls(6, call_of(Collective::broadcast, 300 * KiB, 3));
  const auto error = broken(calls, [](auto& plans) {
    for (intranode::PlannedPhase& p : plans[1].phases)
      for (intranode::PlannedMove& m : p.moves) m.reserves = false;
  });
  expect_refused(error, 1, "overwrites the bytes of step");
}

TEST(BrokenIntranodePlan, OverwritesASlotThatItDoesNotWaitFor) {
  const std::vector<intranode::CallCase> calls(300, call_of(Collective::broadcast, 8, 3));
  const auto error = broken(calls, [](auto& plans) {
    for (intranode::PlannedPhase& p : plans[1].phases)
      for (intranode::PlannedMove& m : p.moves) m.reserves = false;
  });
  expect_refused(error, 1, "overwrites the slot of step");
}

// A receiver that sends its empty slots at once loses the offsets of chunks that it has yet to read.
TEST(BrokenIntranodePlan, RunsAheadOfItsReads) {
  intranode::CallCase c = call_of(Collective::broadcast, 300 * 4 * KiB, 3);
  c.algorithm.chunk = 4 * KiB;
  const auto error = broken({c}, [](auto& plans) {
    for (intranode::PlannedMove& m : plans[2].phases[0].moves)
      if (m.kind == contribute) m.after.read = 0, m.reserves = false;
  });
  expect_refused(error, 2, "is reserved before this rank has read");
}

TEST(BrokenIntranodePlan, LacksAReader) {
  const auto error = broken({call_of(Collective::all_gather, 8, 3)}, [](auto& plans) {
    auto& parts = move(plans[1], 0, read, 0).parts;
    parts.erase(parts.begin() + 2);
  });
  expect_refused(error, 1, "byte 16 of the output is never written");
}

TEST(BrokenIntranodePlan, LacksAPoll) {
  const auto error = broken({call_of(Collective::all_reduce, 8, 3)},
                            [](auto& plans) { move(plans[1], 0, read, 0).polls.pop_back(); });
  expect_refused(error, 1, "of rank 2, which it has not polled");
}

TEST(BrokenIntranodePlan, AddsInAnotherOrder) {
  const auto error = broken({two_shot(200 * KiB, 3)}, [](auto& plans) {
    for (intranode::PlannedPart& p : move(plans[2], 0, reduce, 1).parts)
      std::swap(p.operands[0], p.operands[1]);
  });
  expect_refused(error, 2, "does not add in rank order");
}

TEST(BrokenIntranodePlan, ReadsTheShardOfAnotherRank) {
  const auto error = broken({call_of(Collective::reduce_scatter, 2 * KiB, 3)}, [](auto& plans) {
    move(plans[0], 0, read, 0).parts[0].operands[2].offset += 2 * KiB;
  });
  expect_refused(error, 0, "is not the sum of all ranks");
}

TEST(BrokenIntranodePlan, WritesAByteTwice) {
  const auto error =
      broken({call_of(Collective::all_reduce, 300 * KiB, 3, intranode::MemoryAccess::zero_copy)},
             [](auto& plans) { move(plans[1], 1, read, 0).parts[0].bytes += 64; });
  expect_refused(error, 2, "again");
}

TEST(BrokenIntranodePlan, CompletesBeforeItsBuffersAreFree) {
  const auto error =
      broken({call_of(Collective::all_gather, 300 * KiB, 3, intranode::MemoryAccess::zero_copy)},
             [](auto& plans) { plans[2].phases[1].moves.back().polls.clear(); });
  EXPECT_NE(error.find("accesses a buffer of rank 2 when its call may be complete"), std::string::npos)
      << error;
}

// An in-place all_to_all would overwrite inputs that peers have yet to read, so it is never zero_copy.
TEST(BrokenIntranodePlan, OverwritesAnInputThatPeersRead) {
  intranode::CallCase c = call_of(Collective::all_to_all, 2 * KiB, 3, intranode::MemoryAccess::zero_copy);
  c.in_place = true;
  EXPECT_NE(proof({c}, {.size = 3}).find("overwrites the input of rank"), std::string::npos);
}

TEST(BrokenIntranodePlan, LeavesABarrierEarly) {
  const auto error = broken({call_of(Collective::barrier, 0, 3)},
                            [](auto& plans) { move(plans[1], 0, read, 0).polls.pop_back(); });
  expect_refused(error, 2, "rank 1 may leave the barrier");
}

TEST(BrokenIntranodePlan, WaitsInACircle) {
  const auto error = broken({call_of(Collective::all_gather, 8, 3)}, [](auto& plans) {
    for (int r = 0; r < 3; ++r) {
      intranode::PlannedMove& m = move(plans[at(r)], 0, contribute, 0);
      m.polls = {{(r + 1) % 3, m.step}};
    }
  });
  EXPECT_NE(error.find("waits for ever"), std::string::npos) << error;
}

}  // namespace
}  // namespace rz
