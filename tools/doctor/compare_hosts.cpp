#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "comm/core/text.h"
#include "sharding/io/json.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/instructions.h"

namespace rz::doctor {
namespace {

std::string listed_values(std::span<const NamedFacts> all, std::string (*value)(const HostFacts&)) {
  std::string text;
  for (const NamedFacts& f : all) {
    const std::string v = value(f.facts);
    text += concat(text.empty() ? "" : ", ", f.host, ' ', v.empty() ? "none" : v);
  }
  return text;
}

/// A value that should be the same on all hosts.
struct CommonValue {
  const char* check;
  std::string (*value)(const HostFacts&);
  Verdict otherwise;
  const char* remedy;
  bool cuda_only = false;
};

int mtu_of_address(const HostFacts& f) {
  const auto i = std::ranges::find(f.interfaces, f.address, &Interface::address);
  return i == f.interfaces.end() ? 0 : i->mtu;
}

constexpr CommonValue common_values[] = {
    {"ringzero", [](const HostFacts& f) { return f.version; }, Verdict::missing,
     "Install one version on all hosts, e.g. from a folder that they share: cmake --install build/release "
     "--prefix FOLDER"},
    {"NCCL", [](const HostFacts& f) { return f.nccl; }, Verdict::missing,
     "Install one version on all hosts: apt-get install libnccl2=VERSION", true},
    {"driver", [](const HostFacts& f) { return f.driver; }, Verdict::warning,
     "Install one driver on all hosts: nvidia-smi shows its version", true},
    {"CUDA", [](const HostFacts& f) { return f.cuda; }, Verdict::warning,
     "Install one driver on all hosts: nvidia-smi shows the CUDA that it supports", true},
    {"Open MPI", [](const HostFacts& f) { return f.open_mpi; }, Verdict::warning,
     "Install one version on all hosts, or start with rzrun in place of mpirun: mpirun --version shows it"},
    {"kernel", [](const HostFacts& f) { return f.kernel; }, Verdict::warning,
     "Boot one kernel on all hosts, if calls or updates take longer on some: uname -r shows it"},
    {"instructions",
     [](const HostFacts& f) {
       return describe_instructions(f) +
              (f.openblas_core.empty() ? "" : " and OPENBLAS_CORETYPE=" + f.openblas_core);
     },
     Verdict::warning,
     "Choose hosts of one kind, or one set of kernels, so that a sum has the same bits on all: export "
     "OPENBLAS_CORETYPE=Haswell where all have AVX2"},
    {"MTU", [](const HostFacts& f) { return concat(mtu_of_address(f)); }, Verdict::warning,
     "Set one MTU on all hosts: ip link set dev INTERFACE mtu N"},
};

Finding compare(std::span<const NamedFacts> all, const CommonValue& common) {
  std::set<std::string> values;
  for (const NamedFacts& f : all) values.insert(common.value(f.facts));
  const std::string one = values.begin()->empty() ? "none" : *values.begin();
  if (values.size() == 1) return {"", common.check, one + " on all hosts", "equal on all hosts"};
  return {
      "",           common.check, listed_values(all, common.value), "equal on all hosts", common.otherwise,
      common.remedy};
}

/// How far a host's clock is from this one's, in seconds: at least so much, since its answer took time.
double clock_offset(const NamedFacts& f) {
  if (f.facts.clock > f.after) return f.facts.clock - f.after;
  return f.facts.clock < f.before ? f.facts.clock - f.before : 0;
}

Finding compare_clocks(std::span<const NamedFacts> all) {
  const auto [min, max] = std::ranges::minmax_element(all, {}, clock_offset);
  const double apart = clock_offset(*max) - clock_offset(*min);
  Finding finding{"", "clock", "no difference that shows", "less than 1 s between hosts"};
  if (apart > 0) finding.found = concat(min->host, " is ", fixed(apart, 1), " s behind ", max->host);
  if (apart < 1) return finding;
  finding.verdict = Verdict::warning;
  finding.remedy = "Synchronise the clocks, so that logs and times of files agree: timedatectl set-ntp true";
  return finding;
}

bool loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

/// Addresses of the master apart from loopback, which is what its own host may mean by the name.
std::set<std::string> master_of(const HostFacts& f) {
  std::set<std::string> found;
  for (const std::string& a : f.master_addresses)
    if (!loopback(a)) found.insert(a);
  return found;
}

Finding compare_master(std::span<const NamedFacts> all, const Job& job) {
  std::set<std::string> of_first;
  for (const Interface& i : all.front().facts.interfaces) of_first.insert(i.address);
  std::set<std::set<std::string>> values;
  std::string wrong;
  for (const NamedFacts& f : all) {
    const auto found = master_of(f.facts);
    if (found.empty()) continue;
    values.insert(found);
    if (std::ranges::none_of(found, [&](const std::string& a) { return of_first.contains(a); }))
      wrong += (wrong.empty() ? "" : ", ") + f.host;
  }
  Finding finding{"", "MASTER_ADDR", job.master + " is equal on all hosts", "equal on all hosts"};
  if (values.size() <= 1 && wrong.empty()) return finding;
  finding.found = listed_values(all, [](const HostFacts& f) {
    std::string text;
    for (const std::string& a : f.master_addresses) text += (text.empty() ? "" : "/") + a;
    return text;
  });
  finding.verdict = wrong.empty() ? Verdict::warning : Verdict::missing;
  finding.remedy = concat("Make ", job.master, " an address of ", all.front().host,
                          wrong.empty() ? "" : concat(" on ", wrong),
                          ": edit /etc/hosts there, or set MASTER_ADDR to an address");
  return finding;
}

Finding compare_identities(std::span<const NamedFacts> all) {
  Finding finding{"", "hosts", concat(all.size(), " different ones"), "each in the hostfile once"};
  for (std::size_t i = 0; i < all.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      if (all[i].facts.name == all[j].facts.name && all[i].facts.address == all[j].facts.address &&
          finding.verdict == Verdict::ok) {
        finding.found = concat(all[j].host, " and ", all[i].host, " are one host, ", all[i].facts.name);
        finding.verdict = Verdict::missing;
        finding.remedy = concat("Name the host once, with the sum of its slots: ", all[j].host, " slots=N");
      }
  return finding;
}

/// Under rzrun the ranks have a random secret of the job, so no difference keeps a job from running.
Finding compare_secrets(std::span<const NamedFacts> all) {
  std::set<std::string> digests;
  std::string found;
  for (const NamedFacts& f : all) {
    digests.insert(f.facts.secret_digest);
    const char* const state = f.facts.secret_digest == "none" ? "RZ_INSECURE=1"
                              : !f.facts.secret_error.empty() ? "not usable"
                              : f.facts.secret_digest.empty() ? "none yet"
                                                              : "has one";
    found += concat(found.empty() ? "" : ", ", f.host, ' ', state);
  }
  const std::string& first = *digests.begin();
  Finding finding{"", "secret", "equal on all hosts", "one for all hosts, unless rzrun starts the job"};
  if (digests.size() == 1 && !first.empty() && first != "none") return finding;
  finding.verdict = Verdict::warning;
  finding.found = digests.size() > 1 && !digests.contains("") ? "differs: " + found : found;
  finding.remedy =
      "Copy that of the first host to those with another home directory: (umask 77; mkdir -p "
      "~/.config/ringzero; test -e ~/.config/ringzero/secret || openssl rand -hex 32 > "
      "~/.config/ringzero/secret); ssh HOST mkdir -p .config/ringzero; scp -p ~/.config/ringzero/secret "
      "HOST:.config/ringzero/";
  if (first == "none" && digests.size() == 1)
    finding.remedy = "Let nobody in that reaches a port: unset RZ_INSECURE";
  return finding;
}

// ---- pairs

constexpr double slow_rate = 100e6;  // bytes a second: less than a network of 1 Gbit/s has
constexpr double slow_round_trip_us = 2000;
constexpr double slow_beside_others = 0.5;

double rate_of(const PairMeasurement& m) { return std::min(m.send_rate, m.receive_rate); }

Finding check_route(const PairMeasurement& m, double median) {
  Finding finding{concat(m.from, " -> ", m.to), "route", "", concat("TCP to ", m.address)};
  if (!m.connected) {
    finding.found = m.error, finding.verdict = Verdict::missing;
    finding.remedy = concat(
        "Open the way for all TCP ports between the hosts, or choose an interface of a network that "
        "both have: ping ",
        m.address, ", ip route get ", m.address, ", export RZ_INTERFACE=NAME");
    return finding;
  }
  const double rate = rate_of(m);
  if (!m.error.empty()) {
    finding.found = m.error, finding.verdict = Verdict::missing;
    finding.remedy = concat("Find where large packets are lost: tracepath -n ", m.address);
    return finding;
  }
  finding.found = concat(fixed(m.round_trip_us, 0), " us, ", fixed(m.send_rate / 1e9, 2), " GB/s there, ",
                         fixed(m.receive_rate / 1e9, 2), " GB/s back");
  finding.needed = "100 MB/s, a round trip below 2 ms";
  if (rate < slow_beside_others * median)
    finding.needed = concat("about ", fixed(median / 1e9, 2), " GB/s, as other pairs have");
  if (rate >= slow_rate && m.round_trip_us <= slow_round_trip_us && rate >= slow_beside_others * median)
    return finding;
  finding.verdict = Verdict::warning;
  finding.remedy = concat("Choose a faster network on both hosts: ip route get ", m.address,
                          " shows the present one, "
                          "export RZ_INTERFACE=NAME chooses");
  return finding;
}

Finding check_mtu(const PairMeasurement& m) {
  Finding finding{concat(m.from, " -> ", m.to), "path MTU", concat("packets of ", m.packet, " bytes pass"),
                  concat(m.packet, " bytes")};
  if (m.passed == 0)
    finding.found = "not known: UDP does not pass";  // jobs do not need it
  else if (m.passed < m.packet) {
    finding.found = concat("packets above ", m.passed, " bytes are lost without a notice");
    finding.verdict = m.error.empty() ? Verdict::warning : Verdict::missing;
    finding.remedy = concat("Lower the MTU on ", m.from,
                            ", or raise that of the switches between: ip link set dev "
                            "INTERFACE mtu ",
                            m.passed);
  }
  return finding;
}

template <class Measurement, class Visit>
void visit_measurement(Measurement& m, const Visit& visit) {
  visit("from", m.from), visit("to", m.to), visit("address", m.address), visit("error", m.error);
  visit("connected", m.connected), visit("round_trip_us", m.round_trip_us);
  visit("send_rate", m.send_rate), visit("receive_rate", m.receive_rate);
  visit("packet", m.packet), visit("passed", m.passed);
}

}  // namespace

std::vector<Finding> compare_hosts(std::span<const NamedFacts> all, const Job& job) {
  std::vector<Finding> findings;
  if (all.size() < 2) return findings;
  findings.push_back(compare_identities(all));
  for (const CommonValue& common : common_values)
    if (job.cuda || !common.cuda_only) findings.push_back(compare(all, common));
  findings.push_back(compare_clocks(all));
  findings.push_back(compare_master(all, job));
  findings.push_back(compare_secrets(all));
  return findings;
}

std::vector<Finding> check_pairs(std::span<const PairMeasurement> pairs) {
  std::vector<double> rates;
  for (const PairMeasurement& m : pairs)
    if (m.error.empty()) rates.push_back(rate_of(m));
  std::ranges::sort(rates);
  const double median = rates.size() < 3 ? 0 : rates[rates.size() / 2];
  std::vector<Finding> findings;
  for (const PairMeasurement& m : pairs) {
    findings.push_back(check_route(m, median));
    if (m.connected) findings.push_back(check_mtu(m));
  }
  return findings;
}

std::string to_json(const PairMeasurement& m) {
  nlohmann::json json = nlohmann::json::object();
  visit_measurement(m, [&](const char* key, const auto& value) { json[key] = value; });
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

PairMeasurement parse_measurement(const std::string& text, const std::string& source) {
  const nlohmann::json json = parse_json(text, source, JsonDialect::strict);
  const JsonObject object(json, source);
  PairMeasurement m;
  visit_measurement(m, [&]<class T>(const char* key, T& value) {
    if constexpr (std::is_same_v<T, std::string>)
      value = object.text(key, "");
    else if constexpr (std::is_same_v<T, bool>)
      value = object.boolean(key, false);
    else if constexpr (std::is_same_v<T, int>)
      value = static_cast<int>(object.integer(key, 0, 0, 65536));
    else
      value = object.number(key, 0, 0, 1e18);
  });
  return m;
}

}  // namespace rz::doctor
