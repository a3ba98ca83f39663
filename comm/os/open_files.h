#pragma once
/// The limit of open files of this process.

#include <cstddef>
#include <string>

namespace rz {

/// Makes sure that so many files more than now, and some for others, can be open: raises the soft limit
/// (RLIMIT_NOFILE) as far as that takes, and never lowers it. Errc::system names `what` and the numbers if
/// the hard limit forbids it. `advice` is the end of that message.
void require_open_files(std::size_t more, const std::string& what, const std::string& advice = {});

}  // namespace rz
