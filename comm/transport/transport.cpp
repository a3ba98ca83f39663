#include "comm/transport/transport.h"

#include <algorithm>
#include <cstring>

#include "comm/transport/shared_memory_group.h"

namespace rz {

int Transport::begin_sleep() { return wait(std::chrono::milliseconds(1), false), -1; }

std::size_t Transport::receive(int peer, Channel lane, std::span<std::byte> into) {
  std::size_t done = 0;
  CallSignature signature;
  // Peeks only while bytes are needed: a peek() at the end of a departed rank's stream fails the group.
  while (done < into.size()) {
    const ReceiveView next = peek(peer, lane);
    if (next.bytes.empty() || (done && next.signature != signature)) break;
    signature = next.signature;
    const std::size_t n = std::min(next.bytes.size(), into.size() - done);
    std::memcpy(into.data() + done, next.bytes.data(), n);
    consume(peer, lane, n);
    done += n;
  }
  return done;
}

bool Transport::one_node() const {
  const auto node = nodes();
  return std::all_of(node.begin(), node.end(), [](int h) { return h == 0; });
}

std::shared_ptr<std::byte> Transport::allocate(std::size_t bytes) {
  SharedMemoryGroup* const group = shared_memory();
  return allocate_zeroed(group ? group->allocator() : nullptr, bytes);
}

}  // namespace rz
