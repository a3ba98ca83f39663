#include "bench/common_options.h"

#include <CLI/CLI.hpp>

#include "comm/core/error.h"

namespace rz::bench {

void add_json(CLI::App& app, std::string& path) {
  app.add_option("--json", path, "Write the results there as JSON");
}

void add_timeout(CLI::App& app, double& seconds) {
  app.add_option("-T,--timeout", seconds, "Deadline of an operation in seconds; default RZ_TIMEOUT_S or 600")
      ->check(CLI::Range(0.0, 1e6));
}

void add_memory(CLI::App& app, int& registered, const std::string& why) {
  app.add_option(
         "-R,--local_register", registered,
         str("Memory: 0 ordinary, 1 of Communicator::allocate, 2 of allocate_symmetric, 3 ordinary memory "
             "that is registered; default ",
             registered, why))
      ->check(CLI::Range(0, 3));
}

}  // namespace rz::bench
