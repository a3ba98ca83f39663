#pragma once
/// The tuning table as a value: which algorithm serves which calls. tools/tune measures one and writes it as
/// text, CommOptions::tuning (RZ_TUNING) names it, and what it does not hold is up to the built-in tables
/// (comm/tuning/select.cpp, comm/tuning/intranode.cpp), which are made of the same lines.
///
///     # comment
///     link shm alpha=0.41 beta=0.00012 gamma=0.00006
///     all_reduce one_host ranks=2 bytes<=64K one_shot
///     all_reduce one_host ranks=2 two_shot chunk=32K
///     all_reduce reachable ranks=2 bytes<=4K copied
///     all_reduce network ranks<=8 bytes<=16K tree
///
/// A line is a collective, a place, conditions, an algorithm, and perhaps a chunk. The first line that fits
/// wins; with `deterministic`, lines whose algorithm does not sum in rank order are passed over. Bytes are of
/// the whole buffer, the larger of a rank's input and output. Places:
///   one_host    ranks that meet in shared memory: "one_shot" and "two_shot" of all_reduce, "letters" of the
///               others, or a schedule over streams ("ring", or "streams:two_shot" where ranks that meet have
///               a way of that name, for which memory is not asked where it lies)
///   reachable   the same, and every rank reaches the call's memory, e.g. that of Communicator::allocate():
///               "direct" reads and writes it where it lies, "copied" does as if it were any memory
///   readable    the same, and every rank may read every other's memory through the kernel
///               (process_vm_readv): "single_copy" of what only moves, "copied" through shared memory,
///               or "by_time": whichever took less time when both were last tried
///   streams     one host whose ranks do not meet (more than 256 of them): schedules
///   network     ranks of several hosts: schedules
///   multi_rank_nodes the same, and some of the hosts have several ranks
///   anywhere    streams and network
/// Links are the cost model's (comm/tuning/cost_model.h) and fill what no line holds, for groups up to 64.

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/schedule/algorithms/algorithm.h"

namespace rz {

/// One_host: "streams".
enum class TuningScope : std::uint8_t {
  any,
  intra_node_schedule,
  inter_node,
  multi_rank_nodes,
  intra_node,
  intra_node_registered,
  intra_node_cma
};
/// In shared memory, without streams.
constexpr bool is_intra_node(TuningScope where) { return where >= TuningScope::intra_node; }

inline constexpr std::size_t any_bytes = std::numeric_limits<std::size_t>::max();
inline constexpr int any_size = std::numeric_limits<int>::max();

/// Who says so.
enum class Source : std::uint8_t { built_in, file, interpolated, model };

/// One line of a table: the algorithm serves groups up to `size` ranks, buffers up to `bytes`, and, of a
/// rank that sends its whole buffer to everybody, up to `traffic` bytes in all (buffer times group size).
struct TuningRule {
  Collective collective;
  TuningScope scope;
  const char* algorithm;  ///< of the library's names: it outlives everything
  int max_ranks = any_size;
  std::size_t max_bytes = any_bytes;
  std::size_t max_traffic = any_bytes;
  std::size_t min_bytes = 0;  ///< and buffers of more than that, if it is not 0
  int min_ranks = 1;
  std::size_t chunk = 0;     ///< bytes, a multiple of 64; 0: as the executor has it
  bool is_schedule = false;  ///< of `together`: a schedule, over streams
  Source source = Source::built_in;
};

/// "all_reduce on one host, up to 64 KiB, up to 2 ranks".
std::string to_string(const TuningRule&);
/// What comes before that: "built-in table: ", "tuning.txt: ", …; `table` is the file's name.
std::string source_prefix(const TuningRule&, const std::string& table);

/// What a link costs, us: a message, a byte of it, and a byte that is combined or copied where it arrives.
struct LinkCost {
  double alpha = 0, beta = 0, gamma = 0;
};

struct Tuning {
  std::string name;  ///< the file's, for messages; empty: there is no table
  std::vector<TuningRule> rules;
  std::optional<LinkCost> shm, tcp;

  bool empty() const { return rules.empty() && !shm && !tcp; }
  /// As parse_tuning() reads it.
  std::string text() const;
};

/// Errc::config says file, line, what is wrong there, and what may stand there instead.
Tuning parse_tuning(std::string_view text, const std::string& name);
/// Errc::config, too, if the file cannot be read.
Tuning read_tuning(const std::string& path);

/// A call, as rules see it.
struct RuleQuery {
  Collective collective;
  TuningScope scope;      ///< the narrowest place: multi_rank_nodes rather than network; never anywhere
  std::size_t bytes = 0;  ///< of the whole buffer: the larger of a rank's input and output
  int size = 1;
};

/// Whether the rule serves the call: collective, place, ranks and bytes. Rules for `anywhere` serve all
/// schedules, rules for `network` those of multi_rank_nodes too.
bool matches(const TuningRule&, const RuleQuery&);
/// The first rule that matches and, with `deterministic`, sums in rank order; null: there is none.
const TuningRule* find_rule(std::span<const TuningRule>, const RuleQuery&, bool deterministic);

/// The names that a line for that place, or a forced one, may have: "one_shot, two_shot, …".
std::string algorithm_choices(Collective, TuningScope);
/// Fills the rule's algorithm, its `streams` too. False: the collective has no such name at that place.
bool set_algorithm(TuningRule&, std::string_view name);

/// "64K" and the like, exactly; and back: nothing, if it is no size.
std::string exact_bytes(std::size_t);
std::optional<std::size_t> bytes_from(std::string_view);
Collective collective_from_name(std::string_view);  ///< Errc::config lists the collectives

}  // namespace rz
