#include "tools/rzrun/flags/program_flags.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "comm/core/error.h"
#include "tools/rzrun/flags/environment_file.h"
#include "tools/rzrun/flags/launchers.h"

namespace rz::rzrun {
namespace {

bool begins_with_interpreter(const std::string& path) {
  char begin[2] = {};
  std::ifstream(path).read(begin, 2);
  return begin[0] == '#' && begin[1] == '!';
}

/// A file of Python that does not start itself.
bool is_python_script(const std::string& path) {
  struct stat s {};
  if (!path.ends_with(".py")) return false;
  if (::stat(path.c_str(), &s) != 0) return path.find('/') != std::string::npos;  // python3 explains it
  return S_ISREG(s.st_mode) && (::access(path.c_str(), X_OK) != 0 || !begins_with_interpreter(path));
}

void add_interpreter(const ProgramFlags& f, Options& o) {
  require(!f.module || !f.no_python, Errc::config,
          "--module and --no_python exclude each other: a module needs python");
  require(!f.local_rank || !f.no_local_rank, Errc::config,
          "--local_rank and --no_local_rank exclude each other");
  std::vector<std::string> words;
  if (f.module || (!f.no_python && !o.command.empty() && is_python_script(o.command.front()))) {
    const char* const python = std::getenv("PYTHON_EXEC");
    words = {python && *python ? python : "python3", "-u"};
    if (f.module) words.push_back("-m");
  } else if (std::string& own = o.command.front();
             own.ends_with(".py") && own.find('/') == own.npos && ::access(own.c_str(), X_OK) == 0) {
    own.insert(0, "./");  // a script is that of this folder, not one of PATH
  }
  if (f.local_rank) o.local_rank_at = static_cast<int>(words.size()) + 1;
  o.command.insert(o.command.begin(), words.begin(), words.end());
}

void add_variable(const std::string& word, Options& o) {
  require(!word.empty(), Errc::config, "-x: a value is missing; write -x NAME or -x NAME=VALUE");
  const std::string place = concat("-x ", word.substr(0, word.find('=')), ": ");
  const auto equals = word.find('=');
  std::string name = word.substr(0, equals), value;
  if (equals == std::string::npos) {
    const char* const own = std::getenv(word.c_str());
    require(own, Errc::config, place, "is not set here; set it, or write -x ", word, "=VALUE");
    value = own;
  } else {
    value = word.substr(equals + 1);
  }
  check_variable(name, value, place);
  o.variables.emplace_back(std::move(name), std::move(value));
}

}  // namespace

void add_program_flags(CommandLine& line, ProgramFlags& f, HostFlags& h) {
  const std::string heading = "Python programs and variables", deepspeed = "";  // not shown
  line.add_flag("-m,--module", f.module, "PROGRAM is a module of Python: python3 -u -m PROGRAM")
      .group(heading);
  line.add_flag("--no_python,--no-python", f.no_python,
                "Start a file that ends in .py itself, without python3")
      .group(heading);
  line.add_flag("--local_rank,--local-rank", f.local_rank, "Add --local_rank=R behind PROGRAM")
      .group(heading);
  line.add_option("-x", f.variables, "A variable for all ranks; may be repeated")
      .type_name("NAME[=VALUE]")
      .one_value_each()
      .group(heading);
  line.add_flag("--no_local_rank,--no-local-rank", f.no_local_rank, "The default").group(deepspeed);
  line.add_flag("--no_ssh_check,--no-ssh-check", f.no_ssh_check, "No effect").group(deepspeed);
  line.add_flag("--bind_cores_to_rank,--bind-cores-to-rank", f.bind_cores_to_rank, "--bind core")
      .group(deepspeed);
  line.add_option("--enable_each_rank_log,--enable-each-rank-log", f.each_rank_log, "--log-dir")
      .group(deepspeed);
  line.add_option("--launcher", f.launcher,
                  "What starts the agents: ssh (default), openmpi, slurm; pdsh is ssh here")
      .type_name("NAME")
      .group("Several hosts");
  line.add_option("--launcher_args,--launcher-args", f.launcher_args,
                  "More words for ssh, mpirun or srun, such as '-i KEY'")
      .type_name("WORDS")
      .group("Several hosts");
  line.add_flag("--force_multi,--force-multi", h.force_multi, "An agent also if this host is the only one")
      .group("Several hosts");
}

void apply_deepspeed_flags(const CommandLine& line, const ProgramFlags& f, Options& o) {
  apply_launcher(f.launcher, f.launcher_args, o);
  require(!f.bind_cores_to_rank || o.bind, Errc::config,
          "--bind_cores_to_rank and --bind none exclude each other; the former is --bind core");
  if (!line.is_set("--enable_each_rank_log") || f.each_rank_log == "None") return;
  require(o.log_dir.empty() || o.log_dir == f.each_rank_log, Errc::config,
          "--enable_each_rank_log and --log-dir are the same flag; give one");
  o.log_dir = f.each_rank_log;
}

void apply_program_flags(const ProgramFlags& f, Options& o) {
  add_interpreter(f, o);
  for (EnvironmentFile& file : read_environment_files()) {
    std::string names;
    for (auto& variable : file.variables) {
      names += concat(names.empty() ? "" : ", ", variable.first);
      o.variables.push_back(std::move(variable));
    }
    o.plan.push_back(concat("variables of ", file.path, ": ", names.empty() ? "none" : names));
  }
  std::string names;
  for (const std::string& word : f.variables) {
    add_variable(word, o);
    names += concat(names.empty() ? "" : ", ", o.variables.back().first);
  }
  if (!names.empty()) o.plan.push_back(concat("variables of -x: ", names));
}

}  // namespace rz::rzrun
