// Highway compiles this file once per target and selects one at run time.

#include "comm/reduce/reduce.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/reduce/nontemporal_copy.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// `to` is aligned to 64 bytes, and `bytes` is a multiple of 64.
void stream_lines(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) {
  const hn::ScalableTag<std::uint8_t> d;
  const std::size_t step = hn::Lanes(d);
  for (std::size_t i = 0; i < bytes; i += step) hn::Stream(hn::LoadU(d, from + i), d, to + i);
  hwy::FlushStream();
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(stream_lines);

void copy_nontemporal(void* to, const void* from, std::size_t bytes) {
  constexpr std::size_t line = 64;
  auto* out = static_cast<std::uint8_t*>(to);
  const auto* in = static_cast<const std::uint8_t*>(from);
  const std::size_t head = std::min(bytes, (line - reinterpret_cast<std::uintptr_t>(out) % line) % line);
  const std::size_t lines = (bytes - head) / line * line;
  if (head) std::memcpy(out, in, head);
  if (lines) HWY_DYNAMIC_DISPATCH(stream_lines)(out + head, in + head, lines);
  if (head + lines < bytes) std::memcpy(out + head + lines, in + head + lines, bytes - head - lines);
}

}  // namespace rz
#endif
