#pragma once
/// Hosts and their slots as launchers name them: hostfiles, DeepSpeed's filters. Functions are pure, but for
/// read_hostfile() and those of this host. Their errors are Errc::config in one line that names the place and
/// the word.

#include <string>
#include <string_view>
#include <vector>

#include "comm/bootstrap/node_lists.h"

namespace rz::hosts {

/// One host, with the slots (places for ranks, numbers of devices) that a job may use, in rising order.
struct Host {
  std::string name;
  std::vector<int> slots;
  bool filtered = false;  ///< a filter has left slots out
  bool operator==(const Host&) const = default;
};

/// With which some editors begin a file of UTF-8.
inline constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";

/// A hostfile, one host a line: "NAME slots=N", as DeepSpeed and Open MPI read it; Open MPI's "max_slots=M"
/// may follow. Blank lines are skipped, and comments from '#' to the end of a line. `file` is for messages.
std::vector<Host> parse_hostfile(std::string_view text, const std::string& file);
/// The hostfile at this path.
std::vector<Host> read_hostfile(const std::string& path);

/// The hosts and slots that DeepSpeed's --include names: NAME[:SLOT[,SLOT…]][@…]. A name alone means all its
/// slots. Order is that of `all`; a slot that is named twice counts once.
std::vector<Host> include(const std::vector<Host>& all, std::string_view filter);
/// `all` without what DeepSpeed's --exclude names, in the same grammar.
std::vector<Host> exclude(const std::vector<Host>& all, std::string_view filter);

/// The first `nodes` hosts, as of --num_nodes; the first `slots` slots of each, as of --num_gpus, which is a
/// filter. Errors name that flag.
std::vector<Host> first_nodes(std::vector<Host> all, int nodes);
std::vector<Host> first_slots(std::vector<Host> all, int slots);

/// The address of the first host that the others can reach: the one whose network the largest number of other
/// hosts has an address in, and of equal ones one of IPv4. Each host has its addresses with the length of
/// their prefix, such as "10.0.0.1/24" and "fd00::1/64". An address that two hosts have is that of a bridge
/// inside each. Empty if there is none.
std::string master_address(const std::vector<std::vector<std::string>>& addresses);

/// Addresses of the interfaces that are up, each with the length of its prefix. Loopback is left out, and
/// addresses that are valid on one link alone.
std::vector<std::string> own_addresses();
/// The name of this host.
std::string own_name();
/// True for "localhost" and the name of this host.
bool is_this_host(const std::string& name);

}  // namespace rz::hosts
