#pragma once
/// The flags of other launchers that users of torchrun, mpirun and DeepSpeed type, and what to use here.

#include <span>
#include <string_view>

namespace rz {

/// A flag of another launcher.
struct LauncherFlag {
  std::string_view flag;         ///< as its launcher documents it, with its dashes
  std::string_view launcher;     ///< "torchrun", "mpirun" or "deepspeed"; the first of several that have it
  std::string_view in_rzrun;     ///< what to do when rzrun was given it
  std::string_view in_programs;  ///< what to do when another program was given it
};

/// Every row of the table.
std::span<const LauncherFlag> launcher_flags();

/// The row of `flag`, or nullptr. Behind two dashes '-' and '_' are the same, as in torchrun and DeepSpeed.
const LauncherFlag* find_launcher_flag(std::string_view flag);

}  // namespace rz
