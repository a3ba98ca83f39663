#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/os/fd.h"
#include "tools/rzrun/flags/flags.h"
#include "tools/rzrun/flags/starters.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::rzrun {

// ---- variables of files

namespace {

constexpr std::size_t max_environment_bytes = 1 << 20;
/// Linux passes no longer "NAME=VALUE" to a program.
constexpr std::size_t max_variable_bytes = (128 << 10) - 1;

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t\r\v\f");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r\v\f") + 1 - begin);
}

bool is_name(std::string_view name) {
  const auto alphabetic = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
  return !name.empty() && alphabetic(name.front()) &&
         std::ranges::all_of(name, [&](char c) { return alphabetic(c) || (c >= '0' && c <= '9'); });
}

std::string value_of(std::string_view text, const std::string& place) {
  const char quote = text.empty() ? '\0' : text.front();
  const bool is_quoted = quote == '"' || quote == '\'';
  if (is_quoted) {
    require(text.size() > 1 && text.find(quote, 1) == text.size() - 1, Errc::config, place,
            "a value that begins with ", quote, " must end with it, and have no other");
    text = text.substr(1, text.size() - 2);
  } else {
    const auto comment = std::min(text.find(" #"), text.find("\t#"));
    require(comment == std::string_view::npos, Errc::config, place,
            "text behind '#' would be part of the value; put a comment into a line of its own, or the value "
            "in quotes");
  }
  require(quote == '\'' || text.find_first_of("$`") == std::string_view::npos, Errc::config, place,
          "'$' and '`' are not expanded; write the value itself, or put it in single quotes to keep them");
  return std::string(text);
}

/// Where a file may be, and its path for messages.
std::vector<std::string> candidates() {
  const char* const name = std::getenv("DS_ENV_FILE");
  const std::filesystem::path file = name ? name : ".deepspeed_env";
  if (file.empty()) return {};
  if (file.is_absolute()) return {file.string()};
  std::vector<std::string> found;
  if (const char* home = std::getenv("HOME"); home && *home)
    found.push_back(std::filesystem::path(home) / file);
  found.push_back(file.string());
  return found;
}

void check_owner(const struct stat& s, const std::string& path) {
  require((s.st_mode & S_IWOTH) == 0, Errc::config, path,
          ": every user may write it, and it decides what the ranks run; remedy: chmod o-w ", path);
  require(s.st_uid == ::geteuid() || s.st_uid == 0 || std::getenv("DS_ENV_FILE"), Errc::config, path,
          ": its owner is user ", s.st_uid,
          ", and it decides what your ranks run; if that is right set DS_ENV_FILE=", path,
          ", else DS_ENV_FILE= (empty)");
}

std::string content_of(const UniqueFd& file, const std::string& path) {
  std::string text(max_environment_bytes + 1, '\0');
  std::size_t size = 0;
  for (ssize_t n = 1; n != 0 && size < text.size();) {
    n = ::read(file.get(), text.data() + size, text.size() - size);
    require(n >= 0 || errno == EINTR, Errc::config, path, ": ", std::strerror(errno));
    if (n > 0) size += static_cast<std::size_t>(n);
    if (n < 0) n = 1;
  }
  require(size <= max_environment_bytes, Errc::config, path, ": it has more than ",
          human_bytes(max_environment_bytes));
  text.resize(size);
  return text;
}

}  // namespace

void check_variable(std::string_view name, std::string_view value, const std::string& place) {
  static constexpr std::string_view own[] = {
      "RANK",      "LOCAL_RANK",      "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",  "GROUP_WORLD_SIZE",
      "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",  "RZ_LAUNCH",        "RZ_SECRET_FD"};
  require(
      is_name(name), Errc::config, place, hosts::quoted(name),
      " is no name of a variable: it has A to Z, a to z, digits and '_', and does not begin with a digit");
  require(name != "MASTER_ADDR", Errc::config, place,
          "MASTER_ADDR is set by rzrun; use --master-addr ADDRESS");
  require(name != "MASTER_PORT", Errc::config, place, "MASTER_PORT is set by rzrun; use --master-port PORT");
  require(!std::ranges::count(own, name) && !name.starts_with("TORCHELASTIC_"), Errc::config, place, name,
          " is set by rzrun for each rank; remove it");
  require(value.find('\0') == std::string_view::npos, Errc::config, place, "the value of ", name,
          " has a zero byte");
  require(name.size() + 1 + value.size() <= max_variable_bytes, Errc::config, place, "the value of ", name,
          " is longer than ", human_bytes(max_variable_bytes + 1), ", the limit of Linux");
}

Variables parse_environment_file(std::string_view text, const std::string& file) {
  Variables found;
  int number = 0;
  if (text.starts_with(hosts::byte_order_mark)) text.remove_prefix(hosts::byte_order_mark.size());
  for (const std::string& whole : parts_of(text, '\n')) {
    const std::string place = concat(file, ":", ++number, ": ");
    std::string_view line = trimmed(whole);
    if (line.empty() || line.front() == '#') continue;
    if (line.starts_with("export ") || line.starts_with("export\t")) line = trimmed(line.substr(7));
    const auto equals = line.find('=');
    require(equals != std::string_view::npos, Errc::config, place, hosts::quoted(line),
            " has no '='; a line is NAME=VALUE, or a comment that begins with '#'");
    const std::string_view name = trimmed(line.substr(0, equals));
    std::string value = value_of(trimmed(line.substr(equals + 1)), place);
    check_variable(name, value, place);
    const auto before = std::ranges::find(found, name, &std::pair<std::string, std::string>::first);
    if (before != found.end())
      before->second = std::move(value);
    else
      found.emplace_back(name, std::move(value));
  }
  return found;
}

std::vector<EnvironmentFile> read_environment_files() {
  std::vector<EnvironmentFile> found;
  std::vector<std::pair<dev_t, ino_t>> seen;  // the working folder may be the home folder
  for (const std::string& path : candidates()) {
    const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!file && (errno == ENOENT || errno == ENOTDIR)) continue;
    struct stat s {};
    require(file && ::fstat(file.get(), &s) == 0, Errc::config, path, ": ", std::strerror(errno));
    if (!S_ISREG(s.st_mode)) continue;
    if (std::ranges::count(seen, std::pair(s.st_dev, s.st_ino))) continue;
    seen.emplace_back(s.st_dev, s.st_ino);
    check_owner(s, path);
    found.push_back({path, parse_environment_file(content_of(file, path), path)});
  }
  return found;
}

// ---- the program

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
