#pragma once
/// doctor on the hosts of a hostfile: a process that a remote shell starts, which obeys requests on its
/// standard input, one a line, and replies on its standard output. Nothing of a request is on a command line.
///
///     facts {"master": …}                         facts {…}
///     serve {"address": …, "token": …}            serving {"port": N}, and when the client has left: served
///     {} measure {"address": …, "port": …, …}        measured {…}
///
/// A reply "error {"message": …}" may take the place of each.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/net/socket.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/host_facts.h"
#include "tools/rzrun/hosts/connector.h"

namespace rz::doctor {

/// Time within which a server ends if no client comes, and a client if the server does not answer.
inline constexpr std::chrono::seconds probe_timeout{25};

/// Obeys requests until standard input ends. Returns the exit status.
int run_agent();

/// An agent on another host. Errors are Errc::rendezvous, one line with what the remote shell has printed
/// last.
class RemoteAgent {
 public:
  /// Starts `shell` HOST 'PROGRAM' --agent, without waiting for it. `shell`: the words of a remote shell.
  RemoteAgent(const std::vector<std::string>& shell, const std::string& host, const std::string& program);
  RemoteAgent(const RemoteAgent&) = delete;
  /// Ends it: the end of its input, two seconds later SIGTERM, then SIGKILL.
  ~RemoteAgent();

  const std::string& host() const { return host_; }
  void send(const std::string& word, const std::string& json);
  /// The JSON of its next reply, which must begin with this word. What a shell prints before is skipped.
  std::string receive(const std::string& word, Deadline);

 private:
  std::string next_line(Deadline);
  [[noreturn]] void fail_ended(const std::string& how);
  std::string last_error() const;

  std::string host_;
  UniqueFd errors_;
  hosts::Connector connector_;
  std::string received_;
};

/// Runs a server on `to` and a client on `from`.
PairMeasurement measure_pair(RemoteAgent& from, RemoteAgent& to, const std::string& address);

}  // namespace rz::doctor
