#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>

#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "comm/net/listening.h"
#include "comm/net/socket.h"
#include "comm/topology.h"
#include "tools/rzrun/flags/flags.h"

namespace rz::rzrun {
namespace {

/// torchrun's default ports, of its backends c10d and static.
constexpr int c10d_port = 29400, static_port = 29500;
/// rzruns that can only be on this host wait no longer for each other.
constexpr std::chrono::seconds time_at_loopback{60};

using Setting = Given::Setting;

void check_backend(const Setting& backend) {
  if (!backend.is_set() || backend.value == "c10d" || backend.value == "static") return;
  require(
      !backend.value.starts_with("etcd"), Errc::config, backend.where, " ", backend.value,
      " is not supported, nor is a server needed: give --rdzv-backend c10d, and --rdzv-endpoint HOST:PORT of "
      "one of the hosts");
  fail(Errc::config, backend.where, " ", hosts::quoted(backend.value), ": c10d or static is needed");
}

/// Of an address of node 0: one that can be no name would be waited for until the deadline.
void check_host(const std::string& host) {
  const bool is_ipv6 = host.find(':') != std::string::npos;
  const std::string why = is_ipv6 ? "" : hosts::why_no_host_name(host);
  require(why.empty(), Errc::config, hosts::quoted(host), " is no host: ", why);
}

/// "HOST:PORT", or "HOST" with this port.
net::HostPort endpoint(const Setting& text, int default_port) {
  require(text.value.find("://") == std::string::npos, Errc::config, text.where, " ",
          hosts::quoted(text.value), ": HOST:PORT is needed, without ",
          text.value.substr(0, text.value.find("://") + 3));
  try {
    const bool is_bare = text.value.find(':') == std::string::npos,
               is_ipv6 = text.value.starts_with('[') && text.value.ends_with(']');
    net::HostPort where = is_bare   ? net::HostPort{text.value, default_port}
                          : is_ipv6 ? net::parse_host_port(concat(text.value, ':', default_port))
                                    : net::parse_host_port(text.value);
    require(where.port != 0, Errc::config, "port 0 is no port that other hosts know");
    check_host(where.host);
    return where;
  } catch (const Error& e) {
    fail(Errc::config, text.where, ": ", e.what());
  }
}

constexpr const char* flags_of_torchrun[] = {"--nnodes",           "--node-rank",     "--nproc-per-node",
                                             "--rdzv-backend",     "--rdzv-endpoint", "--rdzv-id",
                                             "--rdzv-conf",        "--local-addr",    "--standalone",
                                             "--master-addr",      "--master-port",   "--max-restarts",
                                             "--monitor-interval", "--start-method",  "--role",
                                             "--module",           "--no-python",     "--log-dir",
                                             "--redirects",        "--tee",           "--local-ranks-filter"};

void note_unknown_variables(const Flags& flags, Remarks& remarks) {
  for (char** v = environ; *v && !chooses_ranks(flags); ++v) {
    const std::string_view name(*v, std::strcspn(*v, "="));
    const auto is_of = [&](const char* flag) { return variable_of(flag) == name; };
    if (name.starts_with("PET_") && std::ranges::none_of(flags_of_torchrun, is_of))
      remarks.notes.push_back(
          concat(name, " has no effect: there is no such flag of torchrun that rzrun takes"));
  }
}

/// Values that change nothing.
void check_unused(const Given& given) {
  const TorchrunFlags& f = given.flags.torchrun;
  const Setting interval = given.setting("--monitor-interval", f.monitor_interval),
                method = given.setting("--start-method", f.start_method);
  if (interval.is_set()) {
    const auto s = parse_number<double>(interval.value);
    require(s && *s >= 0, Errc::config, interval.where, " ", hosts::quoted(interval.value),
            ": seconds are needed");
  }
  constexpr std::string_view methods[] = {"spawn", "fork", "forkserver"};
  require(!method.is_set() || std::ranges::count(methods, method.value) > 0, Errc::config, method.where, " ",
          hosts::quoted(method.value), ": spawn, fork or forkserver is needed");
}

void check_conflicts(const Flags& flags, const std::vector<Setting>& settings) {
  for (const Setting& s : settings) {
    if (!s.is_set()) continue;
    for (const char* flag : {"--hostfile", "--include", "--exclude", "--num_nodes", "--num_gpus"})
      require(!flags.is_typed(flag), Errc::config, flag, " and ", s.where,
              " exclude each other: with --hostfile rzrun starts the ranks of all hosts, with torchrun's "
              "flags it is started on each of them");
    require(!flags.is_typed("-n"), Errc::config, "-n and ", s.where,
            " exclude each other: -n N counts the ranks of all hosts, --nproc-per-node K those of this one");
  }
}

/// An endpoint that each host takes for itself. Several rzruns of one host, with which users try a job, may
/// meet at loopback.
void check_endpoint(const Setting& endpoint, const Rendezvous& r, Remarks& remarks) {
  const std::string text = concat(endpoint.where, " ", endpoint.value);
  if (net::is_unspecified(r.host)) {
    const bool is_node0 = r.node_rank < 0 ? r.is_host.value_or(false) : r.node_rank == 0;
    const bool is_other = r.node_rank < 0 ? !r.is_host.value_or(true) : r.node_rank > 0;
    require(!is_other, Errc::config, text,
            " is this host itself, and node 0 is another one: give its name or address");
    require(
        is_node0, Errc::config, text,
        " is each host itself: give the name or address of node 0 on all, or --node-rank 0 on the host that "
        "is to be it");
  }
  if (!net::names_loopback(r.host) || !r.local_address.empty()) return;
  remarks.notes.push_back(
      concat(text, " is loopback: all ", r.max_nodes,
             " rzruns must be on this host; else give the name or address of node 0 on all"));
}

/// Where node 0 listens.
net::HostPort address_of_node0(const Setting& endpoint_given, const Setting& address, const Setting& port,
                               const Setting& backend, const Setting& nnodes) {
  const int p = port.is_set() ? number_of(port, 1, 65535) : static_port;
  if (endpoint_given.is_set()) {
    const net::HostPort where = endpoint(endpoint_given, backend.value == "static" ? p : c10d_port);
    require(!address.is_set() || address.value == where.host, Errc::config, endpoint_given.where, " and ",
            address.where, " name two hosts, ", where.host, " and ", address.value, "; give one");
    return where;
  }
  require(address.is_set(), Errc::config, nnodes.where, " ", nnodes.value,
          ": where is node 0? Give --rdzv-endpoint HOST:PORT, or --master-addr HOST and --node-rank R, on "
          "all hosts");
  try {
    check_host(address.value);
  } catch (const Error& e) {
    fail(Errc::config, address.where, ": ", e.what());
  }
  return {address.value, p};
}

}  // namespace

int number_of(const Given::Setting& given, int min, int max) {
  const auto n = parse_number<int>(given.value);
  require(n && *n >= min && *n <= max, Errc::config, given.where, " ", hosts::quoted(given.value),
          ": a whole number from ", min, " to ", max, " is needed");
  return *n;
}

std::pair<int, int> parse_nnodes(const std::string& text, const std::string& where) {
  const auto colon = text.find(':');
  const auto min = parse_number<int>(text.substr(0, colon)),
             max = colon == std::string::npos ? min : parse_number<int>(text.substr(colon + 1));
  require(min && max && *min >= 1 && *max >= *min && *max <= hosts::max_nodes, Errc::config, where, " ",
          hosts::quoted(text), ": a number of hosts is needed, or MIN:MAX, from 1 to ", hosts::max_nodes);
  return {*min, *max};
}

int parse_nproc(const std::string& text, const std::string& where, int devices, int cpus) {
  if (text == "cpu" || (text == "auto" && devices == 0)) return cpus;
  if (text == "gpu" || text == "auto") {
    require(devices > 0, Errc::config, where, " gpu: this host has no CUDA device");
    return devices;
  }
  const auto n = parse_number<int>(text);
  require(n && *n >= 1 && *n <= hosts::max_slots, Errc::config, where, " ", hosts::quoted(text),
          ": a number from 1 to ", hosts::max_slots, ", auto, gpu or cpu is needed");
  return *n;
}

void parse_rdzv_conf(const std::string& text, const std::string& where, Rendezvous& r) {
  static constexpr std::string_view no_effect[] = {"read_timeout",        "close_timeout",
                                                   "heartbeat_timeout",   "heartbeat",
                                                   "keep_alive_interval", "keep_alive_max_attempt",
                                                   "store_type",          "use_libuv",
                                                   "use_agent_store",     "rank"};
  for (const std::string& part : split_at_commas(text)) {
    const auto equals = part.find('=');
    require(equals != std::string::npos && equals > 0 && equals + 1 < part.size(), Errc::config, where, " ",
            hosts::quoted(part), ": KEY=VALUE,KEY=VALUE is needed");
    const std::string key = part.substr(0, equals), value = part.substr(equals + 1), at = where + " " + key;
    if (key == "timeout" || key == "join_timeout")
      r.join_timeout = std::chrono::seconds(number_of({value, at}, 1, 1000000));
    else if (key == "last_call_timeout")
      r.last_call = std::chrono::seconds(number_of({value, at}, 0, 1000000));
    else if (key == "is_host")
      r.is_host = is_true({value, at});
    else
      require(std::ranges::count(no_effect, key) > 0, Errc::config, where, ": unknown key ",
              hosts::quoted(key), "; there are join_timeout (or timeout), last_call_timeout and is_host");
  }
}

void add_torchrun_flags(CommandLine& line, TorchrunFlags& f, std::string& role) {
  const std::string heading = "rzrun on each host, as with torchrun";
  const auto add = [&](const char* names, std::string& value, const char* what, const char* type) {
    auto flag = line.add_option(names, value, what).type_name(type).group(heading);
    if (std::string_view(names).starts_with("--rdzv-")) flag.may_be_empty();  // scripts give torchrun such
  };
  add("--nnodes", f.nnodes, "Hosts; with MIN:MAX as many of them as come", "N|MIN:MAX");
  add("--node-rank,--node_rank", f.node_rank, "Number of this host; default: that of its arrival", "R");
  add("--nproc-per-node,--nproc_per_node", f.nproc,
      "Ranks of this host: a number, auto, gpu or cpu; default 1", "K");
  add("--rdzv-endpoint,--rdzv_endpoint", f.rdzv_endpoint,
      "Where node 0 listens; without --node-rank that is the "
      "host which has the address",
      "HOST[:PORT]");
  add("--rdzv-id,--rdzv_id", f.rdzv_id, "Name of the job, equal on all hosts; TORCHELASTIC_RUN_ID", "ID");
  add("--rdzv-backend,--rdzv_backend", f.rdzv_backend, "Both are the same here", "c10d|static");
  add("--rdzv-conf,--rdzv_conf", f.rdzv_conf, "join_timeout=600, last_call_timeout=30 (seconds), is_host=1",
      "KEY=VALUE,…");
  add("--local-addr,--local_addr", f.local_addr, "At node 0: where it listens, and MASTER_ADDR", "ADDRESS");
  line.add_flag("--standalone", f.standalone, "One host").group(heading);
  add("--role", role, "ROLE_NAME", "NAME");
  add("--monitor-interval,--monitor_interval", f.monitor_interval,
      "No effect: rzrun is woken by ends of ranks", "SECONDS");
  add("--start-method,--start_method", f.start_method, "No effect: ranks are programs",
      "spawn|fork|forkserver");
}

Node choose_node(const Given& given, Remarks& remarks) {
  const Flags& flags = given.flags;
  const TorchrunFlags& f = flags.torchrun;
  const auto get = [&](const char* flag, const std::string& typed) { return given.setting(flag, typed); };
  const Setting nnodes = get("--nnodes", f.nnodes), node_rank = get("--node-rank", f.node_rank),
                nproc = get("--nproc-per-node", f.nproc), backend = get("--rdzv-backend", f.rdzv_backend),
                where = get("--rdzv-endpoint", f.rdzv_endpoint), id = get("--rdzv-id", f.rdzv_id),
                conf = get("--rdzv-conf", f.rdzv_conf), local = get("--local-addr", f.local_addr),
                address = get("--master-addr", flags.hosts.master_addr),
                port = get("--master-port", concat(flags.hosts.master_port));
  check_conflicts(flags, {nnodes, node_rank, nproc, where, conf, local});
  check_backend(backend);
  check_unused(given);
  note_unknown_variables(flags, remarks);
  const bool is_alone = given.is_on("--standalone", f.standalone);
  Node node;
  if (!nnodes.is_set() && !node_rank.is_set() && !nproc.is_set() && !where.is_set() && !is_alone &&
      !flags.any_typed({"--rdzv-id", "--rdzv-conf", "--rdzv-backend", "--local-addr"}))
    return node;
  const bool counts_devices = nproc.value == "auto" || nproc.value == "gpu";
  node.ranks = !nproc.is_set()
                   ? 1
                   : parse_nproc(nproc.value, nproc.where, counts_devices ? cuda::device_count() : 0,
                                 static_cast<int>(cpu_limits().processors.size()));
  Rendezvous r;
  if (nnodes.is_set()) std::tie(r.min_nodes, r.max_nodes) = parse_nnodes(nnodes.value, nnodes.where);
  require(!is_alone || r.max_nodes == 1, Errc::config, "--standalone is for one host, and ", nnodes.where,
          " is ", nnodes.value);
  if (conf.is_set()) parse_rdzv_conf(conf.value, conf.where, r);
  if (node_rank.is_set()) r.node_rank = number_of(node_rank, 0, r.max_nodes - 1);
  if (r.max_nodes == 1) {
    node.master_addr = local.value;
    return node;
  }
  r.local_address = local.value;
  if (id.is_set()) r.id = id.value;
  const net::HostPort node0 = address_of_node0(where, address, port, backend, nnodes);
  r.host = node0.host;
  r.port = node0.port;
  check_endpoint(where.is_set() ? where : address, r, remarks);
  if (net::names_loopback(r.host)) {
    r.join_timeout = time_at_loopback;
    if (conf.is_set()) parse_rdzv_conf(conf.value, conf.where, r);
  }
  node.rendezvous = r;
  return node;
}

}  // namespace rz::rzrun
