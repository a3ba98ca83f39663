// The operators of autograd_lite on the host, timed on request (bench/operators.py). Reads lines
//
//   OPERATOR DTYPE THREADS EXTENT…
//
// from standard input, and answers each with a line of JSON: "forward", without gradients, and "both",
// forward and backward, in ms; each the median of runs that take some 0.2 s: of the time of
// the processor with one thread, of the wall otherwise. bench/operators.py has the
// meaning of the extents.

#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "autograd_lite/image_ops.h"
#include "autograd_lite/ops.h"
#include "comm/core/error.h"

namespace {

using namespace rz;
using Extents = std::vector<std::size_t>;

/// Inputs of an operator; those that have a gradient are leaves of each recording.
class Inputs {
 public:
  Inputs(DType dtype, const Stream& stream) : dtype_(dtype), stream_(stream) {}

  /// Numbers from -2 to 2, or from 0.1 to 2.1.
  Tensor values(const Shape& shape, bool positive = false) const {
    const Tensor f32 = Tensor::empty(shape), out = Tensor::empty(shape, dtype_);
    std::uint32_t state = 1;
    for (std::size_t i = 0; i < f32.count(); ++i) {
      state = state * 1664525u + 1013904223u;
      const float x = static_cast<float>(state >> 8) / (1 << 24);
      f32.data<float>()[i] = positive ? 0.1f + 2 * x : 4 * x - 2;
    }
    ops::copy(out, f32, stream_);
    return out;
  }
  /// 0 or 1, where one of four is 1.
  Tensor mask(const Shape& shape) const {
    const Tensor f32 = Tensor::empty(shape), out = Tensor::empty(shape, dtype_);
    for (std::size_t i = 0; i < f32.count(); ++i) f32.data<float>()[i] = i * 2654435761u >> 30 & 3 ? 0 : 1;
    ops::copy(out, f32, stream_);
    return out;
  }
  static Tensor indices(const Shape& shape, std::size_t below) {
    const Tensor out = Tensor::empty(shape, DType::i32);
    for (std::size_t i = 0; i < out.count(); ++i)
      out.data<std::int32_t>()[i] = static_cast<std::int32_t>(i * 7919 % below);
    return out;
  }
  DType dtype() const { return dtype_; }
  const Stream& stream() const { return stream_; }

 private:
  DType dtype_;
  Stream stream_;
};

using Vars = std::vector<Var>;
using Shapes = std::vector<Shape>;
using Tensors = std::vector<Tensor>;

/// How an operator is called. Extents are those of bench/operators.py.
struct Operator {
  const char* name;
  Shapes (*shapes)(const Extents&);  ///< of its inputs, which have a gradient
  Vars (*record)(Tape&, const Vars& x, const Extents&, const Tensors& others);
  Tensors (*others)(const Inputs&, const Extents&) = nullptr;  ///< inputs without a gradient, made once
  bool positive = false;                                       ///< values from 0.1 to 2.1
};

Shapes vector(const Extents& e) { return {{e.at(0)}}; }
Shapes matrix(const Extents& e) { return {{e.at(0), e.at(1)}}; }
Shapes images(const Extents& e) { return {{e.at(0), e.at(1), e.at(2), e.at(3)}}; }
Shapes normalised_images(const Extents& e) { return {images(e)[0], {e[1]}, {e[1]}}; }
Shapes two_vectors(const Extents& e) { return {{e.at(0)}, {e[0]}}; }

/// B, T, heads, key heads, channels of a head.
Shapes heads(const Extents& e) {
  return {{e.at(0), e.at(1), e.at(2) * e.at(4)}, {e[0], e[1], e.at(3) * e[4]}, {e[0], e[1], e[3] * e[4]}};
}
enum class Keys { all, window, padded };
template <Keys keys>
Vars attention(Tape& tape, const Vars& x, const Extents& e, const Tensors& counts) {
  nn::AttentionOptions options{.heads = static_cast<int>(e[2]),
                               .kv_heads = static_cast<int>(e[3]),
                               .causal = keys != Keys::padded,
                               .window = keys == Keys::window ? e[1] / 4 : 0};
  if (keys == Keys::padded) options.key_counts = counts[0];
  return {nn::attention(tape, x[0], x[1], x[2], options)};
}
Tensors key_counts(const Inputs&, const Extents& e) {
  const Tensor counts = Tensor::empty({e[0]}, DType::i32);
  for (std::size_t b = 0; b < e[0]; ++b)
    counts.data<std::int32_t>()[b] = static_cast<std::int32_t>(e[1] * (4 - b % 3) / 4);
  return {counts};
}

Tensors mask(const Inputs& in, const Extents& e) { return {in.mask({e[0]})}; }

template <Var (*f)(Tape&, Var)>
Vars unary(Tape& tape, const Vars& x, const Extents&, const Tensors&) {
  return {f(tape, x[0])};
}
template <Var (*f)(Tape&, Var, float), int hundredths>
Vars unary(Tape& tape, const Vars& x, const Extents&, const Tensors&) {
  return {f(tape, x[0], hundredths / 100.0f)};
}
/// N, C, H, W, kernel, stride, padding.
template <Var (*f)(Tape&, Var, const ops::Pool2d&)>
Vars pool(Tape& tape, const Vars& x, const Extents& e, const Tensors&) {
  return {f(tape, x[0], {e.at(4), e.at(5), e.at(6)})};
}

constexpr Operator operators[] = {
    {"attention", heads, attention<Keys::all>},
    {"attention_groups", heads, attention<Keys::all>},
    {"attention_window", heads, attention<Keys::window>},
    {"attention_padding", heads, attention<Keys::padded>, key_counts},
    {"rotary",
     [](const Extents& e) {
       return Shapes{{e.at(0), e.at(1), e.at(2) * e.at(3)}};
     },  // B, T, H, D
     [](Tape& t, const Vars& x, const Extents& e, const Tensors& tables) {
       return Vars{nn::rotary(t, x[0], static_cast<int>(e[2]), {tables[0], tables[1]})};
     },
     [](const Inputs&, const Extents& e) {
       const ops::RotaryTables tables = ops::rotary_tables(e[3], e[1]);
       return Tensors{tables.cosines, tables.sines};
     }},
    {"rms_norm",
     [](const Extents& e) {
       return Shapes{{e.at(0), e.at(1)}, {e[1]}};
     },
     [](Tape& t, const Vars& x, const Extents&, const Tensors&) {
       return Vars{nn::rms_norm(t, x[0], x[1], 1e-5f)};
     }},
    {"permute", images,
     [](Tape& t, const Vars& x, const Extents&, const Tensors&) {
       return Vars{nn::permute(t, x[0], {0, 2, 1, 3})};
     }},
    {"transpose",
     [](const Extents& e) {
       return Shapes{{e.at(0), e.at(1), e.at(2)}};
     },
     [](Tape& t, const Vars& x, const Extents&, const Tensors&) {
       return Vars{nn::transpose(t, x[0], 1, 2)};
     }},
    {"cat",
     [](const Extents& e) {
       return Shapes{{e.at(0), e.at(1)}, {e[0], e[1]}};
     },
     [](Tape& t, const Vars& x, const Extents&, const Tensors&) {
       return Vars{nn::cat(t, {x[0], x[1]}, 1)};
     }},
    {"split",
     [](const Extents& e) {
       return Shapes{{e.at(0), 3 * e.at(1)}};
     },
     [](Tape& t, const Vars& x, const Extents& e, const Tensors&) {
       return nn::split(t, x[0], {e[1], e[1], e[1]}, 1);
     }},
    {"index_select", matrix,  // rows of the table, columns, indices
     [](Tape& t, const Vars& x, const Extents&, const Tensors& i) {
       return Vars{nn::index_select(t, x[0], i[0])};
     },
     [](const Inputs&, const Extents& e) { return Tensors{Inputs::indices({e.at(2)}, e[0])}; }},
    {"gather", matrix,
     [](Tape& t, const Vars& x, const Extents&, const Tensors& i) { return Vars{nn::gather(t, x[0], i[0])}; },
     [](const Inputs&, const Extents& e) { return Tensors{Inputs::indices({e[0]}, e[1])}; }},
    {"matmul",  // batch, M, K, N
     [](const Extents& e) {
       return Shapes{{e.at(0), e.at(1), e.at(2)}, {e[0], e[2], e.at(3)}};
     },
     [](Tape& t, const Vars& x, const Extents&, const Tensors&) {
       return Vars{nn::matmul(t, x[0], false, x[1], false)};
     }},
    {"where", two_vectors,
     [](Tape& t, const Vars& x, const Extents&, const Tensors& c) {
       return Vars{nn::where(t, t.constant(c[0]), x[0], x[1])};
     },
     mask},
    {"masked_fill", vector,
     [](Tape& t, const Vars& x, const Extents&, const Tensors& c) {
       return Vars{nn::masked_fill(t, x[0], t.constant(c[0]), -1e9f)};
     },
     mask},
    {"log_softmax", matrix, unary<nn::log_softmax>},
    {"conv2d",  // N, C, H, W, O, kernel, stride, padding
     [](const Extents& e) {
       return Shapes{images(e)[0], {e.at(4), e[1], e.at(5), e[5]}, {e[4]}};
     },
     [](Tape& t, const Vars& x, const Extents& e, const Tensors&) {
       return Vars{nn::conv2d(t, x[0], x[1], x[2], {.stride = e.at(6), .padding = e.at(7)})};
     }},
    {"max_pool2d", images, pool<nn::max_pool2d>},
    {"avg_pool2d", images, pool<nn::avg_pool2d>},
    {"batch_norm", normalised_images,
     [](Tape& t, const Vars& x, const Extents&, const Tensors&) {
       return Vars{nn::batch_norm(t, x[0], x[1], x[2], {})};
     }},
    {"group_norm", normalised_images,
     [](Tape& t, const Vars& x, const Extents& e, const Tensors&) {
       return Vars{nn::group_norm(t, x[0], e.at(4), x[1], x[2], 1e-5f)};
     }},
    {"abs", vector, unary<nn::abs>},
    {"pow", vector, unary<nn::pow, 250>, nullptr, /*positive=*/true},
    {"rsqrt", vector, unary<nn::rsqrt>, nullptr, /*positive=*/true},
    {"sin", vector, unary<nn::sin>},
    {"cos", vector, unary<nn::cos>},
    {"softplus", vector, unary<nn::softplus>},
    {"elu", vector, unary<nn::elu, 100>},
    {"leaky_relu", vector, unary<nn::leaky_relu, 1>},
    {"gelu_erf", vector, unary<nn::gelu_erf>},
};

const Operator& operator_named(const std::string& name) {
  for (const Operator& o : operators)
    if (o.name == name) return o;
  fail(Errc::invalid_argument, "no operator \"", name, "\"");
}

/// Processor time with one thread, which other programs disturb less; otherwise wall time.
double milliseconds(const Stream& stream) {
  timespec t{};
  clock_gettime(stream.threads() == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

/// Median ms of runs of some 0.2 s in all.
double time(const std::function<void()>& f, const Stream& stream) {
  const auto once = [&](int calls) {
    const double begin = milliseconds(stream);
    for (int i = 0; i < calls; ++i) f();
    return (milliseconds(stream) - begin) / calls;
  };
  once(3);
  const double first = once(1);
  const int calls = std::max(1, static_cast<int>(2 / std::max(first, 1e-4)));
  std::vector<double> times;
  for (double total = 0; times.size() < 5 || (total < 200 && times.size() < 200);
       total += times.back() * calls)
    times.push_back(once(calls));
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

void answer(const std::string& line) {
  std::istringstream words(line);
  std::string name, dtype;
  int threads = 1;
  words >> name >> dtype >> threads;
  Extents extents;
  for (std::size_t e = 0; words >> e;) extents.push_back(e);
  const Operator& op = operator_named(name);
  const Inputs inputs(dtype_from_name(dtype), Stream::host(threads));
  Tensors with_gradient;
  for (const Shape& shape : op.shapes(extents)) with_gradient.push_back(inputs.values(shape, op.positive));
  const Tensors others = op.others ? op.others(inputs, extents) : Tensors();
  Tape tape(inputs.stream());
  const auto record = [&] {
    tape.reset();
    std::vector<Var> leaves;
    for (const Tensor& t : with_gradient) leaves.push_back(tape.variable(t));
    return op.record(tape, leaves, extents, others);
  };
  const double forward = time(
      [&] {
        const Tape::NoGrad no_grad(tape);
        record();
      },
      inputs.stream());
  std::vector<Tensor> gradients;
  for (const Var out : record()) gradients.push_back(inputs.values(tape.value(out).shape()));
  const double both = time(
      [&] {
        const std::vector<Var> outs = record();
        // A loss whose gradients are these.
        const auto backward = [&gradients](Tape& t, const Tensor&, std::span<const Var> of) {
          for (std::size_t i = 0; i < of.size(); ++i) t.accumulate_grad(of[i], gradients[i]);
        };
        tape.backward(tape.record(tape.empty({}), std::span<const Var>(outs), backward));
      },
      inputs.stream());
  std::printf("{\"forward\": %.6f, \"both\": %.6f}\n", forward, both);
  std::fflush(stdout);
}

}  // namespace

int main() try {
  for (std::string line; std::getline(std::cin, line);) answer(line);
} catch (const std::exception& e) {
  std::fprintf(stderr, "operators_bench: %s\n", rz::one_line(e).c_str());
  return 1;
}
