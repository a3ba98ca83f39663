#include "comm/os/fd.h"

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <iterator>

#include "comm/core/error.h"

namespace rz {

namespace {

constexpr std::size_t reserved_files = 32;

std::size_t count_open_files() {
  std::error_code ignored;
  const std::filesystem::directory_iterator files("/proc/self/fd", ignored);
  return static_cast<std::size_t>(std::distance(begin(files), end(files)));
}

}  // namespace

void require_open_files(std::size_t more, const std::string& what, const std::string& advice) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const std::size_t open = count_open_files(), need = open + more + reserved_files;
  if (need <= limit.rlim_cur) return;
  require(need <= limit.rlim_max, Errc::system, what, " needs ", more, " files beside the ", open,
          " that are open, but no more than ", limit.rlim_max,
          " may be open in this process; raise the hard limit (ulimit -Hn)", advice);
  limit.rlim_cur = need;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) fail_errno("setrlimit", concat("RLIMIT_NOFILE to ", need));
}

}  // namespace rz
