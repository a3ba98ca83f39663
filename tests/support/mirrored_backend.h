#pragma once
/// A group in one process, whose other ranks are assumed to make the same calls with the same data: for tests
/// of the order in which calls are launched and waited for.
///
/// A call runs when it is waited for, not before. So the result of a call that is used too early is absent,
/// and the set of calls in flight does not depend on clocks or threads.

#include <functional>
#include <memory>
#include <vector>

#include "comm/backend.h"
#include "comm/communicator.h"

namespace rz::test {

class MirroredCall;

/// The calls of one communicator, in the order of their launch. Outlives it.
class CallRecord {
 public:
  struct Call {
    Collective kind;
    DType dtype;
    std::size_t elements;  ///< of the larger of input and output
  };
  using Filter = std::function<bool(const Call&)>;

  /// Launched since clear().
  std::vector<Call> launched(const Filter&) const;
  /// Launched since clear() and not waited for until now.
  std::vector<Call> in_flight(const Filter&) const;
  void clear() { calls_.clear(); }

 private:
  friend class MirroredBackend;
  std::vector<std::shared_ptr<MirroredCall>> calls_;
};

/// Of rank `rank` of `size`. Sums of floats equal one rank's contribution; messages, gathers at a root and
/// all_to_all are Errc::unsupported.
Communicator mirrored_communicator(int rank, int size, std::shared_ptr<CallRecord>);

}  // namespace rz::test
