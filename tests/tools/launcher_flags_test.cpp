// Needs: rz_command_line rzrun train_lm all_reduce_perf tune topology doctor checkpoint

// Flags of other launchers: each program names the replacement.

#include "tools/command_line/launcher_flags.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "tests/support/program.h"

namespace rz {
namespace {

struct Tool {
  std::string name;
  std::set<std::string_view> own;  ///< flags of the table that the program has itself
};

const Tool launcher{"rzrun",
                    {"--master-port",
                     "--master-addr",
                     "--log-dir",
                     "--tee",
                     "--local-ranks-filter",
                     "--max-restarts",
                     "--hostfile",
                     "-H",
                     "--include",
                     "--exclude",
                     "--num-nodes",
                     "--num-gpus",
                     "--ssh-port",
                     "--nproc-per-node",
                     "--nnodes",
                     "--node-rank",
                     "--standalone",
                     "--rdzv-backend",
                     "--rdzv-endpoint",
                     "--rdzv-id",
                     "--rdzv-conf",
                     "--local-addr",
                     "--monitor-interval",
                     "--start-method",
                     "--role",
                     "--redirects",
                     "--module",
                     "--no-python",
                     "--local-rank",
                     "-x",
                     "--launcher",
                     "--launcher-args",
                     "--force-multi",
                     "--no-local-rank",
                     "--bind-cores-to-rank",
                     "--enable-each-rank-log",
                     "--no-ssh-check",
                     "--num-accelerators",
                     "--config-file",
                     "--deepspeed-config-file",
                     "--use-deepspeed",
                     "--use-fsdp",
                     "--multi-gpu",
                     "--num-processes",
                     "--num-machines",
                     "--machine-rank",
                     "--main-process-ip",
                     "--main-process-port",
                     "--gpu-ids",
                     "--mixed-precision",
                     "--zero-stage"}};
const Tool programs[] = {{"train_lm", {"--local-rank", "--deepspeed", "--deepspeed-config"}},
                         {"all_reduce_perf", {"-x", "-N", "--local-rank"}},
                         {"tune", {"--local-rank"}},
                         {"topology", {"--local-rank"}},
                         {"doctor", {"--hostfile", "--master-addr", "--local-rank"}},
                         {"checkpoint", {"--local-rank"}}};

/// "--a-b" as "--a_b".
std::string with_underscores(std::string_view flag) {
  std::string other(flag);
  std::replace(other.begin() + 2, other.end(), '-', '_');
  return other;
}

std::string expected(const LauncherFlag& row, const std::string& flag, std::string_view instead) {
  return flag + " is a flag of " + std::string(row.launcher) + "; " + std::string(instead) + "\n";
}

TEST(LauncherFlags, EachRowOfTheTableIsNamedByRzrun) {
  for (const auto& row : launcher_flags()) {
    if (launcher.own.contains(row.flag)) continue;
    const std::string flag(row.flag);
    SCOPED_TRACE(flag);
    test::expect_refusal("rzrun", {flag, "2", "true"}, expected(row, flag, row.in_rzrun));
    test::expect_refusal("rzrun", {"-n", "2", flag + "=2", "true"}, expected(row, flag, row.in_rzrun));
  }
}

TEST(LauncherFlags, EachRowOfTheTableIsNamedByThePrograms) {
  for (const auto& tool : programs)
    for (const auto& row : launcher_flags()) {
      if (tool.own.contains(row.flag)) continue;
      const std::string flag(row.flag);
      SCOPED_TRACE(tool.name + " " + flag);
      test::expect_refusal(tool.name, {flag, "2"}, expected(row, flag, row.in_programs));
    }
}

TEST(LauncherFlags, UnderscoresAreDashes) {
  for (const char* flag : {"--save-pid", "--no-ssh", "--venv-script", "--deepspeed-config"}) {
    const std::string other = with_underscores(flag);
    const LauncherFlag* row = find_launcher_flag(other);
    ASSERT_NE(row, nullptr) << other;
    test::expect_refusal("rzrun", {other + "=2", "true"}, expected(*row, other, row->in_rzrun));
  }
}

TEST(LauncherFlags, DevicesBehindAHostAreNamed) {
  test::expect_refusal("rzrun", {"--localhost:0,2,3,4", "train"},
                       "--localhost is a flag of deepspeed; write --include localhost:0,2,3,4\n");
  test::expect_refusal("train_lm", {"--localhost:0,2"},
                       "start it with rzrun --include localhost:0,2 PROGRAM\n");
  test::expect_refusal("rzrun", {"--localhost:x", "train"}, "write --include localhost:SLOT,SLOT\n");
}

TEST(LauncherFlags, AProgramsOwnFlagsAndValuesAreNotRefused) {
  test::Program port(
      {test::built("rzrun"), "-n", "1", "--master-port", "29511", "sh", "-c", "echo $MASTER_PORT"});
  EXPECT_EQ(port.wait(), 0) << port.err();
  EXPECT_EQ(port.out(), "29511\n");
  // Words after PROGRAM belong to the program.
  test::Program behind(
      {test::built("rzrun"), "-n", "1", "echo", "-np", "--standalone", "--tee", "3", "--hostfile=x"});
  EXPECT_EQ(behind.wait(), 0) << behind.err();
  EXPECT_EQ(behind.out(), "-np --standalone --tee 3 --hostfile=x\n");
  // The value of a flag is no flag: the error is the missing program.
  test::expect_refusal("rzrun", {"-n", "1", "--log-dir", "-np"}, "no program to start");
}

/// As --flag=$NAME of a variable that is not set.
TEST(LauncherFlags, AnEmptyValueTakesNoOtherWord) {
  test::Program endpoint(
      {test::built("rzrun"), "--rdzv-endpoint=", "--nproc-per-node=2", "sh", "-c", "echo of $WORLD_SIZE"});
  EXPECT_EQ(endpoint.wait(), 0) << endpoint.err();
  EXPECT_EQ(endpoint.out(), "of 2\nof 2\n");
  test::Program behind({test::built("rzrun"), "-n", "1", "echo", "--role=", "-n=", "x"});
  EXPECT_EQ(behind.wait(), 0) << behind.err();
  EXPECT_EQ(behind.out(), "--role= -n= x\n");
  for (const char* flag : {"--log-dir", "--role", "--master-addr"})
    test::expect_refusal("rzrun", {concat(flag, "="), "-n", "1", "true"},
                         concat(flag, ": a value is missing"));
  test::expect_refusal("rzrun", {"--max-restarts=", "-n", "1", "true"}, "--max-restarts");
  test::expect_refusal("rzrun", {"--standalone=", "true"}, "--standalone=: the flag has no value");
  test::expect_refusal("all_reduce_perf", {"--output_file=", "--iters=3"},
                       "--output_file: a value is missing");
  test::expect_refusal("train_lm", {"--save=", "--steps=1"}, "--save: a value is missing");
}

TEST(LauncherFlags, NoRowIsThereTwice) {
  std::set<std::string_view> seen;
  for (const auto& row : launcher_flags()) {
    EXPECT_TRUE(seen.insert(row.flag).second) << row.flag;
    EXPECT_FALSE(row.launcher.empty() || row.in_rzrun.empty() || row.in_programs.empty()) << row.flag;
  }
}

}  // namespace
}  // namespace rz
