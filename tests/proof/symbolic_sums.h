#pragma once
/// Symbolic values of the verifier: expressions as hash-consed trees. Two expressions are equal if and only
/// if their ids are, where a + b equals b + a and nothing else is reordered. Not thread safe.

#include <cstdint>
#include <span>
#include <vector>

namespace rz::schedule {

class SymbolicSums {
 public:
  using Id = int;

  explicit SymbolicSums(int ranks);

  /// The contribution of one rank to one chunk.
  Id leaf(int rank, int chunk) { return intern(Kind::leaf, rank, chunk); }
  Id sum(Id a, Id b) { return intern(Kind::sum, a < b ? a : b, a < b ? b : a); }
  /// `a` stored to memory, which rounds 8- and 16-bit floats.
  Id stored(Id a) { return intern(Kind::stored, a, 0); }
  /// `a` after a final step, which divides for avg.
  Id finished(Id a) { return intern(Kind::finished, a, 0); }

  /// The ranks whose contributions an expression includes, as a bit set of words_per_set() words.
  std::span<const std::uint64_t> ranks(Id) const;
  int words_per_set() const { return words_; }
  /// True for the contribution of one rank, false for a sum.
  bool is_leaf(Id) const;
  /// A rank that both include, or -1.
  int common_rank(Id a, Id b) const;
  /// A rank that it does not include, or -1.
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
  std::vector<Node> table_;             // open addressing; its size is a power of two, key 0 is free
  std::vector<std::uint64_t> members_;  // words_ for each expression
  Id count_ = 0;
};

}  // namespace rz::schedule
