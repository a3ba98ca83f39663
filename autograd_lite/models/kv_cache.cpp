#include "autograd_lite/models/kv_cache.h"

#include <algorithm>
#include <span>

namespace rz {
namespace {

Tensor indices(Tape& tape, const Shape& shape, const std::vector<std::int32_t>& values) {
  const Tensor t = tape.empty(shape, DType::i32);
  t.assign(std::span<const std::int32_t>(values), tape.stream());
  return t;
}

}  // namespace

void KvCache::begin(Tape& tape, std::size_t tokens, std::vector<std::size_t> counts) {
  require(counts.size() == lengths_.size(), Errc::invalid_argument, "a cache of ", lengths_.size(),
          " sequences got tokens of ", counts.size());
  const bool first = std::ranges::all_of(lengths_, [](std::size_t n) { return n == 0; });
  require(first || tokens == 1, Errc::invalid_argument,
          "a cache that has tokens takes one of each sequence, got ", tokens);
  std::vector<std::int32_t> positions;
  for (std::size_t b = 0; b < counts.size(); ++b) {
    const bool fits = counts[b] <= tokens && tokens <= positions_ && lengths_[b] + counts[b] <= positions_;
    require(fits, Errc::invalid_argument, "sequence ", b, " has ", lengths_[b], " + ", counts[b], " of ",
            tokens, " tokens, more than the ", positions_, " positions of the cache");
    // A sequence that is full has no more tokens: its padding may be anywhere.
    for (std::size_t t = 0; t < tokens; ++t)
      positions.push_back(static_cast<std::int32_t>(std::min(lengths_[b] + t, positions_ - 1)));
  }
  next_positions_ = indices(tape, {counts.size(), tokens}, positions);
  counts_ = std::move(counts);
}

KvCache::Layer& KvCache::layer(Tape& tape, std::size_t index, const Tensor& k, std::size_t rows) {
  if (layers_.size() <= index) layers_.resize(index + 1);
  Layer& l = layers_[index];
  const Shape shape{lengths_.size(), rows, k.shape()[2]};
  if (!l.keys.defined()) l = {tape.empty(shape, k.dtype()), tape.empty(shape, k.dtype())};
  return l;
}

void KvCache::keep(Tape& tape, const Tensor& to, const Tensor& x) const {
  const std::size_t rows = to.shape()[1], width = to.shape()[2], tokens = x.shape()[1];
  for (std::size_t b = 0; b < lengths_.size(); ++b) {
    // A sequence without tokens in this pass has none later: its row is free.
    const std::size_t count = std::max<std::size_t>(counts_[b], 1);
    for (std::size_t t = count > rows ? count - rows : 0; t < count;) {
      const std::size_t row = (lengths_[b] + t) % rows, run = std::min(count - t, rows - row);
      ops::copy(to.view((b * rows + row) * width, {run * width}),
                x.view((b * tokens + t) * width, {run * width}), tape.stream());
      t += run;
    }
  }
}

Tensor KvCache::key_counts(Tape& tape, std::size_t rows) const {
  std::vector<std::int32_t> counts;
  for (std::size_t b = 0; b < lengths_.size(); ++b)
    counts.push_back(static_cast<std::int32_t>(std::min(lengths_[b] + 1, rows)));
  return indices(tape, {counts.size()}, counts);
}

Var KvCache::attention(Tape& tape, std::size_t index, const Tensor& q, const Tensor& k, const Tensor& v,
                       const ops::AttentionOptions& of_model) {
  ops::AttentionOptions options = of_model;
  const std::size_t rows = options.window ? std::min(options.window, positions_) : positions_;
  const Layer& l = layer(tape, index, k, rows);
  keep(tape, l.keys, k), keep(tape, l.values, v);
  const Tensor out = tape.empty(q.shape(), q.dtype());
  const Tensor log_sum = tape.empty({q.shape()[0], static_cast<std::size_t>(options.heads), q.shape()[1]});
  const std::size_t longest = *std::ranges::max_element(lengths_);
  if (longest == 0) {  // padding follows the tokens, which do not attend to it
    ops::attention(out, log_sum, q, k, v, options, {}, tape.stream());
  } else {
    options.causal = false, options.window = 0;
    options.keys = std::min(longest + 1, rows);
    options.key_counts = key_counts(tape, rows);
    ops::attention(out, log_sum, q, l.keys, l.values, options, {}, tape.stream());
  }
  return tape.constant(out);
}

void KvCache::end() {
  for (std::size_t b = 0; b < lengths_.size(); ++b) lengths_[b] += counts_[b];
}

}  // namespace rz
