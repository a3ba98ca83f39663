#pragma once
/// One round of Philox4x32 (Salmon et al., 2011, doi:10.1145/2063384.2063405), shared by g++ and nvcc.

#include <cstdint>

#include "comm/core/math.h"

namespace rz {

struct Philox {
  static constexpr int rounds = 10;
  static constexpr std::uint32_t multiplier0 = 0xD2511F53, multiplier1 = 0xCD9E8D57;
  static constexpr std::uint32_t weyl0 = 0x9E3779B9, weyl1 = 0xBB67AE85;  // added to the key after each round

  RZ_HOST_DEVICE static inline void round(std::uint32_t& c0, std::uint32_t& c1, std::uint32_t& c2,
                                          std::uint32_t& c3, std::uint32_t key0, std::uint32_t key1) {
    const std::uint64_t p0 = static_cast<std::uint64_t>(multiplier0) * c0;
    const std::uint64_t p1 = static_cast<std::uint64_t>(multiplier1) * c2;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<std::uint32_t>(p1);
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<std::uint32_t>(p0);
  }
};

}  // namespace rz
