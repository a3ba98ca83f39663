#include "tools/rzrun/flags/flags.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "comm/core/error.h"
#include "comm/core/text.h"

namespace rz::rzrun {
namespace {

constexpr const char* description =
    "rzrun -n N [OPTIONS] PROGRAM [ARGS…]\n"
    "rzrun --hostfile FILE [OPTIONS] PROGRAM [ARGS…]\n"
    "rzrun --nnodes N --rdzv-endpoint HOST:PORT [OPTIONS] PROGRAM [ARGS…]    (on each host)\n"
    "\n"
    "Starts N ranks of PROGRAM on this machine, or a rank for each slot of several, with the environment\n"
    "variables of torchrun, and ends all of them when one fails. All words after PROGRAM are its arguments.\n"
    "\n"
    "  rzrun -n 2 all_reduce_perf -b 8 -e 64M -f 2\n"
    "  rzrun -n 4 --prefix train_lm --model config.json --config ds.json --data .\n"
    "  rzrun -n 4 --log-dir logs --tee ./my_program\n"
    "  rzrun --hostfile hosts --include worker-0@worker-1:0,2 ./my_program";

constexpr const char* footer =
    R"(Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the other
variables of torchrun; RZ_LAUNCH, an identifier that is unique to this start of the ranks;
OMP_NUM_THREADS=1 if there are several ranks and it is not set; and, if it is not set, RZ_WAIT_REPORT_S=10:
ringzero then prints calls that have waited for 10 s, with the ranks that are missing. Rank 0 keeps the standard input unless
that is a terminal; the other ranks read /dev/null.

Each rank has a TORCHELASTIC_ERROR_FILE, beside its log files if there are any. A program may write the
reason of its end into it, as torch's @record does; rzrun writes that of a signal. The last line of rzrun is
the first failure with this reason, or that of the rank that it blames.

When a rank fails, the others end: they have 1 s to print errors of their own, and 3 s after status 2 (wrong
input), which one rank often explains for all. Then they and their child processes get
SIGTERM and, after the grace period, SIGKILL. Once all have ended, rzrun prints on standard error how the
others ended and in which call of ringzero they waited, and last which rank failed first, and how.

With --prefix or --tee no output is lost, however slowly it is read: ranks that print faster wait. Only
after a signal that ends the job is output dropped that nobody reads, which is reported with its size.

With --max-restarts K all ranks are then started again, up to K times, as torchrun does. The restarted
ranks get a new RZ_LAUNCH, a free MASTER_PORT unless --master-port is set, the same TORCHELASTIC_RUN_ID,
and the number of restarts as TORCHELASTIC_RESTART_COUNT (of TORCHELASTIC_MAX_RESTARTS). They write log
files to <log-dir>/restart<K>, and read the standard input from where rank 0 left it. A job removes the log
files that an earlier one has left in <log-dir>. A group that fails within 10 s is restarted after 0.1 s;
that pause doubles, up to 10 s, until a group lives longer. There is no restart after status 2 (wrong
input), 126 or 127 (the program cannot be executed), 130 or 143 (a
rank handled SIGINT or SIGTERM and ended), nor after a signal to rzrun.

SIGTERM, SIGINT (Ctrl-C), SIGHUP or SIGQUIT to rzrun ends the job: the ranks get SIGTERM, then SIGKILL as
above; another such signal, more than a second after the first, kills them at once. SIGUSR1 and SIGUSR2
are forwarded to the processes of the ranks that have a handler for them, each at most once a second.
Ctrl-Z (SIGTSTP) stops rzrun alone: the ranks go on, on other hosts too, which rzrun tells before; their
output waits. After SIGSTOP, of which it cannot tell them, other hosts end the job within 10 s.
Programs on ringzero's engine save at SIGUSR1, and save and end at SIGTERM. rzrun has a child, rz-supervisor;
SIGKILL of either of both kills all processes that the ranks have started.

With --hostfile an agent starts the ranks of each host: `rzrun --agent`, through ssh, which must need no
password. Program, arguments and variables go through that connection, not on a command line; ranks get the
variables of rzrun except those of a login or a machine (HOME, TMPDIR, SSH_…). The program, rzrun and the
working folder have the same paths on all hosts. Lines are printed with "[host:rank] " before them; log
files are each host's own; no rank reads the standard input. A rank is numbered by the order of the
hostfile; slots that a filter or --num_gpus chooses are its host's CUDA_VISIBLE_DEVICES. A host whose connection ends, or
which is silent for 10 s, is lost: the others end, and there is no restart. Agents that lose rzrun end
their ranks in the same way. On more than a few hosts use --launcher or --nnodes.

With --launcher openmpi one mpirun starts the agents of all hosts, and with --launcher slurm one srun, in an
allocation (salloc, sbatch). They connect to rzrun, on a free port of this host, and prove a secret of this job,
which is in RZ_SECRET of mpirun or srun, or in the file of RZ_SECRET_FILE if that is set. Without --hostfile the
hosts are those of SLURM_JOB_NODELIST; each has as many slots as tasks (SLURM_TASKS_PER_NODE) or, if that is 1 on
all or no tasks were asked for, as GPUs (SLURM_GPUS_PER_NODE, SLURM_GPUS_ON_NODE). srun exports all variables itself. In a job of Slurm slots
that a filter chooses are places in the CUDA_VISIBLE_DEVICES that Slurm set on their host.

With --nnodes rzrun is started on each host, as torchrun is, and needs no ssh. Node 0 (--node-rank 0, or the
host that has the address of --rdzv-endpoint) listens; the others wait for it up to join_timeout of
--rdzv-conf, 600 s. Both ends prove the secret of RZ_SECRET, RZ_SECRET_FILE or ~/.config/ringzero/secret, and
encrypt what they send (RZ_ENCRYPTION). Each host prints what its own ranks print, and has its own arguments, folder and variables; --nnodes, --rdzv-id,
--max-restarts, --role and the program must be equal. The exit status of all is that of the job. With MIN:MAX the job starts when MAX hosts
have come, or last_call_timeout (30 s) after MIN; with --max-restarts a host that is lost leaves the others to
start again if they are MIN or more, and one that comes late takes part after the next restart. A host whose
rzrun gets such a signal as above leaves in the same way, if more than MIN are there and a restart is left; its
ranks get SIGTERM. A lost node 0, and a signal to it, end the job.

A PROGRAM that ends in .py and is not executable, or has no "#!", runs as `python3 -u PROGRAM`, as with
torchrun; PYTHON_EXEC is another interpreter. No --local_rank is added unless --local_rank is given: programs
find LOCAL_RANK. All ranks get the variables of ~/.deepspeed_env and then ./.deepspeed_env, lines NAME=VALUE,
and those of -x; the last one holds, also over rzrun's own environment. DS_ENV_FILE is another name or path,
and no file if empty. rzrun's variables such as RANK are refused there, as is a file that every user may write
or, without DS_ENV_FILE, that belongs to another user. Also accepted, as in DeepSpeed: --no_local_rank and
--no_ssh_check (no effect), --bind_cores_to_rank (--bind core), --enable_each_rank_log DIR (--log-dir DIR).

With --config_file FILE ranks, hosts and devices are those of Accelerate's file, and its deepspeed_config,
fsdp_config, parallelism_config and mixed_precision become a DeepSpeed configuration in RZ_CONFIG, which
programs on ringzero's engine read if they have no other; the path of deepspeed_config_file is handed on as it
is. num_processes counts the ranks of all num_machines, which divide it; with several machines rzrun is started
on each, or, with deepspeed_hostfile, on one. Every key that Accelerate writes is known: an error names file,
line and remedy. Flags of `accelerate launch` set the same keys, and win over the file, as do rzrun's own; -x
and .deepspeed_env win over RZ_CONFIG. --dry-run prints it.

Exit status: 0 if every rank exited with 0; else that of the rank that failed first, after the last
restart, 128 + the signal's number if a signal ended it or rzrun; 255 if a host is lost; 2 for a wrong command
line; 126 or 127 if the program cannot be started.)";

void add_flags(CommandLine& line, Flags& f) {
  line.add_option("-n,--ranks", f.ranks, "Ranks to start").type_name("N");
  line.add_option(
          "--bind", f.program.bind,
          "core (default): bind each rank to whole cores, or several ranks to one core; none: no binding")
      .one_of({"core", "none"})
      .type_name("core|none");
  line.add_option("--grace", f.grace_s,
                  "Between SIGTERM and SIGKILL, for ranks that save before they end; default 30")
      .within(0.0, 86400.0)
      .type_name("SECONDS");
  line.add_option("--max-restarts,--max_restarts", f.max_restarts,
                  "Start all ranks again after a failure, at most K times; default 0")
      .within(0, 1000000)
      .type_name("K");
  line.add_option(
          "--master-port,--master_port", f.hosts.master_port,
          "MASTER_PORT; default: a free one; without --rdzv-endpoint also where node 0 of --nnodes listens")
      .within(1, 65535)
      .type_name("PORT");
}

JobSpec job_of(const Given& given, Remarks& remarks) {
  const Flags& f = given.flags;
  const Hosts hosts = choose_hosts(given, remarks);
  require(!f.program.command.empty(), Errc::config, "no program to start; try: rzrun -n ", hosts.ranks,
          " PROGRAM [ARGS…]");
  const Output output = choose_output(given, hosts);
  const Program program = choose_program(given, hosts, remarks);
  const auto restarts = given.setting("--max-restarts", concat(f.max_restarts)),
             id = given.setting("--rdzv-id", f.torchrun.rdzv_id);
  return {.hosts = hosts,
          .program = program,
          .output = output,
          .run_id = id.value == "none" ? "" : id.value,
          .max_restarts = restarts.is_set() ? number_of(restarts, 0, 1000000) : 0,
          .grace = std::chrono::milliseconds(static_cast<long>(f.grace_s * 1e3))};
}

}  // namespace

Flags::Flags() : line_(description, "rzrun", footer) {
  line_.allow_trailing_command();
  add_flags(line_, *this);
  add_log_flags(line_, log);
  add_host_flags(line_, hosts, dry_run);
  add_torchrun_flags(line_, torchrun, program.role);
  add_program_flags(line_, program, hosts, log);
  add_accelerate_flags(line_, accelerate);
}

std::string Flags::parse(int argc, const char* const* argv) {
  const auto words = take_tee(line_, {argv, argv + argc}, log);
  std::vector<const char*> arguments;
  for (const std::string& word : words) arguments.push_back(word.c_str());
  std::string help = line_.parse(static_cast<int>(arguments.size()), arguments.data());
  if (!help.empty()) return help;
  program.command = line_.remaining();
  require(!is_typed("-n") || ranks >= 1, Errc::config, "-n must be at least 1, not ", ranks);
  for (const auto& [flag, value] : {std::pair("--hostfile", &hosts.hostfile),
                                    {"--include", &hosts.include},
                                    {"--exclude", &hosts.exclude},
                                    {"--log-dir", &log.log_dir},
                                    {"--config_file", &accelerate.file}})
    require(!is_typed(flag) || !value->empty(), Errc::config, flag, ": a value is missing");
  return "";
}

bool Flags::any_typed(std::initializer_list<const char*> flags) const {
  return std::ranges::any_of(flags, [&](const char* flag) { return is_typed(flag); });
}

std::string variable_of(std::string_view flag) {
  std::string name = "PET_";
  for (const char c : flag.substr(2))
    name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

bool chooses_ranks(const Flags& f) { return f.any_typed({"-n", "--hostfile", "--include", "--num_gpus"}); }

Given::Setting Given::setting(const std::string& flag, const std::string& typed) const {
  if (flags.is_typed(flag)) {
    // Scripts give torchrun an empty endpoint for its default.
    require(!typed.empty() || flag.starts_with("--rdzv-"), Errc::config, flag, ": a value is missing");
    return {typed, flag};
  }
  if (const auto found = file.flags.find(flag); found != file.flags.end()) return found->second;
  const std::string name = variable_of(flag);
  const char* text = std::getenv(name.c_str());
  return {text && !chooses_ranks(flags) ? text : "", name};
}

bool is_true(const Given::Setting& given) {
  for (const char* word : {"1", "true", "True", "yes"})
    if (given.value == word) return true;
  for (const char* word : {"0", "false", "False", "no"})
    if (given.value == word) return false;
  fail(Errc::config, given.where, " ", hosts::quoted(given.value), ": true or false is needed");
}

bool Given::is_on(const std::string& flag, bool is_typed) const {
  const Setting set = setting(flag, "1");
  return is_typed || (set.is_set() && is_true(set));
}

std::string Given::text(const std::string& flag, const std::string& typed) const {
  const auto found = file.flags.find(flag);
  return flags.is_typed(flag) || found == file.flags.end() ? typed : found->second.value;
}

std::string nodes_text(int min_nodes, int max_nodes) {
  return min_nodes == max_nodes ? concat(min_nodes) : concat(min_nodes, ':', max_nodes);
}

std::string ranks_text(int first, int count) {
  return count == 1 ? concat("rank ", first) : concat("ranks ", first, " to ", first + count - 1);
}

bool Streams::has(int local_rank, int stream) const {
  for (const auto& [rank, streams] : of_rank)
    if (rank == local_rank) return (streams & stream) != 0;
  return (of_all & stream) != 0;
}

bool Streams::any() const {
  return of_all || std::ranges::any_of(of_rank, [](const auto& r) { return r.second != 0; });
}

bool Output::to_file(int local_rank, int stream) const {
  return !log_dir.empty() && (files.has(local_rank, stream) || tees.has(local_rank, stream));
}

bool Output::to_console(int local_rank, int stream) const {
  const bool is_shown = shown.empty() || std::ranges::count(shown, local_rank);
  return is_shown && (!to_file(local_rank, stream) || tees.has(local_rank, stream));
}

ParsedOptions parse_options(int argc, const char* const* argv) {
  ParsedOptions parsed;
  Options& o = parsed.options;
  if (argc == 2 && std::string_view(argv[1]) == "--agent") {
    o.agent = true;
    return parsed;
  }
  Flags flags;
  parsed.help = flags.parse(argc, argv);
  if (!parsed.help.empty()) return parsed;
  const accelerate::Translation file = read_accelerate(flags);
  o.dry_run = flags.dry_run;
  o.remarks = {file.notes, file.plan};
  o.job = job_of(Given(flags, file), o.remarks);
  return parsed;
}

}  // namespace rz::rzrun
