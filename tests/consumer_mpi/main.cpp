// The program owns MPI; the sum runs over a communicator that it made.

#include <ringzero/comm/backends/mpi/mpi.h>

#include <cstdio>

int main(int argc, char** argv) {
  int level = 0, rank = 0, size = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm reversed;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_split(MPI_COMM_WORLD, 0, -rank, &reversed);
  float x = static_cast<float>(rank + 1), expected = 0;
  bool right = false;
  {
    auto comm = rz::connect_mpi(reversed);
    size = comm.size();
    comm.all_reduce({&x, 1}).wait();
    for (int r = 0; r < size; ++r) expected += static_cast<float>(r + 1);
    right = x == expected && comm.rank() == size - 1 - rank;
    if (rank == 0) std::printf("%g over %s\n", x, comm.describe().c_str());
  }
  MPI_Comm_free(&reversed);
  MPI_Finalize();
  return right && size > 1 ? 0 : 1;
}
