// Inspects, verifies, compares and converts checkpoints.
#include <cstdio>
#include <string_view>

#include "comm/core/error.h"
#include "tools/checkpoint/commands.h"
#include "tools/command_line/command_line.h"

namespace rz::checkpoint {
namespace {

constexpr const char* description =
    "Works on checkpoints of ringzero, and on weights of Hugging Face, PyTorch and DeepSpeed. Nothing in a\n"
    "file is executed.\n"
    "\n"
    "  checkpoint inspect RUN                      the checkpoints of a folder\n"
    "  checkpoint inspect RUN/global_step100       state and tensors of one\n"
    "  checkpoint verify RUN                       reads every byte, compares checksums\n"
    "  checkpoint diff RUN/global_step100 OTHER    tensors and state that differ\n"
    "  checkpoint merge RUN OUT --dtype bf16       weights for from_pretrained() of Hugging Face\n"
    "  checkpoint merge DEEPSPEED OUT              f32 weights of ZeRO's stages 0 to 3\n"
    "  checkpoint adapter RUN OUT                  the adapter of a run with LoRA, for PEFT\n"
    "  checkpoint split IN OUT --max-shard-size 2GB";

constexpr const char* footer =
    "checkpoint COMMAND --help describes a command. A folder RUN of checkpoints stands for the one that\n"
    "RUN/latest names. No command needs the ranks or the strategy that wrote a checkpoint, nor a GPU; each\n"
    "holds one block of a tensor in memory at a time.\n"
    "\n"
    "Exit status: 0 success; 1 verify found damage, or diff found a difference; 2 any error, in one line.";

constexpr struct {
  std::string_view name;
  int (*run)(int argc, const char* const* argv);
} commands[] = {{"inspect", inspect}, {"verify", verify}, {"diff", diff},
                {"merge", merge},     {"split", split},   {"adapter", adapter}};

int run_command(int argc, const char* const* argv) {
  const std::string_view word = argv[1];
  for (const auto& c : commands)
    if (word == c.name) return c.run(argc - 1, argv + 1);
  std::vector<std::string> names;
  for (const auto& c : commands) names.emplace_back(c.name);
  const std::string near = nearest_name(word, names);
  fail(Errc::config, "no command '", word, "'", near.empty() ? "" : "; did you mean " + near + "?",
       "; see checkpoint --help");
}

int run(int argc, const char* const* argv) {
  if (argc > 1 && argv[1][0] != '-') return run_command(argc, argv);
  CommandLine line(description, "checkpoint COMMAND", footer);
  const std::string help = line.parse(argc, argv);
  require(!help.empty(), Errc::config, "no command; see checkpoint --help");
  return print_help(help);
}

}  // namespace
}  // namespace rz::checkpoint

int main(int argc, char** argv) {
  return rz::run_program("checkpoint", [&] {
    try {
      return rz::checkpoint::run(argc, argv);
    } catch (const std::exception& e) {
      rz::fail(rz::Errc::config, rz::one_line(e));  // 1 is a result
    }
  });
}
