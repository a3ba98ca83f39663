#include "autograd_lite/attention_ops.h"

#include <algorithm>
#include <bit>

#include "autograd_lite/element_ops.h"
#include "autograd_lite/saved_variable.h"

namespace rz::nn {
namespace {

/// Pairs of a query and a key that a head of a sequence multiplies: those that `causal` and `window` leave.
/// Padding and the borders of documents, which are in memory of the device, are not subtracted.
std::uint64_t pairs(std::size_t queries, std::size_t keys, const AttentionOptions& o) {
  if (!o.causal) return std::uint64_t{queries} * keys;
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < queries; ++i) {
    const std::size_t before = std::min(keys, o.past + i + 1);
    sum += o.window ? std::min(o.window, before) : before;
  }
  return sum;
}

/// Counts `products` of queries and keys: two in forward, the scores and the sum of values; five in backward,
/// the scores again and four gradients.
void count_products(Tape& tape, const Tensor& q, const Tensor& k, const AttentionOptions& o, int products) {
  if (!tape.profiles()) return;
  const std::size_t keys = o.keys ? o.keys : k.shape()[1];
  tape.count_macs(static_cast<std::uint64_t>(products) * q.shape()[0] * q.shape()[2] *
                  pairs(q.shape()[1], keys, o));
}

struct Attended {
  Tensor out, log_sum;
  ops::DropoutMask mask;
};

/// Forward of `op`, for q[B, T, H·D] and k[B, S, …].
Attended attend(const char* op, Tape& tape, const Tensor& q, const Tensor& k, const Tensor& v,
                const AttentionOptions& options, float dropout, RankOf heads_of) {
  for (const Tensor& t : {q, k, v})
    require(t.shape().dims() == 3, Errc::invalid_argument, op, ": the input ", name(t.shape()), " has ",
            t.shape().dims(), " extents, expected 3");
  require(options.heads > 0, Errc::invalid_argument, op, ": ", options.heads, " heads");
  require(dropout >= 0 && dropout < 1, Errc::invalid_argument, op, ": dropout is ", dropout,
          ", expected 0 <= dropout < 1");
  Attended a;
  a.out = tape.empty(q.shape(), q.dtype());
  a.log_sum = tape.empty({q.shape()[0], static_cast<std::size_t>(options.heads), q.shape()[1]});
  const std::size_t keys = options.keys ? options.keys : k.shape()[1];
  const std::size_t of_sequence = a.log_sum.shape()[1] * a.log_sum.shape()[2] * keys;
  if (dropout > 0) a.mask = tape.next_dropout_mask(dropout, a.log_sum.count() * keys, heads_of, of_sequence);
  count_products(tape, q, k, options, 2);
  ops::attention(a.out, a.log_sum, q, k, v, options, a.mask, tape.stream());
  return a;
}

/// Column `n` of three of equal width.
Tensor third(const Tensor& t, std::size_t n) {
  const std::size_t width = t.shape()[-1] / 3;
  return t.columns(n * width, width);
}

Var attention_of_thirds(const char* op, Tape& tape, Var qkv_var, const AttentionOptions& options,
                        float dropout, RankOf heads_of = {}) {
  qkv_var = autocast_low(tape, qkv_var);
  const Tensor qkv = tape.value(qkv_var);
  const bool three = qkv.shape().dims() == 3 && qkv.shape()[2] % 3 == 0;
  require(three, Errc::invalid_argument, op, ": the input ", name(qkv.shape()),
          " is not [batch, tokens, 3 * channels]");
  const Attended a =
      attend(op, tape, third(qkv, 0), third(qkv, 1), third(qkv, 2), options, dropout, heads_of);
  return tape.record(
      a.out, {qkv_var},
      [qkv_var, options, a, kept = SavedVariable(tape, qkv_var)](Tape& tape, const Tensor& d_out) {
        const Tensor& qkv = kept(tape);
        const Tensor d_qkv = empty_like(tape, qkv);
        count_products(tape, third(qkv, 0), third(qkv, 1), options, 5);
        ops::attention_backward(third(d_qkv, 0), third(d_qkv, 1), third(d_qkv, 2), d_out, a.out, a.log_sum,
                                third(qkv, 0), third(qkv, 1), third(qkv, 2), options, a.mask, tape.stream());
        tape.accumulate_grad(qkv_var, d_qkv);
      });
}

}  // namespace

Var attention(Tape& tape, Var q_var, Var k_var, Var v_var, const AttentionOptions& options, float dropout,
              RankOf heads_of) {
  q_var = autocast_low(tape, q_var), k_var = autocast_low(tape, k_var), v_var = autocast_low(tape, v_var);
  const Attended a = attend("attention", tape, tape.value(q_var), tape.value(k_var), tape.value(v_var),
                            options, dropout, heads_of);
  return tape.record(a.out, {q_var, k_var, v_var},
                     [q_var, k_var, v_var, options, a, kept_q = SavedVariable(tape, q_var),
                      kept_k = SavedVariable(tape, k_var),
                      kept_v = SavedVariable(tape, v_var)](Tape& tape, const Tensor& d_out) {
                       const Tensor &q = kept_q(tape), &k = kept_k(tape), &v = kept_v(tape);
                       count_products(tape, q, k, options, 5);
                       const Tensor d_q = empty_like(tape, q), d_k = empty_like(tape, k),
                                    d_v = empty_like(tape, v);
                       ops::attention_backward(d_q, d_k, d_v, d_out, a.out, a.log_sum, q, k, v, options,
                                               a.mask, tape.stream());
                       tape.accumulate_grad(q_var, d_q);
                       tape.accumulate_grad(k_var, d_k);
                       tape.accumulate_grad(v_var, d_v);
                     });
}

Var self_attention(Tape& tape, Var qkv, const AttentionOptions& options, float dropout, RankOf heads_of) {
  return attention_of_thirds("self_attention", tape, qkv, options, dropout, heads_of);
}

Var causal_attention(Tape& tape, Var qkv, int heads, float dropout) {
  return attention_of_thirds("causal_attention", tape, qkv, {.heads = heads, .causal = true}, dropout);
}

Var rotary(Tape& tape, Var x, int heads, const RotaryTables& tables, std::size_t past,
           const Tensor& positions) {
  const Tensor out = empty_like(tape, tape.value(x));
  ops::rotary(out, tape.value(x), heads, tables.cosines, tables.sines, positions, past,
              ops::Rotation::forward, tape.stream());
  return tape.record(out, {x}, [x, heads, tables, past, positions](Tape& tape, const Tensor& d_out) {
    const Tensor d_x = empty_like(tape, d_out);
    ops::rotary(d_x, d_out, heads, tables.cosines, tables.sines, positions, past, ops::Rotation::inverse,
                tape.stream());
    tape.accumulate_grad(x, d_x);
  });
}

RotaryEmbedding::RotaryEmbedding(std::size_t rotated, std::size_t positions,
                                 const ops::RotaryOptions& options)
    : rotated_(rotated), positions_(positions), options_(options) {}

std::size_t RotaryEmbedding::max_positions() const {
  if (!is_dynamic()) return positions_;
  return static_cast<std::size_t>(static_cast<double>(positions_) * options_.factor);
}

/// Tables grow by powers of two; those of dynamic scaling depend on the length.
RotaryTables RotaryEmbedding::tables(std::size_t length, const Stream& stream) {
  if (is_dynamic() ? length_ != length : length_ < length) {
    length_ = is_dynamic() ? length : std::min(std::bit_ceil(length), max_positions());
    tables_ = ops::rotary_tables(rotated_, length_, options_, stream);
  }
  return tables_;
}

}  // namespace rz::nn
