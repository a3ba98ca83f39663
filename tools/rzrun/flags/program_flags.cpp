#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "comm/core/error.h"
#include "tools/rzrun/flags/environment_file.h"
#include "tools/rzrun/flags/flags.h"
#include "tools/rzrun/flags/starters.h"

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

/// A Python program gets its interpreter.
void set_command(const Given& given, Program& p) {
  const ProgramFlags& f = given.flags.program;
  const bool is_module = given.is_on("--module", f.module),
             is_no_python = given.is_on("--no-python", f.no_python);
  require(!is_module || !is_no_python, Errc::config,
          "--module and --no_python exclude each other: a module needs python");
  require(!f.local_rank || !f.no_local_rank, Errc::config,
          "--local_rank and --no_local_rank exclude each other");
  p.command = f.command;
  std::vector<std::string> words;
  if (is_module || (!is_no_python && is_python_script(p.command.front()))) {
    const char* const python = std::getenv("PYTHON_EXEC");
    words = {python && *python ? python : "python3", "-u"};
    if (is_module) words.push_back("-m");
  } else if (std::string& own = p.command.front();
             own.ends_with(".py") && own.find('/') == own.npos && ::access(own.c_str(), X_OK) == 0) {
    own.insert(0, "./");  // a script is that of this folder, not one of PATH
  }
  if (f.local_rank) p.local_rank_at = static_cast<int>(words.size()) + 1;
  p.command.insert(p.command.begin(), words.begin(), words.end());
}

void add_variable(const std::string& word, Variables& variables) {
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
  variables.emplace_back(std::move(name), std::move(value));
}

}  // namespace

void add_program_flags(CommandLine& line, ProgramFlags& f, HostFlags& h, LogFlags& l) {
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
  line.add_option("--enable_each_rank_log,--enable-each-rank-log", l.each_rank_log, "--log-dir")
      .group(deepspeed);
  line.add_option("--launcher", h.launcher,
                  "What starts the agents: ssh (default), openmpi, slurm; pdsh is ssh here")
      .type_name("NAME")
      .group("Several hosts");
  line.add_option("--launcher_args,--launcher-args", h.launcher_args,
                  "More words for ssh, mpirun or srun, such as '-i KEY'")
      .type_name("WORDS")
      .group("Several hosts");
  line.add_flag("--force_multi,--force-multi", h.force_multi, "An agent also if this host is the only one")
      .group("Several hosts");
}

Program choose_program(const Given& given, const Hosts& hosts, Remarks& remarks) {
  const ProgramFlags& f = given.flags.program;
  const auto role = given.setting("--role", f.role);
  Program p{.variables = given.file.variables, .role = role.is_set() ? role.value : f.role};
  p.bind = f.bind == "core";
  require(!f.bind_cores_to_rank || p.bind, Errc::config,
          "--bind_cores_to_rank and --bind none exclude each other; the former is --bind core");
  set_command(given, p);
  if (hosts.rendezvous && !given.file.devices.empty()) {
    p.variables.emplace_back("CUDA_VISIBLE_DEVICES",
                             devices_of_slots(given.file.devices, devices_of_slurm()));
    remarks.plan.push_back("CUDA_VISIBLE_DEVICES=" + p.variables.back().second);
  }
  for (EnvironmentFile& file : read_environment_files()) {
    std::string names;
    for (auto& variable : file.variables) {
      names += concat(names.empty() ? "" : ", ", variable.first);
      p.variables.push_back(std::move(variable));
    }
    remarks.plan.push_back(concat("variables of ", file.path, ": ", names.empty() ? "none" : names));
  }
  std::string names;
  for (const std::string& word : f.variables) {
    add_variable(word, p.variables);
    names += concat(names.empty() ? "" : ", ", p.variables.back().first);
  }
  if (!names.empty()) remarks.plan.push_back(concat("variables of -x: ", names));
  return p;
}

}  // namespace rz::rzrun
