#include "tools/rzrun/ranks/stack.h"

#include <algorithm>
#include <map>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/core/text.h"
#include "comm/os/child.h"

namespace rz::rzrun {
namespace {

constexpr std::chrono::seconds time_to_resolve{3};
constexpr std::size_t max_shown = 24, max_line = 200;

std::string hexadecimal(std::uint64_t n) {
  std::string digits;
  do digits.insert(digits.begin(), "0123456789abcdef"[n & 15]);
  while (n >>= 4);
  return "0x" + digits;
}

/// "function at file:line", or "function" without debug information; empty if even that is unknown.
std::string shown_frame(std::string line) {
  if (line.starts_with("??")) return "";
  if (const auto at = line.rfind(" at ??:"); at != std::string::npos) line.resize(at);
  return line;
}

/// The frames of one file, by its symbols.
void resolve(const std::string& file, const std::vector<std::size_t>& of_file,
             const std::vector<flight::Frame>& frames, Deadline end, std::vector<std::string>& shown) {
  std::vector<std::string> words{"addr2line", "-C", "-f", "-p", "-e", file};
  for (const std::size_t i : of_file) words.push_back(hexadecimal(frames[i].address));
  const auto lines = parts_of(output_of(words, end), '\n');
  for (std::size_t i = 0; i < std::min(of_file.size(), lines.size()); ++i)
    shown[of_file[i]] = shown_frame(lines[i]);
}

}  // namespace

std::string describe_stack(const flight::Report& report) {
  std::vector<flight::Frame> frames = report.stack;
  if (frames.empty()) return "";
  const std::size_t more = frames.size() - std::min(frames.size(), max_shown);
  frames.resize(frames.size() - more);
  std::map<std::string, std::vector<std::size_t>> files;
  for (std::size_t i = 0; i < frames.size(); ++i)
    if (frames[i].file.starts_with('/')) files[frames[i].file].push_back(i);
  std::vector<std::string> shown(frames.size());
  const Deadline end = Deadline::after(time_to_resolve);
  for (const auto& [file, of_file] : files) resolve(file, of_file, frames, end, shown);
  std::string text;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    std::string line =
        shown[i].empty() ? concat(frames[i].file, "+", hexadecimal(frames[i].address)) : shown[i];
    if (line.size() > max_line) line = line.substr(0, max_line) + "…";
    std::erase_if(line, [](unsigned char c) { return c < 32 || c == 127; });
    text += concat(i ? "\n" : "", "#", i, " ", line);
  }
  return more ? text + concat("\n… ", more, " more") : text;
}

}  // namespace rz::rzrun
