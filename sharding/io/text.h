#pragma once
/// Text from outside: where its characters end, and how it reads in a message.

#include <cstddef>
#include <string>
#include <string_view>

namespace rz {

/// Bytes of the UTF-8 character at the front; 0 if it is none. Overlong forms and surrogates are none.
std::size_t utf8_length(std::string_view);
bool is_utf8(std::string_view);

/// One line that is fit for a terminal: control characters and bytes that are not UTF-8 become \xNN, all else
/// stays. Doing it twice changes nothing more.
std::string escaped(std::string_view);

}  // namespace rz
