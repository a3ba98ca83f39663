#include "comm/core/long_wait.h"

#include "comm/core/text.h"

namespace rz {

void LongWait::report(const WaitReportOptions& options, int rank, int size, const std::string& call,
                      std::chrono::duration<double> waited, const std::string& reason) noexcept {
  try {
    options.report(concat("rank ", rank, " of ", size, " of ", options.communicator, ": ", call,
                          " has made no progress for ", fixed(waited.count(), 1), " s: ", reason,
                          "; every rank must make the same calls in the same order"));
  } catch (...) {  // not a failure of the group
  }
}

}  // namespace rz
