#pragma once
/// Files for the results of programs.

#include <string>
#include <string_view>

#include "comm/os/fd.h"

namespace rz {

/// The error of a file whose program was killed.
inline constexpr const char* unfinished_error = "the run did not end by itself: it was killed";

/// A file that receives the results of a program at its end. The constructor creates or empties it, so call
/// it after the command line is accepted and before the work: a file that cannot be written is an error at
/// once, and results of an earlier run do not outlive the beginning of this one.
class OutputFile {
 public:
  /// `flag` named the file. Errc::config if it cannot be written.
  OutputFile(const std::string& flag, const std::string& path);
  /// What a regular file has until write(), and for ever if this process is killed before.
  void hold(std::string_view text);
  /// Replaces the contents. Errc::system if it cannot be written completely.
  void write(std::string_view text);
  /// The same for the text of an error, beside which a failure to write it does not matter.
  void try_write(std::string_view text) noexcept;

 private:
  std::string path_;
  UniqueFd file_;
};

}  // namespace rz
