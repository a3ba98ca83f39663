#pragma once
/// Judgement of facts: pure functions, one a check.

#include <span>
#include <string>
#include <vector>

#include "tools/doctor/host_facts.h"

namespace rz::doctor {

/// `warning`: a job runs, but slower or with a risk. `missing`: it would not run.
enum class Verdict { ok, warning, missing };
const char* name(Verdict);

struct Finding {
  std::string host;   ///< by the name in the hostfile; of a pair "a -> b"; empty: all
  std::string check;  ///< such as "open files"
  std::string found, needed;
  Verdict verdict = Verdict::ok;
  std::string remedy;  ///< one imperative sentence with the command; empty if all is well
};

/// The part of a job that runs on one host.
struct Job {
  int nodes = 1;
  int ranks = 1;        ///< of the whole job
  int local_ranks = 1;  ///< on this host
  bool cuda = false;
  bool first = true;   ///< rank 0 is on this host
  int sockets = 2;     ///< CommOptions::sockets
  std::string master;  ///< MASTER_ADDR; empty: none
};

/// All checks of one host, in the order of the table.
std::vector<Finding> check_host(const std::string& host, const HostFacts&, const Job&);

/// A host as the hostfile names it.
struct NamedFacts {
  std::string host;
  HostFacts facts;
  double before = 0, after = 0;  ///< this process's clock when the facts were asked for, and when they came
};

/// What must be equal on all hosts. The first one is that of rank 0.
std::vector<Finding> compare_hosts(std::span<const NamedFacts>, const Job&);

/// What was measured between two hosts.
struct PairMeasurement {
  std::string from, to;  ///< hosts
  std::string address;   ///< of `to`, to which `from` has connected
  std::string error;     ///< no connection, or it broke; empty if all was measured
  bool connected = false;
  double round_trip_us = 0;                ///< median, 8 bytes
  double send_rate = 0, receive_rate = 0;  ///< bytes a second, of one TCP connection
  int packet = 0;                          ///< bytes of the largest packet that `from`'s interface sends
  int passed = 0;  ///< bytes of the largest packet that arrives unfragmented; 0: none, of any size
};
std::string to_json(const PairMeasurement&);
PairMeasurement parse_measurement(const std::string& json, const std::string& source);

/// Judges the pairs, also beside each other.
std::vector<Finding> check_pairs(std::span<const PairMeasurement>);

}  // namespace rz::doctor
