#include "comm/intranode/plan/output_stores.h"

#include <algorithm>
#include <cstring>

#include "comm/reduce/nontemporal_copy.h"

namespace rz::intranode {

void OutputStores::reduce(std::byte* to, std::byte* too, std::span<const void*> operands,
                          std::size_t bytes) const {
  if (!nontemporal) return reduce_block(to, too, operands, bytes);
  std::byte buffer[block_bytes];
  for (std::size_t at = 0; at < bytes; at += block_bytes) {
    const std::size_t n = std::min(block_bytes, bytes - at);
    std::byte* const near = too ? too + at : buffer;
    reduce_block(near, nullptr, operands, n);
    copy_nontemporal(to + at, near, n);
    for (auto& s : operands) s = static_cast<const std::byte*>(s) + n;
  }
}

void OutputStores::copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
  if (bytes == 0 || to == from) return;
  nontemporal ? copy_nontemporal(to, from, bytes) : void(std::memcpy(to, from, bytes));
}

}  // namespace rz::intranode
