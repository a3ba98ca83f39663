// Runs: ci alone

// A caller's own memory that collectives use in place: conditions of registration, state of the memory
// afterwards, and zero-copy calls.

#include "comm/registration.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>
#include <optional>
#include <sstream>
#include <thread>

#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/core/types.h"
#include "comm/intranode/engine.h"
#include "comm/os/fd.h"
#include "comm/shared_memory/allocator.h"
#include "comm/transport/mailbox.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/mailbox_rank.h"
#include "tests/support/ranks.h"
#include "tests/support/streams.h"

namespace {
long pretended_page = 0;  // the page size that sysconf() returns, unless it is 0
}

// Clang's no_sanitize leaves entries into functions to the thread sanitizer.
#ifdef __clang__
#define RZ_NOT_INSTRUMENTED __attribute__((disable_sanitizer_instrumentation))
#else
#define RZ_NOT_INSTRUMENTED __attribute__((no_sanitize("address", "thread")))
#endif
/// Replaces the system's; the sanitizers call it before they are initialised.
extern "C" long __sysconf(int name) noexcept;
extern "C" RZ_NOT_INSTRUMENTED long sysconf(int name) noexcept {
  return name == _SC_PAGESIZE && pretended_page ? pretended_page : __sysconf(name);
}

namespace rz {
namespace {

using test::error_of;
using test::run_processes;
using test::run_ranks;

constexpr std::size_t page = 4096;

/// Protection and name of the mapping that contains the address.
std::string mapping_of(const void* address) {
  std::ifstream maps("/proc/self/maps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  for (std::string line; std::getline(maps, line);) {
    std::istringstream in(line);
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::string rights, offset, device, inode, name;
    in >> std::hex >> begin >> dash >> end >> rights >> offset >> device >> inode >> name;
    if (begin <= wanted && wanted < end) return rights + " " + name;
  }
  return "none";
}
bool is_private(const void* address) {
  const std::string m = mapping_of(address);
  return m == "rw-p " || m == "rw-p [heap]" || m.rfind("rw-p [anon", 0) == 0;
}

/// Memory of mmap, unmapped at its end.
struct Mapped {
  explicit Mapped(std::size_t bytes, int protection = PROT_READ | PROT_WRITE,
                  int flags = MAP_PRIVATE | MAP_ANONYMOUS, int fd = -1)
      : bytes(bytes), data(static_cast<std::byte*>(mmap(nullptr, bytes, protection, flags, fd, 0))) {}
  Mapped(const Mapped&) = delete;
  ~Mapped() {
    if (data != MAP_FAILED) munmap(data, bytes);
  }
  std::size_t bytes;
  std::byte* data;
};

Registration lend(SharedMemoryAllocator& arena, void* data, std::size_t bytes) {
  return arena.register_buffer({static_cast<std::byte*>(data), bytes});
}
std::string why_not(SharedMemoryAllocator& arena, void* data, std::size_t bytes) {
  const Registration r = lend(arena, data, bytes);
  EXPECT_FALSE(r.zero_copy());
  return r.reason();
}
void expect_message(const std::string& why, const std::string& words) {
  EXPECT_NE(why.find(words), std::string::npos) << why;
}

/// As in a fresh process: freed memory makes malloc keep larger blocks in its heap.
void use_mmap_for_large_blocks() { mallopt(M_MMAP_THRESHOLD, 128 << 10); }

std::vector<int> counted(std::size_t n) {
  std::vector<int> v(n);
  std::iota(v.begin(), v.end(), 1);
  return v;
}

// ---- process tests come first: they fork before this process has threads

void sum_until_killed(Communicator& comm, float* x, std::size_t n) {
  for (;;) {
    std::fill_n(x, n, 1.0f);
    comm.all_reduce({x, n}).wait();
  }
}

TEST(Registration, AKilledPeerLeavesOwnMemoryIntact) {
  constexpr std::size_t n = 1 << 20;
  const auto endings = run_processes(2, [&](int rank, auto store) {
    use_mmap_for_large_blocks();
    std::vector<float> x(n, 1.0f);
    std::optional<Registration> r;
    {
      auto comm = Communicator::connect(rank, 2, store, {.timeout = std::chrono::seconds(20)});
      r = comm.register_buffer(x.data(), n * sizeof(float));
      EXPECT_TRUE(r->zero_copy()) << r->reason();
      std::optional<std::thread> death;
      if (rank == 1)
        death.emplace([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(60));
          kill(getpid(), SIGKILL);
        });
      const Error e = error_of([&] { sum_until_killed(comm, x.data(), n); });
      EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
      EXPECT_EQ(e.culprit(), 1) << e.what();
    }
    std::fill(x.begin(), x.end(), 3.0f);
    r.reset();
    EXPECT_TRUE(is_private(x.data())) << mapping_of(x.data());
    EXPECT_EQ(x, std::vector<float>(n, 3.0f));
  });
  EXPECT_EQ(endings[0].exit_code, 0) << endings[0].error;
  EXPECT_EQ(endings[1].signal, SIGKILL) << endings[1].error;
}

TEST(Registration, OfProcessesEndsWhilePeersHaveItMapped) {
  constexpr std::size_t n = 100'000;
  test::expect_processes(2, [&](int rank, auto store) {
    auto comm = Communicator::connect(rank, 2, store, {.timeout = std::chrono::seconds(20)});
    use_mmap_for_large_blocks();
    auto x = std::make_unique<std::vector<int>>(n);
    for (int call = 0; call < 20; ++call) {
      std::iota(x->begin(), x->end(), rank);
      Registration r = comm.register_buffer(x->data(), n * sizeof(int));
      EXPECT_TRUE(r.zero_copy()) << r.reason();
      comm.all_reduce({x->data(), n}).wait();
      if (call % 2 == rank) {  // before the other rank's registration ends
        r = {};
        x = std::make_unique<std::vector<int>>(*x);
      }
      comm.barrier().wait();
      for (std::size_t i = 0; i < n; ++i)
        if ((*x)[i] != static_cast<int>(2 * i + 1)) FAIL() << "element " << i << " is " << (*x)[i];
    }
  });
}

// ---- state of the memory

TEST(Registration, KeepsContentsAndAddressesAtItsBeginAndEnd) {
  use_mmap_for_large_blocks();
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  const auto expected = counted(300'000);
  auto v = expected;
  {
    const Registration r = lend(*arena, v.data(), v.size() * sizeof(int));
    ASSERT_TRUE(r.zero_copy()) << r.reason();
    EXPECT_EQ(r.reason(), "");
    expect_message(mapping_of(v.data()), "rw-s /memfd:ringzero");
    expect_message(mapping_of(&v.back()), "rw-s /memfd:ringzero");
    EXPECT_EQ(v, expected);
    v[0] = v[77'777] = v.back() = -5;
  }
  EXPECT_TRUE(is_private(v.data())) << mapping_of(v.data());
  EXPECT_TRUE(is_private(&v.back())) << mapping_of(&v.back());
  auto changed = expected;
  changed[0] = changed[77'777] = changed.back() = -5;
  EXPECT_EQ(v, changed);
}

TEST(Registration, OfMoreBytesThanOneStepOfItsEndRestores) {
  use_mmap_for_large_blocks();
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  auto v = counted((std::size_t{70} << 20) / sizeof(int));
  { ASSERT_TRUE(lend(*arena, v.data(), v.size() * sizeof(int)).zero_copy()); }
  EXPECT_TRUE(is_private(&v[v.size() / 2])) << mapping_of(&v[v.size() / 2]);
  for (std::size_t i = 0; i < v.size(); ++i)
    if (v[i] != static_cast<int>(i + 1)) FAIL() << "element " << i << " is " << v[i];
}

TEST(Registration, OfMallocNewMmapAndAlignedMemory) {
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  constexpr std::size_t bytes = 1 << 20;
  const auto check = [&](void* p, const char* which) {
    ASSERT_NE(p, nullptr);
    std::memset(p, 0x5a, bytes);
    {
      const Registration r = lend(*arena, p, bytes);
      EXPECT_TRUE(r.zero_copy()) << which << ": " << r.reason();
    }
    EXPECT_EQ(std::count(static_cast<char*>(p), static_cast<char*>(p) + bytes, 0x5a), std::ptrdiff_t{bytes})
        << which;
  };
  use_mmap_for_large_blocks();
  void* const p = std::malloc(bytes);
  check(p, "malloc"), std::free(p);
  auto* const q = new char[bytes];
  check(q, "new"), delete[] q;
  for (const std::size_t alignment : {64, 256, 4096}) {
    void* const a = std::aligned_alloc(alignment, bytes);
    check(a, "aligned_alloc"), std::free(a);
  }
  const Mapped m(bytes);
  check(m.data, "mmap");
  const auto host = allocate_host(bytes);
  check(host.get(), "allocate_host");
}

TEST(Registration, AfterItsEndFreeCallocAndMadviseBehaveAsUsual) {
  use_mmap_for_large_blocks();
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  constexpr std::size_t bytes = 1 << 20;
  for (int i = 0; i < 50; ++i) {
    auto* const p = static_cast<unsigned char*>(std::malloc(bytes));
    std::memset(p, 0xff, bytes);
    { ASSERT_TRUE(lend(*arena, p, bytes).zero_copy()); }
    std::free(p);
    auto* const q = static_cast<unsigned char*>(std::calloc(bytes, 1));
    ASSERT_EQ(std::count(q, q + bytes, 0), std::ptrdiff_t{bytes});
    std::free(q);
  }
  const Mapped m(bytes);
  std::memset(m.data, 1, bytes);
  { ASSERT_TRUE(lend(*arena, m.data, bytes).zero_copy()); }
  ASSERT_EQ(madvise(m.data, bytes, MADV_DONTNEED), 0);
  EXPECT_EQ(std::count(m.data, m.data + bytes, std::byte{}), std::ptrdiff_t{bytes});
}

TEST(Registration, MayBeginAgainAndOutliveTheCommunicator) {
  use_mmap_for_large_blocks();
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  auto v = counted(100'000);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(lend(*arena, v.data(), v.size() * sizeof(int)).zero_copy());
  Registration r;
  EXPECT_FALSE(r.zero_copy());
  {
    const auto brief = std::make_shared<SharedMemoryAllocator>();
    r = lend(*brief, v.data(), v.size() * sizeof(int));
  }
  EXPECT_TRUE(r.zero_copy());
  Registration moved = std::move(r);
  EXPECT_TRUE(moved.zero_copy());
  EXPECT_EQ(v, counted(100'000));
  moved = {};
  EXPECT_TRUE(is_private(v.data()));
  EXPECT_EQ(v, counted(100'000));
}

// A misuse, but memory of others must not be damaged.
TEST(Registration, OfMemoryThatWasFreedTooEarlyLeavesAloneWhatLiesThereNow) {
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  const Mapped m(8 * page);
  Registration r = lend(*arena, m.data, m.bytes);
  ASSERT_TRUE(r.zero_copy()) << r.reason();
  std::memset(m.data, 1, m.bytes);
  ASSERT_EQ(munmap(m.data, m.bytes), 0);
  ASSERT_EQ(mmap(m.data, m.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
            m.data);
  std::memset(m.data, 2, m.bytes);
  r = {};
  EXPECT_EQ(std::count(m.data, m.data + m.bytes, std::byte{2}), static_cast<std::ptrdiff_t>(m.bytes));
}

TEST(Registration, ManyThreadsAtOnce) {
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&arena, t] {
      for (int i = 0; i < 30; ++i) {
        const Mapped m(40 * page);
        std::memset(m.data, t + 1, m.bytes);
        const Registration r = lend(*arena, m.data, m.bytes);
        EXPECT_TRUE(r.zero_copy()) << r.reason();
        EXPECT_EQ(std::count(m.data, m.data + m.bytes, static_cast<std::byte>(t + 1)),
                  static_cast<std::ptrdiff_t>(m.bytes));
      }
    });
  for (auto& t : threads) t.join();
}

TEST(Registration, ReadersNeverSeeAHole) {
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  const Mapped m(64 * page);
  std::memset(m.data, 7, m.bytes);
  std::atomic<bool> over{false};
  std::atomic<long> rounds{0}, wrong{0};
  std::thread reader([&] {
    while (!over || rounds == 0) {
      for (std::size_t at = 0; at < m.bytes; at += 512)
        wrong += *static_cast<volatile std::byte*>(m.data + at) != std::byte{7};
      ++rounds;
    }
  });
  for (int i = 0; i < 200; ++i) EXPECT_TRUE(lend(*arena, m.data, m.bytes).zero_copy());
  over = true;
  reader.join();
  EXPECT_EQ(wrong, 0);
}

// ---- rejected memory

TEST(Registration, RefusesWhatIsNotPrivateAnonymousMemory) {
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  char here[3 * page];
  std::memset(here, 0, sizeof here);
  expect_message(why_not(*arena, here, sizeof here), "stack");
  std::thread([&] {
    char there[3 * page];
    std::memset(there, 0, sizeof there);
    expect_message(why_not(*arena, there, sizeof there), "stack");
  }).join();

  const UniqueFd self(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  const Mapped file(8 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE, self.get());
  expect_message(why_not(*arena, file.data, file.bytes), "registration_test");

  const Mapped read_only(8 * page, PROT_READ);
  expect_message(why_not(*arena, read_only.data, read_only.bytes), "r--p");
  const Mapped shared(8 * page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS);
  expect_message(why_not(*arena, shared.data, shared.bytes), "shared memory already");
  const auto own = arena->allocate(1 << 20);
  expect_message(why_not(*arena, own.get(), 1 << 20), "of Communicator::allocate");

  const Mapped partly(8 * page);
  ASSERT_EQ(mprotect(partly.data + 4 * page, page, PROT_NONE), 0);
  expect_message(why_not(*arena, partly.data, partly.bytes), "---p");
  ASSERT_EQ(munmap(partly.data + 4 * page, page), 0);
  expect_message(why_not(*arena, partly.data, partly.bytes), "not all of it is mapped");
  EXPECT_TRUE(is_private(partly.data));
}

TEST(Registration, RefusesPagesThatAreLockedOrHuge) {
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  const Mapped locked(8 * page);
  // Not by mlock(), which does nothing under the address sanitizer.
  if (syscall(SYS_mlock, locked.data + page, page) != 0) GTEST_SKIP() << "mlock: " << std::strerror(errno);
  expect_message(why_not(*arena, locked.data, locked.bytes), "locked");
  const Mapped beside(8 * page);
  EXPECT_TRUE(lend(*arena, beside.data, beside.bytes).zero_copy());
  const Mapped huge(std::size_t{2} << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB);
  if (huge.data == MAP_FAILED) GTEST_SKIP() << "no huge pages are reserved here: " << std::strerror(errno);
  expect_message(why_not(*arena, huge.data, huge.bytes), "huge");
}

TEST(Registration, RefusesPagesThatOthersUseToo) {
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  const Mapped m(8 * page);
  m.data[100] = std::byte{1};
  expect_message(why_not(*arena, m.data + 200, 6 * page), "first page");
  expect_message(why_not(*arena, m.data + 16 + 200, 6 * page), "first page");
  m.data[100] = std::byte{};
  m.data[7 * page + 300] = std::byte{1};
  expect_message(why_not(*arena, m.data, 7 * page + 300), "last page");
  EXPECT_TRUE(lend(*arena, m.data, 7 * page + 301).zero_copy());
  EXPECT_TRUE(lend(*arena, m.data, 7 * page).zero_copy());
  EXPECT_TRUE(lend(*arena, m.data + 16, 7 * page - 16).zero_copy());
}

void put_words(std::byte* at, std::uint64_t first, std::uint64_t second) {
  std::memcpy(at, &first, 8), std::memcpy(at + 8, &second, 8);
}

// Of the 16 bytes before a block, only malloc's own may be replaced.
TEST(Registration, RefusesEdgePagesInUse) {
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  const Mapped m(8 * page);
  for (const std::size_t at : {0, 7, 8, 15}) {
    m.data[at] = std::byte{1};
    expect_message(why_not(*arena, m.data + 16, 7 * page), "first page");
    m.data[at] = std::byte{};
  }
  m.data[page] = std::byte{1};
  expect_message(why_not(*arena, m.data + page + 8, 6 * page), "first page");
  m.data[page] = std::byte{};
  // Header words that no mmapped block has: too short, of the heap, not whole pages.
  for (const std::uint64_t second : {page | 2, 8 * page | 1, (8 * page - 64) | 2}) {
    put_words(m.data, 0, second);
    expect_message(why_not(*arena, m.data + 16, 7 * page), "first page");
  }
  put_words(m.data, 64, 8 * page | 2);
  expect_message(why_not(*arena, m.data + 16, 7 * page), "first page");
#ifndef __SANITIZE_ADDRESS__  // its malloc has other header words
  put_words(m.data, 0, 8 * page | 2);
  EXPECT_TRUE(lend(*arena, m.data + 16, 7 * page).zero_copy());
  put_words(m.data, 1, (8 * page - 16) | 2);  // as in newer versions of glibc
  EXPECT_TRUE(lend(*arena, m.data + 16, 7 * page).zero_copy());
#endif
  put_words(m.data, 0, 0);
  EXPECT_TRUE(lend(*arena, m.data + 16, 7 * page).zero_copy());
}

// As on machines with pages of 64 KiB: there is one whole page, shared with neighbours.
TEST(Registration, RoundsToWholePages) {
  constexpr std::size_t large = 64 << 10;
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  const Mapped m(6 * large);
  std::byte* const at = m.data + large - reinterpret_cast<std::uintptr_t>(m.data) % large;
  struct Pretence {
    Pretence() { pretended_page = large; }
    ~Pretence() { pretended_page = 0; }
  } const pretence;
  at[3 * page] = std::byte{1};
  expect_message(why_not(*arena, at + 4 * page, page), "first page");
  at[3 * page] = std::byte{};
  at[9 * page] = std::byte{1};
  expect_message(why_not(*arena, at + 4 * page, page), "last page");
  at[9 * page] = std::byte{};
  const Registration r = lend(*arena, at + 4 * page, page);
  ASSERT_TRUE(r.zero_copy()) << r.reason();
  for (const std::size_t offset : {std::size_t{0}, 4 * page, large - 1})
    expect_message(mapping_of(at + offset), "memfd:ringzero");
  EXPECT_TRUE(is_private(at + large)) << mapping_of(at + large);
}

// As on a server without free descriptors.
TEST(Registration, EndsWithoutAFreeDescriptor) {
  use_mmap_for_large_blocks();
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  auto x = counted(100'000);
  Registration r = lend(*arena, x.data(), x.size() * sizeof(int));
  ASSERT_TRUE(r.zero_copy()) << r.reason();
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none{0, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_LT(open("/dev/null", O_RDONLY | O_CLOEXEC), 0);
  r = {};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_TRUE(is_private(x.data())) << mapping_of(x.data());
  EXPECT_EQ(x, counted(100'000));
}

TEST(Registration, RefusesWhatOverlapsAndNothingAtAll) {
  const auto arena = std::make_shared<SharedMemoryAllocator>(),
             another = std::make_shared<SharedMemoryAllocator>();
  const Mapped m(8 * page);
  {
    const Registration r = lend(*arena, m.data + 2 * page, 3 * page);
    ASSERT_TRUE(r.zero_copy());
    expect_message(why_not(*arena, m.data, 8 * page), "registered before");
    expect_message(why_not(*arena, m.data + 2 * page, 3 * page), "registered before");
    expect_message(why_not(*another, m.data + 4 * page, 2 * page), "registered before");
    EXPECT_TRUE(lend(*another, m.data + 5 * page, 3 * page).zero_copy());
  }
  EXPECT_TRUE(lend(*arena, m.data, 8 * page).zero_copy());
  expect_message(why_not(*arena, m.data, 0), "no bytes");
}

// As where the kernel promises more memory than exists.
TEST(Registration, WithoutMemoryForItIsOneErrorAndChangesNothing) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer has no shadow for 4 TiB";
#endif
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  const std::size_t bytes = std::size_t{1} << 42;
  const Mapped m(bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE);
  if (m.data == MAP_FAILED) GTEST_SKIP() << "no address space for 4 TiB: " << std::strerror(errno);
  m.data[12345] = std::byte{9};
  const Error e = error_of([&] { (void)lend(*arena, m.data, bytes); });
  EXPECT_EQ(e.code(), Errc::system);
  expect_message(e.what(), "need 4");
  EXPECT_TRUE(is_private(m.data + 12345));
  EXPECT_EQ(m.data[12345], std::byte{9});
  EXPECT_TRUE(lend(*arena, m.data, 16 * page).zero_copy());
}

TEST(Registration, MoreMemoryThanThereIsIsRefusedOnOneRankToo) {
  // Beyond a control group's limit the kernel would kill the process.
  auto alone = Communicator::connect(0, 1, nullptr);
  const Error e = error_of([&] { (void)alone.allocate(std::size_t{1} << 46); });
  EXPECT_EQ(e.code(), Errc::system);
  expect_message(e.what(), "memory: need 64 TiB, have about ");
}

TEST(Registration, WithoutALocalPeerIsReported) {
  auto alone = Communicator::connect(0, 1, nullptr);
  std::vector<float> x(100'000);
  const Registration r = alone.register_buffer(x.data(), x.size() * sizeof(float));
  EXPECT_FALSE(r.zero_copy());
  expect_message(r.reason(), "no other rank shares memory");
  EXPECT_EQ(error_of([&] { (void)alone.register_buffer(nullptr, 8); }).code(), Errc::invalid_argument);
  lab::group(2, {.transport = "tcp"}, [](Communicator& comm) {
    std::vector<float> y(100'000);
    expect_message(comm.register_buffer(y.data(), y.size() * sizeof(float)).reason(),
                   "no other rank shares memory");
    comm.barrier().wait();
  });
}

// ---- collectives use it in place

enum class Kind { plain, registered };

/// One call on a rank of `size`. Any copy on the way to peers would be in this rank's staging ring.
struct Ring {
  explicit Ring(const MailboxView& view) : bytes(view.staging_ring, view.staging_bytes) {
    std::memset(bytes.data(), 0xee, bytes.size());
  }
  bool untouched() const {
    return std::count(bytes.begin(), bytes.end(), std::byte{0xee}) ==
           static_cast<std::ptrdiff_t>(bytes.size());
  }
  std::span<std::byte> bytes;
};

std::size_t at(int i) { return static_cast<std::size_t>(i); }

void call(intranode::Engine& engine, Transport& transport, const CollectiveCall& op, std::uint32_t sequence) {
  engine.start(op, sequence);
  test::drive(transport, [&] { return engine.spin(20); });
}

void expect_direct(int size, Kind of_last_rank, bool direct) {
  use_mmap_for_large_blocks();
  run_ranks(size, [&](int rank, auto store) {
    const auto transport = test::connect(rank, size, *store, {"shm"});
    intranode::Engine engine(*transport, rank, size);
    std::uint32_t sequence = 0;
    for (const std::size_t n : {std::size_t{40'000}, std::size_t{40'001}, std::size_t{1'000'003}}) {
      std::vector<float> in(n), out(n, -1.0f);
      for (std::size_t i = 0; i < n; ++i) in[i] = static_cast<float>(i % 1000) + static_cast<float>(rank);
      Registration a, b;
      if (rank + 1 < size || of_last_rank == Kind::registered) {
        a = lend(*transport->shared_memory()->allocator(), in.data(), n * sizeof(float));
        b = lend(*transport->shared_memory()->allocator(), out.data(), n * sizeof(float));
        EXPECT_TRUE(a.zero_copy()) << a.reason();
        EXPECT_TRUE(b.zero_copy()) << b.reason();
      }
      const Ring ring(transport->shared_memory()->mailboxes()[static_cast<std::size_t>(rank)]);
      test::sync_all(*transport, rank, size);
      CollectiveCall op{};
      op.kind = Collective::all_reduce;
      op.in = Buffer{in.data(), n}, op.out = Buffer{out.data(), n};
      call(engine, *transport, op, sequence++);
      test::sync_all(*transport, rank, size);
      EXPECT_EQ(ring.untouched(), direct) << n;
      for (std::size_t i = 0; i < n; ++i) {
        const auto sum = static_cast<float>(i % 1000) * static_cast<float>(size) +
                         static_cast<float>(size * (size - 1) / 2);
        if (out[i] != sum) FAIL() << "element " << i << " is " << out[i] << ", not " << sum;
      }
    }
  });
}

TEST(RegisteredMemory, IsUsedInPlace) {
  expect_direct(2, Kind::registered, true);
  expect_direct(3, Kind::registered, true);
}
TEST(RegisteredMemory, OfSomeRanksOnlyIsStaged) {
  expect_direct(2, Kind::plain, false);
  expect_direct(3, Kind::plain, false);
}

/// Mappings in this process of the file that is mapped at this address.
std::ptrdiff_t mappings_of_file_at(const void* address) {
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  std::vector<std::string> inodes;
  std::string here;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::string rights, offset, device;
    std::istringstream(line) >> std::hex >> begin >> dash >> end >> rights >> offset >> device >>
        inodes.emplace_back();
    if (begin <= wanted && wanted < end) here = inodes.back();
  }
  return std::ranges::count(inodes, here);
}

// The ranks are threads, so that a call which is zero-copy adds the peers' mappings to this process.
TEST(RegisteredMemory, OfAGroupIsUsedInPlaceByGroupsSplitFromIt) {
  use_mmap_for_large_blocks();
  constexpr std::size_t n = 100'000;
  lab::group(4, [](Communicator& world) {
    std::vector<float> x(2 * n);
    Registration registration = world.register_buffer(x.data(), 2 * n * sizeof(float));
    ASSERT_TRUE(registration.zero_copy()) << registration.reason();
    const auto allocated = world.allocate_array<float>(n);
    world.barrier().wait();
    ASSERT_EQ(mappings_of_file_at(x.data()), 1);
    auto pair = *world.split(world.rank() / 2, world.rank());
    const auto sum = [](Communicator& comm, float* data, float value, float expected, std::size_t count) {
      std::fill_n(data, count, value);
      comm.all_reduce(Buffer(data, count)).wait();
      EXPECT_EQ(std::vector<float>(data, data + count), std::vector<float>(count, expected));
      comm.barrier().wait();
    };
    const auto own = static_cast<float>(world.rank()),
               in_pair = static_cast<float>(4 * (world.rank() / 2) + 1);
    sum(pair, x.data(), own, in_pair, n);
    EXPECT_EQ(mappings_of_file_at(x.data()), 2) << "this rank, and its peer in the pair";
    sum(pair, allocated.get(), own, in_pair, n);
    sum(world, x.data(), own, 6, n);
    EXPECT_EQ(mappings_of_file_at(x.data()), 2 + 3) << "the other group of the same memory maps it, too";
    world.barrier().wait();

    registration = {};  // every group learns that it has ended
    sum(pair, x.data(), own, in_pair, n);
    sum(world, x.data(), own, 6, n);
    auto of_pair = pair.register_buffer(x.data(), 2 * n * sizeof(float));
    world.barrier().wait();
    sum(world, x.data(), own, 6, 2 * n);  // calls of n elements have backed off from zero-copy
    EXPECT_EQ(mappings_of_file_at(x.data()), 4) << "memory that the new group registered";
    world.barrier().wait();
  });
}

// Repeated calls of memory at the same addresses that is registered, registered anew, or not.
TEST(RegisteredMemory, MayEndAndBeginBetweenCallsThatAreAlike) {
  use_mmap_for_large_blocks();
  for (const int size : {2, 3})
    test::run(size, test::before_wrap, [](test::Rank& me, Store&) {
      constexpr std::size_t n = 40'000;
      constexpr int calls = 30;
      std::vector<float> in(n), out(n);
      Registration a, b;
      for (int i = 0; i < calls; ++i) {
        me.turns = i % 2 ? test::enough_spins : 0;
        if (i % 3 == 0) {
          a = {}, b = {};
          if (const int turn = i / 3 % 5; turn < 3 || turn - 3 != me.rank) {
            a = lend(*me.transport->shared_memory()->allocator(), in.data(), n * sizeof(float));
            b = lend(*me.transport->shared_memory()->allocator(), out.data(), n * sizeof(float));
            EXPECT_TRUE(a.zero_copy()) << a.reason();
            EXPECT_TRUE(b.zero_copy()) << b.reason();
          }
        }
        for (std::size_t k = 0; k < n; ++k) in[k] = static_cast<float>((k + at(i)) % 1000 + at(me.rank));
        CollectiveCall op{.kind = Collective::all_reduce};
        op.in = Buffer{in.data(), n}, op.out = Buffer{out.data(), n};
        me.call(op);
        for (std::size_t k = 0; k < n; ++k) {
          const auto sum =
              static_cast<float>((k + at(i)) % 1000 * at(me.size) + at(me.size * (me.size - 1) / 2));
          if (out[k] != sum) FAIL() << "call " << i << ", element " << k << ": " << out[k] << ", not " << sum;
        }
      }
      EXPECT_EQ(me.repeated, calls - 1);
    });
}

TEST(RegisteredMemory, OfAPeerIsTheSameMemory) {
  use_mmap_for_large_blocks();
  run_ranks(2, [](int rank, auto store) {
    const auto transport = test::connect(rank, 2, *store, {"shm"});
    std::vector<int> v = counted(50'000);
    std::optional<Registration> r =
        lend(*transport->shared_memory()->allocator(), v.data(), v.size() * sizeof(int));
    ASSERT_TRUE(r->zero_copy()) << r->reason();
    const auto bytes = std::as_bytes(std::span(v)).subspan(8 * sizeof(int));
    const auto spot = transport->shared_memory()->export_handle(bytes);
    ASSERT_TRUE(spot.has_value());
    test::sync_all(*transport, rank, 2);
    SharedMemoryHandle theirs{};
    const CallSignature s{.sequence = 7};
    test::post_all(*transport, 1 - rank, Channel::point_to_point, s, std::as_bytes(std::span(&*spot, 1)));
    test::receive_all(*transport, 1 - rank, Channel::point_to_point,
                      std::as_writable_bytes(std::span(&theirs, 1)));
    auto* const there =
        reinterpret_cast<int*>(transport->shared_memory()->map_handle(1 - rank, theirs, bytes.size()));
    ASSERT_NE(there, nullptr);
    EXPECT_EQ(there[0], 9);
    test::sync_all(*transport, rank, 2);
    there[100] = 1000 + rank;
    test::sync_all(*transport, rank, 2);
    EXPECT_EQ(v[108], 1000 + 1 - rank);
    if (rank == 0) {
      r.reset();
      EXPECT_FALSE(transport->shared_memory()->export_handle(bytes).has_value());
    }
    test::sync_all(*transport, rank, 2);
    there[100] = -1;  // rank 0's memory is no longer shared
    test::sync_all(*transport, rank, 2);
    EXPECT_EQ(v[108], rank == 0 ? 1001 : -1);
  });
}

TEST(RegisteredMemory, InEveryCollective) {
  use_mmap_for_large_blocks();
  lab::group(3, [](Communicator& comm) {
    constexpr std::size_t n = 60'000;
    std::vector<int> one(n), all(3 * n);
    const Registration a = comm.register_buffer(one.data(), n * sizeof(int));
    const Registration b = comm.register_buffer(all.data(), 3 * n * sizeof(int));
    ASSERT_TRUE(a.zero_copy()) << a.reason();
    ASSERT_TRUE(b.zero_copy()) << b.reason();
    const auto value = [](int r, std::size_t i) { return static_cast<int>(i % 1009) * (r + 1); };
    for (int again = 0; again < 3; ++again) {
      for (std::size_t i = 0; i < n; ++i) one[i] = value(comm.rank(), i);
      comm.all_gather({one.data(), n}, {all.data(), 3 * n}).wait();
      for (std::size_t i = 0; i < 3 * n; ++i) ASSERT_EQ(all[i], value(static_cast<int>(i / n), i % n));
      comm.reduce_scatter({all.data(), 3 * n}, {one.data(), n}).wait();
      for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(one[i], 3 * value(comm.rank(), i));
      comm.broadcast({one.data(), n}, 2).wait();
      for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(one[i], 3 * value(2, i));
      comm.all_reduce({one.data(), n}).wait();
      for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(one[i], 9 * value(2, i));
      comm.gather({one.data(), n}, {all.data(), 3 * n}, 1).wait();
      comm.scatter({all.data(), 3 * n}, {one.data(), n}, 1).wait();
      for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(one[i], 9 * value(2, i));
      const int next = (comm.rank() + 1) % 3, before = (comm.rank() + 2) % 3;
      comm.group().send({one.data(), n}, next).recv({all.data(), n}, before).launch().wait();
      for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(all[i], 9 * value(2, i));
    }
  });
}

}  // namespace
}  // namespace rz
