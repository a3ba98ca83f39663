// Needs: rzrun_lib rzrun topology

// What users of DeepSpeed type into a launcher: Python programs, variables of files and flags.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "comm/core/error.h"
#include "tests/support/fuzz.h"
#include "tests/support/program.h"
#include "tests/support/rzrun.h"
#include "tools/command_line/shell_words.h"
#include "tools/rzrun/flags/flags.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::rzrun {
namespace {

using test::Directory;
using test::lines;
using test::Program;

std::string refusal(const std::string& text) {
  try {
    parse_environment_file(text, "F");
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config);
    return e.what();
  }
  return "";
}

TEST(EnvironmentFile, LinesAreVariables) {
  const Variables found = parse_environment_file(
      "# a comment\n\nA=1\r\n  export B = two words \nC='$HOME #x'\nD=\"a 'b'\"\nE=\nA=a=b#c", "F");
  const Variables expected{{"A", "a=b#c"}, {"B", "two words"}, {"C", "$HOME #x"}, {"D", "a 'b'"}, {"E", ""}};
  EXPECT_EQ(found, expected);
}

TEST(EnvironmentFile, ErrorsNameTheLine) {
  const auto expect = [](const std::string& text, const std::string& words) {
    EXPECT_NE(refusal(text).find(words), std::string::npos) << refusal(text);
  };
  expect("A=1\nB\n", "F:2: 'B' has no '='");
  expect("1A=1", "F:1: '1A' is no name of a variable");
  expect("A B=1", "F:1: 'A B' is no name of a variable");
  expect("=1", "F:1: '' is no name of a variable");
  expect("A='x", "F:1: a value that begins with ' must end with it");
  expect("A='", "F:1: a value that begins with ' must end with it");
  expect("A=\"x\" y", "F:1: a value that begins with \" must end with it");
  expect("PATH=$PATH:/x", "F:1: '$' and '`' are not expanded");
  expect("A=\"`id`\"", "F:1: '$' and '`' are not expanded");
  expect("A=1 # one", "F:1: text behind '#'");
  expect("\nRANK=1", "F:2: RANK is set by rzrun for each rank");
  expect("TORCHELASTIC_RUN_ID=1", "F:1: TORCHELASTIC_RUN_ID is set by rzrun");
  expect("MASTER_PORT=1", "F:1: MASTER_PORT is set by rzrun; use --master-port PORT");
  expect(std::string("A=1\0002", 5), "F:1: the value of A has a zero byte");
  expect("A=" + std::string(131070, 'x'), "F:1: the value of A is longer than 128 KiB");
  EXPECT_EQ(refusal("A=" + std::string(131069, 'x')), "");
}

TEST(EnvironmentFileFuzz, AnyTextIsReadOrRefusedInOneLine) {
  test::Fuzz fuzz(3000);
  auto& random = fuzz.random;
  const std::vector<std::string> words{"A", "=", "B=1\n", "\n",    "'", "\"", "#",  " #",   "export ",
                                       "$", "`", "\t",    "RANK=", "x", " ",  "C=", "\r\n", "1"};
  long read = 0;
  while (fuzz.next()) {
    std::string text;
    for (std::size_t n = random() % 10; n > 0; --n)
      text += random() % 24 ? words[random() % words.size()] : std::string(1, static_cast<char>(random()));
    const std::string why = refusal(text);
    EXPECT_EQ(why.find('\n'), std::string::npos) << why;
    if (!why.empty()) continue;
    ++read;
    std::string again;  // what was read is read again as the same
    const auto first = parse_environment_file(text, "F");
    for (const auto& [name, value] : first)
      again += name + "=" +
               (value.find('\'') == std::string::npos ? "'" + value + "'" : "\"" + value + "\"") + "\n";
    const bool has_quote =
        std::ranges::any_of(first, [](const auto& v) { return v.second.find('\'') != std::string::npos; });
    if (!has_quote) {
      EXPECT_EQ(parse_environment_file(again, "F"), first) << text;
    }
  }
  EXPECT_GT(read, fuzz.tried() / 100);
  EXPECT_LT(read, fuzz.tried());
}

class RzrunWords : public testing::Test {
 protected:
  RzrunWords() { ::unsetenv("DS_ENV_FILE"); }  // the home is a folder of the test

  void write(const std::string& name, const std::string& text, int mode = 0644) {
    std::filesystem::create_directories(std::filesystem::path(folder_ / name).parent_path());
    std::ofstream(folder_ / name) << text;
    ASSERT_EQ(::chmod((folder_ / name).c_str(), static_cast<mode_t>(mode)), 0);
  }

  /// Sorted lines of rzrun's output, run in the folder with `home` as HOME.
  std::string out(const std::string& arguments, Program::Variables variables = {}, int status = 0) {
    variables.emplace_back("HOME", folder_ / "home");
    Program p(
        {"sh", "-c", "cd '" + folder_.string() + "' && exec '" + test::built("rzrun") + "' " + arguments},
        variables);
    EXPECT_EQ(p.wait(), status) << p.err();
    err_ = p.err();
    auto all = lines(p.out());
    std::ranges::sort(all);
    std::string text;
    for (const auto& line : all) text += line + "\n";
    return text;
  }

  Directory folder_;
  std::string err_;
};

TEST_F(RzrunWords, ModulesAndScriptsRunUnderPython) {
  if (std::system("python3 -c '' 2>/dev/null") != 0) GTEST_SKIP() << "no python3";
  const std::string script =
      "import os, sys\nprint(os.environ['RANK'], sys.argv[1:], sys.stdout.write_through)\n";
  write("train.py", script);
  const std::string expected = "0 ['--lr', '1'] True\n1 ['--lr', '1'] True\n";
  EXPECT_EQ(out("-n 2 --module train --lr 1"), expected);
  EXPECT_EQ(out("-n 2 -m train --lr 1"), expected);
  EXPECT_EQ(out("-n 2 train.py --lr 1"), expected);
  EXPECT_EQ(out("-n 2 --no_local_rank ./train.py --lr 1"), expected);
  EXPECT_EQ(out("-n 1 --local_rank train.py --lr 1"), "0 ['--local_rank=0', '--lr', '1'] True\n");
  EXPECT_EQ(out("-n 1 --dry-run -m train --lr 1"),
            "1 rank of: python3 -u -m train --lr 1\nthis host: rank 0\n");
  write("own.py", "#!/bin/sh\necho own $1\n", 0755);
  EXPECT_EQ(out("-n 1 own.py --lr"), "own --lr\n");
  write("without.py", script, 0755);
  EXPECT_EQ(out("-n 1 without.py"), "0 [] True\n");
  out("-n 1 --no_python train.py", {}, 127);
  write("python", "#!/bin/sh\necho python of $@\n", 0755);
  EXPECT_EQ(out("-n 1 train.py 1", {{"PYTHON_EXEC", "./python"}}), "python of -u train.py 1\n");
}

TEST_F(RzrunWords, EachRankGetsItsLocalRank) {
  EXPECT_EQ(out("-n 2 --local_rank echo x"), "--local_rank=0 x\n--local_rank=1 x\n");
}

TEST_F(RzrunWords, VariablesOfFilesReachTheRanks) {
  write("home/.deepspeed_env", "A=home\nB=home\n");
  write(".deepspeed_env", "B=here\nRZ_WAIT_REPORT_S=77\n");
  const std::string script = " sh -c 'echo $RANK $A $B $C $RZ_WAIT_REPORT_S'";
  EXPECT_EQ(out("-n 2" + script, {{"A", "before"}, {"C", "c"}}), "0 home here c 77\n1 home here c 77\n");
  EXPECT_EQ(out("-n 1 -x B=x -x C" + script, {{"C", "c"}}), "0 home x c 77\n");
  EXPECT_EQ(out("-n 1 --force_multi" + script), "[localhost:0] 0 home here 77\n") << "through an agent";
  EXPECT_EQ(out("-n 1" + script, {{"DS_ENV_FILE", ""}}), "0 10\n");
  write("other", "A=other\n");
  EXPECT_EQ(out("-n 1" + script, {{"DS_ENV_FILE", "other"}}), "0 other 10\n");
  EXPECT_EQ(out("-n 1" + script, {{"DS_ENV_FILE", folder_ / "other"}}), "0 other 10\n");
  EXPECT_EQ(out("-n 1 -x C=1 --dry-run true"),
            "1 rank of: true\nthis host: rank 0\nvariables of -x: C\n"
            "variables of .deepspeed_env: B, RZ_WAIT_REPORT_S\nvariables of " +
                (folder_ / "home/.deepspeed_env") + ": A, B\n");
}

TEST_F(RzrunWords, AFileOfOthersIsRefused) {
  write(".deepspeed_env", "A=1\n", 0666);
  out("-n 1 true", {}, 2);
  EXPECT_EQ(lines(err_).size(), 1u);
  EXPECT_NE(err_.find(".deepspeed_env: every user may write it"), std::string::npos) << err_;
  write(".deepspeed_env", "A=1\n");
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  ASSERT_EQ(::chown((folder_ / ".deepspeed_env").c_str(), 12345, 12345), 0);
  out("-n 1 true", {}, 2);
  EXPECT_NE(err_.find(".deepspeed_env: its owner is user 12345"), std::string::npos) << err_;
  EXPECT_EQ(out("-n 1 sh -c 'echo $A'", {{"DS_ENV_FILE", ".deepspeed_env"}}), "1\n");
}

TEST_F(RzrunWords, FlagsOfDeepSpeedsLauncher) {
  out("-n 1 --bind_cores_to_rank --no_ssh_check --enable_each_rank_log logs sh -c 'echo x'");
  EXPECT_EQ(test::content(folder_ / "logs/rank0.stdout"), "x\n");
  out("-n 1 --launcher PDSH true");
  EXPECT_EQ(err_, "rzrun: --launcher pdsh: agents are started by ssh, with the same effect\n");
  write("hosts", "n0 slots=1\n");
  EXPECT_NE(out("-H hosts --launcher ssh --launcher_args '-i KEY' --dry-run true").find(" -i KEY n0 "),
            std::string::npos);
  test::expect_refusal("rzrun", {"-H", folder_ / "hosts", "--rsh", "ssh 'x", "true"},
                       "--rsh: a quote (') has no other one");
}

TEST(ShellWords, QuotesKeepBlanks) {
  const auto words = [](const char* text) {
    std::string all;
    for (const std::string& word : shell_words(text, "--rsh")) all += "[" + word + "]";
    return all;
  };
  EXPECT_EQ(words(" ssh  -p\t22 "), "[ssh][-p][22]");
  EXPECT_EQ(words("-o 'ProxyCommand ssh -W %h:%p gate' -v"), "[-o][ProxyCommand ssh -W %h:%p gate][-v]");
  EXPECT_EQ(words("-oProxyCommand=\"ssh 'a b'\" x"), "[-oProxyCommand=ssh 'a b'][x]");
  EXPECT_EQ(words(R"(a\ b '' "q\"q" 'b\s')"), R"([a b][][q"q][b\s])");
  EXPECT_EQ(words(""), "");
  EXPECT_THROW(words("-o 'x"), Error);
}

TEST_F(RzrunWords, MpirunAndSrunStartAllAgentsAtOnce) {
  const auto plan = [&](const std::string& flags, const Program::Variables& variables) {
    return out(flags + " --dry-run true", variables);
  };
  write("hosts", "n0 slots=2\nn1 slots=1\n");
  const std::string by_mpirun = plan(
      "-H hosts --launcher OpenMPI --launcher_args '--mca btl tcp,self' --grace 5", {{"SLURM_JOB_ID", ""}});
  const auto has = [](const std::string& text, const std::string& words) {
    EXPECT_NE(text.find(words), std::string::npos) << text;
  };
  has(by_mpirun,
      "agents: mpirun --bind-to none --mca odls_base_sigkill_timeout 7 --mca btl tcp,self -n 1 "
      "--host n0:1 -x RZ_AGENT -x RZ_ENCRYPTION -x RZ_SECRET ");
  has(by_mpirun, "/rzrun --agent : -n 1 --host n1:1 -x RZ_AGENT -x RZ_ENCRYPTION -x RZ_SECRET ");
  has(plan("-H hosts --launcher openmpi", {{"RZ_SECRET", ""}, {"RZ_SECRET_FILE", "/secret"}}),
      " -x RZ_SECRET_FILE ");
  has(plan("-H hosts --launcher openmpi --num_gpus 1", {}),
      "n0: rank 0; CUDA_VISIBLE_DEVICES=0\nn1: rank 1\n");
  const Program::Variables job{{"SLURM_JOB_ID", "7"},
                               {"SLURM_JOB_NODELIST", "n[1-2]"},
                               {"SLURM_TASKS_PER_NODE", "2,1"},
                               {"SLURM_NTASKS", "3"}};
  const std::string by_srun = plan("--launcher slurm --launcher_args --overlap", job);
  has(by_srun, "3 ranks of: true\nagents: srun --nodes=2 --ntasks=2 ");
  has(by_srun, "n1: ranks 0 to 1\nn2: rank 2\n");
  has(by_srun, " --nodelist=n1,n2 ");
  has(by_srun, " --overlap ");
  has(plan("--launcher slurm --num_gpus 1", job), "n1: rank 0\nn2: rank 1\n");
  has(plan("--launcher slurm --exclude n1", job), "n2: rank 0\n");
  Program::Variables gpus{job[0], job[1], {"SLURM_TASKS_PER_NODE", "1(x2)"}};
  has(plan("--launcher slurm", gpus), "2 ranks of: true\n");
  gpus.emplace_back("SLURM_GPUS_PER_NODE", "a100:4");
  has(plan("--launcher slurm", gpus), "n2: ranks 4 to 7\n");
  // Without tasks Slurm counts processors there.
  gpus[2].second = "64(x2)";
  has(plan("--launcher slurm", gpus), "n2: ranks 4 to 7\n");
  gpus.pop_back();
  has(plan("--launcher slurm", gpus), "2 ranks of: true\n");
  gpus.emplace_back("SLURM_NTASKS_PER_NODE", "64");
  has(plan("--launcher slurm", gpus), "128 ranks of: true\n");
  gpus.pop_back();
  // Slurm names the GPUs of the first host, and all.
  gpus.insert(gpus.end(), {{"SLURM_GPUS_ON_NODE", "2"}, {"SLURM_GPUS", "3"}});
  out("--launcher slurm true", gpus, 2);
  has(err_,
      "the GPUs of this allocation are not the same on all nodes: 3 (SLURM_GPUS) on 2, of which the first "
      "has 2 "
      "(SLURM_GPUS_ON_NODE)");
  write("slots", "n1 slots=2\nn2 slots=1\n");
  has(plan("-H slots --launcher slurm", gpus), "3 ranks of: true\n");
  gpus.back().second = "a100:4";
  has(plan("--launcher slurm", gpus), "n2: ranks 2 to 3\n");
  out("--launcher openmpi --nnodes 2 --rdzv-endpoint a:1 true", {}, 2);
  has(err_, "--launcher and --nnodes exclude each other");
  out("-H hosts --launcher slurm true", job, 2);
  has(err_, "hosts: host 'n0' is not in this allocation of Slurm");
  EXPECT_EQ(lines(err_).size(), 1u);
  gpus[2].second = "1";
  out("--launcher slurm true", gpus, 2);
  has(err_, "SLURM_TASKS_PER_NODE has 1 nodes, and SLURM_JOB_NODELIST 2");
}

TEST_F(RzrunWords, SlotsCountTheDevicesThatSlurmGave) {
  Program::Variables job{{"SLURM_JOB_ID", "7"},
                         {"SLURM_JOB_NODELIST", hosts::own_name()},
                         {"SLURM_TASKS_PER_NODE", "4"},
                         {"SLURM_NTASKS", "4"},
                         {"CUDA_VISIBLE_DEVICES", "4,5,GPU-6,7"}};
  const std::string script = " sh -c 'echo $CUDA_VISIBLE_DEVICES'",
                    slurm = "--launcher slurm --include " + hosts::own_name();
  EXPECT_EQ(out(slurm + ":2" + script, job), "GPU-6\n");
  EXPECT_EQ(out(slurm + ":1,3 --dry-run true", job),
            "2 ranks of: true\nthis host: ranks 0 to 1; CUDA_VISIBLE_DEVICES=5,7\n");
  EXPECT_EQ(out("--include localhost:1" + script, job), "5\n");
  EXPECT_EQ(out("--launcher slurm --num_gpus 1" + script, job), "4,5,GPU-6,7\n") << "Slurm's choice";
  job.back().second = "4,5";
  out("--include localhost:1,2" + script, job, 2);
  EXPECT_EQ(
      err_,
      "rzrun: slot 2: Slurm gave this host 2 devices (CUDA_VISIBLE_DEVICES=4,5), which slots count from 0\n");
  job.back().second = "NoDevFiles";
  EXPECT_EQ(out("--include localhost:1" + script, job), "NoDevFiles\n");
  job.front().second = "";
  EXPECT_EQ(out("--include localhost:1" + script, job), "1\n") << "DeepSpeed's numbers of devices";
}

TEST(RzrunWordsRefused, OneLineEach) {
  const auto refuse = [](std::vector<std::string> flags, const std::string& words) {
    flags.insert(flags.begin(), {"-n", "1"});
    flags.push_back("true");
    test::expect_refusal("rzrun", flags, words);
  };
  refuse({"--module", "--no_python"}, "--module and --no_python exclude each other");
  refuse({"--local_rank", "--no_local_rank"}, "--local_rank and --no_local_rank exclude each other");
  refuse({"--launcher", "slurm"}, "this is no allocation of Slurm; put 'salloc");
  ::setenv("SLURM_JOB_NODELIST_HET_GROUP_0", "a", 1);
  refuse({"--launcher", "slurm"}, "heterogeneous job of Slurm, whose groups rzrun does not combine");
  ::unsetenv("SLURM_JOB_NODELIST_HET_GROUP_0");
  ::setenv("SLURM_JOB_ID", "1", 1);
  refuse({"--launcher", "slurm"}, "--launcher slurm: SLURM_JOB_NODELIST is missing");
  ::unsetenv("SLURM_JOB_ID");
  refuse({"--launcher", "openmpi"}, "--launcher openmpi needs --hostfile FILE");
  refuse({"--launcher", "mpich"}, "start the ranks with mpirun -n N PROGRAM");
  refuse({"--launcher", "openmpi", "--rsh", "rsh"}, "--launcher openmpi and --rsh exclude each other");
  refuse({"--launcher", "x"}, "--launcher x: unknown");
  refuse({"--launcher_args", "-v"}, "--launcher_args needs --hostfile FILE");
  refuse({"--launcher_args", "-o 'x"}, "--launcher_args: a quote (') has no other one");
  refuse({"--rsh", "ssh \"x"}, "--rsh");
  refuse({"--bind", "none", "--bind_cores_to_rank"}, "exclude each other");
  refuse({"-x", "RANK=1"}, "-x RANK: RANK is set by rzrun");
  refuse({"-x", "MASTER_ADDR=a"}, "use --master-addr ADDRESS");
  refuse({"-x", "RZ_IS_NOT_SET_HERE"}, "-x RZ_IS_NOT_SET_HERE: is not set here");
  refuse({"--autotuning=tune"}, "--autotuning is a flag of deepspeed");
  refuse({"--shutdown-timeout=30"}, "--shutdown-timeout is a flag of torchrun; use --grace SECONDS");
  refuse({"--log-line-prefix-template=x"}, "--log-line-prefix-template is a flag of torchrun; use --prefix");
}

TEST(TopologyTool, RefusesTheDescriptionOfAnotherMachine) {
  Program p({test::built("topology")}, {{"HWLOC_SYNTHETIC", "pack:4 core:16 pu:2"}});
  EXPECT_EQ(p.wait(), 2);
  EXPECT_NE(p.err().find("hwloc describes another machine"), std::string::npos) << p.err();
}

TEST(LocalRank, ProgramsAcceptTheirOwn) {
  for (const std::string flag : {"--local_rank=1", "--local-rank=1"}) {
    Program p({test::built("topology"), flag}, {{"LOCAL_RANK", "1"}});
    EXPECT_EQ(p.wait(), 0) << p.err();
  }
  Program apart({test::built("topology"), "--local_rank", "-1"}, {{"LOCAL_RANK", "1"}});
  EXPECT_EQ(apart.wait(), 0) << apart.err();
  Program other({test::built("topology"), "--local_rank=1"}, {{"LOCAL_RANK", "0"}});
  EXPECT_EQ(other.wait(), 2);
  EXPECT_EQ(lines(other.err()).size(), 1u);
  EXPECT_NE(other.err().find("--local_rank=1: the local rank is 0 by LOCAL_RANK"), std::string::npos)
      << other.err();
  test::expect_refusal("topology", {"--local_rank"}, "--local_rank: a value is missing");
  test::expect_refusal("topology", {"--local_rank=x"}, "expected an integer");
}

}  // namespace
}  // namespace rz::rzrun
