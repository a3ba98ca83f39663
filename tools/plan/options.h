#pragma once
/// The command line of plan.

#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include "comm/core/types.h"
#include "tools/command_line/command_line.h"
#include "tools/train_gpt/options.h"

namespace rz::plan {

struct Options {
  train_gpt::Options run;     ///< of the run that is planned
  std::vector<int> ranks{1};  ///< numbers of ranks, as given
  Device::Kind device = Device::host;
  std::optional<std::size_t> memory;  ///< bytes that a rank may hold
  bool json = false;
};

using ParsedOptions = Parsed<Options>;

/// Errors are Errc::config, one line that names the flag.
ParsedOptions parse_options(int argc, const char* const* argv);

/// "80GB" is 80e9, "16GiB" and "16G" are 16 · 2^30; bytes without a unit. Errc::config for anything else.
std::size_t bytes_from(std::string_view word);

}  // namespace rz::plan
