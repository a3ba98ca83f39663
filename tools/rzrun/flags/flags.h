#pragma once
/// The command line of rzrun in stages, each with a type of its own, which the next cannot change: words →
/// Flags (what was typed) → Given (with Accelerate's file and torchrun's variables) → Hosts → Output and
/// Program → JobSpec. All errors are Errc::config in one line that names the flag, or file and line.

#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/command_line/command_line.h"
#include "tools/rzrun/accelerate/translation.h"
#include "tools/rzrun/flags/job.h"

namespace rz::rzrun {

using ParsedOptions = Parsed<Options>;

/// All stages.
ParsedOptions parse_options(int argc, const char* const* argv);

// ---- words → Flags

/// Hosts and their slots, with DeepSpeed's names and grammar.
struct HostFlags {
  std::string hostfile, include, exclude;
  int num_nodes = 0, num_gpus = 0;
  bool force_multi = false;                    ///< an agent also for this host alone
  std::string default_file = "/job/hostfile";  ///< DeepSpeed's, in place of `hostfile` if it is there
  std::string launcher, launcher_args, rsh, master_addr;
  int ssh_port = 0, master_port = 0;
};

/// Torchrun's flags, with its names and meaning.
struct TorchrunFlags {
  std::string nnodes, node_rank, nproc, rdzv_backend, rdzv_endpoint, rdzv_id, rdzv_conf, local_addr;
  std::string monitor_interval, start_method;
  bool standalone = false;
};

/// Where the output of the ranks goes: --log-dir, --tee and --prefix, and torchrun's --redirects, --tee WHAT
/// and --local-ranks-filter.
struct LogFlags {
  bool prefix = false;
  std::string log_dir, redirects, filter;
  bool tee = false;           ///< --tee of rzrun, which has no value
  std::string tee_of;         ///< torchrun's --tee WHAT
  std::string each_rank_log;  ///< DeepSpeed's --enable_each_rank_log
};

/// The program and its variables.
struct ProgramFlags {
  std::vector<std::string> command;
  std::string bind = "core", role = "default";
  bool module = false, no_python = false, local_rank = false, no_local_rank = false;
  bool bind_cores_to_rank = false, no_ssh_check = false;
  std::vector<std::string> variables;  ///< NAME or NAME=VALUE
};

/// --config_file, and the flags of `accelerate launch`, as far as rzrun has no flag of that name already.
struct AccelerateFlags {
  std::string file;
  std::deque<std::string> values;  ///< by row of accelerate::keys(); a toggle is in `toggles`
  std::deque<bool> toggles;
};

/// What was typed.
class Flags {
 public:
  Flags();
  Flags(const Flags&) = delete;  // its command line refers to it
  /// Returns "", or the text of --help or --version.
  std::string parse(int argc, const char* const* argv);
  bool is_typed(const std::string& flag) const { return line_.is_set(flag); }
  bool any_typed(std::initializer_list<const char*> flags) const;

  int ranks = 0, max_restarts = 0;
  double grace_s = 30;
  bool dry_run = false;
  HostFlags hosts;
  TorchrunFlags torchrun;
  LogFlags log;
  ProgramFlags program;
  AccelerateFlags accelerate;

 private:
  CommandLine line_;
};

/// Each adds the flags that its file reads, which are members of these structs.
void add_log_flags(CommandLine&, LogFlags&);
void add_host_flags(CommandLine&, HostFlags&, bool& dry_run);
void add_torchrun_flags(CommandLine&, TorchrunFlags&, std::string& role);
void add_program_flags(CommandLine&, ProgramFlags&, HostFlags&, LogFlags&);
void add_accelerate_flags(CommandLine&, AccelerateFlags&);

/// The words without the values of torchrun's `--tee WHAT`, which go to LogFlags::tee_of, since --tee of
/// rzrun has none. WHAT begins with a digit: "3", or "0:1,1:2" for local ranks 0 and 1.
std::vector<std::string> take_tee(const CommandLine&, std::vector<std::string> words, LogFlags&);

/// The command line chooses ranks itself: variables of torchrun do not count then, since they may be those of
/// a job around this one.
bool chooses_ranks(const Flags&);
/// "PET_NNODES" of "--nnodes".
std::string variable_of(std::string_view flag);

// ---- Flags → Given

/// What Accelerate's file and its flags give, for flags that were not typed.
accelerate::Translation read_accelerate(const Flags&);

/// The value of each flag: as typed, else as in Accelerate's file, else that of torchrun's variable, which is
/// PET_NNODES for --nnodes. Variables count only if the command line does not choose ranks and hosts itself.
class Given {
 public:
  using Setting = accelerate::Setting;

  Given(const Flags& f, const accelerate::Translation& l) : flags(f), file(l) {}
  /// Of a flag that torchrun has. `typed`: its value if it was.
  Setting setting(const std::string& flag, const std::string& typed) const;
  /// The same of a flag without a value: whether it is typed, or its variable is true.
  bool is_on(const std::string& flag, bool is_typed) const;
  /// Of a flag that torchrun does not have: as typed, or of the file.
  std::string text(const std::string& flag, const std::string& typed) const;

  const Flags& flags;
  const accelerate::Translation& file;
};

// ---- Given → Hosts

/// Number and place of the ranks, from all flags about hosts.
Hosts choose_hosts(const Given&, Remarks&);
/// The words that start the agent of a host: through ssh or the command of --rsh, or without on this host.
std::vector<std::string> agent_command(const Starter&, const std::string& host);

/// What torchrun's flags choose.
struct Node {
  int ranks = 0;                         ///< of this host; 0: they choose none
  std::optional<Rendezvous> rendezvous;  ///< if rzrun is started on several hosts
  std::string master_addr;               ///< of one host, by --local-addr
};
/// Also refuses values of flags that have no effect, and names PET_ variables of no flag in a note.
Node choose_node(const Given&, Remarks&);

/// A value that is set, as a whole number within these limits, or as a truth value.
int number_of(const Given::Setting&, int min, int max);
bool is_true(const Given::Setting&);
/// "2" or "2:4". `where`, here and below: "--nnodes", for messages.
std::pair<int, int> parse_nnodes(const std::string& text, const std::string& where);
/// A number, "cpu" (processors), "gpu" (devices) or "auto" (devices if there are any, else processors).
int parse_nproc(const std::string& text, const std::string& where, int devices, int processors);
/// "join_timeout=900,last_call_timeout=10,is_host=1". Keys of torchrun that rzrun does not need change
/// nothing; unknown ones are errors.
void parse_rdzv_conf(const std::string& text, const std::string& where, Rendezvous&);

// ---- Hosts → Output, Program

Output choose_output(const Given&, const Hosts&);
/// "0", "1", "2" or "3" for all ranks, or "0:1,1:3" for local ranks 0 and 1, below `ranks`.
Streams parse_streams(const std::string& text, const std::string& where, int ranks);

/// Puts the interpreter before a Python program, and reads the variables of files and of -x.
Program choose_program(const Given&, const Hosts&, Remarks&);

// Parts of it.

/// Lines NAME=VALUE; blank lines and lines that begin with '#' are skipped, and "export " may stand before
/// NAME. Spaces around NAME and VALUE do not count. Quotes around VALUE, single or double, are removed. What
/// a shell would do with '$', '`', or a comment behind VALUE is not done: without single quotes it is an
/// error. A name that is there twice has its last value. Errors are Errc::config in one line: FILE:LINE:
/// what; remedy.
Variables parse_environment_file(std::string_view text, const std::string& file);

struct EnvironmentFile {
  std::string path;
  Variables variables;
};

/// ~/.deepspeed_env and then ./.deepspeed_env, as far as they exist; DS_ENV_FILE is another name instead of
/// .deepspeed_env, or a path, and no file if it is empty. Its variables can start any program, so a file is
/// refused that every user may write, or that has another owner; DS_ENV_FILE permits the latter.
std::vector<EnvironmentFile> read_environment_files();

/// Refuses a variable that rzrun sets itself for each rank, such as RANK, and a name that is none. `place` is
/// where it was given.
void check_variable(std::string_view name, std::string_view value, const std::string& place);

// ---- all of it

/// What would run where, as --dry-run prints it. `node`: the lines about this host, if rzrun is started on
/// each.
std::string describe_plan(const JobSpec&, const std::vector<std::string>& plan, const std::string& node);

}  // namespace rz::rzrun
