#pragma once
/// YAML as Accelerate writes it: mappings, lists and scalars, with the line of each.

#include <string>
#include <string_view>
#include <vector>

namespace rz::accelerate {

struct YamlNode {
  struct Entry;
  enum class Kind { null, scalar, mapping, list };
  Kind kind = Kind::null;
  std::string text;             ///< of a scalar
  int line = 0;                 ///< from 1; of an entry of a mapping that of its key
  bool quoted = false;          ///< a scalar in quotes is text, also "null"
  std::vector<Entry> entries;   ///< of a mapping, in the order of the file
  std::vector<YamlNode> items;  ///< of a list
};
struct YamlNode::Entry {
  std::string name;
  YamlNode node;
};

inline constexpr std::size_t max_yaml_bytes = 64 << 10;
inline constexpr int max_yaml_depth = 8;

/// One document. Refused are aliases, anchors and tags, since a file of a launcher needs none and they can
/// make a small text large; keys that are not scalars or are there twice; a second document; more than
/// max_yaml_bytes or max_yaml_depth. Errors are Errc::config in one line: FILE:LINE: what; remedy.
YamlNode parse_yaml(std::string_view text, const std::string& file);
/// The file at this path.
YamlNode read_yaml(const std::string& path);

}  // namespace rz::accelerate
