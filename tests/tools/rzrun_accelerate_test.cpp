// Needs: rzrun_lib rzrun train_lm

// rzrun by Accelerate's file and flags: what starts, and that train_lm trains as by the same configuration.

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/program.h"
#include "tests/support/rzrun.h"
#include "tools/rzrun/ranks/launch.h"

namespace rz {
namespace {

using test::Folder;
using test::lines;
using test::Program;

/// As `accelerate config` writes it; a user's.
constexpr const char* file = R"(compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
)";

class RzrunAccelerate : public testing::Test {
 protected:
  void SetUp() override { write("a.yaml", file); }

  void write(const std::string& name, const std::string& text) { std::ofstream(folder_ / name) << text; }

  /// Standard output of rzrun, run in the folder.
  std::string out(const std::string& words, const Program::Variables& variables = {}, int status = 0) {
    Program p({"sh", "-c", "cd '" + folder_.path() + "' && exec '" + test::built("rzrun") + "' " + words},
              variables);
    EXPECT_EQ(p.wait(std::chrono::seconds(180)), status) << p.err();
    err_ = p.err();
    return p.out();
  }

  void expect_refused(const std::string& words, const std::string& line) {
    EXPECT_EQ(out(words, {}, 2), "");
    EXPECT_EQ(lines(err_).size(), 1u) << err_;
    EXPECT_NE(err_.find(line), std::string::npos) << err_;
  }

  /// Losses of train_lm with these words of rzrun and of its own.
  std::vector<double> losses(const std::string& launcher, const std::string& own) {
    const std::string data = RZ_SOURCE_DIR "/tests/data/gpt2_tiny/";
    out(launcher + " " + test::built("train_lm") + " --model " + data + "config.json --tokens " + data +
        "tokens.bin --learning-rate 0.01 --per-device-train-batch-size 2 --steps 4 --seq-len 8 --metrics "
        "m.jsonl " +
        own);
    std::vector<double> all;
    for (const std::string& line : lines(test::content(folder_ / "m.jsonl")))
      all.push_back(nlohmann::json::parse(line)["loss"]);
    return all;
  }

  Folder folder_;
  std::string err_;
};

TEST_F(RzrunAccelerate, TheFileOfAUserTrainsAsTheSameConfiguration) {
  write("ds.json", R"({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"},
    "offload_param": {"device": "cpu"}, "stage3_gather_16bit_weights_on_model_save": true}})");
  const auto expected = losses("-n 2", "--config ds.json");
  ASSERT_EQ(expected.size(), 4u);
  EXPECT_EQ(losses("--config_file a.yaml --num_processes 2", ""), expected);
  std::string flat;  // as a page shows it that lost the indentation
  for (const std::string& line : lines(file)) flat += line.substr(line.find_first_not_of(' ')) + "\n";
  write("flat.yaml", flat);
  EXPECT_EQ(losses("--config-file flat.yaml -n 2", ""), expected);
  EXPECT_NE(err_.find("flat.yaml:4: gradient_accumulation_steps and 6 more: read as of deepspeed_config"),
            std::string::npos)
      << err_;

  // What the configuration has is applied.
  const auto clipped = losses("--config_file a.yaml --num_processes 2 --gradient_clipping 0.01", "");
  EXPECT_EQ(clipped.front(), expected.front());
  EXPECT_NE(clipped.back(), expected.back());
  write("ds.json", R"({"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.01})");
  EXPECT_EQ(losses("-n 2 --use_deepspeed --deepspeed_config_file ds.json", ""), clipped) << "in every stage";
  EXPECT_EQ(losses("--config_file a.yaml --num_processes 2", "--config ds.json"), clipped) << "--config wins";
}

TEST_F(RzrunAccelerate, TheConfigurationReachesEachRankOnce) {
  const std::string script = " sh -c 'echo $RANK/$WORLD_SIZE $RZ_CONFIG'";
  const std::string json = "{\"train_batch_size\"";
  const auto of = [&](const std::string& flags, const Program::Variables& variables = {}) {
    auto all = lines(out(flags + script, variables));
    std::ranges::sort(all);
    return all;
  };
  auto all = of("--config_file a.yaml --num_processes 2");
  ASSERT_EQ(all.size(), 2u);
  EXPECT_TRUE(all[0].starts_with("0/2 " + json)) << all[0];
  EXPECT_TRUE(all[1].starts_with("1/2 " + json)) << all[1];
  EXPECT_TRUE(of("--config_file a.yaml -n 1", {{"RZ_CONFIG", "before"}})[0].starts_with("0/1 " + json))
      << "the file wins over the environment";
  EXPECT_EQ(of("--config_file a.yaml -n 1 -x RZ_CONFIG=x")[0], "0/1 x");
  EXPECT_TRUE(of("--config_file a.yaml -n 1 --force_multi")[0].starts_with("[localhost:0] 0/1 " + json));
  EXPECT_EQ(of("--multi_gpu --num_processes 2"), (std::vector<std::string>{"0/2", "1/2"}));
  EXPECT_EQ(lines(out("--num_processes 1 --num_cpu_threads_per_process 3 --cpu sh -c "
                      "'echo $OMP_NUM_THREADS ${CUDA_VISIBLE_DEVICES-all}.'"))[0],
            "3 .");
  EXPECT_EQ(lines(out("--num_processes 1 --gpu_ids 2,0 sh -c 'echo $CUDA_VISIBLE_DEVICES'"))[0], "2,0");
  EXPECT_EQ(lines(out("--num_processes 1 --main_process_port 29517 sh -c 'echo $MASTER_PORT'"))[0], "29517");
}

TEST_F(RzrunAccelerate, DryRunHasRanksHostsAndConfiguration) {
  write("fsdp.yaml",
        "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n"
        "num_processes: 4\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: node0\n"
        "main_process_port: 29501\n");
  const std::string config =
      R"(RZ_CONFIG: {"train_batch_size":"auto","train_micro_batch_size_per_gpu":"auto",)"
      R"("gradient_accumulation_steps":"auto","gradient_clipping":"auto","zero_optimization":{"stage":3},)"
      R"("ringzero":{"mesh":{"replicate":"auto","shard":"auto"}}})";
  EXPECT_EQ(out("--config_file fsdp.yaml --dry-run ./train"),
            "2 ranks on this host of: ./train\n2 hosts, job 'none'; this is node 1\n"
            "connects to node0:29501; waits 600 s for node 0\n"
            "this host: ranks 2 to 3 if each host before has 2 ranks\n" +
                config + "\n");
  EXPECT_EQ(
      out("--config_file fsdp.yaml --machine_rank 0 --node_rank 0 --main_process_ip other --dry-run true"),
      "2 ranks on this host of: true\n2 hosts, job 'none'; this is node 0\n"
      "listens at other:29501, which is no address of this host; waits 600 s for the other hosts\n"
      "this host: ranks 0 to 1\n" +
          config + "\n");
  EXPECT_EQ(out("--num_processes 2 --gpu_ids 0,2,3 --dry-run true"),
            "2 ranks of: true\nthis host: ranks 0 to 1; CUDA_VISIBLE_DEVICES=0,2,3\n");
  write("hosts", "n0 slots=4\nn1 slots=4\n");
  write("pdsh.yaml",
        "distributed_type: DEEPSPEED\nnum_processes: 4\nnum_machines: 2\n"
        "deepspeed_config: {deepspeed_hostfile: hosts, zero_stage: 1}\n");
  auto all = lines(out("--config_file pdsh.yaml --dry-run true"));
  ASSERT_EQ(all.size(), 4u);
  EXPECT_TRUE(all[1].starts_with("n0: ranks 0 to 1; CUDA_VISIBLE_DEVICES=0,1; agent: ssh")) << all[1];
  EXPECT_TRUE(all[2].starts_with("n1: ranks 2 to 3")) << all[2];
  const char* const by_mpirun =
      "--config_file pdsh.yaml --deepspeed_multinode_launcher openmpi --dry-run true";
  EXPECT_NE(out(by_mpirun).find("agents: mpirun "), std::string::npos) << out(by_mpirun);
  all = lines(out("--config_file pdsh.yaml --deepspeed_inclusion_filter n1:3 --dry-run true"));
  EXPECT_TRUE(all[1].starts_with("n1: rank 0; CUDA_VISIBLE_DEVICES=3")) << all[1];
  all = lines(out("--config_file pdsh.yaml --hostfile hosts --exclude n0 --dry-run true"));
  EXPECT_TRUE(all[1].starts_with("n1: ranks 0 to 3")) << all[1];
}

TEST_F(RzrunAccelerate, AFileWinsOverVariablesOfTorchrun) {
  write("port.yaml", "num_processes: 2\nmain_process_port: 29511\n");
  EXPECT_EQ(out("--config_file port.yaml --dry-run true", {{"PET_MASTER_PORT", "44"}}),
            "2 ranks of: true\nthis host: ranks 0 to 1\nMASTER_PORT=29511\n");
}

TEST_F(RzrunAccelerate, TwoMachinesOfOneFileAreOneJob) {
  const int port = rzrun::free_port();
  write("two.yaml", concat("distributed_type: MULTI_CPU\nnum_processes: 4\nnum_machines: 2\nmachine_rank: 0\n"
                           "main_process_ip: 127.0.0.1\nmain_process_port: ",
                           port, "\n"));
  const auto start = [&](const std::string& flags) {
    return test::rzrun({"--config_file", folder_ / "two.yaml", "--machine_rank", flags},
                       "echo $RANK/$WORLD_SIZE of $GROUP_RANK");
  };
  const Program::Variables secret{{"RZ_SECRET", "0123456789012345678901234567890123456789"}};
  Program zero(start("0"), secret), one(start("1"), secret);
  EXPECT_EQ(zero.wait(), 0) << zero.err();
  EXPECT_EQ(one.wait(), 0) << one.err();
  const auto sorted = [](const std::string& text) {
    auto all = lines(text);
    std::ranges::sort(all);
    return all;
  };
  EXPECT_EQ(sorted(zero.out()), (std::vector<std::string>{"0/4 of 0", "1/4 of 0"}));
  EXPECT_EQ(sorted(one.out()), (std::vector<std::string>{"2/4 of 1", "3/4 of 1"}));
}

TEST_F(RzrunAccelerate, WrongFilesAndFlagsAreOneLine) {
  write("b.yaml", "num_processes: 2\nzero_stage: 2\n");
  expect_refused("--config_file b.yaml true", "rzrun: b.yaml:2: 'zero_stage' is a key of deepspeed_config");
  expect_refused("--config_file c.yaml true", "rzrun: --config_file c.yaml: No such file or directory");
  expect_refused("--mixed_precision fp8 -n 1 true", "rzrun: --mixed_precision: fp8 is not supported");
  expect_refused("--use_megatron_lm -n 1 true", "rzrun: --use_megatron_lm: Megatron-LM is not started");
  expect_refused("--num_processes two true", "rzrun: --num_processes: expected a whole number, found");
  expect_refused("-n 2 --num_processes 2 true", "-n and --num_processes exclude each other");
  expect_refused("--num_processes 3 --num_machines 2 --main_process_ip h true", "so the number must divide");
  write("m.yaml", "num_processes: 2\nnum_machines: 2\nmachine_rank: 2\nmain_process_ip: h\n");
  expect_refused("--config_file m.yaml true", "m.yaml:3: machine_rank '2': a whole number from 0 to 1");
  expect_refused("--config_file m.yaml -n 2 true", "-n and m.yaml:2: num_machines exclude each other");
  write("r.yaml", "num_processes: 2\nnum_machines: 2\nmain_process_ip: h\nrdzv_backend: etcd\n");
  expect_refused("--config_file r.yaml true", "r.yaml:4: rdzv_backend etcd is not supported");
  write("hosts", "n0 slots=4\nn1 slots=4\n");
  expect_refused("--hostfile hosts --gpu_ids 0 true", "gpu_ids is of one host, and a hostfile has several");
}

}  // namespace
}  // namespace rz
