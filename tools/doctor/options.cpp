#include "tools/doctor/options.h"

#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "tools/command_line/shell_words.h"

namespace rz::doctor {
namespace {

constexpr const char* description =
    "Shows what this host, or the hosts of a hostfile, lack for a job: each check with what was found,\n"
    "what is needed, and the command that mends it. Run it where the job will run, in its container or\n"
    "allocation, by its user.\n\n"
    "  doctor                                    this host\n"
    "  doctor --ranks 8 --device cuda            this host, for 8 ranks on GPUs\n"
    "  doctor --hostfile hosts --ranks 16        several hosts by ssh, and the ways between them\n\n"
    "A hostfile has a line 'NAME slots=N' for each host. Rank 0 runs on the first.";

constexpr const char* footer =
    "Verdicts: ok; warning, a job runs, but slower or with a risk; missing, it would not run.\n\n"
    "Over several hosts doctor starts itself there, so each needs ssh without a password and ringzero at\n"
    "the same path. It reads their facts, compares versions, clocks and what MASTER_ADDR means, and\n"
    "measures pairs of hosts: round trip, rate of one TCP connection, and the largest packet that passes.\n"
    "Up to 4 hosts every pair is measured in both directions; of more, each with the first and with the\n"
    "next. A pair takes about a second. The servers listen on the address that a job would use, for one\n"
    "client that has a random token.\n\n"
    "Measured are idle ways: a job that runs meanwhile makes them slower, and is disturbed.\n\n"
    "Exit status: 0 a job would run, 1 something is missing, 2 an input is wrong.";

std::vector<std::string> remote_shell(const std::string& text) {
  auto words = shell_words(text, "--rsh");
  require(!words.empty(), Errc::config, "--rsh: no command; give one such as 'ssh -T -p 2222'");
  return words;
}

/// A name, or an IPv6 address.
void check_master(const std::string& where, const std::string& master) {
  std::string word = master;
  if (word.find(':') != std::string::npos) std::erase_if(word, [](char c) { return c == ':' || c == '%'; });
  const std::string why = hosts::why_no_host_name(word);
  require(why.empty(), Errc::config, where, hosts::quoted(master), " is no host: ", why);
}

}  // namespace

Parsed<Options> parse_options(int argc, const char* const* argv) {
  Parsed<Options> parsed;
  Options& o = parsed.options;
  std::string hostfile, shell, device = "host", master;
  CommandLine line(description, "doctor", footer);
  line.add_option(
          "-n,--ranks", o.ranks,
          "Ranks of the job; default: the slots of the hostfile, else one a processor or GPU of this host")
      .type_name("N")
      .within(1, 65536);
  line.add_option("--device", device, "Device of the job: host (default) or cuda").one_of({"host", "cuda"});
  line.add_option("--hostfile", hostfile, "File with the hosts of the job").type_name("FILE");
  line.add_option("--master-addr", master,
                  "Where rank 0 will serve; default: MASTER_ADDR, else the first host")
      .type_name("HOST");
  line.add_option("--rsh", shell,
                  "Remote shell, called as CMD HOST COMMAND; default: ssh -T -o BatchMode=yes …")
      .type_name("CMD");
  line.add_option("--program", o.program, "doctor on the other hosts; default: the path of this one")
      .type_name("PATH");
  line.add_flag("--json", o.json, "Print facts, measurements and findings as JSON");
  line.add_flag("--facts", o.facts, "Print the facts of this host as one line of JSON, without judging them");
  line.add_flag("--agent", o.agent,
                "Obey requests on standard input; doctor starts itself so on other hosts");
  parsed.help = line.parse(argc, argv);
  if (!parsed.help.empty()) return parsed;
  o.cuda = device == "cuda";
  if (!shell.empty()) o.shell = remote_shell(shell);
  if (!hostfile.empty()) o.nodes = hosts::read_hostfile(hostfile);
  constexpr std::size_t max = 256;
  require(o.nodes.size() <= max, Errc::config, "--hostfile ", hostfile, ": ", o.nodes.size(),
          " hosts; doctor reaches up to ", max, " at once, so divide the file");
  std::size_t slots = 0;
  for (const auto& node : o.nodes) slots += node.slots.size();
  require(o.nodes.empty() || o.ranks <= static_cast<int>(slots), Errc::config, "--ranks ", o.ranks,
          ": the hosts of ", hostfile, " have ", slots, " slots; raise slots=N there, or lower --ranks");
  const auto set = environment_variable("MASTER_ADDR");
  const std::string where = master.empty() ? "MASTER_ADDR=" : "--master-addr ";
  o.master = !master.empty() ? master : set.value_or(o.nodes.empty() ? "" : o.nodes.front().name);
  if (!o.master.empty()) check_master(where, o.master);
  if (o.program.empty()) o.program = hosts::own_path();
  return parsed;
}

}  // namespace rz::doctor
