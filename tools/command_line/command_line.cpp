#include "tools/command_line/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <vector>

#include "comm/core/error.h"
#include "comm/core/text.h"

namespace rz {

namespace {

[[noreturn]] void refuse(const CLI::App& app, const std::string& word) {
  std::vector<std::string> names;
  for (const auto* option : app.get_options())
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
  const bool flag = word.starts_with("-");
  const std::string near = flag ? nearest_name(word.substr(0, word.find('=')), names) : "";
  fail(Errc::config, flag ? "unknown flag " : "unexpected argument '", word, flag ? "" : "'",
       near.empty() ? "" : "; did you mean " + near + "?", "; see --help");
}

void refuse_rest(const CLI::App& app) {
  const auto rest = app.remaining();
  const bool commands = app.get_prefix_command();
  if (!rest.empty() && (!commands || rest.front().starts_with("-"))) refuse(app, rest.front());
}

}  // namespace

std::string parse_command_line(CLI::App& app, int argc, const char* const* argv) {
  app.allow_extras();
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return app.help();
  } catch (const CLI::ParseError& e) {
    refuse_rest(app);  // an unknown flag explains more than what is missing besides it
    std::string line = e.what();
    std::ranges::replace(line, '\n', ' ');
    fail(Errc::config, line, "; see --help");
  }
  refuse_rest(app);
  return "";
}

int print_help(const std::string& help) { return std::fputs(help.c_str(), stdout) < 0 ? 1 : 0; }

int run_program(const char* name, const std::function<int()>& body) {
  try {
    return body();
  } catch (const Error& e) {
    std::fprintf(stderr, "%s: %s\n", name, e.what());
    return e.code() == Errc::config ? 2 : 1;
  }
}

}  // namespace rz
