#include "comm/bootstrap/peer_info.h"

#include <algorithm>

#include "comm/bootstrap/rendezvous.h"
#include "comm/core/error.h"
#include "comm/os/process.h"

namespace rz {

namespace {

/// The text without its first `lines` lines.
std::string skip_lines(const std::string& text, int lines) {
  std::size_t at = 0;
  for (; lines > 0; --lines) at = text.find('\n', at) + 1;
  return text.substr(at);
}

/// What must be equal on all ranks, and the advice if it is not.
struct CommonField {
  std::string field, advice;
};

std::vector<CommonField> common_fields(int size, const GroupSettings& o) {
  const auto same = [](const char* variable) { return concat(variable, " must be the same everywhere"); };
  return {{concat("version=", library_version()), "every rank must run the same version of ringzero"},
          {concat("size=", size), "every rank must name the same number of ranks"},
          {concat("transport=", o.transport), same("RZ_TRANSPORT")},
          {concat("sockets=", o.sockets), same("RZ_SOCKETS")},
          {concat("encryption=", o.encryption), same("RZ_ENCRYPTION")},
          {concat("algorithm=", o.algorithm.empty() ? "auto" : o.algorithm), same("RZ_ALGORITHM")},
          {concat("deterministic=", o.deterministic ? "on" : "off"), same("RZ_DETERMINISTIC")},
          {concat("reduction_order=", name(o.reduction_order)), same("RZ_REDUCTION_ORDER")}};
}

/// First line of every entry, in every version of the library. No field contains a tab.
std::string join_fields(const std::vector<CommonField>& commons) {
  std::string line;
  for (const CommonField& c : commons) line += (line.empty() ? "" : "\t") + c.field;
  return line;
}

void check_fields(int rank, const std::vector<CommonField>& ours, int peer, const std::string& entry) {
  const auto theirs = parts_of(entry.substr(0, entry.find('\n')), '\t');
  require(theirs.front().rfind("version=", 0) == 0, Errc::rendezvous, "rank ", peer, " published '", entry,
          "', which is no entry of a group; is another job using this store?");
  for (std::size_t i = 0; i < ours.size(); ++i)
    if (i >= theirs.size() || theirs[i] != ours[i].field)
      throw Error(Errc::mismatch,
                  concat("rank ", peer, " has ", i < theirs.size() ? theirs[i] : "no " + ours[i].field,
                         ", but rank ", rank, " has ", ours[i].field, "; ", ours[i].advice),
                  peer);
}

/// Description of a tuning table for messages. The table's first line is its name.
std::string describe_table(const std::string& table) {
  const std::size_t end = table.find('\n');
  return concat("'", table.substr(0, end), "' (", std::count(table.begin(), table.end(), '\n'), " lines)");
}

}  // namespace

PeerInfo exchange_peer_info(int rank, int size, Store& store, const GroupSettings& settings,
                            const std::string& host_id, Deadline deadline) {
  require(size >= 1 && rank >= 0 && rank < size, Errc::invalid_argument, "rank ", rank, " of ", size);
  require(settings.sockets >= 1 && settings.sockets <= 16, Errc::config, settings.sockets,
          " sockets per link are not 1 to 16");
  if (size > 1) require_not_connected(rank, store);
  const std::string machine = machine_id();
  const std::string host = host_id.empty() ? machine : host_id;
  require(host.find('\n') == std::string::npos, Errc::config, "the host id holds a line break");
  const auto ours = common_fields(size, settings);
  const auto entries = store_all_gather(
      rank, size, store, "peer_info",
      concat(join_fields(ours), '\n', host, '\n', machine, '\n', to_string(cpu_limits()), '\n',
             rank == 0 ? net::random_hex() : "", '\n', settings.tuning),
      deadline, [&](int peer, const std::string& entry) { check_fields(rank, ours, peer, entry); });
  PeerInfo peer_info{.rank = rank, .settings = settings};
  std::string& agreed = peer_info.settings.tuning;
  for (int r = 0; r < size; ++r) {
    const std::string& entry = entries[static_cast<std::size_t>(r)];
    const auto lines = parts_of(entry, '\n');
    require(lines.size() >= 6, Errc::rendezvous, "rank ", r, " published '", entry,
            "', which is no entry of a group; is another job using this store?");
    peer_info.host_ids.push_back(lines[1]);
    peer_info.machines.push_back(lines[2]);
    peer_info.cpu_limits.push_back(parse_cpu_limits(lines[3]));
    if (r == 0) peer_info.job_id = net::from_hex(lines[4]);
    const std::string tuning = skip_lines(entry, 5);
    if (r == 0) agreed = tuning;
    require(tuning.empty() || tuning == agreed, Errc::mismatch, "rank ", r, " has the tuning table ",
            describe_table(tuning), ", but rank 0, whose table counts, ",
            agreed.empty() ? "has none" : "has " + describe_table(agreed),
            "; RZ_TUNING must name the same table everywhere, or be set on rank 0 alone");
  }
  return peer_info;
}

bool PeerInfo::oversubscribed(int of_rank) const {
  const std::string& here = machines[static_cast<std::size_t>(of_rank)];
  const auto kernel = [](const std::string& machine) { return machine.substr(0, machine.find('/')); };
  std::vector<CpuLimits> machine, all;
  for (std::size_t r = 0; r < machines.size(); ++r) {
    if (machines[r] == here) machine.push_back(cpu_limits[r]);
    if (kernel(machines[r]) == kernel(here))
      all.push_back({cpu_limits[r].processors});  // containers have different quotas
  }
  return rz::oversubscribed(machine) || rz::oversubscribed(all);
}

std::string library_version() { return RZ_VERSION; }

}  // namespace rz
