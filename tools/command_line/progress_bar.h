#pragma once
/// A progress bar for a terminal.

#include <string>

namespace rz {

/// A bar of `width` characters, of which the part `done`, from 0 to 1, is full.
inline std::string progress_bar(double done, int width) {
  std::string bar;
  for (int i = 0; i < width; ++i) bar += i < static_cast<int>(width * done) ? "█" : "░";
  return bar;
}

}  // namespace rz
