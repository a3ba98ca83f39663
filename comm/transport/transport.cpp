#include "comm/transport/transport.h"

#include <algorithm>
#include <cstring>

#include "comm/transport/mailbox.h"

namespace rz {

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

std::optional<SharedMemoryHandle> Transport::export_handle(std::span<const std::byte>) {
  return std::nullopt;
}
std::byte* Transport::map_handle(int, const SharedMemoryHandle&, std::size_t) { return nullptr; }
CmaResult Transport::cma_read(int, std::uint64_t, std::span<std::byte>) { return CmaResult::refused; }

}  // namespace rz
