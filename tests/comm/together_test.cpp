// Collectives among ranks of one host, driven call by call: steps that wrap around, ranks that run ahead of
// others, sizes at the edges of letters and pieces, and what ranks learn of each other when they
// differ.

#include "comm/backends/together.h"

#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "comm/backends/layout.h"
#include "comm/core/error.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"
#include "tests/support/streams.h"

namespace rz {
namespace {

using std::chrono::milliseconds;
using test::error_of;
using test::run_ranks;

constexpr std::uint32_t before_wrap = 0xfffffff0;
constexpr int plenty = 1000;  // turns within which a rank does all that it can do alone

// One rank of a group, and the numbers of its calls.
class Rank {
 public:
  Rank(int rank, int size, Store& store, std::uint32_t first_step)
      : rank(rank), size(size), transport(test::connect(rank, size, store, {"shm"})) {
    together.emplace(*transport, rank, size, first_step);
    test::meet_all(*transport, rank, size);
  }

  void start(const Operation& op) { together->start(op, sequence_++); }
  void finish() {
    const auto deadline = Deadline::after(std::chrono::seconds(20));
    while (!together->spin(20)) {
      require(!deadline.expired(), Errc::timeout, "rank ", rank, " waits for ", together->waiting_for());
      transport->progress();
      transport->wait(milliseconds(5));
    }
  }
  void call(const Operation& op) { start(op), finish(); }

  const int rank, size;
  std::unique_ptr<Transport> transport;
  std::optional<Together> together;

 private:
  std::uint32_t sequence_ = 0;
};

template <class F>
void run(int size, std::uint32_t first_step, const F& body) {
  run_ranks(
      size,
      [&](int rank, std::shared_ptr<Store> store) {
        Rank me(rank, size, *store, first_step);
        body(me, *store);
        test::meet_all(*me.transport, rank, size);
      },
      std::chrono::seconds(200));
}

void say(Store& store, const std::string& what) { store.set(what, "said"); }
void hear(Store& store, const std::string& what) {
  store.get(what, Deadline::after(std::chrono::seconds(20)));
}

// ---- any call, and what must come of it

enum class Memory { ordinary, shared, mixed, only_input_shared };

struct Call {
  Collective kind;
  std::size_t count;  ///< of all_to_all_v: the most between two ranks
  int root = 0;
  ReduceOp::Kind op = ReduceOp::sum;
  bool in_place = false;
  Memory memory = Memory::ordinary;
  std::uint32_t seed = 1;
};

std::size_t at(int i) { return static_cast<std::size_t>(i); }

std::uint32_t mixed(std::uint32_t seed, int rank, std::size_t i) {
  std::uint64_t h = (static_cast<std::uint64_t>(seed) << 40 | static_cast<std::uint64_t>(rank) << 32 | i) *
                    0x9e3779b97f4a7c15u;
  return static_cast<std::uint32_t>((h ^ h >> 31) >> 16);
}
// Sums of these are rounded, so that their bits tell the order of the ranks.
template <class T>
T input(const Call& c, int rank, std::size_t i) {
  if constexpr (std::is_floating_point_v<T>)
    return 1 + static_cast<T>(mixed(c.seed, rank, i) % 1000003) / 3;
  else
    return static_cast<T>(mixed(c.seed, rank, i));
}
std::size_t pair_count(const Call& c, int from, int to) {
  const std::uint32_t h = mixed(c.seed, from * 64 + to, 0);
  return h % 3 == 0 || from == c.root ? 0 : h % 3 == 1 ? c.count : h % (c.count + 1);
}
std::size_t pair_begin(const Call& c, int from, int to) {  // in the sender's input, with a gap after each
  std::size_t sum = 0;
  for (int r = 0; r < to; ++r) sum += pair_count(c, from, r) + 1;
  return sum;
}

template <class T>
T folded(const Call& c, int size, std::size_t i) {
  T x = input<T>(c, 0, i);
  for (int r = 1; r < size; ++r) {
    const T y = input<T>(c, r, i);
    x = c.op == ReduceOp::max ? std::max(x, y) : static_cast<T>(x + y);
  }
  return c.op == ReduceOp::avg ? static_cast<T>(x / static_cast<T>(size)) : x;
}

bool is_split(Collective kind) {
  return kind == Collective::reduce_scatter || kind == Collective::scatter || kind == Collective::all_to_all;
}
bool is_gathered(Collective kind) {
  return kind == Collective::all_gather || kind == Collective::gather || kind == Collective::all_to_all;
}

// Input and output of one rank; a few bytes behind their ends that nobody may touch.
template <class T>
class Buffers {
 public:
  Buffers(Rank& me, const Call& c) : me_(me), call_(c) {
    const std::size_t n = at(me.size);
    in_count_ = c.kind == Collective::barrier ? 0 : is_split(c.kind) ? c.count * n : c.count;
    out_count_ = c.kind == Collective::barrier ? 0 : is_gathered(c.kind) ? c.count * n : c.count;
    if (c.kind == Collective::all_to_all_v) {
      in_count_ = pair_begin(c, me.rank, me.size), out_count_ = 0;
      for (int r = 0; r < me.size; ++r) out_count_ += pair_count(c, r, me.rank) + 1;
    }
    const bool larger_in = in_count_ > out_count_;
    in_ = out_ = memory(std::max(in_count_, out_count_) + guard);
    out_at_ = out();
    in_at_ = in();
    if (!c.in_place) {
      in_ = memory(in_count_ + guard, call_.memory == Memory::only_input_shared), in_at_ = in(),
      out_at_ = out();
    } else if (is_split(c.kind) || is_gathered(c.kind)) {
      (larger_in ? out_at_ : in_at_) += at(me.rank) * c.count;
    }
    for (std::size_t i = 0; i < in_count_; ++i) in_at_[i] = input<T>(c, me.rank, i);
  }

  Operation operation() const {
    const Call& c = call_;
    Operation op{.kind = c.kind, .op = c.op, .root = c.root};
    const bool root = me_.rank == c.root;
    const bool sends = root || (c.kind != Collective::broadcast && c.kind != Collective::scatter);
    const bool receives = root || (c.kind != Collective::gather && c.kind != Collective::reduce);
    if (c.kind == Collective::barrier) return op;
    if (sends) op.in = {in_at_, in_count_};
    if (receives) op.out = {out_at_, out_count_};
    if (c.kind == Collective::all_to_all_v) op.pairs = std::make_shared<PairCounts>(pairs());
    return op;
  }

  PairCounts pairs() const {
    PairCounts p;
    for (int r = 0; r < me_.size; ++r) {
      p.send_counts.push_back(pair_count(call_, me_.rank, r));
      p.send_offsets.push_back(pair_begin(call_, me_.rank, r));
      p.recv_counts.push_back(pair_count(call_, r, me_.rank));
      p.recv_offsets.push_back(received_at(r));
    }
    return p;
  }

  void check() const {
    const Operation op = operation();
    if (call_.kind == Collective::all_to_all_v) return check_pairs();
    for (std::size_t i = 0; op.out.data && i < out_count_; ++i)
      if (!(out_at_[i] == want(i))) FAIL() << "at " << i << ": " << +out_at_[i] << ", not " << +want(i);
    for (std::size_t i = 0; op.in.data && !call_.in_place && i < in_count_; ++i)
      if (!(in_at_[i] == input<T>(call_, me_.rank, i))) FAIL() << "the input was changed at " << i;
    check_guards();
  }

 private:
  static constexpr std::size_t guard = 16;

  std::shared_ptr<std::byte> memory(std::size_t count, bool anyway = false) {
    const bool shared = anyway || call_.memory == Memory::shared ||
                        (call_.memory == Memory::mixed && me_.rank != me_.size - 1);
    const std::size_t bytes = count * sizeof(T);
    auto m = shared ? me_.transport->allocate(bytes)
                    : std::shared_ptr<std::byte>(new std::byte[bytes], [](auto* p) { delete[] p; });
    std::memset(m.get(), 0x5a, bytes);
    return m;
  }
  T* in() const { return reinterpret_cast<T*>(in_.get()); }
  T* out() const { return reinterpret_cast<T*>(out_.get()); }
  std::size_t received_at(int from) const {
    std::size_t sum = 0;
    for (int r = 0; r < from; ++r) sum += pair_count(call_, r, me_.rank) + 1;
    return sum;
  }
  T want(std::size_t i) const {
    const Call& c = call_;
    const std::size_t part = c.count ? i / c.count : 0, j = c.count ? i % c.count : 0, mine = at(me_.rank);
    switch (c.kind) {
      case Collective::all_reduce:
      case Collective::reduce:
        return folded<T>(c, me_.size, i);
      case Collective::reduce_scatter:
        return folded<T>(c, me_.size, mine * c.count + i);
      case Collective::broadcast:
        return input<T>(c, c.root, i);
      case Collective::scatter:
        return input<T>(c, c.root, mine * c.count + i);
      case Collective::all_to_all:
        return input<T>(c, static_cast<int>(part), mine * c.count + j);
      default:
        return input<T>(c, static_cast<int>(part), j);
    }
  }
  void check_pairs() const {
    for (int r = 0; r < me_.size; ++r) {
      const std::size_t n = pair_count(call_, r, me_.rank), begin = pair_begin(call_, r, me_.rank);
      const T* got = out_at_ + received_at(r);
      for (std::size_t i = 0; i < n; ++i)
        if (!(got[i] == input<T>(call_, r, begin + i))) FAIL() << "of rank " << r << " at " << i;
      ASSERT_TRUE(untouched(got + n, 1)) << "after what rank " << r << " sent";
    }
    check_guards();
  }
  static bool untouched(const T* p, std::size_t n) {
    const std::vector<std::byte> fresh(n * sizeof(T), std::byte{0x5a});
    return std::memcmp(p, fresh.data(), fresh.size()) == 0;
  }
  void check_guards() const {
    const std::size_t whole = call_.in_place ? std::max(in_count_, out_count_) : out_count_;
    if (call_.in_place || !in()) {
      ASSERT_TRUE(untouched(out() + whole, guard)) << "behind the output";
      return;
    }
    ASSERT_TRUE(untouched(in() + in_count_, guard)) << "behind the input";
    ASSERT_TRUE(untouched(out() + whole, guard)) << "behind the output";
  }

  Rank& me_;
  const Call call_;
  std::size_t in_count_ = 0, out_count_ = 0;
  std::shared_ptr<std::byte> in_, out_;
  T *in_at_ = nullptr, *out_at_ = nullptr;
};

template <class T>
void make_and_check(Rank& me, const Call& c) {
  const Buffers<T> buffers(me, c);
  const Operation op = buffers.operation();
  me.call(op);
  SCOPED_TRACE(testing::Message() << name(c.kind) << " of " << c.count << " " << name(dtype_of<T>)
                                  << ", root " << c.root << (c.in_place ? ", in place" : "") << ", memory "
                                  << static_cast<int>(c.memory) << ", rank " << me.rank << " of " << me.size);
  buffers.check();
}

bool has_form_in_place(Collective kind) {
  return kind != Collective::all_to_all && kind != Collective::all_to_all_v && kind != Collective::barrier;
}

constexpr Collective kinds[] = {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather,
                                Collective::broadcast,  Collective::reduce,         Collective::gather,
                                Collective::scatter,    Collective::all_to_all,     Collective::all_to_all_v,
                                Collective::barrier};

// Letters without bytes in between, of calls in memory that all reach, and rings that begin anew: nobody may
// lay out another ring than his peers.
TEST(Together, DirectCallsBetweenOthersLeaveTheRingInOrder) {
  run(4, before_wrap, [](Rank& me, Store&) {
    for (std::uint32_t i = 0; i < 12; ++i) {
      const std::size_t n = 5000 + 9000 * (i % 4);
      make_and_check<float>(me, {Collective::all_reduce, n, 0, ReduceOp::sum, false, Memory::shared, i + 1});
      make_and_check<float>(
          me, {Collective::all_gather, n + i, 0, ReduceOp::sum, false, Memory::ordinary, i + 50});
    }
  });
}

// ---- every collective at every edge

class Groups : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Groups, testing::Values(2, 3, 4, 5, 6, 7, 8));

// Bytes of a part: what lies in a letter, asks where memory lies, fills a piece, and the same for
// parts of which a letter or piece holds one for each rank.
template <class T>
std::vector<std::size_t> edges(Collective kind, int size) {
  std::vector<std::size_t> out{0, 1};
  const std::size_t parts = is_split(kind) ? at(size) : 1;
  for (const std::size_t bytes : {56, 4 << 10, 16 << 10, 32 << 10, 64 << 10})
    for (const std::size_t count : {bytes / parts / sizeof(T)})
      for (const std::size_t n : {count - (count > 0), count, count + 1})
        if (n != out.back()) out.push_back(n);
  return out;
}

template <class T>
void check_edges(Rank& me) {
  std::uint32_t seed = 0;
  for (const Collective kind : kinds)
    for (const std::size_t n : edges<T>(kind, me.size))
      for (const Memory memory : {Memory::ordinary, Memory::shared, Memory::mixed})
        for (const bool in_place : {false, true}) {
          if (in_place && !has_form_in_place(kind)) continue;
          ++seed;
          constexpr ReduceOp::Kind ops[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::max};
          make_and_check<T>(
              me, {kind, n, static_cast<int>(seed) % me.size, ops[seed % 3], in_place, memory, seed});
          if (testing::Test::HasFatalFailure()) return;
        }
}

TEST_P(Groups, BytesAtEveryEdge) {
  run(GetParam(), before_wrap, [](Rank& me, Store&) { check_edges<std::uint8_t>(me); });
}

TEST_P(Groups, FloatsAtEveryEdge) {
  run(GetParam(), 0, [](Rank& me, Store&) { check_edges<float>(me); });
}

TEST_P(Groups, SeveralPieces) {
  run(GetParam(), before_wrap, [](Rank& me, Store&) {
    std::uint32_t seed = 100;
    for (const Collective kind : kinds)
      for (const std::size_t n : {20000u, 65537u, 100003u})
        for (const Memory memory : {Memory::ordinary, Memory::shared, Memory::only_input_shared}) {
          ++seed;
          make_and_check<float>(me, {kind, is_split(kind) ? n / at(me.size) : n,
                                     static_cast<int>(seed) % me.size, ReduceOp::sum, false, memory, seed});
          if (testing::Test::HasFatalFailure()) return;
        }
  });
}

// More pieces than letters: who only reads may not write letters so far ahead that it forgets where lies what
// it has yet to read.
TEST(Together, MorePiecesThanLetters) {
  run(4, before_wrap, [](Rank& me, Store&) {
    std::uint32_t seed = 800;
    for (int i = 0; i < 4; ++i)
      for (const Collective kind : {Collective::broadcast, Collective::reduce, Collective::all_gather})
        make_and_check<std::uint64_t>(me, {kind, (5 << 20) / sizeof(std::uint64_t) + 3, i % 4, ReduceOp::sum,
                                           false, Memory::ordinary, ++seed});
  });
}

// So many bytes that results go past the caches, in every way that they are written.
TEST(Together, LargeResultsGoPastTheCaches) {
  run(2, 0, [](Rank& me, Store&) {
    constexpr std::size_t n = (25 << 20) / sizeof(std::uint64_t) + 5;
    std::uint32_t seed = 900;
    for (const Collective kind :
         {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather, Collective::broadcast})
      for (const Memory memory : {Memory::ordinary, Memory::shared})
        make_and_check<std::uint64_t>(me, {kind, kind == Collective::reduce_scatter ? n / 2 : n, 1,
                                           ReduceOp::sum, false, memory, ++seed});
    make_and_check<std::uint64_t>(
        me, {Collective::all_reduce, n, 0, ReduceOp::sum, true, Memory::shared, ++seed});
  });
}

// With so many ranks and so few bytes nothing is left for the last of them, whichever way it goes.
TEST(Together, LastRanksMayHaveNothingToFold) {
  run(48, 0, [](Rank& me, Store&) {
    make_and_check<float>(me, {Collective::all_reduce, 8193, 0, ReduceOp::sum, false, Memory::ordinary});
    make_and_check<float>(me, {Collective::all_reduce, 8193, 0, ReduceOp::sum, true, Memory::shared});
    make_and_check<float>(me, {Collective::all_reduce, 4096, 0, ReduceOp::sum, false, Memory::shared});
  });
}

// ---- any sequence

TEST_P(Groups, RandomCallsInARow) {
  for (const std::uint32_t seed : {1u, 2u, 3u}) {
    run(GetParam(), 0u - 100 * seed, [&](Rank& me, Store&) {
      std::mt19937 common(seed), own(seed * 100 + static_cast<std::uint32_t>(me.rank));
      for (std::uint32_t i = 0; i < 400; ++i) {
        const auto draw = [&](std::size_t n) { return std::size_t{common()} % n; };
        Call c{kinds[draw(std::size(kinds))], draw(draw(8) ? 60 : 30000)};
        c.root = static_cast<int>(draw(at(me.size)));
        c.in_place = draw(2) && has_form_in_place(c.kind);
        c.memory = static_cast<Memory>(draw(4));
        c.seed = seed * 1000 + i;
        if (own() % 16 == 0)  // some are late, now and then
          for (unsigned k = own() % 64; k > 0; --k) std::this_thread::yield();
        make_and_check<float>(me, c);
        if (testing::Test::HasFatalFailure()) return;
      }
    });
  }
}

// ---- ranks that run ahead

// Calls of which `ahead` wait for nobody, made by rank `first` while the other has not begun.
void run_ahead(Collective kind, int first, std::size_t bytes, unsigned kept) {
  SCOPED_TRACE(testing::Message() << name(kind) << " of " << bytes << " bytes");
  run(2, before_wrap, [&](Rank& me, Store& store) {
    // The larger ones ask where memory lies, at the first, third and seventh call: then nobody asks for a
    // while.
    for (unsigned i = 0; i < 7; ++i)
      make_and_check<std::uint8_t>(me, {.kind = kind, .count = bytes, .seed = i});
    make_and_check<std::uint8_t>(me, {Collective::barrier, 0});  // now all have said what they have read
    test::meet_all(*me.transport, me.rank, me.size);
    if (me.rank != first) hear(store, "ran ahead");
    for (unsigned i = 0; i < 100; ++i) {
      const Buffers<std::uint8_t> buffers(me, {.kind = kind, .count = bytes, .seed = 7u + i});
      const Operation op = buffers.operation();
      me.start(op);
      if (me.rank == first && i <= kept) {
        EXPECT_EQ(me.together->spin(plenty), i < kept) << "call " << i;
        if (i == kept) say(store, "ran ahead");
      }
      me.finish();
      buffers.check();
    }
  });
}

TEST(Together, WhoOnlySendsRunsAheadAsFarAsItIsKept) {
  // 64 letters; a ring of 256 KiB, in pieces of 4 to 32 KiB.
  run_ahead(Collective::broadcast, 0, 56, 64);
  run_ahead(Collective::broadcast, 0, 57, 64);
  run_ahead(Collective::broadcast, 0, 48 << 10, 5);
  run_ahead(Collective::broadcast, 0, 128 << 10, 2);
  run_ahead(Collective::scatter, 0, 28, 64);
  run_ahead(Collective::scatter, 0, 48 << 10, 5);
  run_ahead(Collective::gather, 1, 56, 64);
  run_ahead(Collective::gather, 1, 128 << 10, 2);
  run_ahead(Collective::reduce, 1, 56, 64);
}
TEST(Together, ASlowRankStillFindsTheLettersOfReceivers) {
  run(3, before_wrap, [](Rank& me, Store& store) {
    const Buffers<std::uint8_t> gathered(me, {.kind = Collective::all_gather, .count = 8});
    const Operation op = gathered.operation();
    if (me.rank != 2) hear(store, "offered");
    me.start(op);
    if (me.rank == 2) {
      me.together->advance();
      EXPECT_FALSE(me.together->complete());
      say(store, "offered");
      hear(store, "far ahead");
    }
    me.finish();
    gathered.check();
    for (unsigned i = 0; i < 100; ++i) {
      const Buffers<std::uint8_t> b(me, {.kind = Collective::broadcast, .count = 8, .seed = 2u + i});
      const Operation broadcast = b.operation();
      me.start(broadcast);
      if (me.rank == 1 && i == 63) {
        EXPECT_FALSE(me.together->spin(plenty));
        say(store, "far ahead");
      }
      me.finish();
      b.check();
    }
  });
}

TEST(Together, ADirectCallIsCompleteWhenPeersHaveWrittenTheirParts) {
  run(2, before_wrap, [](Rank& me, Store& store) {
    const Buffers<float> buffers(me,
                                 {.kind = Collective::all_reduce, .count = 5000, .memory = Memory::shared});
    const Operation op = buffers.operation();
    me.start(op);
    me.together->advance();  // says where its memory lies
    say(store, str("said ", me.rank));
    hear(store, str("said ", 1 - me.rank));
    if (me.rank == 0) {
      EXPECT_FALSE(me.together->spin(plenty));
      say(store, "tried");
    } else {
      hear(store, "tried");
    }
    me.finish();
    buffers.check();
  });
}

// ---- ranks that differ

void expect_mismatch(const Error& e, const std::string& part) {
  EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
  EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
}

// Complete at once: who is the root waits for nobody.
void broadcast_from(Rank& me, int root) {
  std::uint64_t x = 1;
  const Operation op{.kind = Collective::broadcast, .in = {&x, 1}, .out = {&x, 1}, .root = root};
  me.call(op);
}
void barrier(Rank& me) {
  const Operation op{.kind = Collective::barrier};
  me.call(op);
}

TEST(Together, TwoRootsOfABroadcastAreFoundOutByTheNextThatLooks) {
  for (const int times : {1, 63, 64, 100})
    run(2, before_wrap, [&](Rank& me, Store&) {
      for (int i = 0; i < times; ++i) broadcast_from(me, me.rank);
      const Error e = error_of([&] { barrier(me); });
      expect_mismatch(e, str("rank ", 1 - me.rank, " called broadcast #"));
      expect_mismatch(e, str("root ", me.rank));
    });
}

TEST(Together, AMismatchWhoseLettersAreGoneIsStillFoundOut) {
  run(2, before_wrap, [](Rank& me, Store& store) {
    broadcast_from(me, me.rank);
    say(store, str("made ", me.rank));
    hear(store, str("made ", 1 - me.rank));
    if (me.rank == 0) {
      for (int i = 0; i < 64; ++i) broadcast_from(me, 0);
      say(store, "gone");
      return;
    }
    hear(store, "gone");
    expect_mismatch(error_of([&] { broadcast_from(me, 0); }), "some time before broadcast #1");
  });
}

TEST(Together, DifferentCallsAndCountsAreNamed) {
  const auto differ = [](const char* what, const auto& make) {
    run(3, 0, [&](Rank& me, Store&) {
      std::vector<float> x(30000), y(30000);
      const Operation op = make(me, x.data(), y.data());
      const Error e = error_of([&] { me.call(op); });
      expect_mismatch(e, what);
    });
  };
  differ("all_reduce #0 (7 f32", [](Rank& me, float* x, float* y) {
    const std::size_t n = me.rank == 2 ? 7 : 9;
    return Operation{.kind = Collective::all_reduce, .in = {x, n}, .out = {y, n}};
  });
  differ("all_reduce #0 (20000 f32", [](Rank& me, float* x, float* y) {
    const std::size_t n = me.rank == 2 ? 20000 : 9;
    return Operation{.kind = Collective::all_reduce, .in = {x, n}, .out = {y, n}};
  });
  differ("avg", [](Rank& me, float* x, float* y) {
    return Operation{.kind = Collective::all_reduce,
                     .in = {x, 3},
                     .out = {y, 3},
                     .op = me.rank == 2 ? ReduceOp::avg : ReduceOp::sum};
  });
  differ("barrier", [](Rank& me, float* x, float* y) {
    if (me.rank == 2) return Operation{.kind = Collective::barrier};
    return Operation{.kind = Collective::all_reduce, .in = {x, 3}, .out = {y, 3}};
  });
}

TEST(Together, CountsOfAPairThatDifferAreNamed) {
  run(2, 0, [](Rank& me, Store&) {
    float x[4] = {}, y[8] = {};
    Operation op{.kind = Collective::all_to_all_v, .in = {x, 4}, .out = {y, 8}};
    op.pairs = std::make_shared<PairCounts>(PairCounts{.send_counts = {2, 2},
                                                       .send_offsets = {0, 2},
                                                       .recv_counts = {me.rank == 1 ? 3u : 2u, 2},
                                                       .recv_offsets = {0, 4}});
    me.start(op);
    if (me.rank == 0) {
      EXPECT_FALSE(me.together->spin(plenty));
    } else {
      expect_mismatch(error_of([&] { me.finish(); }), "(3 f32");
    }
  });
}

// ---- who is waited for

TEST(Together, NamesWhoHasNotSent) {
  run(3, before_wrap, [](Rank& me, Store& store) {
    for (int i = 0; i < 3; ++i) {
      if (me.rank == 2 && i == 1) hear(store, "named");
      broadcast_from(me, 0);
    }
    const Operation op{.kind = Collective::barrier};
    if (me.rank == 1) say(store, "three"), hear(store, "named");
    me.start(op);
    if (me.rank == 0) {
      hear(store, "three");
      EXPECT_FALSE(me.together->spin(plenty));
      EXPECT_EQ(me.together->debtors(), 2);
      EXPECT_EQ(me.together->culprit(), 2) << "it is behind rank 1";
      EXPECT_EQ(me.together->waiting_for(), "rank 1 to send, rank 2 to send");
      say(store, "named");
    }
    me.finish();
    EXPECT_EQ(me.together->culprit(), -1);
    EXPECT_EQ(me.together->debtors(), 0);
  });
}

TEST(Together, NamesWhoHasNotReceived) {
  run(3, before_wrap, [](Rank& me, Store& store) {
    if (me.rank == 2) hear(store, "named");
    for (int i = 0; i < 64; ++i) broadcast_from(me, 0);
    std::uint64_t x = 1;
    const Operation op{.kind = Collective::broadcast, .in = {&x, 1}, .out = {&x, 1}, .root = 0};
    if (me.rank == 1) say(store, "all kept"), hear(store, "named");
    me.start(op);
    if (me.rank == 0) {
      hear(store, "all kept");
      EXPECT_FALSE(me.together->spin(plenty));
      EXPECT_EQ(me.together->debtors(), 1);
      EXPECT_EQ(me.together->culprit(), 2);
      EXPECT_EQ(me.together->waiting_for(), "rank 2 to receive");
      say(store, "named");
    }
    me.finish();
  });
}

// A letter, or room for one, of a rank that is gone.
TEST(Together, ARankThatLeftIsAFailureOnlyForWhoNeedsIt) {
  run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    std::optional<Rank> me(std::in_place, rank, 2, *store, before_wrap);
    barrier(*me);
    if (rank == 1) {
      broadcast_from(*me, 1);  // rank 0 finds it when rank 1 has left
      me.reset();
      return say(*store, "left");
    }
    hear(*store, "left");
    for (int i = 0; i < 3; ++i) me->transport->wait(milliseconds(1)), me->transport->progress();
    broadcast_from(*me, 1);
    for (int i = 0; i < 63; ++i) broadcast_from(*me, 0);
    const Error e = error_of([&] {
      for (int i = 0; i < 64; ++i) broadcast_from(*me, 0);
    });
    EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
    EXPECT_EQ(e.culprit(), 1) << e.what();
  });
}

}  // namespace
}  // namespace rz
