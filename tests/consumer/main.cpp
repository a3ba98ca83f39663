// Two ranks as threads of one process; a vector in, the sum over the ranks out.

#include <ringzero/comm/communicator.h>

#include <cstdio>
#include <thread>
#include <vector>

#include "comm/options.h"

int main() {
  static_assert(consumer::Options().ranks == 2);
  const auto store = rz::memory_store();
  std::vector<float> x[2] = {{1}, {2}};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      try {
        rz::Communicator::connect(rank, 2, store).all_reduce(x[rank]).wait();
      } catch (const rz::Error& e) {
        std::printf("%s\n", e.what());
      }
    });
  for (auto& r : ranks) r.join();
  std::printf("%g %g\n", x[0][0], x[1][0]);
  return x[0][0] == 3 && x[1][0] == 3 ? 0 : 1;
}
