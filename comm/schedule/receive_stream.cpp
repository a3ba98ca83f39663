#include "comm/schedule/receive_stream.h"

#include "comm/core/text.h"
#include "comm/transport/call_signature.h"

namespace rz::schedule {

bool ReceiveStream::match(const CallSignature& mine) {
  if (matched_) return true;
  const ReceiveView incoming = transport_.peek(peer_, Channel::collective);
  if (incoming.bytes.empty()) return false;
  if (!(incoming.signature == mine))
    throw OtherCall(concat("mismatched collectives: rank ", peer_, " called ", describe(incoming.signature),
                           " while rank ", rank_, " called ", describe(mine),
                           "; every rank must make the same calls in the same order"),
                    peer_, incoming.signature);
  return matched_ = true;
}

std::span<const std::byte> ReceiveStream::peek_elements(std::size_t element_bytes) {
  if (partial_.bytes == 0) {
    const ReceiveView incoming = transport_.peek(peer_, Channel::collective);
    if (incoming.bytes.empty() || incoming.bytes.size() >= element_bytes)
      return incoming.bytes.first(incoming.bytes.size() / element_bytes * element_bytes);
  }
  partial_.bytes += receive({partial_.data + partial_.bytes, element_bytes - partial_.bytes});
  return {partial_.data, partial_.bytes == element_bytes ? element_bytes : 0};
}

void ReceiveStream::consume(std::size_t bytes) {
  if (partial_.bytes > 0)
    partial_.bytes = 0;
  else
    transport_.consume(peer_, Channel::collective, bytes);
}

}  // namespace rz::schedule
