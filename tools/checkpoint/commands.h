#pragma once
/// The commands of the program. Each gets its own words, with its name as the first, and returns the exit
/// status. Errors are thrown.

namespace rz::checkpoint {

int inspect(int argc, const char* const* argv);
int verify(int argc, const char* const* argv);
int diff(int argc, const char* const* argv);
int merge(int argc, const char* const* argv);
int split(int argc, const char* const* argv);

}  // namespace rz::checkpoint
