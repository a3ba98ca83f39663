#pragma once
/// The JSON of the bench programs.

#include <nlohmann/json.hpp>
#include <string>

namespace rz::bench {

/// Keeps keys in the order of insertion.
using Json = nlohmann::ordered_json;

/// Replaces the contents of the file by the text and a newline. Errc::system if it could not be written
/// completely.
void write_file(const std::string& path, const std::string& text);

}  // namespace rz::bench
