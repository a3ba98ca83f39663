#include "comm/net/random.h"

#include <sys/random.h>

#include "comm/core/error.h"

namespace rz::net {

JobId random_id() {
  JobId id;
  if (getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) fail_errno("getrandom");
  return id;
}

std::string to_hex(const JobId& id) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const auto byte : id) text += {digits[byte >> 4], digits[byte & 15]};
  return text;
}

JobId from_hex(const std::string& text) {
  require(text.size() == 32 && text.find_first_not_of("0123456789abcdef") == std::string::npos,
          Errc::rendezvous, "'", text, "' is no job id of 32 hexadecimal digits");
  JobId id;
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  for (std::size_t i = 0; i < id.size(); ++i)
    id[i] = static_cast<std::uint8_t>(digit(text[2 * i]) * 16 + digit(text[2 * i + 1]));
  return id;
}

}  // namespace rz::net
