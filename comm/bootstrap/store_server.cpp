#include "comm/bootstrap/store_server.h"

#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "comm/core/error.h"
#include "comm/net/socket.h"
#include "comm/os/fd.h"
#include "comm/os/helper_thread.h"
#include "comm/os/wait_policy.h"

namespace rz {

using store_wire::Reply;
using store_wire::StoreRequest;

namespace {

constexpr std::size_t max_table_bytes = 64 << 20;
/// Connections per rank: each thread that waits for a key has its own.
constexpr std::size_t max_clients_a_rank = 64;
constexpr std::size_t max_clients_of_any_group = 4096;
/// In descriptors_, behind that of the end and that of the door.
constexpr std::size_t first_client = 2;

}  // namespace

std::size_t StoreServer::files_for(int size) {
  return static_cast<std::size_t>(size) + net::Door::max_unproven;
}

StoreServer::StoreServer(std::vector<UniqueFd> listeners, Options options)
    : listeners_(std::move(listeners)),
      stop_(eventfd(0, EFD_CLOEXEC)),
      options_(std::move(options)),
      door_({.key = {options_.secret.get(), net::Purpose::store, ""},
             .group = net::fingerprint(options_.launch),
             .encryption = options_.encryption,
             .members = static_cast<std::size_t>(options_.size),
             .time_to_prove = options_.hello_timeout,
             .on_refusal = [this](const net::Authentication& end) { warn(end); }}),
      table_(max_table_bytes) {
  if (!stop_) fail_errno("eventfd");
  descriptors_.reserve(first_client);
  for (const UniqueFd& listener : listeners_) door_.add(listener.get());
  if (options_.size > 0)
    require_open_files(files_for(options_.size), concat("the store of a group of ", options_.size, " ranks"));
  thread_ = helper_thread([this] { run(); });
}

StoreServer::~StoreServer() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(stop_.get(), &one, sizeof one);
  thread_.join();
  const net::Strangers& strangers = door_.strangers();
  if ((options_.secret && strangers.unknown()) || strangers.has_other_user())
    std::fputs(concat("rank 0: ", strangers.sentence(), '\n').c_str(), stderr);
}

void StoreServer::run() {
  name_this_thread("rz-store");
  for (;;) {
    list_descriptors();
    if (poll(descriptors_.data(), descriptors_.size(), time_to_poll()) < 0) {
      if (errno != EINTR)
        std::this_thread::sleep_for(poll_period::exhausted_descriptors);  // the kernel is out of memory
      continue;
    }
    if (descriptors_[0].revents) return;
    std::size_t i = first_client;
    for (auto c = clients_.begin(); c != clients_.end(); ++i)
      c = poll_again(*c, descriptors_[i].revents) ? std::next(c) : drop(c);
    reply_to_waiting();
    for (net::Door::Arrival& a : door_.advance(accepts_per_second())) let_in(a);
    if (!door_.why_closed().empty()) drop_silent();  // a member needs its descriptor
  }
}

/// Fills descriptors_ for poll(). A client with a pending get is only checked for hang-up.
void StoreServer::list_descriptors() {
  descriptors_.clear();  // let_in() has reserved the capacity for all clients
  descriptors_.push_back({stop_.get(), POLLIN, 0});
  descriptors_.push_back({door_.descriptor(), POLLIN, 0});
  for (const Client& c : clients_) {
    const int events = !c.out.empty() ? POLLOUT : c.waits_for ? POLLRDHUP : POLLIN;
    descriptors_.push_back({c.stream.fd(), static_cast<short>(events), 0});
  }
}

/// Milliseconds until the next deadline.
int StoreServer::time_to_poll() const {
  int ms = door_.poll_ms(1000);
  for (const Client& c : clients_) {
    if (c.waits_for) ms = c.until.poll_ms(ms);
    if (!c.admitted) ms = c.hello_deadline.poll_ms(ms);
  }
  return ms;
}

// ---- one client

/// Serves a client; false if it must be dropped. An exception (such as out of memory) drops only this client.
bool StoreServer::poll_again(Client& c, short events) noexcept {
  try {
    return serve_events(c, events);
  } catch (const std::exception&) {
    return false;
  }
}

/// What has arrived is read first: this process may have been without a processor until the deadline.
bool StoreServer::serve_events(Client& c, short events) {
  if (events && (c.waits_for  // it hung up
                 || !(c.out.empty() ? receive(c) : flush(c)) || !serve(c) || !serve_rest(c)))
    return false;
  return c.admitted || !c.hello_deadline.expired();
}

/// What an encrypted stream has read ahead, of which poll() does not know.
bool StoreServer::serve_rest(Client& c) {
  while (reads(c) && c.stream.has_more())
    if (!receive(c) || !serve(c)) return false;
  return true;
}

bool StoreServer::receive(Client& c) {
  char bytes[65536];
  const ssize_t n = c.stream.receive(bytes, sizeof bytes);
  if (n > 0) c.in.append(bytes, static_cast<std::size_t>(n));
  return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

bool StoreServer::flush(Client& c) {
  const ssize_t n = c.sent < c.out.size() ? c.stream.send(c.out.data() + c.sent, c.out.size() - c.sent)
                                          : c.stream.flush() - 1;
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  c.sent += static_cast<std::size_t>(n);
  if (c.sent < c.out.size() || c.stream.unsent()) return true;
  c.out.clear();
  c.sent = 0;
  return !c.leaving;
}

/// Serves the complete requests in c.in, each after the reply to the previous one was sent. False if a
/// request is malformed.
bool StoreServer::serve(Client& c) {
  std::size_t done = 0;
  while (c.out.empty() && !c.waits_for) {
    const std::string_view rest = std::string_view(c.in).substr(done);
    std::uint32_t magic = 0;
    if (rest.size() >= sizeof magic) {
      std::memcpy(&magic, rest.data(), sizeof magic);
      if (magic != store_wire::request_magic) return false;
    }
    if (rest.size() < sizeof(StoreRequest)) break;
    StoreRequest r;
    std::memcpy(&r, rest.data(), sizeof r);
    if (!valid(r) || (!c.admitted && r.kind != StoreRequest::hello)) return false;
    const std::size_t launch = sizeof r, key = launch + r.launch_bytes, value = key + r.key_bytes;
    if (rest.size() < value + r.value_bytes) break;
    perform(c, r, rest.substr(launch, r.launch_bytes), rest.substr(key, r.key_bytes),
            rest.substr(value, r.value_bytes));
    done += value + r.value_bytes;
    if (!c.out.empty() && !flush(c)) return false;
  }
  c.in.erase(0, done);
  return true;
}

void StoreServer::perform(Client& c, const StoreRequest& r, std::string_view launch, std::string_view key,
                          std::string_view value) {
  if (launch != options_.launch) {
    c.leaving = true;
    return reply(c, Reply::wrong_launch, options_.launch);
  }
  try {
    if (r.kind == StoreRequest::hello) return admit(c);
    if (r.kind == StoreRequest::get) return find_value(c, {std::string(key)}, r.number);
    if (r.kind == StoreRequest::get_numbered)
      return find_value(c, {concat(key, r.first), key.size(), r.first}, r.number);
    if (r.kind == StoreRequest::add) return reply(c, Reply::ok, {}, table_.add(key, r.number));
    table_.set(key, value);
    reply(c, Reply::ok, {});
  } catch (const Error& e) {
    reply(c, Reply::refused, e.what());
  }
}

void StoreServer::admit(Client& c) {
  const std::size_t max_clients = options_.size > 0
                                      ? max_clients_a_rank * static_cast<std::size_t>(options_.size)
                                      : max_clients_of_any_group;
  if (!c.admitted && admitted_ >= max_clients) {
    c.leaving = true;
    return reply(c, Reply::refused,
                 concat("the store has ", admitted_, " clients already, and a group of ", options_.size,
                        " ranks gets no more"));
  }
  admitted_ += !c.admitted;
  c.admitted = true;
  reply(c, Reply::ok, {});
}

/// The value of a reply; empty if there is none.
std::optional<std::string> StoreServer::find(const Wanted& wanted) {
  auto found = table_.find(wanted.key);
  if (!found || !wanted.number) return found;
  const std::string prefix = wanted.key.substr(0, wanted.prefix_bytes);
  std::string values;
  for (std::uint32_t n = *wanted.number; found; found = table_.find(concat(prefix, ++n))) {
    const auto size = static_cast<std::uint32_t>(found->size());
    if (!values.empty() && values.size() + sizeof size + size > store_wire::max_reply) break;
    values.append(reinterpret_cast<const char*>(&size), sizeof size).append(*found);
  }
  return values;
}

void StoreServer::find_value(Client& c, Wanted wanted, std::int64_t milliseconds) {
  if (const auto found = find(wanted)) return reply(c, Reply::ok, *found);
  c.waits_for = std::move(wanted);
  c.until = Deadline::after(std::chrono::milliseconds(std::clamp<std::int64_t>(milliseconds, 0, 86'400'000)));
}

void StoreServer::reply_to_waiting() noexcept {
  for (auto c = clients_.begin(); c != clients_.end();) {
    bool stays = true;
    if (c->waits_for) try {
        const auto found = find(*c->waits_for);
        if (found || c->until.expired()) {
          c->waits_for.reset();
          reply(*c, found ? Reply::ok : Reply::timeout, found ? *found : door_.text());
          stays = flush(*c) && serve(*c) && serve_rest(*c);
        }
      } catch (const std::exception&) {
        stays = false;
      }
    c = stays ? std::next(c) : drop(c);
  }
}

void StoreServer::reply(Client& c, Reply::Status status, std::string_view value, std::int64_t number) {
  const Reply a{store_wire::reply_magic, status, static_cast<std::uint32_t>(value.size()), 0, number};
  c.out.assign(reinterpret_cast<const char*>(&a), sizeof a).append(value);
}

// ---- all of them

StoreServer::Clients::iterator StoreServer::drop(Clients::iterator c) {
  admitted_ -= c->admitted;
  return clients_.erase(c);
}

/// The first stranger that names itself a missing rank is printed: that rank has ended, if its secret or user
/// differs, and the job waits for it until the deadline.
void StoreServer::warn(const net::Authentication& end) noexcept {
  using Refusal = net::Authentication::Refusal;
  const Refusal why = end.refusal();
  if (has_warned_ || (why != Refusal::other_secret && why != Refusal::other_user)) return;
  const std::uint32_t rank = end.claim().rank;
  const auto is_here = [&](const Client& other) { return other.admitted && other.rank == rank; };
  if (static_cast<int>(rank) >= options_.size || std::ranges::any_of(clients_, is_here)) return;
  has_warned_ = true;
  try {
    std::fputs(concat("rank 0 waits for rank ", rank, ": ", door_.strangers().sentence(), '\n').c_str(),
               stderr);
  } catch (const std::exception&) {  // the message at the deadline has it
  }
}

/// The rate of connections that prove nothing.
double StoreServer::accepts_per_second() const {
  const bool running = options_.size > 0 && admitted_ >= static_cast<std::size_t>(options_.size);
  return running ? net::AcceptRate::while_running : net::AcceptRate::while_starting;
}

/// Without a secret everybody proves it: of those that then send no hello the oldest goes.
void StoreServer::let_in(net::Door::Arrival& a) noexcept {
  try {
    descriptors_.reserve(first_client + clients_.size() + 1);
    net::set_tcp_options(a.socket.get());
    clients_.push_back({net::Stream(std::move(a.socket), a.authentication.take_tls()),
                        a.authentication.claim().rank, a.until});
  } catch (const std::exception&) {  // no memory for another client
    return;
  }
  if (!poll_again(clients_.back(), POLLIN)) drop(std::prev(clients_.end()));  // its hello may be there
  if (clients_.size() - admitted_ + door_.unproven() >
      net::Door::max_unproven + static_cast<std::size_t>(options_.size))
    drop_silent();
}

/// The oldest client without a hello.
void StoreServer::drop_silent() noexcept {
  const auto silent = std::ranges::find(clients_, false, &Client::admitted);
  if (silent != clients_.end()) drop(silent);
}

}  // namespace rz
