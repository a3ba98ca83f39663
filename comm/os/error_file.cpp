#include "comm/os/error_file.h"

#include <chrono>
#include <fstream>
#include <string>
#include <string_view>

#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/core/text.h"

namespace rz {

namespace {

/// The text as a string of JSON. Bytes that are no characters are replaced.
std::string quoted(std::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const std::size_t n = utf8_length(text);
    const auto c = static_cast<unsigned char>(text[0]);
    if (n == 0)
      out += "\\ufffd";
    else if (c == '"' || c == '\\')
      (out += '\\') += static_cast<char>(c);
    else if (c < 32)
      ((out += "\\u00") += "0123456789abcdef"[c >> 4]) += "0123456789abcdef"[c & 15];
    else
      out += text.substr(0, n);
    text.remove_prefix(n ? n : 1);
  }
  return out + '"';
}

}  // namespace

void write_error_file(const std::exception& e) noexcept {
  try {
    const auto path = environment_variable("TORCHELASTIC_ERROR_FILE");
    if (!path || path->empty()) return;
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    const auto second = std::chrono::duration_cast<std::chrono::seconds>(now).count();
    std::string extra = concat("\"py_callstack\":\"\",\"timestamp\":\"", second, '"');
    if (const auto* const error = dynamic_cast<const Error*>(&e)) {
      extra = concat("\"code\":", quoted(name(error->code())), ',', extra);
      if (error->culprit() >= 0) extra += concat(",\"culprit\":", error->culprit());
    }
    std::ofstream(*path, std::ios::binary)
        << "{\"message\":{\"extraInfo\":{" << extra << "},\"message\":" << quoted(e.what()) << "}}";
  } catch (const std::exception&) {  // the caller prints the error
  }
}

}  // namespace rz
