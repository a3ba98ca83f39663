// Runs: ci alone

// Guarantees of shared memory alone: zero-copy, and its conditions.

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <set>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/net/handshake.h"
#include "comm/net/poller.h"
#include "comm/net/unix_socket.h"
#include "comm/shared_memory/allocator.h"
#include "comm/transport/shm/shm_transport.h"
#include "comm/transport/wait_for_graph.h"
#include "tests/support/error_of.h"
#include "tests/support/forked.h"
#include "tests/support/ranks.h"
#include "tests/support/streams.h"

namespace {
off_t max_fallocate = 0;  // a longer allocation is interrupted, unless it is 0
}

/// Replaces the system's.
extern "C" int posix_fallocate(int fd, off_t offset, off_t bytes) {
  if (max_fallocate && bytes > max_fallocate) return EINTR;
  static const auto real = reinterpret_cast<int (*)(int, off_t, off_t)>(dlsym(RTLD_NEXT, "posix_fallocate"));
  return real(fd, offset, bytes);
}

namespace rz {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::span<const std::byte> view(const std::shared_ptr<std::byte>& memory, std::size_t bytes) {
  return {memory.get(), bytes};
}

ReceiveView await_piece(Transport& t, int peer, Channel lane) {
  test::drive(t, [&] { return !t.peek(peer, lane).bytes.empty(); });
  return t.peek(peer, lane);
}

void signal_peer(Transport& t, int peer) {
  const std::byte b{1};
  test::post_all(t, peer, Channel::point_to_point, {}, {&b, 1});
}
void wait_peer(Transport& t, int peer) {
  std::byte b;
  test::receive_all(t, peer, Channel::point_to_point, {&b, 1});
}

// The receiver sees writes that the sender makes after post(): both use the same memory.
void see_later_writes(int rank, std::shared_ptr<Store> store) {
  const auto t = test::connect(rank, 2, *store);
  constexpr std::size_t size = 3 << 20;
  if (rank == 0) {
    const auto memory = t->allocate(size);
    std::memset(memory.get(), 1, size);
    EXPECT_EQ(t->post(1, Channel::collective, {}, view(memory, size)), size)
        << "one frame, whatever its length";
    wait_peer(*t, 1);
    memory.get()[size - 1] = std::byte{2};
    signal_peer(*t, 1);
    wait_peer(*t, 1);
    EXPECT_EQ(t->released(1, Channel::collective), 0u) << "not before it was consumed";
    signal_peer(*t, 1);
    test::drive(*t, [&] { return t->released(1, Channel::collective) >= 1000; });
    EXPECT_EQ(t->released(1, Channel::collective), 1000u) << "as far as it was consumed";
    signal_peer(*t, 1);
    test::drive(*t, [&] { return t->released(1, Channel::collective) == size; });
    signal_peer(*t, 1);
    return;
  }
  const ReceiveView in = await_piece(*t, 0, Channel::collective);
  ASSERT_EQ(in.bytes.size(), size);
  EXPECT_EQ(in.bytes.back(), std::byte{1});
  signal_peer(*t, 0);
  wait_peer(*t, 0);
  EXPECT_EQ(in.bytes.back(), std::byte{2});
  signal_peer(*t, 0);
  wait_peer(*t, 0);
  t->consume(0, Channel::collective, 1000);
  wait_peer(*t, 0);
  t->consume(0, Channel::collective, size - 1000);
  wait_peer(*t, 0);
}

TEST(Shm, ByReferenceIsTheSendersOwnMemoryBetweenThreads) { test::run_ranks(2, see_later_writes); }
TEST(Shm, ByReferenceIsTheSendersOwnMemoryBetweenProcesses) { test::expect_processes(2, see_later_writes); }

TEST(Shm, OtherMemoryIsReleasedAtOnce) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    const auto t = test::connect(rank, 2, *store);
    if (rank == 0) {
      std::vector<std::byte> plain(20'000, std::byte{5});
      const auto shared = t->allocate(200'000);
      EXPECT_EQ(t->post(1, Channel::collective, {}, plain), plain.size());
      EXPECT_EQ(t->released(1, Channel::collective), plain.size());
      std::fill(plain.begin(), plain.end(), std::byte{6});
      EXPECT_EQ(t->post(1, Channel::collective, {}, view(shared, 100)), 100u);  // too short for a reference
      EXPECT_EQ(t->released(1, Channel::collective), plain.size() + 100);
      EXPECT_EQ(t->post(1, Channel::collective, {}, view(shared, 160'000)), 160'000u);
      EXPECT_EQ(t->post(1, Channel::collective, {}, plain), plain.size());
      EXPECT_EQ(t->released(1, Channel::collective), plain.size() + 100) << "what lies behind waits";
      signal_peer(*t, 1);
      test::drive(*t, [&] { return t->released(1, Channel::collective) == 2 * plain.size() + 160'100; });
    } else {
      wait_peer(*t, 0);
      std::vector<std::byte> all(200'100);
      test::receive_all(*t, 0, Channel::collective, all);
      EXPECT_EQ(all[19'999], std::byte{5});
      EXPECT_EQ(all.back(), std::byte{6});
    }
    test::sync_all(*t, rank, 2);
  });
}

// Parts of a copied message end at whole cache lines, so that no element is cut.
TEST(Shm, ChunksHoldWholeElements) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    const auto t = test::connect(rank, 2, *store);
    constexpr std::size_t size = 1'000'004;
    if (rank == 0) {
      const std::vector<std::byte> plain(size);
      for (int i = 0; i < 3; ++i) test::post_all(*t, 1, Channel::collective, {}, plain);
    } else {
      for (int i = 0; i < 3; ++i)
        for (std::size_t at = 0; at < size;) {
          const std::size_t n = await_piece(*t, 0, Channel::collective).bytes.size();
          at += n;
          EXPECT_TRUE(n % 64 == 0 || at == size) << n << " at " << at;
          t->consume(0, Channel::collective, n);
        }
    }
    test::sync_all(*t, rank, 2);
  });
}

std::size_t mappings() {
  std::ifstream in("/proc/self/maps");
  std::size_t n = 0;
  for (std::string line; std::getline(in, line);) n += line.find("memfd:ringzero") != std::string::npos;
  return n;
}

// Peers unmap memory that its owner has freed.
TEST(Shm, PeersUnmapFreedMemory) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    const auto t = test::connect(rank, 2, *store);
    test::sync_all(*t, rank, 2);
    const std::size_t before = mappings();
    for (int i = 0; i < 20; ++i) {
      constexpr std::size_t size = 1 << 20;
      if (rank == 0) {
        const auto memory = t->allocate(size);
        *memory = std::byte(i);
        EXPECT_EQ(t->post(1, Channel::collective, {}, view(memory, size)), size);
        test::drive(*t, [&] { return t->released(1, Channel::collective) == (i + 1) * size; });
      } else {
        EXPECT_EQ(await_piece(*t, 0, Channel::collective).bytes.front(), std::byte(i));
        t->consume(0, Channel::collective, size);
      }
    }
    test::drive(*t, [&] { return mappings() <= before + 2; });
    test::sync_all(*t, rank, 2);
  });
}

// Memory that is freed while a peer still reads it stays readable.
TEST(Shm, MemoryThatIsFreedTooEarlyIsNoCrash) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    const auto t = test::connect(rank, 2, *store);
    if (rank == 0) {
      auto memory = t->allocate(1 << 20);
      *memory = std::byte{9};
      EXPECT_EQ(t->post(1, Channel::collective, {}, view(memory, 1 << 20)), 1u << 20);
      memory.reset();
      t->progress(0);
      signal_peer(*t, 1);
    } else {
      wait_peer(*t, 0);
      EXPECT_EQ(await_piece(*t, 0, Channel::collective).bytes.front(), std::byte{9});
      t->consume(0, Channel::collective, 1 << 20);
    }
    test::sync_all(*t, rank, 2);
  });
}

TEST(Shm, ManyFramesFillTheRingAndGoOn) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    const auto t = test::connect(rank, 2, *store);
    std::vector<std::byte> bytes(8);
    int posted = 0;
    while (rank == 0 &&
           t->post(1, Channel::collective, {.sequence = static_cast<std::uint32_t>(posted)}, bytes) == 8)
      ++posted;
    if (rank == 0) {
      EXPECT_GE(posted, 64);
      EXPECT_LT(posted, 10'000);
      signal_peer(*t, 1);
      for (; posted < 20'000; ++posted)
        test::post_all(*t, 1, Channel::collective, {.sequence = static_cast<std::uint32_t>(posted)}, bytes);
    } else {
      wait_peer(*t, 0);
      for (std::uint32_t i = 0; i < 20'000; ++i) {
        ASSERT_EQ(await_piece(*t, 0, Channel::collective).signature.sequence, i);
        t->consume(0, Channel::collective, 8);
      }
    }
    test::sync_all(*t, rank, 2);
  });
}

TEST(Shm, ConsumingMoreThanWasShownIsRefused) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    const auto t = test::connect(rank, 2, *store);
    signal_peer(*t, 1 - rank);
    EXPECT_EQ(await_piece(*t, 1 - rank, Channel::point_to_point).bytes.size(), 1u);
    EXPECT_THROW(t->consume(1 - rank, Channel::point_to_point, 2), Error);
    t->consume(1 - rank, Channel::point_to_point, 1);
    test::sync_all(*t, rank, 2);
  });
}

TEST(Shm, LackOfMemoryStatesNeedAndHave) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    const auto t = test::connect(rank, 2, *store);
    constexpr std::size_t all = ~std::size_t{0};
    for (const std::size_t size : {std::size_t{1} << 50, all / 2, all - 8192, all - 8191, all - 255, all})
      try {
        t->allocate(size);
        ADD_FAILURE() << size;
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Errc::system);
        EXPECT_NE(std::string(e.what()).find("need"), std::string::npos) << e.what();
        EXPECT_NE(std::string(e.what()).find("have"), std::string::npos) << e.what();
        EXPECT_EQ(std::string(e.what()).find("posix_fallocate"), std::string::npos)
            << "not called: " << e.what();
      }
    test::sync_all(*t, rank, 2);
  });
}

/// KiB of our memory that this process has mapped, and how much of it there is.
struct Held {
  long mapped = 0, resident = 0;
};
Held held() {
  std::ifstream smaps("/proc/self/smaps");
  Held sum;
  bool ours = false;
  for (std::string line; std::getline(smaps, line);) {
    std::uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2)
      ours = line.find("memfd:ringzero") != std::string::npos;
    long kib = 0;
    if (ours && std::sscanf(line.c_str(), "Size: %ld", &kib) == 1) sum.mapped += kib;
    if (ours && std::sscanf(line.c_str(), "Rss: %ld", &kib) == 1) sum.resident += kib;
  }
  return sum;
}

// Ranks without further calls: one must not hold the other's memory.
TEST(Shm, IdleRanksReleaseFreedMemory) {
  test::expect_processes(2, [](int rank, std::shared_ptr<Store> store) {
    auto comm = Communicator::connect(rank, 2, store);
    comm.barrier().wait();
    const Held before = held();
    constexpr std::size_t blocks = 8, n = 2 << 20;
    {
      std::vector<std::shared_ptr<float>> memory;
      for (std::size_t i = 0; i < blocks; ++i) {
        memory.push_back(comm.allocate_array<float>(n));
        std::fill_n(memory.back().get(), n, 1.0f);
        comm.all_reduce({memory.back().get(), n}).wait();
        EXPECT_EQ(memory.back().get()[n - 1], 2.0f);
      }
      EXPECT_GT(held().resident, before.resident + 8 * 8192 + 1024) << "KiB: of its own, and the peer's";
      comm.barrier().wait();
    }
    store->set(concat("freed", rank), "");
    store->get(concat("freed", 1 - rank), Deadline::after(seconds(20)));
    EXPECT_LT(held().resident, before.resident + 1024) << "KiB: the peer's are still there";
    const auto end = Deadline::after(seconds(20));
    while (held().mapped > before.mapped && !end.expired()) std::this_thread::sleep_for(milliseconds(20));
    EXPECT_LE(held().mapped, before.mapped) << "KiB: the peer's are still mapped";
    store->set(concat("seen", rank), "");
    store->get(concat("seen", 1 - rank), Deadline::after(seconds(30)));
  });
}

// Memory posted by reference stays readable after the sender frees it and departs.
TEST(Shm, DataPostedByReferenceOutlivesItsSender) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    auto t = test::connect(rank, 2, *store);
    constexpr std::size_t size = 3 << 20;
    if (rank == 0) {
      auto memory = t->allocate(size);
      std::memset(memory.get(), 9, size);
      EXPECT_EQ(t->post(1, Channel::collective, {}, view(memory, size)), size);
      memory.reset();
      t.reset();
      store->set("left", "");
      return;
    }
    store->get("left", Deadline::after(seconds(20)));
    const ReceiveView in = await_piece(*t, 0, Channel::collective);
    ASSERT_EQ(in.bytes.size(), size);
    EXPECT_EQ(std::count(in.bytes.begin(), in.bytes.end(), std::byte{9}), std::ptrdiff_t{size});
    t->consume(0, Channel::collective, size);
  });
}

TEST(SharedMemoryAllocator, AnArrayOfMoreBytesThanThereAreNumbersIsRefused) {
  auto comm = Communicator::connect(0, 1, nullptr);
  for (const std::size_t count : {~std::size_t{0} / 8 + 2, ~std::size_t{0} / 4, ~std::size_t{0}}) {
    const Error e = test::error_of([&] { comm.allocate_array<double>(count); });
    EXPECT_EQ(e.code(), Errc::system) << e.what();
  }
}

// As a profiler's timer, which fires again before a long call ends.
TEST(SharedMemoryAllocator, SignalsDoNotKeepMemoryFromBeingMade) {
  EXPECT_EQ(test::in_forked_child([] {
              max_fallocate = 256 << 10;
              const auto arena = std::make_shared<SharedMemoryAllocator>();
              constexpr std::size_t bytes = 5'000'000;
              const auto memory = arena->allocate(bytes);
              return std::count(memory.get(), memory.get() + bytes, std::byte{}) == bytes;
            }),
            0);
}

// ulimit -f: the kernel would end the process.
TEST(SharedMemoryAllocator, MoreThanAFileMayHoldIsAnErrorThatNamesTheLimit) {
  EXPECT_EQ(test::in_forked_child([] {
              const rlimit limit{3 << 20, 3 << 20};
              setrlimit(RLIMIT_FSIZE, &limit);
              const auto arena = std::make_shared<SharedMemoryAllocator>();
              const auto small = arena->allocate(1000);
              const Error e = test::error_of([&] { arena->allocate(4 << 20); });
              return e.code() == Errc::system &&
                     std::string(e.what()).find("ulimit -f") != std::string::npos &&
                     arena->allocate(1 << 20) != nullptr;
            }),
            0);
}

TEST(SharedMemoryAllocator, SmallBlocksShareASegmentAndComeBack) {
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  SegmentMap map;
  auto a = arena->allocate(1000), b = arena->allocate(5000);
  arena->refresh(map);
  EXPECT_EQ(map.find(a.get(), 1000), map.find(b.get(), 5000));
  EXPECT_NE(map.find(a.get(), 1000), nullptr);
  EXPECT_EQ(map.find(a.get(), 1 << 24), nullptr) << "not all of it is in the segment";
  const std::byte* at = a.get();
  a.reset();
  EXPECT_EQ(arena->allocate(1000).get(), at) << "first fit";
  b.reset();
  std::byte plain;
  EXPECT_EQ(map.find(&plain, 1), nullptr);
}

TEST(SharedMemoryAllocator, ASegmentThatIsGoneIsNotFound) {
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  const auto released = arena->watch_released(), late = arena->watch_released();
  SegmentMap map;
  auto a = arena->allocate(10 << 20);
  const std::byte* at = a.get();
  arena->refresh(map);
  const auto number = map.find(at, 100)->number;
  a.reset();
  EXPECT_EQ(map.find(at, 100), nullptr) << "even before the map is refreshed";
  EXPECT_TRUE(released->any());
  for (const auto& watcher : {released, late}) {  // each group of peers learns of it
    std::vector<std::uint32_t> dropped;
    arena->drain_released(*watcher, dropped);
    EXPECT_EQ(dropped, std::vector{number});
    EXPECT_FALSE(watcher->any());
  }
}

/// KiB of the mapping at this address that are in huge pages.
long huge_kib(const std::byte* address) {
  std::ifstream smaps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  bool within = false;
  for (std::string line; std::getline(smaps, line);) {
    std::uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) within = begin <= wanted && wanted < end;
    if (long kib = 0; within && std::sscanf(line.c_str(), "ShmemPmdMapped: %ld", &kib) == 1) return kib;
  }
  return -1;
}

TEST(SharedMemoryAllocator, LargeBlocksLieInHugePagesWhereThereAreAny) {
  constexpr std::size_t bytes = 9 << 20;
  const SharedMemory memory = SharedMemory::create(bytes);
  const SharedMemory peers = SharedMemory::map(UniqueFd(dup(memory.fd())), true);
  ASSERT_NE(memory.data(), peers.data());
  for (const SharedMemory* m : {&memory, &peers}) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(m->data()) % (2 << 20), 0u);
    EXPECT_EQ(std::count(m->data(), m->data() + bytes, std::byte{}), std::ptrdiff_t{bytes});
  }
  peers.data()[bytes - 1] = std::byte{1};
  EXPECT_EQ(memory.data()[bytes - 1], std::byte{1});
  const long kib = huge_kib(memory.data());
  if (kib <= 0) GTEST_SKIP() << "the system has no huge pages for shared memory (" << kib << " KiB)";
  EXPECT_EQ(kib, 8 << 10);  // the rest is too small for one
  EXPECT_EQ(huge_kib(peers.data()), 8 << 10);
}

TEST(SharedMemoryAllocator, LargeBlocksHaveDifferentCacheColours) {
  const auto here = std::make_shared<SharedMemoryAllocator>(0),
             there = std::make_shared<SharedMemoryAllocator>(1);
  constexpr std::size_t bytes = 4 << 20, sets = 64 << 10;
  const auto place = [](const auto& block) { return reinterpret_cast<std::uintptr_t>(block.get()) % sets; };
  const auto a = here->allocate(bytes), b = here->allocate(bytes);
  const auto c = there->allocate(bytes), d = there->allocate(bytes);
  const std::set<std::uintptr_t> all{place(a), place(b), place(c), place(d)};
  EXPECT_EQ(all.size(), 4u);
  for (const auto at : all) EXPECT_EQ(at % 256, 0u);
  std::memset(b.get(), 1, bytes);
  EXPECT_EQ(a.get()[bytes - 1], std::byte{});
}

TEST(SharedMemoryAllocator, ManyThreadsAllocateAndFree) {
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::vector<std::shared_ptr<std::byte>> held(8);
      for (int i = 0; i < 400; ++i) {
        const std::size_t size = static_cast<std::size_t>((i * 7919 + t * 104729) % 60'000);
        auto& slot = held[static_cast<std::size_t>(i) % held.size()];
        slot = arena->allocate(size);
        for (std::size_t k = 0; k < size; k += 97) ASSERT_EQ(slot.get()[k], std::byte{0});
        std::memset(slot.get(), t + 1, size);
      }
    });
  for (auto& t : threads) t.join();
}

// Unauthenticated peers on the listening socket of a handshake are dropped.
TEST(Handshake, UnauthenticatedPeersOnTheUnixSocketAreRejected) {
  const std::string name = "ringzero-test-" + net::random_hex();
  const net::JobId job = net::random_id();
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    const net::HandshakeInfo me{job, rank, 2, {}};
    if (rank == 1) {
      store->get("listening", Deadline::after(seconds(10)));
      UniqueFd mute = net::connect_unix(name, Deadline::after(seconds(1)));
      UniqueFd liar = net::connect_unix(name, Deadline::after(seconds(1)));
      const std::string nonsense(40, 'x');
      EXPECT_EQ(send(liar.get(), nonsense.data(), nonsense.size(), MSG_NOSIGNAL), 40);
      std::vector<net::Connection> calls;
      calls.push_back({0, 0, net::connect_unix(name, Deadline::after(seconds(1))), {}, name});
      EXPECT_EQ(net::handshake(me, -1, std::move(calls), {}, 1, Deadline::after(seconds(10))).size(), 1u);
      return;
    }
    const UniqueFd listener = net::listen_unix(name);
    store->set("listening", "");
    const auto met = net::handshake(me, listener.get(), {}, {1}, 1, Deadline::after(seconds(10)));
    ASSERT_EQ(met.size(), 1u);
    EXPECT_EQ(met[0].rank, 1);
  });
}

// Ranks may see different caches, and must still compute the same staging offsets.
TEST(ShmMailboxes, UsesTheSmallestRingSizeOfAll) {
  constexpr std::size_t small = 1 << 20, large = 4 << 20;
  const net::JobId job = net::random_id();
  const std::vector<int> ranks{0, 1};
  const auto monitor = [](int rank) { return std::make_shared<LinkMonitor>(rank, std::vector{0, 0}, false); };
  ShmTransport a(monitor(0), ranks, large), b(monitor(1), ranks, small);
  const std::vector<std::string> addresses{a.address(), b.address()};
  const auto connect = [&](ShmTransport& transport, int rank) {
    transport.connect({job, rank, 2, {}}, addresses, Deadline::after(seconds(30)));
  };
  std::thread other([&] { connect(b, 1); });
  connect(a, 0);
  other.join();
  for (ShmTransport* transport : {&a, &b})
    for (const MailboxView& view : transport->shared_memory()->mailboxes())
      EXPECT_EQ(view.staging_bytes, small);
  a.shared_memory()->mailboxes()[0].staging_ring[small - 1] = std::byte{7};
  EXPECT_EQ(b.shared_memory()->mailboxes()[0].staging_ring[small - 1], std::byte{7});
}

}  // namespace
}  // namespace rz
