#pragma once
/// Layers that several ranks share (tensor parallelism: Shoeybi et al., arXiv:1909.08053; sequence
/// parallelism: Korthikanti et al., arXiv:2205.05198): what they exchange with these ranks, and the table by
/// which parallelize() (sharding/parallel/parallelize.h) divides a model.
///
/// A layer holds functions, since this floor knows no communicators. Without them a layer does nothing more.

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "../../comm/core/range.h"
#include "../ops.h"

namespace rz {

/// What a layer exchanges with the ranks that share it. All of them call the same functions in the same
/// order.
struct Exchange {
  using Function = std::function<Var(Tape&, Var)>;
  Function input;   ///< of its input
  Function output;  ///< of its product, before a bias
  /// For a parameter that all ranks have whole and each uses on a part: sums its gradient over the ranks.
  Function parameter;
  /// x of each rank as [ranks, …], in rank order. Not recorded.
  std::function<Tensor(Tape&, const Tensor&)> gather;
  RankOf part;  ///< this rank
  /// For a layer without parameters, such as dropout: its part of a tensor is a range of the tokens, the
  /// dimension before the last, while gradients are recorded; false: of the last dimension, always.
  bool by_tokens = false;
  nn::PartOf columns{};  ///< of a dropout: this rank's of the last dimension; of = 0: as many as other ranks

  static Var through(const Function& f, Tape& tape, Var x) { return f ? f(tape, x) : x; }
};

/// How ranks share a layer.
enum class ParallelStyle {
  column,      ///< nn::Linear, nn::MultiheadAttention: each rank computes some outputs of a whole input
  row,         ///< nn::Linear: each rank has some inputs; the outputs are summed, and are whole
  vocabulary,  ///< nn::Embedding: each rank has some rows, as a table and as a head with its loss
  sequence,    ///< whole; with sequence parallelism used on this rank's tokens: norms, positions, dropout
  shared,      ///< whole, used between column and row on a part: norms of heads, dropout
  replicated,  ///< whole, used on whole tensors
};
constexpr const char* name(ParallelStyle style) {
  constexpr const char* names[] = {"column", "row", "vocabulary", "sequence", "shared", "replicated"};
  return names[static_cast<int>(style)];
}

/// A row of the table. Modules are those whose names, from the module that is divided, the pattern matches
/// (matches_name()).
struct ParallelRule {
  std::string pattern;
  ParallelStyle style;
  /// Columns of a column layer that are divided one by one: 3 for a layer that computes q, k and v.
  std::size_t blocks = 1;
  /// Columns, or inputs of a row layer, that stay together: the channels of a head, of which all ranks have
  /// as many. 0: each stands alone, and ranks have the numbers of chunk_of().
  std::size_t head_size = 0;
  /// The columns of all ranks together, for a `shared` dropout where ranks have different numbers of them.
  std::size_t columns = 0;
};

/// The indices of a rank in a dimension of `size`, as torch.chunk cuts it: 136 between 3 ranks are 46, 46 and
/// 44, and 5 between 4 are 2, 2, 1 and none.
constexpr Range chunk_of(std::size_t size, RankOf rank) {
  const auto ranks = static_cast<std::size_t>(rank.ranks), each = (size + ranks - 1) / ranks,
             begin = std::min(size, static_cast<std::size_t>(rank.rank) * each);
  return {begin, std::min(size, begin + each)};
}

/// The first rule that matches a module applies. Modules without one are whole. No divided tensor leaves the
/// way from column to row: what is between them works on each column alone, or on each head.
using ParallelPlan = std::vector<ParallelRule>;

}  // namespace rz
