#include "comm/backends/mpi/control_channel.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <thread>

#include "comm/backends/mpi/mpi_runtime.h"
#include "comm/core/deadline.h"

namespace rz::mpi {

void ControlMessage::set_text(const std::string& from) {
  length = static_cast<std::uint32_t>(std::min(from.size(), sizeof text));
  std::memcpy(text, from.data(), length);
}

void ControlChannel::send(int peer, const ControlMessage& message) {
  reap_sent();
  Outgoing& out = outgoing_.emplace_back(Outgoing{message});
  const int bytes = static_cast<int>(offsetof(ControlMessage, text) + message.length);
  check(MPI_Isend(&out.message, bytes, MPI_BYTE, peer, tag, comm_, &out.request), "MPI_Isend");
}

void ControlChannel::broadcast(const ControlMessage& message) {
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) send(peer, message);
}

void ControlChannel::reap_sent() {
  outgoing_.remove_if([](Outgoing& out) {
    int done = 0;
    check(MPI_Test(&out.request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    return done != 0;
  });
}

void ControlChannel::poll(const std::function<void(int, const ControlMessage&)>& f) {
  for (;;) {
    int available = 0;
    MPI_Status status;
    check(MPI_Iprobe(MPI_ANY_SOURCE, tag, comm_, &available, &status), "MPI_Iprobe");
    if (!available) return;
    ControlMessage message;
    check(MPI_Recv(&message, sizeof message, MPI_BYTE, status.MPI_SOURCE, tag, comm_, MPI_STATUS_IGNORE),
          "MPI_Recv");
    f(status.MPI_SOURCE, message);
  }
}

bool ControlChannel::flush(std::chrono::milliseconds limit) noexcept {
  try {
    for (const Deadline end = Deadline::after(limit);;) {
      reap_sent();
      if (outgoing_.empty() || end.expired()) return outgoing_.empty();
      std::this_thread::yield();
    }
  } catch (const Error&) {
    return false;
  }
}

void ControlChannel::abandon() {
  if (!outgoing_.empty()) new std::list<Outgoing>(std::move(outgoing_));
  outgoing_.clear();
}

}  // namespace rz::mpi
