#pragma once
/// A simulated network: the ranks of a group in one thread, with virtual time, delays by a seed, and faults.

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/core/error.h"
#include "tests/support/sim_stream.h"

namespace rz::test {

class SimTransport;

struct SimOptions {
  std::uint64_t seed = 1;
  std::vector<int> node_of_rank;  ///< as Transport::nodes(); empty: every rank has a node of its own
  SimLink intra_node{SimTime(300), 20'000}, inter_node{};
  SimJitter jitter;
  /// Upper bound of the random time after which a peer detects that a rank has stopped or a link is down.
  SimTime max_detection_time{1'000'000};
};

/// The program of one rank. schedule::Executor and PointToPoint have functions like these.
struct SimProgram {
  std::function<bool()> advance;  ///< never blocks; true if anything moved
  std::function<bool()> complete;
  std::function<std::string()> waiting_for;  ///< "rank 2 to send"
};

/// Runs with equal seeds, options and programs are equal, event by event. One thread drives a network and all
/// its transports.
class SimNetwork {
 public:
  explicit SimNetwork(int size, SimOptions = {});
  ~SimNetwork();

  int size() const { return static_cast<int>(transports_.size()); }
  SimTime now() const { return clock_.now(); }
  SimTransport& transport(int rank);
  /// Replaces the properties of one direction.
  void set_link(int from, int to, SimLink);
  /// At this time the rank's program ends; what it has sent and has not arrived is lost. Every peer fails
  /// with Errc::peer_lost and this rank as culprit.
  void stop_rank(int rank, SimTime at);
  /// From this time on nothing arrives between the two ranks. The group fails with Errc::peer_lost; the
  /// culprit is one of the two.
  void drop_link(int a, int b, SimTime at);

  /// Runs the ranks' programs, one for each rank, until each is complete, has failed, or its rank has
  /// stopped. Returns the error of each rank that failed; it aborts the group. Errc::timeout if no event is
  /// left and a rank is not complete: a deadlock, with the ranks for which each rank waits.
  [[nodiscard]] std::vector<std::optional<Error>> run_until_complete(std::span<const SimProgram>);

  // For SimTransport.
  SimStream& stream(int from, int to, Channel);
  std::span<const int> node_of_rank() const { return options_.node_of_rank; }
  /// Runs `action` when a control message from one rank arrives at the other, if the link is not down.
  void send_control(int from, int to, std::function<void()> action);
  /// Runs events until one concerns the rank, at most until now() + most.
  void wait(int rank, SimTime timeout);
  /// Stores the failure until the network's thread calls deliver_abort(). Any thread.
  void request_abort(int rank, const Failure&);
  void deliver_abort();

 private:
  struct AbortRequest {
    int rank;
    Failure failure;
  };
  SimWire& wire(int from, int to) { return wires_[index(from, to)]; }
  std::size_t index(int from, int to) const;
  void run_event();
  [[noreturn]] void fail_deadlocked(std::span<const SimProgram>, const std::vector<bool>& ended) const;
  void run_turn(int rank, const SimProgram&, std::optional<Error>&);
  void fail_group(int rank, const Failure&);
  void detect_loss(int rank, int peer, const std::string& reason);

  const SimOptions options_;
  SimClock clock_;
  SimRandom random_;
  std::vector<SimWire> wires_;
  std::vector<std::array<SimStream, channel_count>> streams_;
  std::vector<std::unique_ptr<SimTransport>> transports_;
  std::vector<bool> stopped_;
  std::optional<Failure> failure_;  // the first one: every rank throws it
  std::mutex abort_mutex_;
  std::optional<AbortRequest> abort_request_;  // guarded by abort_mutex_
};

}  // namespace rz::test
