#pragma once
/// The collectives of a communicator over MPI, one at a time, in order.
///
/// Before a collective starts, all ranks verify that they make the same call: an MPI_Iallreduce of a hash of
/// the call's signature, run ahead for queued calls. MPI therefore never executes mismatched collectives, and
/// a deadline that expires before the start is distinguished from one during execution.

#include <mpi.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "comm/backends/mpi/stages.h"
#include "comm/progress/request.h"
#include "comm/transport/call_signature.h"

namespace rz::mpi {

/// Used with the progress token.
class VerifiedCollectives {
 public:
  /// Verifies over `control`, on which no other collectives run.
  VerifiedCollectives(MPI_Comm control, const MpiContext& context) : control_(control), context_(context) {}

  void add(const std::shared_ptr<Request>&, const CollectiveCall&);
  /// Progresses the first call. True once it has ended; its request is then appended.
  bool advance(std::vector<Request*>& ended);
  bool is_idle() const { return queue_.empty(); }

  /// The first call and its request; requires !is_idle().
  const CallSignature& front() const { return queue_.front().signature; }
  const Request& front_request() const { return *queue_.front().request; }
  const CollectiveCall& front_call() const { return *queue_.front().call; }
  /// All ranks have made the first call's number, but not the same call.
  bool front_differs() const { return !queue_.empty() && queue_.front().differs; }
  /// The numbers of the calls made, and of those that have ended.
  std::uint32_t made() const { return next_sequence_; }
  std::uint32_t ended() const { return queue_.empty() ? next_sequence_ : front().sequence; }
  /// The call of that number, if it is pending or one of the last that have ended.
  std::optional<CallSignature> find(std::uint32_t sequence) const;

  /// Leaks what MPI may still use, since MPI cannot cancel a collective.
  void abandon();
  /// Frees the operators, before MPI is finalised.
  void free_operators() { operators_.free(); }

 private:
  struct Call {
    std::shared_ptr<Request> request;
    const CollectiveCall* call = nullptr;
    CallSignature signature;
    std::uint64_t proposal[2], reduced[2];  // maxima over all ranks; complementary iff all hashes are equal
    MPI_Request agreement_request = MPI_REQUEST_NULL;
    bool proposed = false, differs = false, started = false;
    std::vector<Stage> stages;
    std::size_t stage_index = 0;
    Requests mpi_requests;
  };

  void propose();
  static bool is_agreed(Call&);
  static bool advance_stages(Call&);

  const MPI_Comm control_;
  const MpiContext context_;
  Operators operators_;
  std::deque<Call> queue_;
  std::deque<CallSignature> recent_;  // calls that have ended, latest last
  std::uint32_t next_sequence_ = 0;
};

}  // namespace rz::mpi
