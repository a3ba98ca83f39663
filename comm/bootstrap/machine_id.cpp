#include "comm/bootstrap/machine_id.h"

#include <unistd.h>

#include <fstream>

#include "comm/core/text.h"

namespace rz {

std::string kernel_boot_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot;
}

std::string machine_id() {
  char host[256] = {}, space[64] = {};
  gethostname(host, sizeof host - 1);
  if (readlink("/proc/self/ns/net", space, sizeof space - 1) < 0) space[0] = 0;
  return concat(kernel_boot_id(), '/', host, '/', space);
}

}  // namespace rz
