#include "tools/command_line/launcher_flags.h"

#include <algorithm>

namespace rz {
namespace {

/// The advice for rzrun, and for the programs that it starts.
struct Instead {
  std::string_view in_rzrun, in_programs;
};

constexpr Instead ranks{"use -n N", "start the ranks with rzrun -n N PROGRAM"};
constexpr Instead hosts{"use --hostfile FILE, with a line 'NAME slots=N' for each host",
                        "use rzrun --hostfile FILE PROGRAM, with a line 'NAME slots=N' for each host"};
constexpr Instead filter{"use --include HOST:SLOT,SLOT", "use rzrun --include HOST:SLOT,SLOT PROGRAM"};
constexpr Instead ssh{"use --ssh_port PORT, or --rsh 'ssh OPTIONS'",
                      "use rzrun --ssh_port PORT or --rsh 'ssh OPTIONS'"};
constexpr Instead not_needed{"leave it out, rzrun does not need it",
                             "leave it out, rzrun -n N PROGRAM does not need it"};
constexpr Instead each_host{"use it as with torchrun",
                            "start rzrun with this flag, as torchrun: rzrun FLAGS PROGRAM"};
constexpr Instead on_each{"use --nnodes N --node-rank R --master-addr HOST on each host",
                          "use rzrun --nnodes N --node-rank R --master-addr HOST PROGRAM on each host"};
constexpr Instead of_accelerate{"use it as with accelerate launch",
                                "start rzrun with this flag, as accelerate launch: rzrun FLAGS PROGRAM"};
constexpr Instead rendezvous{
    "use --rdzv-endpoint HOST:PORT, as with torchrun; --hostfile FILE needs no address",
    "leave it out; the program reads MASTER_ADDR and MASTER_PORT"};
constexpr Instead port{"use --master-port PORT", "use rzrun --master-port PORT, or set MASTER_PORT"};
constexpr Instead binding{"use --bind core or --bind none", "use rzrun --bind core or rzrun --bind none"};
constexpr Instead placement{"use -n N, and --bind core or --bind none to place ranks",
                            "use rzrun -n N, and its --bind to place ranks"};
constexpr Instead logs{"use --log-dir DIR", "use rzrun --log-dir DIR"};
constexpr Instead labels{"use --prefix", "use rzrun --prefix"};
constexpr Instead restarts{"use --max-restarts K", "use rzrun --max-restarts K"};
constexpr Instead grace{"use --grace SECONDS", "use rzrun --grace SECONDS"};
constexpr Instead module{"use --module", "use rzrun -n N --module MODULE"};
constexpr Instead not_here{"leave it out; plan --memory proposes a mesh, and tune measures collectives",
                           "leave it out; plan --memory proposes a mesh, and tune measures collectives"};
constexpr Instead elastic{"use --max-restarts K; a checkpoint resumes on any number of ranks",
                          "use rzrun --max-restarts K; a checkpoint resumes on any number of ranks"};
constexpr Instead own_pid{"leave it out; $! of the shell is the process id of rzrun",
                          "leave it out; $! of the shell is the process id of rzrun"};
constexpr Instead venv{"activate it before rzrun, ranks inherit its variables",
                       "activate it before rzrun, ranks inherit its variables"};
constexpr Instead cores{"use taskset -c LIST rzrun; ranks are bound within these cores",
                        "use taskset -c LIST rzrun; ranks are bound within these cores"};
constexpr Instead of_srun{"leave it out, or start the ranks with srun and its flag",
                          "leave it out, or start the ranks with srun and its flag"};
constexpr Instead in_allocation{
    "give it to salloc or sbatch, and use --launcher slurm there; on one host use -n N",
    "give it to salloc or sbatch, and start the ranks there with rzrun --launcher slurm PROGRAM, or srun"};
constexpr Instead environment{"use -x NAME=VALUE, or set the variable before rzrun",
                              "set the variable in the environment, ranks inherit it"};
constexpr Instead local_rank{"leave it out, ranks find LOCAL_RANK in their environment",
                             "leave it out, the program finds LOCAL_RANK in its environment"};
constexpr Instead configuration{"put it behind PROGRAM: train_lm --config DS.json",
                                "use --config DS.json of train_lm"};
constexpr Instead backend{"set RZ_BACKEND, or put --backend NAME behind PROGRAM",
                          "use --backend NAME, or set RZ_BACKEND"};

constexpr LauncherFlag row(std::string_view flag, std::string_view launcher, Instead instead) {
  return {flag, launcher, instead.in_rzrun, instead.in_programs};
}

constexpr LauncherFlag table[] = {
    row("--nproc-per-node", "torchrun", each_host),
    row("--nnodes", "torchrun", each_host),
    row("--node-rank", "torchrun", each_host),
    row("--standalone", "torchrun", each_host),
    row("--rdzv-backend", "torchrun", each_host),
    row("--rdzv-endpoint", "torchrun", each_host),
    row("--rdzv-id", "torchrun", each_host),
    row("--rdzv-conf", "torchrun", each_host),
    row("--master-addr", "torchrun", rendezvous),
    row("--master-port", "torchrun", port),
    row("--local-addr", "torchrun", each_host),
    row("--max-restarts", "torchrun", restarts),
    row("--monitor-interval", "torchrun", each_host),
    row("--start-method", "torchrun", each_host),
    row("--role", "torchrun", each_host),
    row("--no-python", "torchrun", not_needed),
    row("--run-path", "torchrun", not_needed),
    row("--logs-specs", "torchrun", logs),
    row("--event-log-handler", "torchrun", not_needed),
    row("--duplicate-stdout-filters", "torchrun", not_needed),
    row("--duplicate-stderr-filters", "torchrun", not_needed),
    row("--signals-to-handle", "torchrun", not_needed),
    row("--virtual-local-rank", "torchrun", not_needed),
    row("--shutdown-timeout", "torchrun", grace),
    row("--log-line-prefix-template", "torchrun", labels),
    row("--numa-binding", "torchrun", binding),
    row("--module", "torchrun", module),
    row("--redirects", "torchrun", logs),
    row("--log-dir", "torchrun", logs),
    row("--tee", "torchrun", each_host),
    row("--local-ranks-filter", "torchrun", each_host),
    row("--use-env", "torchrun", local_rank),
    row("--local-rank", "torchrun", local_rank),
    row("-N", "srun", in_allocation),
    row("--nodes", "srun", in_allocation),
    row("--ntasks", "srun", in_allocation),
    row("--ntasks-per-node", "srun", in_allocation),
    row("-np", "mpirun", ranks),
    row("--np", "mpirun", ranks),
    row("-npernode", "mpirun", ranks),
    row("--npernode", "mpirun", ranks),
    row("-ppn", "mpirun", ranks),
    row("-host", "mpirun", hosts),
    row("--host", "mpirun", hosts),
    row("-H", "mpirun", hosts),
    row("-hostfile", "mpirun", hosts),
    row("--hostfile", "mpirun", hosts),
    row("-machinefile", "mpirun", hosts),
    row("--machinefile", "mpirun", hosts),
    row("-map-by", "mpirun", placement),
    row("--map-by", "mpirun", placement),
    row("-rank-by", "mpirun", placement),
    row("--rank-by", "mpirun", placement),
    row("-bind-to", "mpirun", binding),
    row("--bind-to", "mpirun", binding),
    row("--bind-to-core", "mpirun", binding),
    row("--report-bindings", "mpirun", binding),
    row("-oversubscribe", "mpirun", not_needed),
    row("--oversubscribe", "mpirun", not_needed),
    row("--allow-run-as-root", "mpirun", not_needed),
    row("--use-hwthread-cpus", "mpirun", not_needed),
    row("-tag-output", "mpirun", labels),
    row("--tag-output", "mpirun", labels),
    row("-output-filename", "mpirun", logs),
    row("--output-filename", "mpirun", logs),
    row("-x", "mpirun", environment),
    row("-genv", "mpirun", environment),
    row("-mca", "mpirun", backend),
    row("--mca", "mpirun", backend),
    row("--num-gpus", "deepspeed", ranks),
    row("--num-nodes", "deepspeed", hosts),
    row("--include", "deepspeed", filter),
    row("--exclude", "deepspeed", filter),
    row("--launcher", "deepspeed", hosts),
    row("--launcher-args", "deepspeed", ssh),
    row("--no-ssh", "deepspeed", on_each),
    row("--ssh-port", "deepspeed", ssh),
    row("--force-multi", "deepspeed", hosts),
    row("--no-local-rank", "deepspeed", local_rank),
    row("--bind-cores-to-rank", "deepspeed", binding),
    row("--bind-core-list", "deepspeed", cores),
    row("--no-ssh-check", "deepspeed", not_needed),
    row("--num-accelerators", "deepspeed", ranks),
    row("--autotuning", "deepspeed", not_here),
    row("--elastic-training", "deepspeed", elastic),
    row("--min-elastic-nodes", "deepspeed", elastic),
    row("--max-elastic-nodes", "deepspeed", elastic),
    row("--save-pid", "deepspeed", own_pid),
    row("--venv-script", "deepspeed", venv),
    row("--comment", "deepspeed", of_srun),
    row("--account", "deepspeed", of_srun),
    row("--enable-each-rank-log", "deepspeed", logs),
    row("--localhost", "deepspeed",
        {"write --include localhost:SLOT,SLOT", "start it with rzrun --include localhost:SLOT,SLOT PROGRAM"}),
    row("--deepspeed", "deepspeed", configuration),
    row("--deepspeed-config", "deepspeed", configuration),
    row("--config-file", "accelerate", of_accelerate),
    row("--deepspeed-config-file", "accelerate", of_accelerate),
    row("--use-deepspeed", "accelerate", of_accelerate),
    row("--use-fsdp", "accelerate", of_accelerate),
    row("--multi-gpu", "accelerate", of_accelerate),
    row("--num-processes", "accelerate", of_accelerate),
    row("--num-machines", "accelerate", of_accelerate),
    row("--machine-rank", "accelerate", of_accelerate),
    row("--main-process-ip", "accelerate", of_accelerate),
    row("--main-process-port", "accelerate", of_accelerate),
    row("--gpu-ids", "accelerate", of_accelerate),
    row("--mixed-precision", "accelerate", of_accelerate),
    row("--zero-stage", "accelerate", of_accelerate),
};

bool same_flag(std::string_view a, std::string_view b) {
  const bool long_ones = a.starts_with("--") && b.starts_with("--");
  return std::ranges::equal(a, b, [&](char x, char y) {
    return x == y || (long_ones && (x == '-' || x == '_') && (y == '-' || y == '_'));
  });
}

}  // namespace

std::span<const LauncherFlag> launcher_flags() { return table; }

const LauncherFlag* find_launcher_flag(std::string_view flag) {
  const auto found = std::ranges::find_if(table, [&](const auto& row) { return same_flag(row.flag, flag); });
  return found == std::end(table) ? nullptr : found;
}

}  // namespace rz
