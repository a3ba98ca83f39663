#pragma once
/// Writes results to a file.

#include <string>

namespace rz::bench {

/// Replaces the contents of the file by the text and a newline. Errc::system if it could not be written
/// completely.
void write_file(const std::string& path, const std::string& text);

}  // namespace rz::bench
