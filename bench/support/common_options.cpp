#include "bench/support/common_options.h"

#include <chrono>

#include "comm/bootstrap.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"

namespace rz::bench {

void add_timeout(CommandLine& line, double& seconds) {
  line.add_option("-T,--timeout", seconds, "Deadline of an operation in seconds; default RZ_TIMEOUT_S or 600")
      .within(0.0, 1e6);
}

void add_memory(CommandLine& line, int& registered, const std::string& why) {
  line.add_option(
          "-R,--local_register", registered,
          concat(
              "Memory: 0 ordinary, 1 of Communicator::allocate, 2 of allocate_symmetric, 3 ordinary memory "
              "that is registered; default ",
              registered, why))
      .within(0, 3);
}

Communicator connect_group(double timeout_s) {
  const LaunchInfo info = launch_info_from_environment();
  CommOptions options;
  if (timeout_s > 0) options.timeout = std::chrono::milliseconds(static_cast<long>(timeout_s * 1e3));
  return Communicator::connect(info.rank, info.size, info.size > 1 ? store_for_launch(info) : memory_store(),
                               options);
}

}  // namespace rz::bench
