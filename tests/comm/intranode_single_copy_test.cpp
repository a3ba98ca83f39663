// Runs: alone

// Calls in which the kernel copies data out of other ranks' processes.

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>

#include "comm/os/cma.h"
#include "tests/support/error_of.h"
#include "tests/support/random_call.h"

namespace rz {
namespace {

using test::before_wrap;
using test::error_of;
using test::make_and_check;
using test::Memory;
using test::Rank;
using test::run;
using test::run_ranks;

// ---- reading

TEST(Cma, ReadsMappedMemoryAndFailsElsewhere) {
  const long page = sysconf(_SC_PAGESIZE);
  auto* const at = static_cast<std::byte*>(mmap(nullptr, static_cast<std::size_t>(2 * page),
                                                PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(at, MAP_FAILED);
  at[page - 1] = std::byte{7};
  std::byte got[2]{};
  const auto address = reinterpret_cast<std::uint64_t>(at + page - 1);
  EXPECT_EQ(cma_read_process(getpid(), address, got), 0);
  EXPECT_EQ(got[0], std::byte{7});
  EXPECT_TRUE(cma_readable({at, static_cast<std::size_t>(2 * page)}));
  munmap(at + page, static_cast<std::size_t>(page));
  EXPECT_EQ(cma_read_process(getpid(), address, got), EFAULT) << "its second byte is gone";
  EXPECT_FALSE(cma_readable({at, static_cast<std::size_t>(2 * page)}));
  EXPECT_TRUE(cma_readable({at, static_cast<std::size_t>(page)}));
  EXPECT_TRUE(cma_readable({}));
  EXPECT_EQ(cma_read_process(0x3fffffff, address, got), ESRCH);
  munmap(at, static_cast<std::size_t>(page));
}

// ---- calls

constexpr const char* all_single_copy =
    "all_gather=single_copy,broadcast=single_copy,gather=single_copy,scatter=single_copy,"
    "all_to_all=single_copy";

void force(Rank& me) {
  me.engine.emplace(
      *me.transport, me.rank, me.size,
      tuning::IntranodeTable(me.size, {}, "", tuning::AlgorithmOverrides(all_single_copy, true), true));
}

constexpr Collective moves[] = {Collective::all_gather, Collective::broadcast, Collective::gather,
                                Collective::scatter, Collective::all_to_all};

void check_all(Rank& me, std::initializer_list<std::size_t> counts) {
  std::uint32_t seed = 7;
  for (const Collective kind : moves)
    for (const std::size_t n : counts)
      for (const Memory memory : {Memory::ordinary, Memory::mixed, Memory::only_input_shared, Memory::shared})
        for (const bool in_place : {false, true}) {
          ++seed;
          make_and_check<float>(
              me, {kind, n, static_cast<int>(seed) % me.size, ReduceOp::sum, in_place, memory, seed});
          if (testing::Test::HasFatalFailure()) return;
        }
}

TEST(SingleCopy, MovesTheSameBytes) {
  for (const int size : {2, 3, 5})
    run(size, 0, [](Rank& me, Store&) {
      force(me);
      check_all(me, {0, 1, 1000});
    });
}

TEST(SingleCopy, MovesMoreThanOneChunk) {
  static_assert(300'001 * sizeof(float) > intranode::single_copy_chunk);
  run(3, 0, [](Rank& me, Store&) {
    force(me);
    for (const Collective kind : moves)
      for (const Memory memory : {Memory::ordinary, Memory::mixed})
        for (const bool in_place : {false, true}) {
          make_and_check<float>(me, {kind, 300'001, 1, ReduceOp::sum, in_place, memory, 7});
          if (testing::Test::HasFatalFailure()) return;
        }
  });
}

TEST(SingleCopy, TheTunerMovesTheSameBytes) {
  run(2, 0, [](Rank& me, Store&) {
    for (std::uint32_t i = 0; i < 240; ++i)  // the first round of samples ends at about 200
      for (const Collective kind : {Collective::all_gather, Collective::broadcast, Collective::scatter}) {
        make_and_check<float>(me, {kind, 16 << 10, static_cast<int>(i % 2), ReduceOp::sum, false,
                                   i % 100 == 99 ? Memory::shared : Memory::ordinary, i + 1});
        if (testing::Test::HasFatalFailure()) return;
      }
  });
}

// From now on the calling thread's process_vm_readv() fails.
void deny_cma() {
  sock_filter steps[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{static_cast<unsigned short>(std::size(steps)), steps};
  ASSERT_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

TEST(SingleCopy, AllStageWhenOneRankLacksCma) {
  run_ranks(3, [](int rank, auto store) {
    if (rank == 1) deny_cma();
    Rank me(rank, 3, *store, 0);
    EXPECT_EQ(me.transport->shared_memory()->has_cma(), rank != 1);
    force(me);
    check_all(me, {1000, 20000});
    test::sync_all(*me.transport, rank, 3);
  });
}

// A container's policy, or a process that drops privileges, may forbid it at any time.
TEST(SingleCopy, AllStageWhenOneRankLosesCma) {
  for (const int loser : {0, 2})
    run_ranks(3, [&](int rank, auto store) {
      Rank me(rank, 3, *store, 0);
      EXPECT_TRUE(me.transport->shared_memory()->has_cma());
      force(me);
      check_all(me, {1000});
      if (rank == loser) deny_cma();
      check_all(me, {20000, 1000});
      test::sync_all(*me.transport, rank, 3);
      EXPECT_EQ(me.transport->shared_memory()->has_cma(), rank != loser);
    });
}

TEST(SingleCopy, ALongCallIsStagedWhenOneRankLosesCma) {
  for (const Collective kind : moves)
    run_ranks(3, [&](int rank, auto store) {
      Rank me(rank, 3, *store, 0);
      force(me);
      if (rank == 1) deny_cma();
      make_and_check<float>(me, {kind, 300'001, 0, ReduceOp::sum, false, Memory::ordinary, 7});
      test::sync_all(*me.transport, rank, 3);
    });
}

TEST(SingleCopy, TheTunerStagesWhenOneRankLosesCma) {
  run_ranks(2, [](int rank, auto store) {
    Rank me(rank, 2, *store, 0);
    for (std::uint32_t i = 0; i < 400; ++i) {
      if (i == 200 && rank == 1) deny_cma();
      make_and_check<float>(me,
                            {Collective::all_gather, 16 << 10, 0, ReduceOp::sum, false, Memory::ordinary, i});
      if (testing::Test::HasFatalFailure()) return;
    }
    test::sync_all(*me.transport, rank, 2);
  });
}

// Neither end reports it.
TEST(SingleCopy, MemoryWithAHoleIsAnErrorThatNamesItsRank) {
  run(2, 0, [](Rank& me, Store& store) {
    force(me);
    constexpr std::size_t n = 1 << 20;
    auto* const at =
        static_cast<std::byte*>(mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(at, MAP_FAILED);
    if (me.rank == 0)
      ASSERT_EQ(mprotect(at + n / 2, n / 4, PROT_NONE), 0);  // unmapped, it would go to another thread
    CollectiveCall op{.kind = Collective::broadcast};
    if (me.rank == 0) op.in = {at, n, DType::u8};
    op.out = {at, n, DType::u8};
    me.start(op);
    if (me.rank == 0) {
      me.engine->spin(test::enough_spins);
      test::wait_event(store, "seen");
    } else {
      const Error e = error_of([&] { me.finish(); });
      EXPECT_EQ(e.code(), Errc::system);
      EXPECT_NE(std::string(e.what()).find("of rank 0"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("process_vm_readv"), std::string::npos) << e.what();
      test::signal_event(store, "seen");
    }
    munmap(at, n);
  });
}

}  // namespace
}  // namespace rz
