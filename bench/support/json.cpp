#include "bench/support/json.h"

#include <fstream>

#include "comm/core/error.h"

namespace rz::bench {

void write_file(const std::string& path, const std::string& text) {
  std::ofstream out(path);
  out << text << '\n';
  out.flush();
  if (!out) fail_errno("write", path);
}

}  // namespace rz::bench
