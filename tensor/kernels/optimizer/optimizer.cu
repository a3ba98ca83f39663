// The updates of optimizer.cpp, operation by operation; intrinsics that round once prevent fused
// multiply-adds. Buffers are passed to a kernel by value, as many as fit its arguments; each block processes
// one tile of one buffer.

#include <algorithm>
#include <cfloat>
#include <cstring>
#include <vector>

#include "comm/device/launch.h"
#include "tensor/kernels/block_sum.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/vector_load.h"

namespace rz::ops::device {

namespace {

using kernels::UpdateRun;

constexpr unsigned threads = 256;
constexpr int width = 4;  // elements per thread and access
constexpr unsigned tile = threads * width * 2;

/// Buffers, and the index of each one's first tile in the grid.
template <class Piece, int room>
struct Batch {
  Piece piece[room];
  std::uint32_t first_tile[room];
  int count = 0;

  /// The buffer to which tile t belongs.
  __device__ int find(std::uint32_t t) const {
    int low = 0, high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_tile[middle] <= t ? low : high) = middle;
    }
    return low;
  }
};

/// Calls launch(batch, tiles) for groups of up to `room` non-empty elements of `all`. make(p) converts an
/// element to a Piece; tiles_of(p) is its number of tiles.
template <int room, class Piece, class From, class Make, class Tiles, class Launch>
void in_batches(std::span<const From> all, const Make& make, const Tiles& tiles_of, const Launch& launch) {
  Batch<Piece, room> batch;
  std::uint32_t tiles = 0;
  for (const From& from : all) {
    if (from.count == 0) continue;
    batch.piece[batch.count] = make(from);
    batch.first_tile[batch.count++] = tiles;
    tiles += static_cast<std::uint32_t>(tiles_of(from));
    if (batch.count < room) continue;
    launch(batch, tiles);
    batch.count = 0, tiles = 0;
  }
  if (batch.count) launch(batch, tiles);
}

struct Update {
  float *value, *state0, *state1, *state2;
  const void* gradient;
  void* working;
  std::size_t count;
  DType gradient_dtype, working_dtype;
  bool packs;
  std::uint8_t rule;
  std::uint32_t member;
};

template <int k>
__device__ inline void load_as(float (&x)[k], const void* p, DType t, std::size_t i) {
  if (t == DType::f32)
    load(x, static_cast<const float*>(p) + i);
  else if (t == DType::f16)
    load(x, static_cast<const f16*>(p) + i);
  else
    load(x, static_cast<const bf16*>(p) + i);
}

template <int k>
__device__ inline void store_as(void* p, DType t, std::size_t i, const float (&x)[k]) {
  if (t == DType::f16)
    store(static_cast<f16*>(p) + i, x);
  else
    store(static_cast<bf16*>(p) + i, x);
}

/// NaN stays NaN.
__device__ inline float flush_subnormal(float x) { return fabsf(x) < FLT_MIN ? 0.0f : x; }

// A rule reads and writes `states` states. With `optional` it has those whose memory is given.

/// New m and v.
__device__ inline void adam_moments(const kernels::AdamFactors& f, float scale, float p, float g, float& m,
                                    float& v) {
  g = __fadd_rn(__fmul_rn(g, scale), __fmul_rn(f.l2, p));
  m = flush_subnormal(__fadd_rn(__fmul_rn(f.beta1, m), __fmul_rn(f.rest1, g)));
  v = flush_subnormal(__fadd_rn(__fmul_rn(f.beta2, v), __fmul_rn(__fmul_rn(f.rest2, g), g)));
}
__device__ inline float adam_step(const kernels::AdamFactors& f, float p, float m, float v) {
  const float root = __fadd_rn(__fmul_rn(__fsqrt_rn(v), f.correction), f.eps);
  return __fsub_rn(__fmul_rn(p, f.keep), __fdiv_rn(__fmul_rn(f.rate, m), root));
}

struct Adam {
  kernels::AdamFactors f;

  static constexpr int states = 2;
  static constexpr bool optional = false;
  __device__ void operator()(const Update&, float scale, float& p, float g, float& m, float& v,
                             float&) const {
    adam_moments(f, scale, p, g, m, v);
    p = adam_step(f, p, m, v);
  }
};

struct Amsgrad {
  kernels::AdamFactors f;

  static constexpr int states = 3;
  static constexpr bool optional = false;
  __device__ void operator()(const Update&, float scale, float& p, float g, float& m, float& v,
                             float& largest) const {
    adam_moments(f, scale, p, g, m, v);
    if (v > largest || v != v) largest = v;  // NaN in either stays
    p = adam_step(f, p, m, largest);
  }
};

struct Sgd {
  kernels::SgdFactors f;

  static constexpr int states = 1;
  static constexpr bool optional = true;
  __device__ void operator()(const Update& u, float scale, float& p, float g, float& buf, float&,
                             float&) const {
    g = __fadd_rn(__fmul_rn(g, scale), __fmul_rn(f.weight_decay, p));
    if (u.state0) {
      buf = flush_subnormal(__fadd_rn(__fmul_rn(f.momentum, buf), __fmul_rn(f.rest, g)));
      g = f.nesterov ? __fadd_rn(g, __fmul_rn(f.momentum, buf)) : buf;
    }
    p = __fsub_rn(p, __fmul_rn(f.lr, g));
  }
};

struct Lion {
  kernels::LionFactors f;

  static constexpr int states = 1;
  static constexpr bool optional = false;
  __device__ void operator()(const Update&, float scale, float& p, float g, float& m, float&, float&) const {
    g = __fmul_rn(g, scale);
    const float c = __fadd_rn(__fmul_rn(f.beta1, m), __fmul_rn(f.rest1, g));
    const float move = c > 0 ? f.rate : c < 0 ? -f.rate : c;
    p = __fsub_rn(__fmul_rn(f.keep, p), move);
    m = flush_subnormal(__fadd_rn(__fmul_rn(f.beta2, m), __fmul_rn(f.rest2, g)));
  }
};

/// Without grad_scale: the gradient is a direction.
struct DecayedStep {
  kernels::DecayedStepFactors f;

  static constexpr int states = 0;
  static constexpr bool optional = false;
  __device__ void operator()(const Update&, float scale, float& p, float g, float&, float&, float&) const {
    p = __fsub_rn(__fmul_rn(f.keep, p), __fmul_rn(f.rate, __fmul_rn(scale, g)));
  }
};

/// The value is the direction.
struct Muon {
  kernels::MuonFactors f;

  static constexpr int states = 1;
  static constexpr bool optional = false;
  __device__ void operator()(const Update&, float scale, float& direction, float g, float& m, float&,
                             float&) const {
    g = __fmul_rn(scale, g);
    m = flush_subnormal(__fadd_rn(__fmul_rn(f.beta, m), __fmul_rn(f.rest, g)));
    direction = f.nesterov ? __fadd_rn(__fmul_rn(f.rest, g), __fmul_rn(f.beta, m)) : m;
  }
};

struct Adagrad {
  kernels::AdagradFactors f;

  static constexpr int states = 1;
  static constexpr bool optional = false;
  __device__ void operator()(const Update&, float scale, float& p, float g, float& s, float&, float&) const {
    g = __fadd_rn(__fmul_rn(g, scale), __fmul_rn(f.l2, p));
    s = flush_subnormal(__fadd_rn(s, __fmul_rn(g, g)));
    p = __fsub_rn(p, __fdiv_rn(__fmul_rn(f.rate, g), __fadd_rn(__fsqrt_rn(s), f.eps)));
  }
};

/// The buffer of the momentum is the last state, as in optimizer.cpp.
struct Rmsprop {
  kernels::RmspropFactors f;

  static constexpr int states = 3;
  static constexpr bool optional = true;
  __device__ void operator()(const Update& u, float scale, float& p, float g, float& s, float& second,
                             float& third) const {
    g = __fadd_rn(__fmul_rn(g, scale), __fmul_rn(f.l2, p));
    s = flush_subnormal(__fadd_rn(__fmul_rn(f.alpha, s), __fmul_rn(__fmul_rn(f.rest, g), g)));
    float variance = s;
    if (f.centered) {
      second = flush_subnormal(__fadd_rn(__fmul_rn(f.alpha, second), __fmul_rn(f.rest, g)));
      variance = __fsub_rn(s, __fmul_rn(second, second));
      if (variance < 0) variance = 0;  // NaN stays
    }
    float update = __fdiv_rn(g, __fadd_rn(__fsqrt_rn(variance), f.eps));
    if (f.centered ? u.state2 : u.state1) {
      float& buf = f.centered ? third : second;
      buf = flush_subnormal(__fadd_rn(__fmul_rn(f.momentum, buf), update));
      update = buf;
    }
    p = __fsub_rn(p, __fmul_rn(f.rate, update));
  }
};

__device__ inline float lamb_update(const kernels::LambFactors& f, float p, float m, float v) {
  const float root = f.eps_inside_sqrt ? __fsqrt_rn(__fadd_rn(v, f.eps)) : __fadd_rn(__fsqrt_rn(v), f.eps);
  return __fadd_rn(__fdiv_rn(m, root), __fmul_rn(f.weight_decay, p));
}

struct Lamb {
  kernels::LambFactors f;

  static constexpr int states = 2;
  __device__ void begin(const Update& u, const StepInputs& inputs) {
    const double* const norms = inputs.norms + 2 * std::size_t{u.member};
    f.rate = __fmul_rn(f.rate, trust_ratio(f, norms[0], norms[1]));
  }
  static constexpr bool optional = false;
  __device__ void operator()(const Update&, float, float& p, float, float& m, float& v, float&) const {
    p = __fsub_rn(p, __fmul_rn(f.rate, lamb_update(f, p, m, v)));
  }
};

/// Whether a rule reads and writes state `index`, which is at `memory`.
template <class Rule>
__device__ inline bool has_state(int index, const float* memory) {
  return index < Rule::states && (!Rule::optional || memory);
}

template <int k, class Rule>
__device__ inline void update(const Rule& rule, const Update& u, float scale, std::size_t i) {
  const bool has0 = has_state<Rule>(0, u.state0), has1 = has_state<Rule>(1, u.state1),
             has2 = has_state<Rule>(2, u.state2);
  float p[k], g[k], state0[k] = {}, state1[k] = {}, state2[k] = {};
  load(p, u.value + i);
  load_as(g, u.gradient, u.gradient_dtype, i);
  if (has0) load(state0, u.state0 + i);
  if (has1) load(state1, u.state1 + i);
  if (has2) load(state2, u.state2 + i);
#pragma unroll
  for (int j = 0; j < k; ++j) rule(u, scale, p[j], g[j], state0[j], state1[j], state2[j]);
  store(u.value + i, p);
  if (has0) store(u.state0 + i, state0);
  if (has1) store(u.state1 + i, state1);
  if (has2) store(u.state2 + i, state2);
  if (u.working) store_as(u.working, u.working_dtype, i, p);
}

constexpr int update_room = 52;

template <class Rule>
struct Updates {
  Batch<Update, update_room> batch;
  Rule rules[max_rules];
  StepInputs inputs;
};
static_assert(sizeof(Updates<Adam>) <= 4000 && sizeof(Updates<Lamb>) <= 4000, "arguments have 4 KiB");

template <class Rule>
__global__ void __launch_bounds__(threads) update_tiles(const __grid_constant__ Updates<Rule> a) {
  if (a.inputs.skip && *a.inputs.skip) return;
  const int which = a.batch.find(blockIdx.x);
  const Update& u = a.batch.piece[which];
  Rule rule = (a.inputs.rules ? static_cast<const Rule*>(a.inputs.rules) : a.rules)[u.rule];
  if constexpr (requires { rule.begin(u, a.inputs); }) rule.begin(u, a.inputs);
  const float own = rule.f.scale;
  const float scale = a.inputs.grad_scale ? __fmul_rn(own, *a.inputs.grad_scale) : own;
  const std::size_t base = std::size_t{blockIdx.x - a.batch.first_tile[which]} * tile;
  if (u.packs) {
#pragma unroll
    for (unsigned at = 0; at < tile; at += threads * width) {
      std::size_t i = base + at + threadIdx.x * width;
      if (i + width <= u.count)
        update<width>(rule, u, scale, i);
      else
        for (; i < u.count; ++i) update<1>(rule, u, scale, i);
    }
  } else {
    for (std::size_t i = base + threadIdx.x; i < base + tile && i < u.count; i += threads)
      update<1>(rule, u, scale, i);
  }
}

bool aligned(const void* p, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(p) % bytes == 0; }

Update checked(const char* name, const UpdateRun& r, std::size_t rules, int needed_states) {
  const bool sixteen = r.working_dtype == DType::f16 || r.working_dtype == DType::bf16;
  const bool gradient =
      r.gradient_dtype == DType::f32 || r.gradient_dtype == DType::f16 || r.gradient_dtype == DType::bf16;
  require(r.value && r.gradient && gradient && (!r.working || sixteen) && r.rule < rules &&
              (needed_states < 1 || r.state0) && (needed_states < 2 || r.state1) &&
              (needed_states < 3 || r.state2),
          Errc::invalid_argument, name, " of ", r.count,
          " elements needs values, states, constants, gradients in f32, f16 or "
          "bf16, and a working copy in f16 "
          "or bf16, if any");
  const bool packs = aligned(r.value, 16) && aligned(r.state0, 16) && aligned(r.state1, 16) &&
                     aligned(r.state2, 16) && aligned(r.gradient, width * size_of(r.gradient_dtype)) &&
                     aligned(r.working, width * size_of(r.working_dtype));
  return {r.value,
          r.state0,
          r.state1,
          r.state2,
          r.gradient,
          r.working,
          r.count,
          r.gradient_dtype,
          r.working_dtype,
          packs,
          static_cast<std::uint8_t>(r.rule),
          r.member};
}

/// Calls launch_batch(arguments, tiles) for all runs.
template <class Rule, class Factors, class Launch>
void in_updates(const char* name, std::span<const UpdateRun> runs, std::span<const Factors> rules,
                int needed_states, const StepInputs& inputs, const Launch& launch_batch) {
  static_assert(sizeof(Rule) == sizeof(Factors), "read as each other");
  require(rules.size() <= max_rules, Errc::invalid_argument, name, " with ", rules.size(),
          " sets of constants; a call has at most ", max_rules);
  Updates<Rule> arguments{{}, {}, inputs};
  std::memcpy(arguments.rules, rules.data(), rules.size_bytes());
  in_batches<update_room, Update>(
      runs, [&](const UpdateRun& r) { return checked(name, r, rules.size(), needed_states); },
      [](const UpdateRun& r) { return (r.count + tile - 1) / tile; },
      [&](const Batch<Update, update_room>& batch, std::uint32_t tiles) {
        arguments.batch = batch;
        launch_batch(arguments, tiles);
      });
}

template <class Rule, class Factors>
void update_all(const char* name, std::span<const UpdateRun> runs, std::span<const Factors> rules,
                int needed_states, const StepInputs& inputs, const Stream& stream) {
  in_updates<Rule>(name, runs, rules, needed_states, inputs,
                   [&](const Updates<Rule>& arguments, std::uint32_t tiles) {
                     cuda::launch(name, update_tiles<Rule>, {{tiles}, {threads}}, stream, arguments);
                   });
}

constexpr std::size_t block_of_squares = 64;
constexpr unsigned lanes_a_block = 8, groups = threads / lanes_a_block;
constexpr unsigned tile_of_squares = groups * 4;  // blocks of 64
constexpr int squared_room = 120;

/// Partial sum of a thread: four words from `first` on, flushed to shared memory when a value does not fit.
/// Squares of one tensor have similar magnitude, so this is rare.
struct Window {
  int first = 0;
  std::int64_t word[4] = {};

  __device__ void flush(unsigned long long* sum) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (word[i]) atomicAdd(sum + first + i, static_cast<unsigned long long>(word[i]));
      word[i] = 0;
    }
  }
  __device__ void add(double x, unsigned long long* sum) {
    if (x == 0) return;
    const ExactParts p = exact_parts(x);
    if (p.first >= ExactLayout::limbs) {
      atomicAdd(sum + p.first, 1ull);
      return;
    }
    if (p.first != first && p.first != first + 1) {
      flush(sum);
      first = p.first;
    }
    const bool upper = p.first != first;
    word[0] += upper ? 0 : p.part[0];
    word[1] += upper ? p.part[0] : p.part[1];
    word[2] += upper ? p.part[1] : p.part[2];
    word[3] += upper ? p.part[2] : 0;
  }
};

/// The sum over the columns of 8 lanes, in the order of kernels::sum_of_squares.
__device__ inline double sum_of_columns(double column) {
  column += __shfl_xor_sync(whole_warp, column, 4);
  column += __shfl_xor_sync(whole_warp, column, 1);
  return column + __shfl_xor_sync(whole_warp, column, 2);
}

/// Sum of squares of one block of 64, computed by 8 lanes in the order of kernels::sum_of_squares: eight
/// columns of eight, then four sums, then pairs. A square of an f32 is exact in double, so a fused
/// multiply-add rounds like the host.
template <class T>
__device__ inline double squares_of_block(const T* x, bool there) {
  const unsigned lane = threadIdx.x % lanes_a_block;
  float row[8] = {};
  if (there)
#pragma unroll
    for (int r = 0; r < 8; ++r) row[r] = to_f32(x[r * 8 + lane]);
  double column = 0;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const auto value = static_cast<double>(row[r]);
    column += value * value;
  }
  return sum_of_columns(column);
}

__global__ void __launch_bounds__(threads)
    square_tiles(const __grid_constant__ Batch<Squared, squared_room> batch, std::uint32_t tiles,
                 unsigned long long* total) {
  RZ_SHARED(unsigned long long, sum, ExactLayout::words);
  for (unsigned w = threadIdx.x; w < ExactLayout::words; w += blockDim.x) sum[w] = 0;
  __syncthreads();
  Window own;
  for (std::uint32_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int which = batch.find(t);
    const Squared& s = batch.piece[which];
    const std::size_t base = std::size_t{t - batch.first_tile[which]} * tile_of_squares;
    for (unsigned at = threadIdx.x / lanes_a_block; at < tile_of_squares; at += groups) {
      const std::size_t first = (base + at) * block_of_squares;
      const bool there = first < s.count;
      const double squares =
          s.dtype == DType::f32   ? squares_of_block(static_cast<const float*>(s.data) + first, there)
          : s.dtype == DType::f16 ? squares_of_block(static_cast<const f16*>(s.data) + first, there)
                                  : squares_of_block(static_cast<const bf16*>(s.data) + first, there);
      if (threadIdx.x % lanes_a_block == 0) own.add(squares, sum);
    }
  }
  own.flush(sum);
  __syncthreads();
  for (unsigned w = threadIdx.x; w < ExactLayout::words; w += blockDim.x)
    if (sum[w]) atomicAdd(total + w, sum[w]);
}

static_assert(tile == groups * block_of_squares, "a group of lanes has one block of a tile");

/// One tile a block: eight lanes update a block of 64 elements and sum its squares.
__global__ void __launch_bounds__(threads)
    lamb_tiles(const __grid_constant__ Updates<Lamb> a, unsigned long long* sums) {
  if (a.inputs.skip && *a.inputs.skip) return;
  RZ_SHARED(unsigned long long, sum, 2 * ExactLayout::words);
  for (unsigned w = threadIdx.x; w < 2 * ExactLayout::words; w += blockDim.x) sum[w] = 0;
  __syncthreads();
  const int which = a.batch.find(blockIdx.x);
  const Update& u = a.batch.piece[which];
  const kernels::LambFactors f =
      (a.inputs.rules ? static_cast<const Lamb*>(a.inputs.rules) : a.rules)[u.rule].f;
  const float scale = a.inputs.grad_scale ? __fmul_rn(f.scale, *a.inputs.grad_scale) : f.scale;
  const std::size_t first = std::size_t{blockIdx.x - a.batch.first_tile[which]} * tile +
                            threadIdx.x / lanes_a_block * block_of_squares;
  const unsigned lane = threadIdx.x % lanes_a_block;
  double values = 0, updates = 0;
  for (std::size_t i = first + lane; i < first + block_of_squares && i < u.count; i += lanes_a_block) {
    float g[1];
    load_as(g, u.gradient, u.gradient_dtype, i);
    const float x = __fmul_rn(g[0], scale), p = u.value[i];
    const float m = flush_subnormal(__fadd_rn(__fmul_rn(f.beta1, u.state0[i]), __fmul_rn(f.rest1, x)));
    const float v =
        flush_subnormal(__fadd_rn(__fmul_rn(f.beta2, u.state1[i]), __fmul_rn(__fmul_rn(f.rest2, x), x)));
    u.state0[i] = m, u.state1[i] = v;
    const double wide = p, update = lamb_update(f, p, m, v);
    values += wide * wide, updates += update * update;
  }
  values = sum_of_columns(values), updates = sum_of_columns(updates);
  Window own;
  if (lane == 0) {
    own.add(values, sum);
    own.flush(sum);
    own.add(updates, sum + ExactLayout::words);
    own.flush(sum + ExactLayout::words);
  }
  __syncthreads();
  unsigned long long* const total = sums + 2 * std::size_t{u.member} * ExactLayout::words;
  for (unsigned w = threadIdx.x; w < 2 * ExactLayout::words; w += blockDim.x)
    if (sum[w]) atomicAdd(total + w, sum[w]);
}

__global__ void read_exact(double* value, const std::int64_t* sums, std::size_t count) {
  const std::size_t which = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (which >= count) return;
  std::int64_t word[ExactLayout::words];
  for (int i = 0; i < ExactLayout::words; ++i)
    word[i] = sums[which * ExactLayout::words + static_cast<std::size_t>(i)];
  value[which] = exact_value(word);
}

__device__ inline double value_of(const std::int64_t* words) {
  std::int64_t word[ExactLayout::words];
  for (int i = 0; i < ExactLayout::words; ++i) word[i] = words[i];
  return exact_value(word);
}

__global__ void decide(StepOutcome* outcome, const std::int64_t* squares, const std::int64_t* terms,
                       const StepLimits* limits) {
  *outcome = step_outcome(value_of(squares), terms ? value_of(terms) : uncounted_terms, *limits);
}

__global__ void add_one(std::int64_t* sum, const double* value) {
  const ExactParts p = exact_parts(*value);
  if (p.first >= ExactLayout::limbs) {
    ++sum[p.first];
    return;
  }
  for (int i = 0; i < 3; ++i) sum[p.first + i] += p.part[i];
}

}  // namespace

void add_exact(std::int64_t* sum, const double* value, const Stream& stream) {
  cuda::launch("add_exact", add_one, {{1}, {1}}, stream, sum, value);
}

void decide_step(StepOutcome* outcome, const std::int64_t* squares, const std::int64_t* terms,
                 const StepLimits* limits, const Stream& stream) {
  cuda::launch("decide_step", decide, {{1}, {1}}, stream, outcome, squares, terms, limits);
}

void adam(std::span<const UpdateRun> runs, std::span<const kernels::AdamFactors> rules,
          const StepInputs& inputs, const Stream& stream) {
  const auto has_maximum = [](const UpdateRun& r) { return r.count > 0 && r.state2 != nullptr; };
  if (std::ranges::none_of(runs, has_maximum))
    return update_all<Adam>("adam", runs, rules, 2, inputs, stream);
  std::vector<UpdateRun> with, without;
  for (const UpdateRun& r : runs) (has_maximum(r) ? with : without).push_back(r);
  update_all<Amsgrad>("adam", with, rules, 3, inputs, stream);
  update_all<Adam>("adam", without, rules, 2, inputs, stream);
}

void sgd(std::span<const UpdateRun> runs, std::span<const kernels::SgdFactors> rules,
         const StepInputs& inputs, const Stream& stream) {
  update_all<Sgd>("sgd", runs, rules, 0, inputs, stream);
}

void lion(std::span<const UpdateRun> runs, std::span<const kernels::LionFactors> rules,
          const StepInputs& inputs, const Stream& stream) {
  update_all<Lion>("lion", runs, rules, 1, inputs, stream);
}

void adagrad(std::span<const UpdateRun> runs, std::span<const kernels::AdagradFactors> rules,
             const StepInputs& inputs, const Stream& stream) {
  update_all<Adagrad>("adagrad", runs, rules, 1, inputs, stream);
}

void rmsprop(std::span<const UpdateRun> runs, std::span<const kernels::RmspropFactors> rules,
             const StepInputs& inputs, const Stream& stream) {
  update_all<Rmsprop>("rmsprop", runs, rules, 1, inputs, stream);
}

void decayed_step(std::span<const UpdateRun> runs, std::span<const kernels::DecayedStepFactors> rules,
                  const StepInputs& inputs, const Stream& stream) {
  update_all<DecayedStep>("decayed_step", runs, rules, 0, inputs, stream);
}

void muon_direction(std::span<const UpdateRun> runs, std::span<const kernels::MuonFactors> rules,
                    const StepInputs& inputs, const Stream& stream) {
  update_all<Muon>("muon_direction", runs, rules, 1, inputs, stream);
}

void lamb_moments(std::span<const UpdateRun> runs, std::span<const kernels::LambFactors> rules,
                  const StepInputs& inputs, std::int64_t* sums, const Stream& stream) {
  for (const UpdateRun& r : runs)
    require(r.count % block_of_squares == 0, Errc::invalid_argument, "lamb_moments of ", r.count,
            " elements; expected a multiple of ", block_of_squares);
  in_updates<Lamb>("lamb_moments", runs, rules, 2, inputs,
                   [&](const Updates<Lamb>& arguments, std::uint32_t tiles) {
                     cuda::launch("lamb_moments", lamb_tiles, {{tiles}, {threads}}, stream, arguments,
                                  reinterpret_cast<unsigned long long*>(sums));
                   });
}

void lamb(std::span<const UpdateRun> runs, std::span<const kernels::LambFactors> rules,
          const StepInputs& inputs, const Stream& stream) {
  update_all<Lamb>("lamb", runs, rules, 2, inputs, stream);
}

void read_sums(double* value, const std::int64_t* sums, std::size_t count, const Stream& stream) {
  cuda::launch("read_sums", read_exact, cuda::grid_for(count), stream, value, sums, count);
}

void add_squares(std::int64_t* sum, std::span<const Squared> all, const Stream& stream) {
  in_batches<squared_room, Squared>(
      all,
      [](const Squared& s) {
        require(s.count % block_of_squares == 0 &&
                    (s.dtype == DType::f32 || s.dtype == DType::f16 || s.dtype == DType::bf16),
                Errc::invalid_argument, "add_squares needs f32, f16 or bf16 and a multiple of ",
                block_of_squares, " elements, not ", s.count, " of ", name(s.dtype));
        return s;
      },
      [](const Squared& s) {
        const std::size_t blocks = s.count / block_of_squares;
        return (blocks + tile_of_squares - 1) / tile_of_squares;
      },
      [&](const Batch<Squared, squared_room>& batch, std::uint32_t tiles) {
        cuda::launch("add_squares", square_tiles, {{std::min(tiles, 1024u)}, {threads}}, stream, batch, tiles,
                     reinterpret_cast<unsigned long long*>(sum));
      });
}

}  // namespace rz::ops::device
