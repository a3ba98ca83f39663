// Times the matrix products of a training step with each BLAS library of this build, in the scheme of
// tensor/kernels/linear_algebra/gemm.cpp: single-threaded calls on blocks, which are distributed over the
// threads of the stream. The libraries are interleaved in one run, so that other load on the machine affects
// both alike. Prints medians.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "comm/core/error.h"
#include "tensor/kernels/linear_algebra/gemm.h"

#ifdef RZ_BENCH_DNNL
#include <dnnl.h>
extern "C" void omp_set_num_threads(int);
#endif

namespace {

using rz::Stream;
using rz::kernels::Matrix;

struct Product {
  const char* model;
  const char* what;
  std::size_t m, n, k;
  bool transpose_a, transpose_b;
  int times;  ///< per training step
};

std::vector<Product> products() {
  std::vector<Product> all;
  const auto linear = [&](const char* model, std::size_t rows, std::size_t in, std::size_t out, bool in_out,
                          int times) {
    all.push_back({model, "forward", rows, out, in, false, !in_out, times});
    all.push_back({model, "d_x", rows, in, out, false, in_out, times});
    all.push_back({model, "d_weight", in_out ? in : out, in_out ? out : in, rows, true, false, times});
  };
  const auto gpt2 = [&](const char* model, std::size_t rows, std::size_t c, std::size_t vocabulary,
                        int layers, std::size_t head) {
    for (const auto& [in, out] : {std::pair{c, 3 * c}, {c, c}, {c, 4 * c}, {4 * c, c}})
      linear(model, rows, in, out, true, layers);
    linear(model, rows, c, vocabulary, false, 1);
    // tiles of attention, which tensor/kernels multiplies itself: shown, but not part of the step
    all.push_back({model, "tile q kT", 64, 64, head, false, true, 0});
    all.push_back({model, "tile p v", 64, head, 64, false, false, 0});
    all.push_back({model, "tile pT dy", 64, head, 64, true, false, 0});
  };
  gpt2("tiny", 512, 128, 256, 4, 32);
  gpt2("124M", 256, 768, 50257, 12, 64);
  return all;
}

using Gemm = std::function<void(const Product&, float* c, const Matrix& a, const Matrix& b, const Stream&)>;

void run_library(const Product& p, float* c, const Matrix& a, const Matrix& b, const Stream& stream) {
  rz::kernels::gemm(c, p.n, p.m, p.n, p.k, 1, a, b, 0, stream);
}

#ifdef RZ_BENCH_DNNL
void run_dnnl(const Product& p, float* c, const Matrix& a, const Matrix& b, const Stream& stream) {
  const char ta = p.transpose_a ? 'T' : 'N', tb = p.transpose_b ? 'T' : 'N';
  const auto call = [&](float* to, const float* x, const float* y, std::size_t m, std::size_t n) {
    omp_set_num_threads(1);  // per-thread setting
    dnnl_sgemm(ta, tb, static_cast<dnnl_dim_t>(m), static_cast<dnnl_dim_t>(n), static_cast<dnnl_dim_t>(p.k),
               1, x, static_cast<dnnl_dim_t>(a.stride), y, static_cast<dnnl_dim_t>(b.stride), 0, to,
               static_cast<dnnl_dim_t>(p.n));
  };
  if (p.n > p.m)
    stream.parallel_for(p.n, 16, [&](std::size_t begin, std::size_t end) {
      call(c + begin, a.data, b.data + (p.transpose_b ? begin * b.stride : begin), p.m, end - begin);
    });
  else
    stream.parallel_for(p.m, 16, [&](std::size_t begin, std::size_t end) {
      call(c + begin * p.n, a.data + (p.transpose_a ? begin : begin * a.stride), b.data, end - begin, p.n);
    });
}
#endif

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

/// Median seconds per call of each library, measured in interleaved rounds.
std::vector<double> time(const Product& p, const std::vector<Gemm>& libraries, const Stream& stream) {
  std::vector<float> a(p.m * p.k, 0.5f), b(p.k * p.n, 0.25f), c(p.m * p.n);
  const Matrix x{a.data(), p.transpose_a ? p.m : p.k, p.transpose_a};
  const Matrix y{b.data(), p.transpose_b ? p.k : p.n, p.transpose_b};
  const double flops = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
  const int rounds = flops > 5e9 ? 7 : 41;
  const int calls = std::max(1, static_cast<int>(5e7 / flops));
  std::vector<std::vector<double>> seconds(libraries.size());
  for (int round = -1; round < rounds; ++round)
    for (std::size_t l = 0; l < libraries.size(); ++l) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < calls; ++i) libraries[l](p, c.data(), x, y, stream);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      if (round >= 0) seconds[l].push_back(took.count() / calls);  // the first round is a warm-up
    }
  std::vector<double> medians;
  for (auto& s : seconds) medians.push_back(median(std::move(s)));
  return medians;
}

}  // namespace

int main() try {
  std::vector<Gemm> libraries{run_library};
#ifdef RZ_BENCH_DNNL
  libraries.push_back(run_dnnl);
#endif
  for (const int threads : {1, 2}) {
    const Stream stream = Stream::host(threads);
    std::printf("\n%d thread%s%50s %10s  GFlop/s\n", threads, threads > 1 ? "s" : " ", "OpenBLAS",
                libraries.size() > 1 ? "oneDNN" : "");
    std::vector<double> step(libraries.size());
    const char* model = "tiny";
    const auto print_step = [&] {
      std::printf("%-5s per step, ms%44.1f", model, step[0] * 1e3);
      if (step.size() > 1) std::printf(" %10.1f", step[1] * 1e3);
      std::printf("\n");
      std::fill(step.begin(), step.end(), 0);
    };
    for (const Product& p : products()) {
      if (model != p.model) print_step(), model = p.model;
      const auto seconds = time(p, libraries, p.times ? stream : Stream());
      const double flops =
          2e-9 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
      std::printf("%-5s %-16s %5zu x %5zu x %5zu %s%s x %-4d", p.model, p.what, p.m, p.n, p.k,
                  p.transpose_a ? "T" : "N", p.transpose_b ? "T" : "N", p.times);
      for (std::size_t l = 0; l < seconds.size(); ++l) {
        std::printf(" %10.1f", flops / seconds[l]);
        step[l] += seconds[l] * p.times;
      }
      std::printf("\n");
    }
    print_step();
  }
} catch (const std::exception& e) {
  std::fprintf(stderr, "gemm_bench: %s\n", rz::one_line(e).c_str());
  return 1;
}
