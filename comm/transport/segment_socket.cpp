#include "comm/transport/segment_socket.h"

#include <utility>

#include "comm/core/error.h"
#include "comm/net/unix_socket.h"

namespace rz {

namespace {

struct SocketMessage {
  enum Kind : std::uint32_t { segment, release, wait } kind;
  std::uint32_t number = 0;
  WaitMessage wait_message = {};
};

}  // namespace

SegmentSocket::SegmentSocket(int peer, UniqueFd socket, net::Poller& poller, WaitForGraph& graph)
    : peer_(peer), socket_(std::move(socket)), poller_(poller), wait_graph_(graph) {
  poller_.add(socket_.get(), fd_events_, EPOLLIN);
  fd_events_.events = EPOLLIN;  // messages may have arrived before the registration
}

void SegmentSocket::close() {
  poller_.remove(socket_.get());
  socket_.close();
}

bool SegmentSocket::poll() {
  if (!fd_events_.events || hung_up_) return hung_up_;
  hung_up_ = fd_events_.hung_up();
  fd_events_.events = 0;
  read_messages();
  if (hung_up_) poller_.remove(socket_.get());
  return hung_up_;
}

void SegmentSocket::read_messages() {
  SocketMessage message{};
  UniqueFd fd;
  while (net::receive_message(socket_.get(), message, fd)) {
    if (message.kind == SocketMessage::release) {
      mapped_.erase(message.number);
      continue;
    }
    if (message.kind == SocketMessage::wait) {
      wait_graph_.receive(peer_, message.wait_message);
      continue;
    }
    require(static_cast<bool>(fd), Errc::system, "the descriptor of shared memory from rank ", peer_,
            " was lost: too many files are open in this process; ulimit -n raises the limit");
    SharedMemory memory = SharedMemory::map(std::move(fd), true);
    memory.close_fd();
    mapped_.emplace(message.number, std::move(memory));
  }
}

bool SegmentSocket::send(const Segment& segment) {
  if (sent_.count(segment.number)) return true;
  if (!net::send_message(socket_.get(), SocketMessage{SocketMessage::segment, segment.number},
                         segment.memory.fd()))
    return false;
  sent_.insert(segment.number);
  return true;
}

const SharedMemory* SegmentSocket::find(std::uint32_t number) {
  auto it = mapped_.find(number);
  if (it == mapped_.end()) {
    read_messages();
    it = mapped_.find(number);
  }
  return it == mapped_.end() ? nullptr : &it->second;
}

void SegmentSocket::release(std::span<const std::uint32_t> numbers) {
  for (const auto number : numbers)
    if (sent_.erase(number)) to_release_.push_back(number);
}

void SegmentSocket::flush_releases() {
  while (!to_release_.empty() &&
         (hung_up_ ||
          net::send_message(socket_.get(), SocketMessage{SocketMessage::release, to_release_.back()}, -1)))
    to_release_.pop_back();
}

void SegmentSocket::send(const WaitMessage& message) {
  net::send_message(socket_.get(), SocketMessage{.kind = SocketMessage::wait, .wait_message = message}, -1);
}

}  // namespace rz
