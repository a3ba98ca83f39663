#pragma once
/// The error file of a rank, by which launchers know why it ended.

#include <exception>

namespace rz {

/// Writes the error to the file that TORCHELASTIC_ERROR_FILE names, if it is set, as torch's error handler
/// does: message, and extraInfo with py_callstack (empty) and timestamp; of an Error also its code and, if it
/// is known, the rank that caused it. torchrun and rzrun read it. What cannot be written is left out.
void write_error_file(const std::exception&) noexcept;

}  // namespace rz
