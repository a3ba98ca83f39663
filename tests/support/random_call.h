#pragma once
/// Any collective call of an intra-node rank, and its expected result.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "tests/support/mailbox_rank.h"

namespace rz::test {

enum class Memory { ordinary, shared, mixed, only_input_shared };

struct Call {
  Collective kind;
  std::size_t count;  ///< of all_to_all_v: the maximum between two ranks
  int root = 0;
  ReduceOp::Kind op = ReduceOp::sum;
  bool in_place = false;
  Memory memory = Memory::ordinary;
  std::uint32_t seed = 1;
};

inline std::size_t at(int i) { return static_cast<std::size_t>(i); }

inline std::uint32_t mixed(std::uint32_t seed, int rank, std::size_t i) {
  std::uint64_t h = (static_cast<std::uint64_t>(seed) << 40 | static_cast<std::uint64_t>(rank) << 32 | i) *
                    0x9e3779b97f4a7c15u;
  return static_cast<std::uint32_t>((h ^ h >> 31) >> 16);
}
// Sums of these are rounded, so that their bits depend on the order of the ranks.
template <class T>
T input(const Call& c, int rank, std::size_t i) {
  if constexpr (std::is_floating_point_v<T>)
    return 1 + static_cast<T>(mixed(c.seed, rank, i) % 1000003) / 3;
  else
    return static_cast<T>(mixed(c.seed, rank, i));
}
inline std::size_t pair_count(const Call& c, int from, int to) {
  const std::uint32_t h = mixed(c.seed, from * 64 + to, 0);
  return h % 3 == 0 || from == c.root ? 0 : h % 3 == 1 ? c.count : h % (c.count + 1);
}
inline std::size_t pair_begin(const Call& c, int from,
                              int to) {  // in the sender's input, with a gap after each
  std::size_t sum = 0;
  for (int r = 0; r < to; ++r) sum += pair_count(c, from, r) + 1;
  return sum;
}

template <class T>
T expected_reduction(const Call& c, int size, std::size_t i) {
  T x = input<T>(c, 0, i);
  for (int r = 1; r < size; ++r) {
    const T y = input<T>(c, r, i);
    x = c.op == ReduceOp::max ? std::max(x, y) : static_cast<T>(x + y);
  }
  return c.op == ReduceOp::avg ? static_cast<T>(x / static_cast<T>(size)) : x;
}

inline bool is_split(Collective kind) {
  return kind == Collective::reduce_scatter || kind == Collective::scatter || kind == Collective::all_to_all;
}
inline bool is_gathered(Collective kind) {
  return kind == Collective::all_gather || kind == Collective::gather || kind == Collective::all_to_all;
}

// Input and output of one rank, with a few guard bytes behind their ends.
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
    } else if (is_split(c.kind) != is_gathered(c.kind)) {
      (larger_in ? out_at_ : in_at_) += at(me.rank) * c.count;
    }
    for (std::size_t i = 0; i < in_count_; ++i) in_at_[i] = input<T>(c, me.rank, i);
    if (c.kind == Collective::all_to_all_v) counts_ = std::make_shared<AllToAllVCounts>(pairs());
  }

  CollectiveCall operation() const {
    const Call& c = call_;
    CollectiveCall op{.kind = c.kind, .op = c.op, .root = c.root};
    const bool root = me_.rank == c.root;
    const bool sends = root || (c.kind != Collective::broadcast && c.kind != Collective::scatter);
    const bool receives = root || (c.kind != Collective::gather && c.kind != Collective::reduce);
    if (c.kind == Collective::barrier) return op;
    if (sends) op.in = {in_at_, in_count_};
    if (receives) op.out = {out_at_, out_count_};
    if (c.kind == Collective::all_to_all_v) op.counts = counts_.get();
    return op;
  }

  AllToAllVCounts pairs() const {
    AllToAllVCounts p;
    for (int r = 0; r < me_.size; ++r) {
      p.send_counts.push_back(pair_count(call_, me_.rank, r));
      p.send_offsets.push_back(pair_begin(call_, me_.rank, r));
      p.recv_counts.push_back(pair_count(call_, r, me_.rank));
      p.recv_offsets.push_back(received_at(r));
    }
    return p;
  }

  void check() const {
    const CollectiveCall op = operation();
    if (call_.kind == Collective::all_to_all_v) return check_pairs();
    for (std::size_t i = 0; op.out.data && i < out_count_; ++i)
      if (!(out_at_[i] == expected(i)))
        FAIL() << "at " << i << ": " << +out_at_[i] << ", not " << +expected(i);
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
  T expected(std::size_t i) const {
    const Call& c = call_;
    const std::size_t part = c.count ? i / c.count : 0, j = c.count ? i % c.count : 0, mine = at(me_.rank);
    switch (c.kind) {
      case Collective::all_reduce:
      case Collective::reduce:
        return expected_reduction<T>(c, me_.size, i);
      case Collective::reduce_scatter:
        return expected_reduction<T>(c, me_.size, mine * c.count + i);
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
  std::shared_ptr<AllToAllVCounts> counts_;
};

template <class T>
void make_and_check(Rank& me, const Call& c) {
  const Buffers<T> buffers(me, c);
  const CollectiveCall op = buffers.operation();
  me.call(op);
  SCOPED_TRACE(testing::Message() << name(c.kind) << " of " << c.count << " " << name(dtype_of<T>)
                                  << ", root " << c.root << (c.in_place ? ", in place" : "") << ", memory "
                                  << static_cast<int>(c.memory) << ", rank " << me.rank << " of " << me.size);
  buffers.check();
}

inline bool has_form_in_place(Collective kind) {
  return kind != Collective::all_to_all_v && kind != Collective::barrier;
}

inline constexpr Collective kinds[] = {
    Collective::all_reduce,   Collective::reduce_scatter, Collective::all_gather, Collective::broadcast,
    Collective::reduce,       Collective::gather,         Collective::scatter,    Collective::all_to_all,
    Collective::all_to_all_v, Collective::barrier};

}  // namespace rz::test
