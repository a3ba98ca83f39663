#include "tests/proof/symbolic_sums.h"

#include <bit>

namespace rz::schedule {

namespace {

std::size_t place(std::uint64_t key, std::size_t size) {
  return (key * 0x9e3779b97f4a7c15u >> 20) & (size - 1);  // Fibonacci hashing
}

}  // namespace

SymbolicSums::SymbolicSums(int ranks) : ranks_(ranks), words_((ranks + 63) / 64), table_(1024) {}

SymbolicSums::Id SymbolicSums::intern(Kind kind, int a, int b) {
  const std::uint64_t key = static_cast<std::uint64_t>(kind) << 60 | static_cast<std::uint64_t>(a) << 30 |
                            static_cast<std::uint64_t>(b);
  std::size_t i = place(key, table_.size());
  for (; table_[i].key != 0; i = (i + 1) & (table_.size() - 1))
    if (table_[i].key == key) return table_[i].id;
  table_[i] = {key, count_};
  collect_ranks(kind, a, b);
  if (static_cast<std::size_t>(++count_) * 2 > table_.size()) grow();
  return count_ - 1;
}

void SymbolicSums::grow() {
  std::vector<Node> larger(table_.size() * 4);
  for (const Node& node : table_) {
    if (node.key == 0) continue;
    std::size_t i = place(node.key, larger.size());
    while (larger[i].key != 0) i = (i + 1) & (larger.size() - 1);
    larger[i] = node;
  }
  table_.swap(larger);
}

void SymbolicSums::collect_ranks(Kind kind, int a, int b) {
  const std::size_t own = members_.size(), words = static_cast<std::size_t>(words_);
  members_.resize(own + words);
  if (kind == Kind::leaf) {
    members_[own + static_cast<std::size_t>(a / 64)] = std::uint64_t{1} << a % 64;
    return;
  }
  for (std::size_t w = 0; w < words; ++w)
    members_[own + w] = ranks(a)[w] | (kind == Kind::sum ? ranks(b)[w] : 0);
}

std::span<const std::uint64_t> SymbolicSums::ranks(Id id) const {
  const auto words = static_cast<std::size_t>(words_);
  return {members_.data() + static_cast<std::size_t>(id) * words, words};
}

bool SymbolicSums::is_leaf(Id id) const {
  int members = 0;
  for (const std::uint64_t word : ranks(id)) members += std::popcount(word);
  return members == 1;
}

int SymbolicSums::common_rank(Id a, Id b) const {
  for (int w = 0; w < words_; ++w)
    if (const auto both = ranks(a)[w] & ranks(b)[w]) return w * 64 + std::countr_zero(both);
  return -1;
}

int SymbolicSums::missing_rank(Id id) const {
  for (int r = 0; r < ranks_; ++r)
    if (!(ranks(id)[r / 64] >> r % 64 & 1)) return r;
  return -1;
}

}  // namespace rz::schedule
