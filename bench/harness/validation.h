#pragma once
/// Checks the results of a case.

#include <cstdint>
#include <functional>

#include "bench/harness/buffers.h"
#include "bench/harness/case.h"
#include "bench/harness/options.h"
#include "bench/harness/values.h"

namespace rz::bench {

struct Hooks {
  /// Called with the result of a rank before it is checked. Tests corrupt it here.
  std::function<void(int rank, Buffer result)> before_check;
};

/// Results of the checks of a case, over all ranks.
struct CheckResult {
  std::uint64_t wrong_elements = 0;
  int failed_checks = 0;
};

/// Runs a case on known inputs and counts wrong output elements.
class Validation {
 public:
  /// `disjoint_operations`: operations of a group whose results do not overwrite each other; all of them are
  /// checked.
  Validation(const Collective&, const Options&, Communicator&, const Stream&, int disjoint_operations,
             const Hooks&);

  /// Runs options.checks checks. Collective; every rank gets the same result.
  CheckResult check(const Case&, BufferRotation) const;

 private:
  std::uint64_t wrong_on_this_rank(const Case&, BufferRotation&, int iteration) const;
  void prepare(const Case&, const Call&, int operation) const;
  std::vector<std::byte> result_of(const Call&) const;
  std::uint64_t wrong_elements(const Case&, const Call&, int operation, std::vector<std::byte>& result) const;
  Pattern input_of(const Case&, int operation, int rank) const;

  const Collective& collective_;
  const Options& options_;
  Communicator& comm_;
  const Stream stream_;
  const int operations_;  ///< operations per check
  const Hooks& hooks_;
};

}  // namespace rz::bench
