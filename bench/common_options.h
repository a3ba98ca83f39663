#pragma once
/// Flags that the benches share.

#include <string>

namespace CLI {
class App;
}

namespace rz::bench {

/// --json FILE.
void add_json(CLI::App&, std::string& path);
/// --timeout of an operation; 0, the default: the library's own.
void add_timeout(CLI::App&, double& seconds);
/// -R, the kind of memory. `why`: after the default.
void add_memory(CLI::App&, int& registered, const std::string& why = "");

}  // namespace rz::bench
