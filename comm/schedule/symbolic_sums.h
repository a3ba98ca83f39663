#pragma once
/// Sums as shared trees: what the verifier computes with instead of numbers. Two expressions are equal
/// exactly if their ids are, where a + b counts as b + a and nothing else is reordered.

#include <cstdint>
#include <span>
#include <vector>

namespace rz {

class SymbolicSums {
 public:
  using Id = int;

  explicit SymbolicSums(int ranks);

  /// The contribution of one rank to one chunk.
  Id leaf(int rank, int chunk) { return intern(Kind::leaf, rank, chunk); }
  Id sum(Id a, Id b) { return intern(Kind::sum, a < b ? a : b, a < b ? b : a); }
  /// Stored to memory: where a small float is rounded.
  Id stored(Id a) { return intern(Kind::stored, a, 0); }
  /// Divided, if the operation is avg.
  Id finished(Id a) { return intern(Kind::finished, a, 0); }

  /// The ranks whose contributions an expression holds, as a set of `words()` words of 64 bits.
  std::span<const std::uint64_t> ranks(Id) const;
  int words_per_set() const { return words_; }
  /// A rank that both hold, or -1.
  int common_rank(Id a, Id b) const;
  /// A rank that it does not hold, or -1.
  int missing_rank(Id) const;

 private:
  enum class Kind : std::uint8_t { none, leaf, sum, stored, finished };
  struct Node {
    std::uint64_t key;
    Id id;
  };
  Id intern(Kind, int a, int b);
  void grow();
  void collect_ranks(Kind, int a, int b);

  int ranks_, words_;
  std::vector<Node> table_;             // open addressing, a power of two long; key 0 is free
  std::vector<std::uint64_t> members_;  // words_ an expression
  Id count_ = 0;
};

}  // namespace rz
