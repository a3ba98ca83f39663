#pragma once
/// Names of files and folders while they are written.

#include <string>
#include <string_view>

namespace rz {

/// ".NAME.ringzero-XXXXXX" and an ending, with X in a-z and 0-9, in the folder of a path PARENT/NAME: no
/// other program uses such names.
class TemporaryName {
 public:
  TemporaryName(const std::string& path, std::string_view ending);

  /// Whether fresh() could return the name.
  bool matches(std::string_view name) const;
  std::string in_folder(std::string_view name) const { return folder_ + std::string(name); }
  /// The path of a random name.
  std::string fresh() const;

 private:
  std::string folder_, front_, ending_;
};

/// The same for any NAME: NAME of a temporary name with this ending; empty if it is none.
std::string_view name_of_temporary(std::string_view temporary, std::string_view ending);

}  // namespace rz
