#include <algorithm>
#include <cctype>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "tools/rzrun/flags/flags.h"

namespace rz::rzrun {
namespace {

/// Whether the word can only be torchrun's selection of streams.
bool selects_streams(std::string_view text) {
  return !text.empty() && std::isdigit(static_cast<unsigned char>(text.front())) &&
         text.find_first_not_of("0123456789:,") == std::string_view::npos;
}

/// A local rank that some host has. `place`: for messages.
int local_rank_of(std::string_view text, const std::string& place, int ranks) {
  const auto rank = parse_number<int>(text);
  require(rank && *rank >= 0, Errc::config, place, hosts::quoted(text), " is no number of a local rank");
  require(*rank < ranks, Errc::config, place, "there is no local rank ", *rank, ": a host has ",
          ranks == 1 ? "1 rank" : concat("up to ", ranks, " ranks"));
  return *rank;
}

/// "0,2": local ranks.
std::vector<int> parse_filter(const std::string& text, const std::string& where, int ranks) {
  std::vector<int> found;
  for (const std::string& word : parts_of(text, ','))
    found.push_back(local_rank_of(word, concat(where, " ", hosts::quoted(text), ": "), ranks));
  return found;
}

/// The largest number of ranks that a host has.
int ranks_of_a_host(const Hosts& all) {
  std::size_t ranks = 0;
  for (const hosts::Host& h : all.nodes) ranks = std::max(ranks, h.slots.size());
  return ranks ? static_cast<int>(ranks) : all.ranks;
}

/// --enable_each_rank_log is another name of --log-dir, and "None" its default.
std::string log_folder(const Given& given) {
  const LogFlags& f = given.flags.log;
  const std::string other = f.each_rank_log == "None" ? "" : f.each_rank_log;
  require(f.log_dir.empty() || other.empty() || f.log_dir == other, Errc::config,
          "--enable_each_rank_log and --log-dir are the same flag; give one");
  return other.empty() ? given.setting("--log-dir", f.log_dir).value : other;
}

}  // namespace

Streams parse_streams(const std::string& text, const std::string& where, int ranks) {
  const std::string place = concat(where, " ", hosts::quoted(text), ": ");
  const auto streams_of = [&](std::string_view word) {
    require(
        word.size() == 1 && word[0] >= '0' && word[0] <= '3', Errc::config, place, hosts::quoted(word),
        " is no choice of streams; give 0 (none), 1 (standard output), 2 (standard error) or 3 (both), or "
        "one for each local rank, as in 0:1,1:3");
    return word[0] - '0';
  };
  Streams found;
  if (text.find_first_of(":,") == std::string::npos) {
    found.of_all = streams_of(text);
    return found;
  }
  for (const std::string& word : parts_of(text, ',')) {
    const auto colon = word.find(':');
    require(colon != std::string::npos, Errc::config, place, hosts::quoted(word),
            " has no local rank; write RANK:STREAMS,RANK:STREAMS, as in 0:1,1:3");
    const int rank = local_rank_of(word.substr(0, colon), place, ranks);
    require(!std::ranges::count(found.of_rank, rank, &std::pair<int, int>::first), Errc::config, place,
            "local rank ", rank, " is there twice");
    found.of_rank.emplace_back(rank, streams_of(word.substr(colon + 1)));
  }
  return found;
}

void add_log_flags(CommandLine& line, LogFlags& f) {
  line.add_flag("--prefix", f.prefix, "Print whole lines, each prefixed with \"[rank] \"");
  line.add_option("--log-dir,--log_dir", f.log_dir,
                  "Write rank<R>.stdout and rank<R>.stderr there instead of the console")
      .type_name("DIR");
  line.add_flag(
      "-t,--tee", f.tee,
      "With --log-dir: also print to the console; also torchrun's --tee WHAT, as of -r: those streams, "
      "with \"[rank] \" before their lines");
  const std::string heading = "rzrun on each host, as with torchrun";
  line.add_option(
          "-r,--redirects", f.redirects,
          "Which streams --log-dir writes, and the console does not: 0 (none), 1 (standard output), 2 "
          "(standard error) or 3 (both); or RANK:WHAT,… by local ranks, of others none")
      .type_name("WHAT")
      .group(heading);
  line.add_option("--local-ranks-filter,--local_ranks_filter", f.filter,
                  "Local ranks whose output the console has; log files have that of all")
      .type_name("RANK,…")
      .group(heading);
}

std::vector<std::string> take_tee(const CommandLine& line, std::vector<std::string> words, LogFlags& f) {
  std::vector<std::string> rest;
  std::size_t i = 0;
  for (; i < words.size() && (i == 0 || words[i].starts_with("-")); ++i) {
    const std::string &word = words[i], flag = word.substr(0, word.find('='));
    if (word == "--") {  // the end of the flags
      ++i;
      break;
    }
    rest.push_back(word);
    if (i == 0) continue;
    if (flag == "--tee" || flag == "-t" || (flag.starts_with("-t") && selects_streams(flag.substr(2)))) {
      rest.back() = "--tee";
      if (flag.starts_with("-t") && flag.size() > 2)
        f.tee_of = word.substr(2);
      else if (flag != word)
        f.tee_of = word.substr(flag.size() + 1);
      else if (i + 1 < words.size() && selects_streams(words[i + 1]))
        f.tee_of = words[++i];
    } else if (flag == word && line.values_of(word).value_or(0) > 0 && i + 1 < words.size()) {
      rest.push_back(words[++i]);
    }
  }
  rest.insert(rest.end(), words.begin() + static_cast<std::ptrdiff_t>(i), words.end());
  return rest;
}

Output choose_output(const Given& given, const Hosts& hosts) {
  const LogFlags& f = given.flags.log;
  const auto redirects = given.setting("--redirects", f.redirects),
             filter = given.setting("--local-ranks-filter", f.filter),
             tee = f.tee && f.tee_of.empty() ? Given::Setting{}
                   : f.tee                   ? Given::Setting{f.tee_of, "--tee"}
                                             : given.setting("--tee", "");
  Output o{.prefix = f.prefix, .log_dir = log_folder(given)};
  const int ranks = ranks_of_a_host(hosts);
  const Streams all{Streams::both, {}};
  require(!f.tee || tee.is_set() || !o.log_dir.empty(), Errc::config, "--tee needs --log-dir DIR");
  if (f.tee) o.tees = all;
  if (tee.is_set()) {
    o.tees = parse_streams(tee.value, tee.where, ranks);
    o.prefix_tees = true;
  }
  if (redirects.is_set())
    o.files = parse_streams(redirects.value, redirects.where, ranks);
  else if (!tee.is_set() && !o.log_dir.empty())
    o.files = all;
  require(!redirects.is_set() || !o.files.any() || !o.log_dir.empty(), Errc::config, redirects.where,
          " needs --log-dir DIR");
  if (filter.is_set()) o.shown = parse_filter(filter.value, filter.where, ranks);
  const auto prints = [&](int r) { return o.to_console(r, Streams::out) || o.to_console(r, Streams::err); };
  bool any = false;
  for (int r = 0; r < ranks && !any; ++r) any = prints(r);
  require(!o.prefix || any, Errc::config, "--prefix with --log-dir needs --tee: nothing is printed");
  return o;
}

}  // namespace rz::rzrun
