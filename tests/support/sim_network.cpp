#include "tests/support/sim_network.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "tests/support/sim_transport.h"

namespace rz::test {

namespace {

SimOptions with_nodes(SimOptions options, int size) {
  if (options.node_of_rank.empty()) {
    options.node_of_rank.resize(static_cast<std::size_t>(size));
    std::iota(options.node_of_rank.begin(), options.node_of_rank.end(), 0);
  }
  require(options.node_of_rank.size() == static_cast<std::size_t>(size), Errc::invalid_argument,
          "a network of ", size, " ranks has nodes of ", options.node_of_rank.size());
  return options;
}

}  // namespace

SimNetwork::SimNetwork(int size, SimOptions options)
    : options_(with_nodes(std::move(options), size)),
      random_(options_.seed),
      stopped_(static_cast<std::size_t>(size)) {
  const auto& node = options_.node_of_rank;
  for (const int from : node)
    for (const int to : node) wires_.push_back({from == to ? options_.intra_node : options_.inter_node});
  for (int from = 0; from < size; ++from) {
    transports_.push_back(std::make_unique<SimTransport>(*this, from));
    for (int to = 0; to < size; ++to) {
      const SimStream stream(from, to, wires_[static_cast<std::size_t>(from * size + to)], clock_, random_,
                             options_.jitter);
      streams_.push_back({stream, stream});
    }
  }
}

SimNetwork::~SimNetwork() = default;

std::size_t SimNetwork::index(int from, int to) const {
  require(from >= 0 && from < size() && to >= 0 && to < size() && from != to, Errc::invalid_argument,
          "there is no link from rank ", from, " to rank ", to);
  return static_cast<std::size_t>(from * size() + to);
}

SimTransport& SimNetwork::transport(int rank) { return *transports_.at(static_cast<std::size_t>(rank)); }

SimStream& SimNetwork::stream(int from, int to, Channel channel) {
  return streams_[index(from, to)][static_cast<std::size_t>(channel)];
}

// ---- running ----

void SimNetwork::run_event() { transports_[static_cast<std::size_t>(clock_.run_next())]->wake(); }

void SimNetwork::wait(int rank, SimTime timeout) {
  const SimTime limit = clock_.now() + timeout;
  SimTransport& waiting = *transports_[static_cast<std::size_t>(rank)];
  for (deliver_abort(); !waiting.clear_wake(); run_event())
    if (const auto next = clock_.next(); !next || *next > limit) return clock_.advance_to(limit);
}

void SimNetwork::run_turn(int rank, const SimProgram& program, std::optional<Error>& error) {
  SimTransport& transport = *transports_[static_cast<std::size_t>(rank)];
  try {
    transport.progress(0);
    while (program.advance()) {
    }
  } catch (const Error& e) {
    error = e;
    transport.abort({e.culprit(), e.code(), e.what()});
    // Its caller frees the memory of calls that failed.
    for (int peer = 0; peer < size(); ++peer)
      for (const Channel c : {Channel::collective, Channel::point_to_point})
        if (peer != rank) stream(rank, peer, c).close();
  }
}

std::vector<std::optional<Error>> SimNetwork::run_until_complete(std::span<const SimProgram> programs) {
  require(programs.size() == transports_.size(), Errc::invalid_argument, programs.size(), " programs for ",
          size(), " ranks");
  std::vector<std::optional<Error>> errors(programs.size());
  std::vector<bool> ended(programs.size());
  std::size_t remaining = programs.size();
  for (int r = 0; r < size(); ++r) clock_.schedule(random_.delay(options_.jitter.max_delay), r, [] {});
  for (;;) {
    for (std::size_t r = 0; r < programs.size(); ++r) {
      if (ended[r] || !transports_[r]->clear_wake()) continue;
      if (!stopped_[r] && !programs[r].complete()) run_turn(static_cast<int>(r), programs[r], errors[r]);
      ended[r] = stopped_[r] || errors[r] || programs[r].complete();
      remaining -= ended[r];
    }
    deliver_abort();
    if (remaining == 0) return errors;
    if (!clock_.next()) fail_deadlocked(programs, ended);
    run_event();
  }
}

void SimNetwork::fail_deadlocked(std::span<const SimProgram> programs, const std::vector<bool>& ended) const {
  std::string waiting;
  for (std::size_t r = 0; r < programs.size(); ++r)
    if (!ended[r])
      waiting += concat(waiting.empty() ? "" : "; ", "rank ", r, " waits for ", programs[r].waiting_for());
  fail(Errc::timeout, "deadlock at ", now().count(), " ns: ", waiting);
}

// ---- failures ----

void SimNetwork::set_link(int from, int to, SimLink link) { wire(from, to).link = link; }

void SimNetwork::send_control(int from, int to, std::function<void()> action) {
  SimWire& way = wire(from, to);
  clock_.schedule(way.link.latency + random_.delay(options_.jitter.max_delay), to,
                  [&way, action = std::move(action)] {
                    if (!way.down) action();
                  });
}

void SimNetwork::detect_loss(int rank, int peer, const std::string& reason) {
  clock_.schedule(random_.delay(options_.max_detection_time), rank, [this, rank, peer, reason] {
    fail_group(rank, {peer, Errc::peer_lost, reason});
  });
}

void SimNetwork::stop_rank(int rank, SimTime at) {
  clock_.schedule(at - clock_.now(), rank, [this, rank] {
    stopped_[static_cast<std::size_t>(rank)] = true;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank) continue;
      wire(rank, peer).down = wire(peer, rank).down = true;
      detect_loss(peer, rank, concat("rank ", rank, " is lost: it has stopped"));
    }
  });
}

void SimNetwork::drop_link(int a, int b, SimTime at) {
  clock_.schedule(at - clock_.now(), a, [this, a, b] {
    wire(a, b).down = wire(b, a).down = true;
    for (const auto& [rank, peer] : {std::pair(a, b), std::pair(b, a)})
      detect_loss(rank, peer, concat("rank ", peer, " is lost: its link to rank ", rank, " is down"));
  });
}

/// The first failure of the group wins. The other ranks receive it by control messages; those that none
/// reaches detect the loss.
void SimNetwork::fail_group(int rank, const Failure& failure) {
  const bool first = !failure_;
  if (first) failure_ = failure;
  transports_[static_cast<std::size_t>(rank)]->fail(*failure_);
  for (int peer = 0; first && peer < size(); ++peer)
    if (peer != rank)
      send_control(rank, peer,
                   [this, peer] { transports_[static_cast<std::size_t>(peer)]->fail(*failure_); });
}

void SimNetwork::request_abort(int rank, const Failure& failure) {
  const std::lock_guard lock(abort_mutex_);
  if (!abort_request_) abort_request_ = {rank, failure};
}

void SimNetwork::deliver_abort() {
  std::optional<AbortRequest> request;
  {
    const std::lock_guard lock(abort_mutex_);
    request.swap(abort_request_);
  }
  if (request) fail_group(request->rank, request->failure);
}

}  // namespace rz::test
