#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>

#include "comm/core/error.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::hosts {
namespace {

/// N of "slots=N"; `key` has the '='.
int slots_of(std::string_view word, std::string_view key, const std::string& place) {
  const std::string_view digits = word.substr(key.size());
  const auto n = parse_number<int>(digits);
  require(n && *n >= 1 && *n <= max_slots, Errc::config, place, quoted(word),
          " must have a number from 1 to ", max_slots);
  return *n;
}

/// "worker:4" is how MPICH writes slots, "user@worker" belongs into ssh's own configuration.
std::string host_name(std::string_view word, bool has_slots, const std::string& place) {
  const auto colon = word.find(':'), at = word.find('@');
  const bool mpich = colon != std::string_view::npos && parse_number<int>(word.substr(colon + 1));
  const std::string_view before = word.substr(0, colon),
                         after = word.substr(std::min(colon, word.size() - 1) + 1);
  require(!mpich || !has_slots, Errc::config, place, quoted(word), " has a port; write '", before,
          "', and set the port by --ssh_port ", after, " or Port in ~/.ssh/config");
  require(!mpich, Errc::config, place, quoted(word), " is MPICH's way; write '", before, " slots=", after,
          "'");
  require(at == std::string_view::npos, Errc::config, place, quoted(word),
          " has a user; write the host alone, and set User in ~/.ssh/config");
  require(std::ranges::count(word, ':') < 2, Errc::config, place, quoted(word),
          " is an IPv6 address; write a name of that host, as of /etc/hosts or ~/.ssh/config");
  const std::string why = why_no_host_name(word);
  require(why.empty(), Errc::config, place, quoted(word), " is no host: ", why);
  return std::string(word);
}

Host host_of_line(const std::vector<std::string_view>& words, const std::string& place) {
  Host host{host_name(words[0], words.size() > 1, place), {}, false};
  require(words.size() > 1, Errc::config, place, "'", words[0], "' has no slots; write '", words[0],
          " slots=N', where N is its number of ranks");
  int slots = 0, max = max_slots;
  for (std::size_t i = 1; i < words.size(); ++i) {
    const std::string_view word = words[i];
    if (word.starts_with("slots=") && slots == 0)
      slots = slots_of(word, "slots=", place);
    else if (word.starts_with("max_slots=") || word.starts_with("max-slots="))
      max = slots_of(word, "max_slots=", place);
    else
      fail(Errc::config, place, quoted(word), " is not understood; a line is 'NAME slots=N'");
  }
  require(slots > 0, Errc::config, place, "'", words[0], "' has no slots=N");
  require(slots <= max, Errc::config, place, "slots=", slots, " exceeds max_slots=", max);
  for (int s = 0; s < slots; ++s) host.slots.push_back(s);
  return host;
}

}  // namespace

std::vector<Host> parse_hostfile(std::string_view text, const std::string& file) {
  std::vector<Host> found;
  std::map<std::string, int> line_of;
  int number = 0;
  if (text.starts_with(byte_order_mark)) text.remove_prefix(byte_order_mark.size());
  for (const std::string& line : parts_of(text, '\n')) {
    const std::string place = concat(file, ":", ++number, ": ");
    const auto words = words_of(std::string_view(line).substr(0, line.find('#')));
    if (words.empty()) continue;
    found.push_back(host_of_line(words, place));
    const auto [first, is_new] = line_of.emplace(found.back().name, number);
    require(is_new, Errc::config, place, "host '", found.back().name, "' is in line ", first->second,
            " too; a host has one line");
    require(found.size() <= max_nodes, Errc::config, place, "a hostfile has up to ", max_nodes, " hosts");
  }
  require(!found.empty(), Errc::config, file, ": no host in it; a line is 'NAME slots=N'");
  return found;
}

std::vector<Host> read_hostfile(const std::string& path) {
  std::ifstream in(path);
  in.peek();  // a folder can be opened, but not read
  std::ostringstream text;
  if (in.good()) text << in.rdbuf();
  require(in.is_open() && !in.bad(), Errc::config, "hostfile ", path, ": ",
          std::strerror(errno ? errno : EIO));
  return parse_hostfile(text.str(), path);
}

}  // namespace rz::hosts
