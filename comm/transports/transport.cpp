#include "comm/transports/transport.h"

#include <algorithm>
#include <cstring>

namespace rz {

std::size_t Transport::receive(int peer, Lane lane, std::span<std::byte> into) {
  const Incoming first = peek(peer, lane);
  std::size_t done = 0;
  for (Incoming next = first; done < into.size() && !next.bytes.empty() && next.signature == first.signature;
       next = peek(peer, lane)) {
    const std::size_t n = std::min(next.bytes.size(), into.size() - done);
    std::memcpy(into.data() + done, next.bytes.data(), n);
    consume(peer, lane, n);
    done += n;
  }
  return done;
}

}  // namespace rz
