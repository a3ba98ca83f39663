#include "tools/rzrun/agents/joined_agent.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "comm/core/error.h"
#include "tools/rzrun/agents/agent.h"
#include "tools/rzrun/agents/agent_sockets.h"
#include "tools/rzrun/agents/joined_group.h"
#include "tools/rzrun/ranks/restart_policy.h"

namespace rz::rzrun {
namespace {

/// After so long a line names what rzrun waits for.
constexpr std::chrono::seconds time_to_explain{10};

class JoinedAgent : public AgentRole {
 public:
  JoinedAgent(const JobSpec& spec, FrameStream stream, Console& out, Console& err, Console* own_err)
      : spec_(spec),
        node0_(net::join_host_port(spec.hosts.rendezvous->host, spec.hosts.rendezvous->port)),
        out_(out),
        err_(err),
        own_err_(own_err),
        can_leave_(spec.hosts.rendezvous->min_nodes < spec.hosts.rendezvous->max_nodes),
        agent_(*this, std::move(stream), out, err) {
    WireWriter join;
    JoinRequest request = join_request_of(spec);
    JoinRequest::fields(join, request);
    agent_.stream().send(Frame::Kind::join, join.bytes);
  }

  void run() { agent_.run(); }

  int status() const { return status_; }

  /// Waits until the readers have accepted all output; a signal ends the wait, and a kill leaves none.
  void deliver_output() {
    while (!is_killed_ && (!out_.pending().empty() || (own_err_ && !own_err_->pending().empty()))) {
      std::vector<pollfd> outputs;
      append_descriptors(outputs);
      if (agent_.wait_for_output(outputs)) return;
      flush();
    }
  }

 private:
  Job job_of(const std::string& payload) override {
    Variables variables;
    Job job = unpack_job(payload, variables);
    job.program = spec_.program;
    job.output = spec_.output;
    job.grace = spec_.grace;
    require(job.local_ranks == spec_.hosts.ranks, Errc::io, "a job of ", job.local_ranks,
            " ranks for a host that has ", spec_.hosts.ranks);
    job.slots.clear();
    can_leave_ = job.nodes > spec_.hosts.rendezvous->min_nodes && job.restarts < job.max_restarts;
    return job;
  }

  void handle(const Frame& frame) override {
    WireReader reader(frame.payload);
    if (frame.kind == Frame::Kind::message) print(frame.payload);
    if (frame.kind != Frame::Kind::end) return;
    std::string line;
    reader(status_, line);
    if (!line.empty()) print(line);
    has_status_ = true;
    agent_.end();
  }

  /// This host leaves a job that goes on without it; node 0 ends any other. A second signal kills the ranks
  /// of this host.
  void handle_signal(int s) override {
    if (s == SIGCONT) return;
    if (s == SIGTSTP) return agent_.suspend();
    if (s == SIGUSR1 || s == SIGUSR2) {
      if (agent_.is_active()) agent_.ranks().signal_handlers(s);
      return;
    }
    if (stopped_at_ && std::chrono::steady_clock::now() - *stopped_at_ < std::chrono::seconds(1)) return;
    const bool leaves = !stopped_at_ && !has_status_ && can_leave_;
    print(concat("SIG", sigabbrev_np(s),
                 stopped_at_ ? ": killing the ranks of this host"
                 : leaves ? ": this host leaves the job, which goes on without it (once more kills its ranks)"
                          : ": ending the job (once more kills its ranks)"));
    if (stopped_at_) {
      agent_.kill();
      agent_.end();
    }
    stopped_at_ = std::chrono::steady_clock::now();
    if (!has_status_) status_ = 128 + s;
    if (leaves) {
      has_status_ = true;  // the end of the connection is no news
      agent_.stream().send(Frame::Kind::leave, with_number(s));
      agent_.stream().flush();
      agent_.stream().close();
    } else {
      agent_.stream().send(Frame::Kind::stop, with_number(s));
    }
  }

  void lose(const std::string& why) override {
    if (why.empty()) {
      print("SIGKILL: killing the ranks of this host");
      status_ = 128 + SIGKILL;
      is_killed_ = true;
    }
    if (has_status_ || is_killed_) return;
    const std::string own = agent_.own_stop();
    print(own.empty() ? concat("node 0 at ", node0_, " is lost: ", why) : own);
    if (!stopped_at_) status_ = 255;
  }

  void forward_output(bool) override { flush(); }
  void flush() {
    out_.flush();
    if (own_err_) own_err_->flush();
  }
  void append_descriptors(std::vector<pollfd>& wait) const override {
    wait.push_back({out_.fd(), POLLOUT, 0});
    if (own_err_) wait.push_back({own_err_->fd(), POLLOUT, 0});
  }
  void print(const std::string& line) override {
    err_.write("rzrun: " + line + "\n");
    err_.flush();
  }

  const JobSpec& spec_;
  const std::string node0_;
  Console &out_, &err_;
  Console* own_err_;  // null: err_ is out_
  int status_ = 255;
  bool has_status_ = false, is_killed_ = false;
  bool can_leave_;  // the job goes on without this host: at first by --nnodes, then by the hosts it has
  std::optional<std::chrono::steady_clock::time_point> stopped_at_;
  Agent agent_;
};

/// The port of the endpoint, which is this host's, has become free.
struct Freed {
  std::vector<UniqueFd> listeners;
};

}  // namespace

std::variant<FrameStream, std::vector<UniqueFd>> find_node0(const Rendezvous& r) {
  const std::string where = net::join_host_port(r.host, r.port),
                    by_owner = r.node_rank < 0 && !r.is_host
                                   ? concat("; node 0 is the host that owns the address ", r.host,
                                            ", or, where that is of a service or router, the one with "
                                            "--node-rank 0 and --local-addr ADDRESS")
                                   : "";
  const Deadline deadline = Deadline::after(r.join_timeout), explain = Deadline::after(time_to_explain);
  bool is_explained = false;
  try {
    return connect_to_rzrun({r.host, r.port}, process_access(), deadline, [&](const std::string& why) {
      if (auto listeners = listen_as_node0(r); !listeners.empty()) throw Freed{std::move(listeners)};
      if (is_explained || !explain.expired()) return;
      is_explained = true;
      std::fprintf(
          stderr, "rzrun: waiting for node 0 at %s (%s); it has %s to start%s\n", where.c_str(), why.c_str(),
          seconds(std::chrono::ceil<std::chrono::seconds>(deadline.remaining())).c_str(), by_owner.c_str());
    });
  } catch (Freed& freed) {
    return std::move(freed.listeners);
  } catch (const Error& e) {
    require(e.code() != Errc::mismatch, Errc::config, e.what());
    if (e.code() != Errc::rendezvous) throw;
    fail(Errc::rendezvous, "node 0 has not started within ", seconds(r.join_timeout), ": no rzrun at ", where,
         " (", e.what(),
         "); is rzrun running on that host with the same endpoint, and is the port open? join_timeout of "
         "--rdzv-conf is the time to wait",
         by_owner);
  }
}

int run_joined_agent(const JobSpec& spec, FrameStream stream) {
  Console out{STDOUT_FILENO};
  std::optional<Console> own_err;
  if (!is_same_stream(STDOUT_FILENO, STDERR_FILENO)) own_err.emplace(STDERR_FILENO);
  JoinedAgent agent(spec, std::move(stream), out, own_err ? *own_err : out, own_err ? &*own_err : nullptr);
  agent.run();
  agent.deliver_output();
  return agent.status();
}

}  // namespace rz::rzrun
