#include "tools/train_gpt/report/printable.h"

#include "sharding/io/text.h"

namespace rz::train_gpt {

std::string printable(std::string_view bytes) {
  std::string out;
  while (!bytes.empty()) {
    const auto c = static_cast<unsigned char>(bytes[0]);
    const bool line = c == '\n' || c == '\t';
    const std::size_t length = utf8_length(bytes);
    const std::string_view character = bytes.substr(0, length);
    const bool fit = line || (length > 0 && escaped(character) == character);
    out += fit ? character : "·";
    bytes.remove_prefix(fit ? length : 1);
  }
  return out;
}

}  // namespace rz::train_gpt
