// Tests that every rank of an mpirun runs. This program owns MPI, as an embedding program does.
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstring>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const bool funneled = argc > 1 && std::strcmp(argv[1], "funneled") == 0;
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, funneled ? MPI_THREAD_FUNNELED : MPI_THREAD_MULTIPLE, &provided);
  const int status = RUN_ALL_TESTS();
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
  return status;
}
