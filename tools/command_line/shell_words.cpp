#include "tools/command_line/shell_words.h"

#include "comm/core/error.h"

namespace rz {

std::vector<std::string> shell_words(std::string_view text, std::string_view flag) {
  std::vector<std::string> words;
  bool in_word = false;
  char quote = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool blank = c == ' ' || c == '\t' || c == '\n';
    if (!quote && blank) {
      in_word = false;
      continue;
    }
    if (!in_word) words.emplace_back();
    in_word = true;
    if (c == quote)
      quote = 0;
    else if (!quote && (c == '\'' || c == '"'))
      quote = c;
    else if (c == '\\' && quote != '\'' && i + 1 < text.size())
      words.back() += text[++i];
    else
      words.back() += c;
  }
  require(!quote, Errc::config, flag, ": a quote (", quote, ") has no other one");
  return words;
}

std::string quoted_for_shell(std::string_view word) {
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

}  // namespace rz
