// Not linked with MPI: its backend is loaded, though the program is not beside it.

#include <ringzero/comm/bootstrap.h>
#include <ringzero/comm/communicator.h>

#include <cstdio>

int main() try {
  const rz::LaunchInfo launch = rz::launch_info_from_environment();
  auto comm = rz::Communicator::connect(launch.rank, launch.size, rz::store_for_launch(launch));
  float x = 1;
  comm.all_reduce({&x, 1}).wait();
  if (launch.rank == 0) std::printf("%g over %s\n", x, comm.describe().c_str());
  return x == static_cast<float>(launch.size) ? 0 : 1;
} catch (const rz::Error& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
