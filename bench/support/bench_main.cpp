#include "bench/support/bench_main.h"

namespace rz::bench {

int run_bench_program(const char* name, const char* purpose, const char* details, int argc,
                      const char* const* argv, const std::function<void(CommandLine&)>& add_options,
                      const std::function<Json()>& run) {
  return run_program(name, [&] {
    std::string json_path;
    CommandLine line(purpose, name, details);
    add_options(line);
    line.add_option("--json", json_path, "Write the results there as JSON");
    const std::string help = line.parse(argc, argv);
    if (!help.empty()) return print_help(help);
    const Json results = run();
    if (json_path.empty() || results.is_null()) return 0;
    Json all{{"tool", name}};
    all.update(results);
    write_file(json_path, all.dump(1));
    return 0;
  });
}

}  // namespace rz::bench
