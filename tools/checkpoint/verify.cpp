#include <cstdio>
#include <optional>

#include "comm/core/error.h"
#include "sharding/checkpoint/checkpoint_reader.h"
#include "sharding/io/text.h"
#include "tools/checkpoint/commands.h"
#include "tools/checkpoint/stored_checkpoint.h"
#include "tools/command_line/command_line.h"
#include "tools/command_line/progress.h"

namespace rz::checkpoint {
namespace {

constexpr const char* verify_description =
    "Reads every byte of a checkpoint, or of all checkpoints of a folder, and compares it with the "
    "checksums\n"
    "of the index.\n"
    "\n"
    "  checkpoint verify RUN\n"
    "  checkpoint verify RUN/global_step100";

constexpr const char* verify_footer =
    "Prints a line for each tensor of a file that is damaged: the file, the tensor, and both checksums.\n"
    "\n"
    "Exit status: 0 all is as it was written, 1 something is damaged or missing, 2 no checkpoint at PATH.";

void print_fault(const Error& e) { std::puts(escaped(e.what()).c_str()); }

/// Null, after a line, if the index or a file's size is wrong.
std::optional<CheckpointReader> open_or_print(const std::string& folder) {
  try {
    return CheckpointReader::open(folder);
  } catch (const Error& e) {
    return print_fault(e), std::nullopt;
  }
}

/// Returns the number of faults, each of which it prints.
int verify_checkpoint(const std::string& folder) {
  auto reader = open_or_print(folder);
  if (!reader) return 1;
  int faults = 0;
  std::uint64_t done = 0, all = 0;
  for (const StoredFile& f : reader->index().files) all += f.bytes;
  {
    ProgressLine progress;
    for (std::size_t f = 0; f < reader->index().files.size(); ++f) {
      progress.show(done, all, concat(folder, " ", reader->index().files[f].name));
      done += reader->index().files[f].bytes;
      for (const Error& e : reader->find_damage(f)) print_fault(e), ++faults;
    }
  }
  if (faults == 0)
    std::printf("%s: %zu files, %s: as written\n", escaped(folder).c_str(), reader->index().files.size(),
                human_bytes(all).c_str());
  return faults;
}

}  // namespace

int verify(int argc, const char* const* argv) {
  std::string path;
  CommandLine line(verify_description, "checkpoint verify", verify_footer);
  line.add_option("PATH", path, "A checkpoint, or a folder of checkpoints").type_name("").required();
  const std::string help = line.parse(argc, argv);
  if (!help.empty()) return print_help(help);
  int faults = 0;
  for (const std::string& folder : checkpoints_at(path)) faults += verify_checkpoint(folder);
  return faults == 0 ? 0 : 1;
}

}  // namespace rz::checkpoint
