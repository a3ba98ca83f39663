#include "bench/support/bench_main.h"

#include <optional>

#include "comm/bootstrap.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "tools/command_line/output_file.h"

namespace rz::bench {

int run_bench_program(const char* name, const char* purpose, const char* details, int argc,
                      const char* const* argv, const std::function<void(CommandLine&)>& add_options,
                      const std::function<void()>& complete, const std::function<Json()>& run) {
  return run_program(name, [&] {
    std::string json_path;
    CommandLine line(purpose, name, details);
    add_options(line);
    line.add_option("--json", json_path, "Write the results, or the error, there as JSON");
    const std::string help = line.parse(argc, argv);
    if (!help.empty()) return print_help(help);
    complete();
    environment();  // a wrong variable is an error of the input, for which no file is emptied
    std::optional<OutputFile> file;
    if (!json_path.empty() && launch_info_from_environment().rank == 0) file.emplace("--json", json_path);
    Json all{{"tool", name}, {"errors", {unfinished_error}}};
    if (file) file->hold(all.dump(1) + '\n');
    all["errors"] = Json::array();
    try {
      const Json results = run();
      if (!file || results.is_null()) return 0;
      all.update(results);
    } catch (const std::exception& e) {
      all["errors"].push_back(one_line(e));
      if (file) file->try_write(all.dump(1) + '\n');
      throw;
    }
    file->write(all.dump(1) + '\n');
    return 0;
  });
}

}  // namespace rz::bench
