#include "comm/bootstrap/mpi_rendezvous.h"

#include <vector>

#include "comm/bootstrap/mpi_library.h"
#include "comm/bootstrap/secret.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/net/listening.h"
#include "comm/net/random.h"

namespace rz {

namespace {

using std::chrono::milliseconds;

constexpr std::size_t max_addresses = 16;

/// What the ranks must have in common: a variable of the secret, and the backend.
std::string choice(const std::string& backend) { return concat(variable_of_secret(), '\n', backend); }

/// How ranks with this variable authenticate each other.
enum class Authenticated { by_mpi, not_at_all, by_variable };
Authenticated authenticated(const std::string& variable) {
  if (variable.empty()) return Authenticated::by_mpi;
  return variable == "RZ_INSECURE" ? Authenticated::not_at_all : Authenticated::by_variable;
}

void require_alike(const std::vector<std::string>& choices) {
  const auto first = parts_of(choices[0], '\n');
  for (std::size_t r = 1; r < choices.size(); ++r) {
    const auto own = parts_of(choices[r], '\n');
    const auto rank = static_cast<int>(r);
    const auto differ = [rank](const std::string& what) { throw Error(Errc::config, what, rank); };
    if (authenticated(own[0]) != authenticated(first[0]))
      differ(
          concat("rank ", r, " has ", own[0].empty() ? "no RZ_SECRET" : own[0], ", but rank 0 has ",
                 first[0].empty() ? "no RZ_SECRET" : first[0],
                 "; set it on all hosts, as mpirun does with -x, or on none: MPI then hands on a secret of "
                 "this job"));
    if ((own[1] == "mpi") != (first[1] == "mpi"))
      differ(concat("rank ", r, " has the backend '", own[1], "', but rank 0 has '", first[1],
                    "'; give all ranks one, as by mpirun -x RZ_BACKEND"));
  }
}

/// Where rank 0 listens, and by what the others get in.
struct Place {
  std::vector<std::string> addresses;  ///< host:port
  std::string secret;                  ///< empty: that of a variable, or none
  std::string launch;

  std::string text() const {
    std::string all;
    for (const std::string& a : addresses) all += concat(all.empty() ? "" : ",", a);
    return concat(all, '\n', secret, '\n', launch);
  }
  static Place of_text(const std::string& text) {
    const auto lines = parts_of(text, '\n');
    require(lines.size() == 3, Errc::rendezvous, "rank 0 sent '", lines[0],
            "', which is no address of a store; all ranks need one version of ringzero");
    return {parts_of(lines[0], ','), lines[1], lines[2]};
  }
};

std::shared_ptr<Store> open_store(const LaunchInfo& info, const Place& place, milliseconds timeout) {
  return tcp_store(place.addresses.front(), {.serve = info.rank == 0,
                                             .timeout = timeout,
                                             .launch = place.launch,
                                             .remote = true,
                                             .size = info.size,
                                             .rank = info.rank,
                                             .addresses = place.addresses,
                                             .secret = place.secret});
}

/// Runs on rank 0: its place, where `store` listens.
std::string serve(const LaunchInfo& info, milliseconds timeout, const std::vector<std::string>& choices,
                  std::shared_ptr<Store>& store) {
  require_alike(choices);
  Place place{.launch = info.launch};
  if (variable_of_secret().empty()) place.secret = net::random_hex() + net::random_hex();
  const std::string& interface = environment().interface;
  auto addresses = net::reachable_addresses(interface);
  require(!addresses.empty(), Errc::config, "the host of rank 0 has no address that other hosts reach",
          interface.empty() ? "" : concat(" at RZ_INTERFACE='", interface, "'"));
  if (addresses.size() > max_addresses) addresses.resize(max_addresses);
  for (auto& a : addresses) place.addresses.push_back(net::join_host_port(a.host(), 0));
  store = open_store(info, place, timeout);
  place.addresses.clear();
  for (auto& a : addresses) place.addresses.push_back(net::join_host_port(a.host(), tcp_store_port(*store)));
  return place.text();
}

}  // namespace

std::shared_ptr<Store> mpi_rendezvous_store(const LaunchInfo& info, const std::string& backend,
                                            milliseconds timeout) {
  const auto served = std::make_shared<std::shared_ptr<Store>>();
  const auto answer = [info, timeout, served](const std::vector<std::string>& choices) {
    return serve(info, timeout, choices, *served);
  };
  std::string text;
  try {
    text = exchange_over_mpi({.rank = info.rank,
                              .size = info.size,
                              .launcher = info.launcher,
                              .timeout = timeout,
                              .own = choice(backend),
                              .answer = answer,
                              .keep = backend == "mpi"});
  } catch (const Error& e) {
    if (e.code() != Errc::unsupported) throw;
    fail(Errc::config, "the environment of ", info.launcher,
         ": MASTER_ADDR and MASTER_PORT are missing, and only ", info.local_size, " of ", info.size,
         " ranks are on this host; set both (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500). MPI, which "
         "would hand them on, cannot: ",
         e.what());
  }
  if (info.rank == 0) return *served;
  return open_store(info, Place::of_text(text), timeout);
}

}  // namespace rz
