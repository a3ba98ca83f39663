#include "comm/os/fd.h"

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <iterator>

#include "comm/core/error.h"

namespace rz {

namespace {

std::size_t count_open_files() {
  std::error_code ignored;
  const std::filesystem::directory_iterator files("/proc/self/fd", ignored);
  return static_cast<std::size_t>(std::distance(begin(files), end(files)));
}

}  // namespace

OpenFiles open_files() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = limit.rlim_max = RLIM_INFINITY;
  return {count_open_files(), limit.rlim_cur, limit.rlim_max};
}

void require_open_files(std::size_t more, const std::string& what, const std::string& advice) {
  const OpenFiles files = open_files();
  const std::size_t need = files.needed(more);
  if (need <= files.soft) return;
  require(need <= files.hard, Errc::system, what, " needs ", more, " files beside the ", files.open,
          " that are open, but no more than ", files.hard,
          " may be open in this process; raise the hard limit (ulimit -Hn)", advice);
  const rlimit limit{need, files.hard};
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) fail_errno("setrlimit", concat("RLIMIT_NOFILE to ", need));
}

}  // namespace rz
