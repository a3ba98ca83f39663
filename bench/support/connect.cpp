#include "bench/support/connect.h"

#include <chrono>

#include "comm/bootstrap.h"

namespace rz::bench {

Communicator connect_group(double timeout_s) {
  const LaunchInfo info = launch_info_from_environment();
  CommOptions options;
  if (timeout_s > 0) options.timeout = std::chrono::milliseconds(static_cast<long>(timeout_s * 1e3));
  return Communicator::connect(info.rank, info.size, info.size > 1 ? store_for_launch(info) : memory_store(),
                               options);
}

}  // namespace rz::bench
