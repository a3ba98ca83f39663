#pragma once
/// Flags of torchrun, mpirun, DeepSpeed and Accelerate, each with its replacement here.

#include <span>
#include <string_view>

namespace rz {

/// A flag of another launcher.
struct LauncherFlag {
  std::string_view flag;  ///< as its launcher documents it, with its dashes
  std::string_view
      launcher;  ///< "torchrun", "mpirun", "deepspeed" or "accelerate"; the first if several have the flag
  std::string_view in_rzrun;     ///< advice if it was passed to rzrun
  std::string_view in_programs;  ///< advice if it was passed to another program
};

/// All rows of the table.
std::span<const LauncherFlag> launcher_flags();

/// The row of `flag`, or nullptr. After two dashes '-' and '_' are equal, as in torchrun and DeepSpeed.
const LauncherFlag* find_launcher_flag(std::string_view flag);

}  // namespace rz
