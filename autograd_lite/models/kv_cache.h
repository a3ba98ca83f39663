#pragma once
/// Keys and values of texts that a language model continues, so that each pass computes one token only.

#include <cstddef>
#include <vector>

#include "../attention_ops.h"
#include "../tape.h"

namespace rz {

/// Keys and values of `sequences` texts of at most `positions` tokens. LanguageModel::next_logits() fills it.
/// Layers with a sliding window keep the keys of the window alone. Bytes: 2 · layers · sequences · positions
/// · key heads · head size · size of the dtype.
class KvCache {
 public:
  KvCache(std::size_t sequences, std::size_t positions) : positions_(positions), lengths_(sequences) {}

  std::size_t positions() const { return positions_; }
  /// Tokens of each sequence that the cache has.
  const std::vector<std::size_t>& lengths() const { return lengths_; }

  // ---- for next_logits() and the layers of a model
  /// Before a pass: counts[b] tokens of sequence b follow those of the cache, padded at the end to `tokens`.
  /// Errc::invalid_argument if a sequence has no room, or if it is not the first pass and `tokens` is not 1.
  void begin(Tape&, std::size_t tokens, std::vector<std::size_t> counts);
  /// Positions of the tokens of the pass, i32 [B, T].
  const Tensor& next_positions() const { return next_positions_; }
  /// Keeps k and v [B, T, K·D] of the pass, contiguous, and returns the attention of q to all keys.
  Var attention(Tape&, std::size_t layer, const Tensor& q, const Tensor& k, const Tensor& v,
                const ops::AttentionOptions&);
  /// After a pass: its tokens belong to the cache.
  void end();

 private:
  struct Layer {
    Tensor keys, values;  ///< [B, rows, K·D]; the row of a position is its remainder by rows
  };
  Layer& layer(Tape&, std::size_t index, const Tensor& k, std::size_t rows);
  void keep(Tape&, const Tensor& rows, const Tensor& x) const;
  /// i32 [B]: keys of each sequence in `rows` rows, those of the pass included.
  Tensor key_counts(Tape&, std::size_t rows) const;

  std::size_t positions_;
  std::vector<std::size_t> lengths_, counts_;
  std::vector<Layer> layers_;
  Tensor next_positions_;
};

}  // namespace rz
