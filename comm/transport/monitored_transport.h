#pragma once
/// The functions of Transport that a LinkMonitor implements: waits, failures and wait-for messages. A
/// transport derives from this class and adds its streams, and how it connects with its peers.

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/net/handshake.h"
#include "comm/transport/link_monitor.h"
#include "comm/transport/transport.h"

namespace rz {

/// Functions without a comment implement those of Transport. The derived class adds its links to the monitor.
class MonitoredTransport : public Transport {
 public:
  /// Where this rank listens, for connect() of the others; without a space or a line break.
  virtual std::string address() const = 0;
  /// Connects with the peers; called once, before any function of Transport except describe(). addresses[r]
  /// is rank r's address(); passed_fds is ignored.
  virtual void connect(const net::HandshakeInfo&, const std::vector<std::string>& addresses, Deadline) = 0;

  void progress(std::uint32_t completed) final { monitor_->progress(completed); }
  std::optional<Failure> find_lost() final { return monitor_->find_lost(); }
  void wait(std::chrono::microseconds timeout, bool eager) final { monitor_->wait(timeout, eager); }
  int begin_sleep() final { return monitor_->begin_sleep(); }
  void end_sleep() final { monitor_->end_sleep(); }
  void wake() noexcept final { monitor_->wake(); }
  void abort(const Failure& failure) noexcept final { monitor_->abort(failure); }
  std::shared_ptr<LinkMonitor> link_monitor() const final { return monitor_; }
  void close() noexcept final { monitor_->close(); }
  void query_waits() final { monitor_->query_waits(); }
  void query_calls(std::uint32_t number, int peers) final { monitor_->query_calls(number, peers); }
  void record_call(const CallSignature& call) final { monitor_->wait_graph().record(call); }
  void reply_waits(const WaitMessage& reply) final { monitor_->reply_waits(reply); }
  const WaitForGraph& wait_graph() const final { return monitor_->wait_graph(); }
  std::span<const int> nodes() const final { return monitor_->nodes(); }
  bool oversubscribed() const final { return monitor_->oversubscribed(); }

 protected:
  explicit MonitoredTransport(std::shared_ptr<LinkMonitor> monitor) : monitor_(std::move(monitor)) {}
  LinkMonitor& monitor() const { return *monitor_; }

 private:
  const std::shared_ptr<LinkMonitor> monitor_;
};

}  // namespace rz
