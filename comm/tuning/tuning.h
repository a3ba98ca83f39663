#pragma once
/// The tuning table as a value: a list of rules that select the algorithm of a call. tools/tune measures one
/// and writes it as text, and CommOptions::tuning (RZ_TUNING) is its path. Calls that no rule of the file
/// matches use the built-in tables (comm/tuning/select.cpp, comm/tuning/intranode.cpp), which consist of the
/// same rules.
///
///     # comment
///     all_reduce intra_node ranks=2 bytes<=64K one_shot
///     all_reduce intra_node ranks=2 two_shot chunk=32K
///     all_reduce intra_node_registered ranks=2 bytes<=4K staged
///     all_reduce inter_node ranks<=8 bytes<=16K tree
///
/// A rule is a collective, a scope, conditions, an algorithm, and optionally the size of a chunk (`chunk=`,
/// intra-node engine) or of a slice (`slice=`, schedules). The first rule that matches wins; with
/// `deterministic`, rules whose algorithm does not reduce in the group's order are skipped. Bytes are of the
/// whole buffer, the larger of a rank's input and output. Scopes:
///   intra_node             the ranks of one node, by the intra-node engine: "one_shot" and "two_shot" for
///                          all_reduce, "staged" for the others; or a schedule by the executor: "ring", or
///                          "schedule:two_shot" where the engine has an algorithm of that name. Schedules do
///                          not use registered buffers.
///   intra_node_registered  the same, if all ranks have mapped the buffers, such as those of
///                          Communicator::allocate(): "zero_copy" reads and writes them in place, "staged"
///                          treats them as other memory
///   intra_node_cma         the same, if all ranks may read each other's memory by process_vm_readv:
///                          "single_copy" (data movement only), "staged", or "adaptive": whichever was
///                          faster in the last samples
///   intra_node_schedule    one node without the intra-node engine (more than 256 ranks): schedules
///   inter_node             several nodes: schedules
///   multi_rank_nodes       the same, if some node has several ranks
///   any                    intra_node_schedule and inter_node
/// Rules of `ranks=N` serve other group sizes, too, for which the file has none (comm/tuning/group_size.h).

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/schedule/algorithms/algorithm.h"

namespace rz::tuning {

/// Scope of a rule, as described above.
enum class Scope : std::uint8_t {
  any,
  intra_node_schedule,
  inter_node,
  multi_rank_nodes,
  intra_node,
  intra_node_registered,
  intra_node_cma
};
/// True for scopes of the intra-node engine.
constexpr bool is_intra_node(Scope scope) { return scope >= Scope::intra_node; }

inline constexpr std::size_t any_bytes = std::numeric_limits<std::size_t>::max();
inline constexpr int any_size = std::numeric_limits<int>::max();

/// Origin of a rule. `other_size`: a rule of the file for another number of ranks.
enum class Source : std::uint8_t { built_in, file, other_size };

/// One rule of a table. All conditions must hold; limits are inclusive. `max_traffic` limits buffer bytes
/// times group size, for algorithms in which a rank sends its whole buffer to every other.
struct Rule {
  Collective collective;
  Scope scope;
  const char* algorithm;  ///< one of the library's names, with static lifetime
  int max_ranks = any_size;
  std::size_t max_bytes = any_bytes;
  std::size_t max_traffic = any_bytes;
  std::size_t min_bytes = 0;  ///< exclusive, unless 0: matches larger buffers only
  int min_ranks = 1;
  std::size_t chunk = 0;     ///< of the intra-node engine: bytes, a multiple of 64; 0: its default
  std::size_t slice = 0;     ///< of a schedule: bytes, a multiple of 64; 0: default_slice_bytes
  bool is_schedule = false;  ///< scope intra_node: a schedule, run by the executor
  Source source = Source::built_in;
};

/// The rule for explanations: "all_reduce intra-node, up to 64 KiB, up to 2 ranks".
std::string to_string(const Rule&);
/// Origin of a rule as prefix of an explanation: "built-in table: ", "tuning table FILE: ", …; `table` is the
/// file's name.
std::string source_prefix(const Rule&, const std::string& table);

struct Table {
  std::string name;  ///< of the file, for error messages; empty: no table
  std::vector<Rule> rules;

  bool empty() const { return rules.empty(); }
  /// The text form; parse_tuning() restores an equal table from it.
  std::string text() const;
};

/// Parses a table. The message of Errc::config has file, line, the wrong word and the valid ones.
Table parse_tuning(std::string_view text, const std::string& name);
/// Reads and parses a file; Errc::config, too, if it cannot be read.
Table read_tuning(const std::string& path);

/// The properties of a call that rules test.
struct RuleQuery {
  Collective collective;
  Scope scope;            ///< the narrowest one: multi_rank_nodes rather than inter_node; never any
  std::size_t bytes = 0;  ///< of the whole buffer: the larger of a rank's input and output
  int size = 1;
};

/// True if collective, scope, ranks and bytes match. Scope `any` matches all schedule scopes, `inter_node`
/// matches multi_rank_nodes too.
bool matches(const Rule&, const RuleQuery&);
/// The first rule that matches and, with `deterministic`, reduces in that order; null: none.
const Rule* find_rule(std::span<const Rule>, const RuleQuery&, bool deterministic,
                      ReductionOrder = ReductionOrder::rank);

/// The algorithm names of a collective in a scope: "one_shot, two_shot, …".
std::string algorithm_choices(Collective, Scope);
/// Sets `algorithm` and `is_schedule`. False: the collective has no such algorithm in the rule's scope.
bool set_algorithm(Rule&, std::string_view name);

Collective collective_from_name(std::string_view);  ///< Errc::config lists the collectives

}  // namespace rz::tuning
