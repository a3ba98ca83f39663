#pragma once
/// Results in a file.

#include <string>

namespace rz::bench {

/// The text and a newline, in place of what the file held. Errc::system if not all of it could be written.
void write_file(const std::string& path, const std::string& text);

}  // namespace rz::bench
