#pragma once
/// What the reason of a lost connection begins with where neither end is to blame. rzrun looks for it in the
/// reports of ranks.

#include <string_view>

namespace rz {

inline constexpr std::string_view lost_link = "the connection between ";

}  // namespace rz
