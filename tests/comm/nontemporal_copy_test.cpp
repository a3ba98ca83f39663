// Runs: ci pure

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "comm/reduce/reduce.h"

namespace rz {
namespace {

// Every begin and end within lines, and nothing beyond.
TEST(NontemporalCopy, CopiesExactlyTheGivenBytes) {
  constexpr std::size_t margin = 128;
  std::vector<std::uint8_t> from(5000 + 2 * margin);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint8_t>(i * 31 + i / 251 + 1);
  for (std::size_t bytes : {0, 1, 63, 64, 65, 127, 128, 200, 1000, 5000})
    for (std::size_t to_at : {0, 1, 31, 63, 64})
      for (std::size_t from_at : {0, 1, 32, 77}) {
        std::vector<std::uint8_t> to(bytes + 2 * margin, 0), want = to;
        std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(from_at), bytes,
                    want.begin() + static_cast<std::ptrdiff_t>(to_at));
        copy_nontemporal(to.data() + to_at, from.data() + from_at, bytes);
        ASSERT_EQ(to, want) << bytes << " bytes from " << from_at << " to " << to_at;
      }
}

}  // namespace
}  // namespace rz
