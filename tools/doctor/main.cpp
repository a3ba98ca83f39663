// doctor: what hosts lack for a job. See --help.
#include <signal.h>

#include <cstdio>

#include "comm/core/environment.h"
#include "tools/command_line/command_line.h"
#include "tools/doctor/agent.h"
#include "tools/doctor/options.h"
#include "tools/doctor/report.h"

namespace rz::doctor {
namespace {

int print(const std::string& text) {
  return std::fputs(text.c_str(), stdout) < 0 || std::fflush(stdout) != 0 ? 1 : 0;
}

int run(const Options& o) {
  signal(SIGPIPE, SIG_IGN);  // a remote shell that ends is an error of its host alone
  environment();             // a wrong variable is an error of the input
  if (o.agent) return run_agent();
  if (o.facts) return print(to_json(read_facts({o.master, 1, o.cuda, ""})) + "\n");
  const Report report = o.nodes.empty() ? diagnose_this_host(o) : diagnose_hosts(o);
  const int failed = print(o.json ? json(report) : table(report));
  return failed || !runs(report) ? 1 : 0;
}

}  // namespace
}  // namespace rz::doctor

int main(int argc, char** argv) {
  const auto parse = [&] { return rz::doctor::parse_options(argc, argv); };
  return rz::run_program("doctor", parse, rz::doctor::run);
}
