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
#include <map>
#include <memory>
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

/// An operator whose inputs are made: its leaves with a gradient, and how it is recorded.
struct Call {
  std::vector<Tensor> leaves;
  std::function<std::vector<Var>(Tape&, const std::vector<Var>&)> record;
};
using Make = std::function<Call(const Inputs&, const Extents&)>;

template <class F>
Make unary(const F& f, bool positive = false) {
  return [=](const Inputs& in, const Extents& e) {
    return Call{{in.values({e.at(0)}, positive)},
                [=](Tape& tape, const std::vector<Var>& x) { return std::vector{f(tape, x[0])}; }};
  };
}

/// B, T, heads, key heads, channels of a head.
Make attention(std::size_t window, bool padding) {
  return [=](const Inputs& in, const Extents& e) {
    nn::AttentionOptions options{.heads = static_cast<int>(e.at(2)),
                                 .kv_heads = static_cast<int>(e.at(3)),
                                 .causal = !padding,
                                 .window = window ? e.at(1) / 4 : 0};
    if (padding) {
      options.key_counts = Tensor::empty({e[0]}, DType::i32);
      for (std::size_t b = 0; b < e[0]; ++b)
        options.key_counts.data<std::int32_t>()[b] = static_cast<std::int32_t>(e[1] * (4 - b % 3) / 4);
    }
    return Call{{in.values({e[0], e[1], e[2] * e.at(4)}), in.values({e[0], e[1], e[3] * e[4]}),
                 in.values({e[0], e[1], e[3] * e[4]})},
                [=](Tape& tape, const std::vector<Var>& x) {
                  return std::vector{nn::attention(tape, x[0], x[1], x[2], options)};
                }};
  };
}

Make pool(Var (*f)(Tape&, Var, const ops::Pool2d&)) {
  return [=](const Inputs& in, const Extents& e) {  // N, C, H, W, kernel, stride, padding
    const ops::Pool2d how{e.at(4), e.at(5), e.at(6)};
    return Call{{in.values({e[0], e[1], e[2], e[3]})},
                [=](Tape& tape, const std::vector<Var>& x) { return std::vector{f(tape, x[0], how)}; }};
  };
}

std::map<std::string, Make> operators() {
  std::map<std::string, Make> all;
  all["attention"] = all["attention_groups"] = attention(0, false);
  all["attention_window"] = attention(1, false);
  all["attention_padding"] = attention(0, true);
  all["rotary"] = [](const Inputs& in, const Extents& e) {  // B, T, H, D
    const ops::RotaryTables tables = ops::rotary_tables(e.at(3), e.at(1));
    return Call{{in.values({e[0], e[1], e[2] * e[3]})}, [=](Tape& tape, const std::vector<Var>& x) {
                  return std::vector{nn::rotary(tape, x[0], static_cast<int>(e[2]), tables)};
                }};
  };
  all["rms_norm"] = [](const Inputs& in, const Extents& e) {
    return Call{{in.values({e.at(0), e.at(1)}), in.values({e[1]})},
                [](Tape& tape, const std::vector<Var>& x) {
                  return std::vector{nn::rms_norm(tape, x[0], x[1], 1e-5f)};
                }};
  };
  all["permute"] = [](const Inputs& in, const Extents& e) {
    return Call{{in.values({e.at(0), e.at(1), e.at(2), e.at(3)})}, [](Tape& tape, const std::vector<Var>& x) {
                  return std::vector{nn::permute(tape, x[0], {0, 2, 1, 3})};
                }};
  };
  all["transpose"] = [](const Inputs& in, const Extents& e) {
    return Call{{in.values({e.at(0), e.at(1), e.at(2)})}, [](Tape& tape, const std::vector<Var>& x) {
                  return std::vector{nn::transpose(tape, x[0], 1, 2)};
                }};
  };
  all["cat"] = [](const Inputs& in, const Extents& e) {
    return Call{{in.values({e.at(0), e.at(1)}), in.values({e[0], e[1]})},
                [](Tape& tape, const std::vector<Var>& x) {
                  return std::vector{nn::cat(tape, {x[0], x[1]}, 1)};
                }};
  };
  all["split"] = [](const Inputs& in, const Extents& e) {
    return Call{{in.values({e.at(0), 3 * e.at(1)})}, [n = e[1]](Tape& tape, const std::vector<Var>& x) {
                  return nn::split(tape, x[0], {n, n, n}, 1);
                }};
  };
  all["index_select"] = [](const Inputs& in, const Extents& e) {  // rows of the table, columns, indices
    return Call{{in.values({e.at(0), e.at(1)})},
                [i = Inputs::indices({e.at(2)}, e[0])](Tape& tape, const std::vector<Var>& x) {
                  return std::vector{nn::index_select(tape, x[0], i)};
                }};
  };
  all["gather"] = [](const Inputs& in, const Extents& e) {
    return Call{{in.values({e.at(0), e.at(1)})},
                [i = Inputs::indices({e[0]}, e[1])](Tape& tape, const std::vector<Var>& x) {
                  return std::vector{nn::gather(tape, x[0], i)};
                }};
  };
  all["matmul"] = [](const Inputs& in, const Extents& e) {  // batch, M, K, N
    return Call{{in.values({e.at(0), e.at(1), e.at(2)}), in.values({e[0], e[2], e.at(3)})},
                [](Tape& tape, const std::vector<Var>& x) {
                  return std::vector{nn::matmul(tape, x[0], false, x[1], false)};
                }};
  };
  all["where"] = [](const Inputs& in, const Extents& e) {
    return Call{{in.values({e.at(0)}), in.values({e[0]})},
                [c = in.mask({e[0]})](Tape& tape, const std::vector<Var>& x) {
                  return std::vector{nn::where(tape, tape.constant(c), x[0], x[1])};
                }};
  };
  all["masked_fill"] = [](const Inputs& in, const Extents& e) {
    return Call{{in.values({e.at(0)})}, [c = in.mask({e[0]})](Tape& tape, const std::vector<Var>& x) {
                  return std::vector{nn::masked_fill(tape, x[0], tape.constant(c), -1e9f)};
                }};
  };
  all["log_softmax"] = [](const Inputs& in, const Extents& e) {
    return Call{{in.values({e.at(0), e.at(1)})}, [](Tape& tape, const std::vector<Var>& x) {
                  return std::vector{nn::log_softmax(tape, x[0])};
                }};
  };
  all["conv2d"] = [](const Inputs& in, const Extents& e) {  // N, C, H, W, O, kernel, stride, padding
    const ops::Conv2d how{.stride = e.at(6), .padding = e.at(7)};
    return Call{{in.values({e[0], e[1], e[2], e[3]}), in.values({e[4], e[1], e[5], e[5]}), in.values({e[4]})},
                [=](Tape& tape, const std::vector<Var>& x) {
                  return std::vector{nn::conv2d(tape, x[0], x[1], x[2], how)};
                }};
  };
  all["max_pool2d"] = pool(nn::max_pool2d);
  all["avg_pool2d"] = pool(nn::avg_pool2d);
  all["batch_norm"] = [](const Inputs& in, const Extents& e) {
    return Call{{in.values({e.at(0), e.at(1), e.at(2), e.at(3)}), in.values({e[1]}), in.values({e[1]})},
                [](Tape& tape, const std::vector<Var>& x) {
                  return std::vector{nn::batch_norm(tape, x[0], x[1], x[2], {})};
                }};
  };
  all["group_norm"] = [](const Inputs& in, const Extents& e) {
    return Call{{in.values({e.at(0), e.at(1), e.at(2), e.at(3)}), in.values({e[1]}), in.values({e[1]})},
                [g = e.at(4)](Tape& tape, const std::vector<Var>& x) {
                  return std::vector{nn::group_norm(tape, x[0], g, x[1], x[2], 1e-5f)};
                }};
  };
  all["abs"] = unary([](Tape& tape, Var x) { return nn::abs(tape, x); });
  all["pow"] = unary([](Tape& tape, Var x) { return nn::pow(tape, x, 2.5f); }, true);
  all["rsqrt"] = unary([](Tape& tape, Var x) { return nn::rsqrt(tape, x); }, true);
  all["sin"] = unary([](Tape& tape, Var x) { return nn::sin(tape, x); });
  all["cos"] = unary([](Tape& tape, Var x) { return nn::cos(tape, x); });
  all["softplus"] = unary([](Tape& tape, Var x) { return nn::softplus(tape, x); });
  all["elu"] = unary([](Tape& tape, Var x) { return nn::elu(tape, x, 1.0f); });
  all["leaky_relu"] = unary([](Tape& tape, Var x) { return nn::leaky_relu(tape, x, 0.01f); });
  all["gelu_erf"] = unary([](Tape& tape, Var x) { return nn::gelu_erf(tape, x); });
  return all;
}

/// Of this process with one thread, which other programs disturb less; otherwise of the wall.
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

void answer(const std::map<std::string, Make>& all, const std::string& line) {
  std::istringstream words(line);
  std::string name, dtype;
  int threads = 1;
  words >> name >> dtype >> threads;
  Extents extents;
  for (std::size_t e = 0; words >> e;) extents.push_back(e);
  require(all.contains(name), Errc::invalid_argument, "no operator \"", name, "\"");
  const Inputs inputs(dtype_from_name(dtype), Stream::host(threads));
  const Call call = all.at(name)(inputs, extents);
  Tape tape(inputs.stream());
  const auto record = [&] {
    tape.reset();
    std::vector<Var> leaves;
    for (const Tensor& t : call.leaves) leaves.push_back(tape.variable(t));
    return call.record(tape, leaves);
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
  const std::map<std::string, Make> all = operators();
  for (std::string line; std::getline(std::cin, line);) answer(all, line);
} catch (const std::exception& e) {
  std::fprintf(stderr, "operators_bench: %s\n", rz::one_line(e).c_str());
  return 1;
}
