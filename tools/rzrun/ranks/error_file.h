#pragma once
/// Files in which ranks report their errors, in the format of torchrun: {"message": {"message": TEXT,
/// "extraInfo": {…}}}, or {"message": TEXT}. TORCHELASTIC_ERROR_FILE names them.

#include <optional>
#include <string>

namespace rz::rzrun {

struct ErrorReport {
  std::string message;  ///< up to 4 KiB of it, without control characters but line ends
  int culprit = -1;     ///< the rank that it blames, if ringzero wrote it
};

/// The report of a rank; nothing if there is no file, or it is not one.
std::optional<ErrorReport> read_error_file(const std::string& path);

/// Writes a report of a rank that could not, as a signal killed it; with `error_code`, rzrun's own. False if
/// that fails.
bool write_error_file(const std::string& path, const std::string& message, int error_code);

}  // namespace rz::rzrun
