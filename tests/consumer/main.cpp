// Two ranks as threads of one process; raw pointers in, the sum over the ranks out.

#include <cstdio>
#include <thread>
#include <vector>

#include "comm/communicator.h"

int main() {
  const auto store = rz::memory_store();
  float x[2] = {1, 2};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      auto comm = rz::Communicator::connect(rank, 2, store);
      comm.all_reduce({&x[rank], 1}).wait();
    });
  for (auto& r : ranks) r.join();
  std::printf("%g %g\n", x[0], x[1]);
  return x[0] == 3 && x[1] == 3 ? 0 : 1;
}
