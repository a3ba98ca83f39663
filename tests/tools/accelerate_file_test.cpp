// Needs: rz_accelerate

// Accelerate's file: YAML, its keys, and what rzrun makes of them; without processes.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "comm/core/error.h"
#include "tests/support/error_of.h"
#include "tests/support/fuzz.h"
#include "tests/support/rzrun.h"
#include "tools/rzrun/accelerate/translation.h"

namespace rz::accelerate {
namespace {

template <class F>
std::string error_of(const F& f) {
  return test::refusal(f, Errc::config);
}

Values values_of(const std::string& text) {
  Values v;
  v.read_file(parse_yaml(text, "F"), "F");
  return v;
}

Translation translation(const std::string& text, const Typed& typed = {}) {
  return translate(values_of(text), typed);
}

std::string variable(const Translation& l, const std::string& name) {
  for (const auto& [found, value] : l.variables)
    if (found == name) return value;
  return "not set";
}

std::string config(const std::string& text) { return variable(translation(text), "RZ_CONFIG"); }

std::string flag(const Translation& l, const std::string& name) {
  const auto found = l.flags.find(name);
  return found == l.flags.end() ? "not set" : found->second.value;
}

void expect_error(const std::string& text, const std::string& words) {
  const std::string error = error_of([&] { translation(text); });
  EXPECT_NE(error.find(words), std::string::npos) << "of " << text << ": " << error;
}

TEST(Yaml, MappingsListsAndScalarsHaveTheirLines) {
  const YamlNode root = parse_yaml("a: 1\nb:\n  c: 'no'\n  d: [x, \"null\"]\n# e\nf:\ng: ~\nh: {}\n", "F");
  ASSERT_EQ(root.entries.size(), 5u);
  EXPECT_EQ(root.entries[0].node.text, "1");
  const YamlNode& b = root.entries[1].node;
  EXPECT_EQ(b.line, 2);
  EXPECT_EQ(b.entries[0].node.text, "no");
  EXPECT_TRUE(b.entries[0].node.quoted);
  EXPECT_EQ(b.entries[1].node.line, 4);
  EXPECT_EQ(b.entries[1].node.items[1].kind, YamlNode::Kind::scalar) << "in quotes it is text";
  EXPECT_EQ(root.entries[2].node.kind, YamlNode::Kind::null);
  EXPECT_EQ(root.entries[3].node.kind, YamlNode::Kind::null);
  EXPECT_EQ(root.entries[4].node.kind, YamlNode::Kind::mapping);
  EXPECT_EQ(parse_yaml("{\"a\": {\"b\": true}}", "F").entries[0].node.entries[0].node.text, "true") << "JSON";
  EXPECT_EQ(parse_yaml("", "F").kind, YamlNode::Kind::null);
}

TEST(Yaml, ErrorsNameFileAndLine) {
  const auto expect = [](const std::string& text, const std::string& words) {
    const std::string error = error_of([&] { parse_yaml(text, "F"); });
    EXPECT_NE(error.find(words), std::string::npos) << "of " << text << ": " << error;
  };
  expect("a: &x 1\nb: *x", "F:1: an anchor (&NAME) is not accepted");
  expect("a: 1\nb: *x", "F:2: an alias (*NAME) is not accepted");
  expect("*x : 1", "F:1: an alias (*NAME)");
  expect("a: 1\nb: !!python/object x", "F:2: a tag (!NAME) is not accepted");
  expect("a: !x {}", "F:1: a tag");
  expect("a: &x []", "F:1: an anchor");
  expect("a: 1\n\na: 2", "F:3: the key 'a' is there twice; remove one");
  expect("b:\n  c: 1\n  c: 2", "F:3: the key 'c' is there twice");
  expect("[1]: 2", "F:1: a key is a mapping or a list; a key is a word");
  expect("a: 1\n---\nb: 1", "F:2: a second document begins");
  expect("a: [[[[[[[[1]]]]]]]]", "F:1: more than 8 levels");
  expect("a:\n\tb: 1", "F:2: found character that cannot start any token");
  expect("a: 1\n b: 2", "F:2: mapping values are not allowed in this context");
  expect("a: 'x", "F:");
  expect("a: \xff", "F: byte 3: ");
  expect(std::string("a: \"\\0\""), "F:1: a value has a zero byte");
  expect(std::string(max_yaml_bytes + 1, ' '), "F: it has more than 64 KiB");
  EXPECT_NE(error_of([] { read_yaml("/nowhere.yaml"); }).find("--config_file /nowhere.yaml: No such file"),
            std::string::npos);
  EXPECT_NE(error_of([] { read_yaml("/tmp"); }).find("--config_file /tmp: it cannot be read"),
            std::string::npos);
}

TEST(AccelerateKeys, NamesAreUniqueAndHaveReasons) {
  for (const Key& key : keys()) {
    EXPECT_EQ(find_key(key.name), &key) << key.name << " is there twice";
    EXPECT_EQ(key.note.empty(), key.treatment == Treatment::applied) << key.name;
    EXPECT_TRUE(key.name.starts_with(prefix_of(key.block)) || key.name == "dynamo_backend") << key.name;
  }
}

/// A file that `accelerate config` writes, of each block.
TEST(AccelerateKeys, WhatAccelerateWritesIsKnown) {
  EXPECT_EQ(flag(translation(R"(
compute_environment: LOCAL_MACHINE
debug: true
distributed_type: FSDP
downcast_bf16: 'no'
dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: default, dynamo_use_dynamic: true, use_fullgraph: false}
enable_cpu_affinity: true
fp8_config: {backend: TE, margin: 0, interval: 1, fp8_format: E4M3, amax_history_length: 1024,
             amax_compute_algorithm: max, override_linear_precision: [false, false, false],
             use_autocast_during_eval: false, optimization_level: O2, pad_inner_dim: true}
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_min_num_params: 100000000
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
  fsdp_ignored_modules: null
gpu_ids: all
ipex_config: {ipex: false, use_xpu: false}
machine_rank: 0
main_process_ip: null
main_training_function: main
megatron_lm_config: {}
mpirun_config: {mpirun_ccl: '1'}
mixed_precision: 'no'
num_machines: 1
num_processes: 2
parallelism_config: {parallelism_config_cp_size: 1, parallelism_config_sp_backend: deepspeed}
rdzv_backend: static
same_network: true
tpu_env: []
tpu_vm: ['']
tpu_name: null
tpu_use_cluster: false
tpu_use_sudo: false
command_file: null
commands: null
use_cpu: false
)"),
                 "--nproc-per-node"),
            "2");
}

TEST(AccelerateKeys, UnknownOnesAreNamedWithTheNearest) {
  expect_error("num_proceses: 2", "F:1: num_proceses: unknown key; did you mean 'num_processes'?");
  expect_error("deepspeed_conifg: {}",
               "F:1: deepspeed_conifg: unknown key; did you mean 'deepspeed_config'?");
  expect_error("deepspeed_config:\n  zero_stge: 2",
               "F:2: deepspeed_config.zero_stge: unknown key; did you mean 'zero_stage'?");
  expect_error("fsdp_config:\n  sharding_stratgy: x", "F:2: fsdp_config.sharding_stratgy: unknown key; ");
  expect_error("invalid_key: 1", "F:1: invalid_key: unknown key; remove it");
  expect_error("zero_stage: 2", "F:1: 'zero_stage' is a key of deepspeed_config; move it there, indented");
  expect_error("deepspeed_config:\n  num_processes: 2",
               "F:2: 'num_processes' is a key of the file itself; move it");
  expect_error("multi_gpu: true", "F:1: multi_gpu: unknown key");
  expect_error("deepspeed_config: 3", "F:1: deepspeed_config: a block of lines KEY: VALUE is needed");
  expect_error("- a", "F:1: it must have lines KEY: VALUE");
  expect_error("", "F:1: it must have lines KEY: VALUE");
  expect_error("num_processes: [2]", "F:1: num_processes: one value is needed, not a block or a list");
  expect_error("fsdp_config:\n  fsdp_version: 1\n  version: 1", "F:3: version is there twice");
}

TEST(AccelerateKeys, RefusalsNameTheRemedy) {
  for (const char* type : {"MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_HPU", "XLA", "TPU"})
    expect_error(concat("num_processes: 2\ndistributed_type: ", type),
                 concat("F:2: distributed_type: ", type, ": devices are CUDA's, or none; use MULTI_GPU"));
  expect_error("distributed_type: MEGATRON_LM", "Megatron-LM is not started; use FSDP or DEEPSPEED");
  expect_error("distributed_type: MULTI_GPUS", "F:1: distributed_type 'MULTI_GPUS': there are NO, MULTI_GPU");
  expect_error("compute_environment: AMAZON_SAGEMAKER",
               "jobs on SageMaker are not started; use LOCAL_MACHINE");
  expect_error("compute_environment: MOON", "F:1: compute_environment 'MOON': there is LOCAL_MACHINE");
  expect_error("ec2_instance_type: x", "F:1: ec2_instance_type: jobs on SageMaker");
  expect_error("tpu_use_cluster: true", "F:1: tpu_use_cluster: TPUs are not supported; remove it");
  expect_error("downcast_bf16: 'yes'", "F:1: downcast_bf16: TPUs");
  expect_error("tpu_env: [A=1]", "F:1: tpu_env: TPUs");
  expect_error("megatron_lm_config:\n  megatron_lm_tp_degree: 2",
               "F:2: megatron_lm_tp_degree: Megatron-LM is not");
  expect_error("mpirun_config:\n  mpirun_hostfile: h", "F:2: mpirun_hostfile: ranks are started by rzrun");
  expect_error("mixed_precision: fp8", "F:1: mixed_precision: fp8 is not supported; use bf16");
  expect_error("mixed_precision: f16",
               "F:1: mixed_precision: unknown choice \"f16\"; choose no or bf16 or fp16 or fp8");
  expect_error("deepspeed_config: {offload_param_device: nvme}",
               "offload_param_device: nvme is not supported");
  expect_error("deepspeed_config: {offload_param_nvme_path: /n}",
               "offload_param_nvme_path: offload is to host");
  expect_error("deepspeed_config: {deepspeed_moe_layer_cls_names: X}", "there are no mixtures of experts");
  expect_error("fsdp_config: {fsdp_ignored_modules: x}", "fsdp_ignored_modules: all modules are divided");
  expect_error("parallelism_config: {parallelism_config_cp_size: 2}",
               "sequences are not divided between ranks");
  expect_error("fsdp_config: {fsdp_sharding_strategy: NO_SHARD, fsdp_offload_params: true}",
               "fsdp_offload_params: needs values that are divided");
  expect_error("distributed_type: MULTI_GPU\ndeepspeed_config: {zero_stage: 2}",
               "F:2: zero_stage: distributed_type is not DEEPSPEED, so nothing reads deepspeed_config");
  expect_error("distributed_type: DEEPSPEED\nfsdp_config: {fsdp_version: 2}", "nothing reads fsdp_config");
}

TEST(AccelerateKeys, WrongValuesAreNamed) {
  expect_error("num_processes: two", "F:1: num_processes: expected a whole number, found \"two\"");
  expect_error("num_processes: 0", "F:1: num_processes: must be from 1 to ");
  expect_error("num_processes: -1", "F:1: num_processes: the file leaves the number to the command line");
  expect_error("num_processes: 3\nnum_machines: 2\nmain_process_ip: h",
               "F:1: num_processes: 3 ranks of all machines, of which there are 2");
  expect_error("num_machines: 0", "F:1: num_machines: must be from 1 to ");
  expect_error("num_machines: 2\nnum_processes: 2",
               "F:1: num_machines: there are 2 machines, and main_process_ip is missing");
  expect_error("main_process_port: 70000", "F:1: main_process_port: must be from 0 to 65535, found 70000");
  expect_error("num_processes: 2\ndistributed_type: 'NO'",
               "F:1: num_processes: must be from 1 to 1, found 2");
  expect_error("gpu_ids: a", "F:1: gpu_ids: 'a' is no number of a device; write all, or 0,1");
  expect_error("gpu_ids: 0,0", "F:1: gpu_ids: device 0 is there twice");
  expect_error("gpu_ids: []", "F:1: gpu_ids: no device");
  expect_error("gpu_ids: 0,2\nnum_processes: 4", "F:1: gpu_ids: 2 devices for 4 ranks of this host");
  expect_error("use_cpu: maybe", "F:1: use_cpu: expected true or false, found \"maybe\"");
  expect_error("deepspeed_config: {zero_stage: 4}", "F:1: zero_stage: must be from 0 to 3, found 4");
  expect_error("gradient_accumulation_steps: 0",
               "F:1: gradient_accumulation_steps: must be from 1 to 1000000000, found 0");
  expect_error("gradient_clipping: -1", "F:1: gradient_clipping: must be from 0 to ");
  expect_error("gradient_clipping: nan", "F:1: gradient_clipping: expected a number, found \"nan\"");
  expect_error("fsdp_config: {fsdp_sharding_strategy: HALF}",
               "fsdp_sharding_strategy: unknown choice \"HALF\"; choose FULL_SHARD or ");
  expect_error("fsdp_config: {fsdp_version: 3}", "fsdp_version: must be from 1 to 2, found 3");
  expect_error("fsdp_config: {fsdp_reshard_after_forward: x}",
               "fsdp_reshard_after_forward: unknown choice \"x\"; choose FULL_SHARD or ");
  expect_error("num_machines: 2\ndeepspeed_config: {deepspeed_multinode_launcher: nossh}",
               "nossh: write standard");
  expect_error(
      "num_machines: 2\ndeepspeed_config: {deepspeed_multinode_launcher: mvapich}",
      "F:2: deepspeed_multinode_launcher: mvapich: rzrun starts its agents by ssh, openmpi or slurm");
  expect_error("num_machines: 2\ndeepspeed_config: {deepspeed_multinode_launcher: pdsh}",
               "F:1: num_machines: there are 2 machines, and deepspeed_hostfile is missing");
  expect_error(
      "num_machines: 2\ndeepspeed_config: {deepspeed_hostfile: h, deepspeed_inclusion_filter: a, "
      "deepspeed_exclusion_filter: b}",
      "deepspeed_exclusion_filter: it and deepspeed_inclusion_filter exclude each other");
}

constexpr const char* sizes =
    R"("train_batch_size":"auto","train_micro_batch_size_per_gpu":"auto","gradient_accumulation_steps":)";

TEST(AccelerateConfiguration, OfDeepSpeed) {
  const std::string begin = concat("{", sizes);
  EXPECT_EQ(config("distributed_type: DEEPSPEED"),
            begin + R"("auto","gradient_clipping":"auto","zero_optimization":{"stage":2}})");
  EXPECT_EQ(
      config("distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n"
             "  gradient_accumulation_steps: 4\n  gradient_clipping: 0.5\n  offload_optimizer_device: cpu\n"
             "  offload_param_device: none\n  zero3_save_16bit_model: true"),
      begin + R"(4,"gradient_clipping":0.5,"zero_optimization":{"stage":3,"offload_optimizer":)"
              R"({"device":"cpu"},"stage3_gather_16bit_weights_on_model_save":true},)"
              R"("bf16":{"enabled":true}})");
  EXPECT_NE(config("distributed_type: DEEPSPEED\nfp16: true").find(R"("fp16":{"enabled":true})"),
            std::string::npos);
}

TEST(AccelerateConfiguration, AFileIsHandedOnAsItsPath) {
  const test::Folder folder;
  const std::string path = folder / "ds.json";
  const std::string text =
      "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: " + path +
      "\n  zero3_init_flag: true\n";
  expect_error(text, "F:3: deepspeed_config_file: there is no file");
  std::ofstream(path) << "{}";
  EXPECT_EQ(config(text), path);
  expect_error(text + "  zero_stage: 2", "F:5: zero_stage: deepspeed_config_file " + path + " decides");
  expect_error(text + "mixed_precision: bf16",
               "F:5: mixed_precision: deepspeed_config_file " + path + " decides");
}

TEST(AccelerateConfiguration, OfFsdp) {
  const auto stage = [](const std::string& keys) {
    const std::string found = config("distributed_type: FSDP\nfsdp_config: {" + keys + "}");
    const auto at = found.find("\"zero_optimization\"");
    return found.substr(at, found.size() - at - 1);
  };
  const auto is = [](int n, const std::string& rest = "") {
    return concat(R"("zero_optimization":{"stage":)", n, "}", rest);
  };
  const std::string mesh = R"(,"ringzero":{"mesh":{"replicate":"auto","shard":"auto"}})";
  EXPECT_EQ(stage(""), is(3));
  EXPECT_EQ(stage("fsdp_sharding_strategy: FULL_SHARD"), is(3));
  EXPECT_EQ(stage("fsdp_sharding_strategy: SHARD_GRAD_OP"), is(2));
  EXPECT_EQ(stage("fsdp_sharding_strategy: 2"), is(2));
  EXPECT_EQ(stage("sharding_strategy: NO_SHARD"), is(0));
  EXPECT_EQ(stage("fsdp_sharding_strategy: HYBRID_SHARD"), is(3, mesh));
  EXPECT_EQ(stage("fsdp_sharding_strategy: HYBRID_SHARD_ZERO2"), is(2, mesh));
  EXPECT_EQ(stage("fsdp_version: 2, fsdp_reshard_after_forward: true"), is(3));
  EXPECT_EQ(stage("fsdp_version: 2, fsdp_reshard_after_forward: false"), is(2));
  EXPECT_EQ(stage("fsdp_reshard_after_forward: SHARD_GRAD_OP"), is(2)) << "as version 1 has it";
  EXPECT_EQ(
      stage("fsdp_offload_params: true"),
      R"("zero_optimization":{"stage":3,"offload_optimizer":{"device":"cpu"},"offload_param":{"device":"cpu"}})");
  EXPECT_EQ(stage("fsdp_activation_checkpointing: true"),
            is(3, R"(,"activation_checkpointing":{"partition_activations":true})"));
}

TEST(AccelerateConfiguration, OfOthersOnlyWhatIsGiven) {
  EXPECT_EQ(config("num_processes: 2\ndistributed_type: MULTI_GPU\nmixed_precision: 'no'"), "not set");
  EXPECT_EQ(config("mixed_precision: bf16"),
            concat("{", sizes,
                   R"("auto","gradient_clipping":"auto","torch_autocast":{"enabled":true,"dtype":"bf16"}})"));
  EXPECT_EQ(config("parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  "
                   "parallelism_config_dp_shard_size: 4\n  parallelism_config_tp_size: 2"),
            R"({"ringzero":{"mesh":{"replicate":2,"shard":4,"tp":2}}})");
  EXPECT_EQ(config("distributed_type: TP\ntp_config: {tp_size: 2}"), R"({"ringzero":{"mesh":{"tp":2}}})");
}

TEST(AccelerateConfiguration, KeysThatLostTheirIndentationAreOfTheEmptyBlock) {
  const Translation l =
      translation("deepspeed_config:\nzero_stage: 3\ngradient_clipping: 1.0\ndistributed_type: DEEPSPEED");
  EXPECT_NE(variable(l, "RZ_CONFIG").find(R"("stage":3)"), std::string::npos);
  EXPECT_EQ(l.notes, std::vector<std::string>{"F:2: zero_stage and 1 more: read as of deepspeed_config, "
                                              "which is empty; indent what belongs to it"});
}

TEST(AccelerateLaunch, OneMachine) {
  const Translation l = translation("num_processes: 4\nmain_process_port: 29511\ngpu_ids: '3,1,0,2'");
  EXPECT_EQ(flag(l, "--nproc-per-node"), "4");
  EXPECT_EQ(flag(l, "--master-port"), "29511");
  EXPECT_EQ(flag(l, "--nnodes"), "not set");
  EXPECT_EQ(l.devices, (std::vector<int>{3, 1, 0, 2}));
  EXPECT_EQ(translation("gpu_ids: [0, 2]").devices, (std::vector<int>{0, 2}));
  EXPECT_EQ(flag(translation("main_process_port: 0"), "--master-port"), "") << "any";
  EXPECT_EQ(flag(translation("distributed_type: 'NO'"), "--nproc-per-node"), "1");
  EXPECT_EQ(variable(translation("use_cpu: true\ngpu_ids: 0,1"), "CUDA_VISIBLE_DEVICES"), "");
}

TEST(AccelerateLaunch, SeveralMachinesHaveTorchrunsFlags) {
  const std::string text =
      "num_processes: 8\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: h\nmain_process_port: 29500\n"
      "rdzv_backend: c10d\n";
  const Translation l = translation(text);
  EXPECT_EQ(flag(l, "--nproc-per-node"), "4");
  EXPECT_EQ(flag(l, "--nnodes"), "2");
  EXPECT_EQ(flag(l, "--node-rank"), "1");
  EXPECT_EQ(flag(l, "--master-addr"), "h");
  EXPECT_EQ(flag(l, "--master-port"), "29500");
  EXPECT_EQ(flag(l, "--rdzv-backend"), "c10d");
  EXPECT_EQ(l.flags.at("--node-rank").where, "F:3: machine_rank");
  EXPECT_EQ(flag(translation(text, {.nnodes = 4}), "--nproc-per-node"), "2") << "--nnodes wins";
}

TEST(AccelerateLaunch, DeepSpeedsHostfileStartsAllFromOneHost) {
  const std::string text =
      "num_processes: 8\nnum_machines: 2\nmain_process_ip: h\nmain_process_port: 29500\n"
      "deepspeed_config:\n  deepspeed_hostfile: hosts\n";
  const Translation l = translation(text);
  EXPECT_EQ(flag(l, "--hostfile"), "hosts");
  EXPECT_EQ(flag(l, "--num_gpus"), "4");
  EXPECT_EQ(flag(l, "--nproc-per-node"), "not set");
  EXPECT_EQ(flag(l, "--nnodes"), "not set");
  EXPECT_EQ(flag(l, "--master-addr"), "h");
  const Translation filtered = translation(text + "  deepspeed_exclusion_filter: b:1\n");
  EXPECT_EQ(flag(filtered, "--exclude"), "b:1");
  EXPECT_EQ(flag(filtered, "--num_gpus"), "not set");
  EXPECT_EQ(flag(translation(text + "  deepspeed_inclusion_filter: b\n"), "--include"), "b");
  EXPECT_EQ(flag(translation(text + "  deepspeed_multinode_launcher: standard\n"), "--nnodes"), "2");
  EXPECT_EQ(flag(l, "--launcher"), "not set");
  EXPECT_EQ(flag(translation(text + "  deepspeed_multinode_launcher: pdsh\n"), "--launcher"), "not set");
  EXPECT_EQ(flag(translation(text + "  deepspeed_multinode_launcher: slurm\n"), "--launcher"), "slurm");
}

TEST(AccelerateLaunch, TypedFlagsWin) {
  const std::string text = "num_processes: 8\nnum_machines: 2\nmain_process_ip: h\ngpu_ids: 0,1,2,3\n";
  EXPECT_EQ(flag(translation(text, {.ranks = true}), "--nproc-per-node"), "not set");
  const Translation hosts = translation(text, {.ranks = true, .hosts = true});
  EXPECT_TRUE(hosts.flags.empty());
  EXPECT_TRUE(hosts.devices.empty());
  Values v = values_of("num_processes: 8\nmixed_precision: bf16\n");
  v.set_flag(*find_key("num_processes"), "2");
  v.set_flag(*find_key("mixed_precision"), "no");
  v.set_flag(*find_key("num_cpu_threads_per_process"), "3");
  const Translation l = translate(v, {});
  EXPECT_EQ(flag(l, "--nproc-per-node"), "2");
  EXPECT_EQ(l.flags.at("--nproc-per-node").where, "--num_processes");
  EXPECT_EQ(variable(l, "RZ_CONFIG"), "not set");
  EXPECT_EQ(variable(l, "OMP_NUM_THREADS"), "3");
  EXPECT_NE(
      error_of([&] { v.set_flag(*find_key("use_megatron_lm"), "true"); }).find("--use_megatron_lm: Megatron"),
      std::string::npos);
}

/// Random files of the words of the grammar and of all keys are read, or refused in one line.
TEST(AccelerateFuzz, AnyTextIsReadOrRefused) {
  test::Fuzz fuzz(5000);
  auto& random = fuzz.random;
  const std::vector<std::string> marks{
      ":",  ": ",  "\n", "\n  ", " ", "-", "- ", "[",       "]",   "{",  "}",  ",",  "'",   "\"", "#",
      " #", "&a ", "*a", "!!s ", "|", ">", "%",  "\n---\n", "...", "? ", "<<", "\t", "\\x", "~",  "\r\n"};
  const std::vector<std::string> words{"all",         "0,1", "1",    "2",    "8",         "-1",        "true",
                                       "\"a\\n\\e\"", "no",  "'no'", "null", "MULTI_GPU", "DEEPSPEED", "FSDP",
                                       "bf16",        "cpu", "0.5",  "auto", "h",         "[]",        "{}"};
  const auto line = [&](const char* indent) {
    const Key& key = keys()[random() % keys().size()];
    return concat(indent, key.name, ": ", words[random() % words.size()], "\n");
  };
  const auto text = [&] {
    std::string t;
    for (std::size_t n = random() % 6; n > 0; --n) {
      if (random() % 3 == 0) {
        t += concat(blocks()[random() % blocks().size()], ":\n");
        for (std::size_t m = random() % 3; m > 0; --m) t += line("  ");
      } else {
        t += line("");
      }
    }
    if (random() % 2 || t.empty()) return t;
    for (std::size_t n = random() % 4; n > 0; --n) {
      const std::string byte(1, static_cast<char>(random()));
      t.insert(random() % (t.size() + 1), random() % 8 ? marks[random() % marks.size()] : byte);
    }
    return t;
  };
  long parsed = 0, read = 0;
  while (fuzz.next()) {
    const std::string t = text();
    parsed += error_of([&] { parse_yaml(t, "F"); }).empty();
    read +=
        error_of([&] { translation(t, {.ranks = random() % 4 == 0, .hosts = random() % 4 == 0}); }).empty();
  }
  EXPECT_GT(parsed, fuzz.tried() / 2);
  EXPECT_LT(parsed, fuzz.tried());
  EXPECT_GT(read, fuzz.tried() / 100);
  EXPECT_LT(read, parsed);
}

}  // namespace
}  // namespace rz::accelerate
