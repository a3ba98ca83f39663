// Runs: ci

// The BLAS belongs to the program too: our products use one thread per call, and restore its number of
// threads.

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "tensor/ops.h"

extern "C" {
int openblas_get_num_threads(void);
void openblas_set_num_threads(int);
}

namespace {
std::atomic<int> calls{0}, max_threads{0};
}

/// Replaces the BLAS's function: records its number of threads, and calls it.
extern "C" void cblas_sgemm(int order, int a_form, int b_form, int m, int n, int k, float alpha,
                            const float* a, int a_stride, const float* b, int b_stride, float beta, float* c,
                            int c_stride) {
  using Product = decltype(&cblas_sgemm);
  static const auto product = reinterpret_cast<Product>(::dlsym(RTLD_NEXT, "cblas_sgemm"));
  const auto look = [] {
    for (int before = max_threads, now = openblas_get_num_threads();
         now > before && !max_threads.compare_exchange_weak(before, now);) {
    }
  };
  ++calls;
  look();
  product(order, a_form, b_form, m, n, k, alpha, a, a_stride, b, b_stride, beta, c, c_stride);
  look();
}

namespace rz {
namespace {

class BlasThreads : public testing::Test {
 protected:
  void SetUp() override {
    openblas_set_num_threads(2);
    ASSERT_EQ(openblas_get_num_threads(), 2);
    calls = max_threads = 0;
  }
  static void multiply(const Stream& stream, int times) {
    const Tensor a = Tensor::zeros({96, 64}), b = Tensor::zeros({64, 96}), c = Tensor::empty({96, 96});
    for (int i = 0; i < times; ++i) ops::matmul(c, a, false, b, false, ops::Into::overwrite, stream);
  }
};

TEST_F(BlasThreads, AProductUsesOneThreadAndRestoresTheSetting) {
  multiply(Stream::host(1), 1);
  EXPECT_GT(calls, 0);
  EXPECT_EQ(max_threads, 1);
  EXPECT_EQ(openblas_get_num_threads(), 2);
}

TEST_F(BlasThreads, ConcurrentProductsRestoreTheSetting) {
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n) threads.emplace_back([n] { multiply(Stream::host(1 + n % 2), 300); });
  for (auto& t : threads) t.join();
  EXPECT_GE(calls, 4 * 300);
  EXPECT_EQ(max_threads, 1);
  EXPECT_EQ(openblas_get_num_threads(), 2);
}

}  // namespace
}  // namespace rz
