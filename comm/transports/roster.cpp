#include "comm/transports/roster.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "comm/core/error.h"
#include "comm/transports/meet.h"

namespace rz {

namespace {

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines(1);
  for (const char c : text)
    if (c == '\n')
      lines.emplace_back();
    else
      lines.back() += c;
  return lines;
}

/// All of a text behind so many lines.
std::string last_lines(const std::string& text, int lines) {
  std::size_t at = 0;
  for (; lines > 0; --lines) at = text.find('\n', at) + 1;
  return text.substr(at);
}

/// A table, whose first line is its name, for messages.
std::string quoted(const std::string& table) {
  const std::size_t end = table.find('\n');
  return str("'", table.substr(0, end), "' (", std::count(table.begin(), table.end(), '\n'), " lines)");
}

/// The ranks from `first` on that have not published yet, without waiting.
std::vector<int> absent(int first, int size, Store& store, const std::string& what) {
  std::vector<int> ranks;
  for (int r = first; r < size; ++r) try {
      store.get(str(what, '/', r), Deadline::after(std::chrono::milliseconds(r == first ? 0 : 1)));
    } catch (const Error&) {
      ranks.push_back(r);
    }
  return ranks;
}

}  // namespace

std::vector<std::string> exchange(int rank, int size, Store& store, const std::string& what,
                                  const std::string& value, Deadline deadline) {
  store.set(str(what, '/', rank), value);
  std::vector<std::string> values;
  for (int r = 0; r < size; ++r) try {
      values.push_back(store.get(str(what, '/', r), deadline));
    } catch (const Error& e) {
      if (e.code() != Errc::timeout) throw;
      const auto missing = absent(r, size, store, what);
      throw Error(
          Errc::timeout,
          str("rank ", rank, " of ", size, ": rank ", list_ranks(missing.empty() ? std::vector{r} : missing),
              " did not come to the rendezvous before the deadline (", e.what(), ")"),
          r);
    }
  return values;
}

Roster exchange_roster(int rank, int size, Store& store, const TransportOptions& options, Deadline deadline) {
  const std::string machine = machine_id();
  const std::string host = options.host_id.empty() ? machine : options.host_id;
  require(host.find('\n') == std::string::npos, Errc::config, "the host id holds a line break");
  const std::string setup = str("transport=", options.kind, " sockets=", options.sockets,
                                " algorithm=", options.algorithm.empty() ? "auto" : options.algorithm);
  const auto entries = exchange(rank, size, store, "who",
                                str(host, '\n', machine, '\n', setup, '\n', in_words(allowance()), '\n',
                                    rank == 0 ? random_hex() : "", '\n', options.tuning),
                                deadline);
  Roster roster;
  for (int r = 0; r < size; ++r) {
    const std::string& entry = entries[static_cast<std::size_t>(r)];
    const auto lines = split_lines(entry);
    require(lines.size() >= 6, Errc::rendezvous, "rank ", r, " published '",
            entries[static_cast<std::size_t>(r)],
            "', which is no entry of a group; is another job using this store?");
    require(lines[2] == setup, Errc::mismatch, "rank ", r, " has ", lines[2], ", but rank ", rank, " has ",
            setup, "; RZ_TRANSPORT, RZ_SOCKETS and RZ_ALGORITHM must be the same everywhere");
    roster.hosts.push_back(lines[0]);
    roster.machines.push_back(lines[1]);
    roster.allowances.push_back(allowance_from(lines[3]));
    if (r == 0) roster.job = from_hex(lines[4]);
    const std::string tuning = last_lines(entry, 5);
    if (r == 0) roster.tuning = tuning;
    require(tuning.empty() || tuning == roster.tuning, Errc::mismatch, "rank ", r, " has the tuning table ",
            quoted(tuning), ", but rank 0, whose table counts, ",
            roster.tuning.empty() ? "has none" : "has " + quoted(roster.tuning),
            "; RZ_TUNING must name the same table everywhere, or be set on rank 0 alone");
  }
  return roster;
}

bool Roster::crowded(int rank) const {
  const std::string& here = machines[static_cast<std::size_t>(rank)];
  const auto kernel = [](const std::string& machine) { return machine.substr(0, machine.find('/')); };
  std::vector<Allowance> machine, all;
  for (std::size_t r = 0; r < machines.size(); ++r) {
    if (machines[r] == here) machine.push_back(allowances[r]);
    if (kernel(machines[r]) == kernel(here)) all.push_back({allowances[r].processors});  // quotas differ
  }
  return rz::crowded(machine) || rz::crowded(all);
}

bool Roster::crowded_somewhere() const {
  std::set<std::string> seen;
  for (int r = 0; r < static_cast<int>(machines.size()); ++r)
    if (seen.insert(machines[static_cast<std::size_t>(r)]).second && crowded(r)) return true;
  return false;
}

std::string machine_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char host[256] = {}, space[64] = {};
  gethostname(host, sizeof host - 1);
  if (readlink("/proc/self/ns/net", space, sizeof space - 1) < 0) space[0] = 0;
  return str(boot, '/', host, '/', space);
}

}  // namespace rz
