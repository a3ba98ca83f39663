#pragma once
/// Limit of open files (RLIMIT_NOFILE).

#include <cstddef>
#include <string>

namespace rz {

/// Ensures that `more` additional files, plus a small reserve, can be open: raises the soft limit if
/// necessary and never lowers it. Errc::system names `what` and the numbers if the hard limit is too low; the
/// message ends with `advice`.
void require_open_files(std::size_t more, const std::string& what, const std::string& advice = {});

}  // namespace rz
