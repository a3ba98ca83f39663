#pragma once
/// UTF-8 validation, and escaping of untrusted text for messages.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "comm/core/text.h"

namespace rz {

/// True if the whole text is valid UTF-8.
bool is_utf8(std::string_view);

/// Returns the text as one line that is safe on a terminal: control characters and invalid UTF-8 become \xNN.
/// Idempotent.
std::string escaped(std::string_view);

/// "a, b and 6 more": at most eight of the names.
std::string listed(std::span<const std::string> names);

}  // namespace rz
