#pragma once
/// Variables of the ranks from files, as DeepSpeed's launcher reads them.

#include <string>
#include <string_view>
#include <vector>

#include "tools/rzrun/flags/job.h"

namespace rz::rzrun {

/// Lines NAME=VALUE; blank lines and lines that begin with '#' are skipped, and "export " may stand before
/// NAME. Spaces around NAME and VALUE do not count. Quotes around VALUE, single or double, are removed. What
/// a shell would do with '$', '`', or a comment behind VALUE is not done: without single quotes it is an
/// error. A name that is there twice has its last value. Errors are Errc::config in one line: FILE:LINE:
/// what; remedy.
Variables parse_environment_file(std::string_view text, const std::string& file);

struct EnvironmentFile {
  std::string path;
  Variables variables;
};

/// ~/.deepspeed_env and then ./.deepspeed_env, as far as they exist; DS_ENV_FILE is another name instead of
/// .deepspeed_env, or a path, and no file if it is empty. Its variables can start any program, so a file is
/// refused that every user may write, or that has another owner; DS_ENV_FILE permits the latter.
std::vector<EnvironmentFile> read_environment_files();

/// Refuses a variable that rzrun sets itself for each rank, such as RANK, and a name that is none. `place` is
/// where it was given.
void check_variable(std::string_view name, std::string_view value, const std::string& place);

}  // namespace rz::rzrun
