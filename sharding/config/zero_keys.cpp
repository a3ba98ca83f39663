// Keys of the section "zero_optimization". Keys that begin with "stage3_" are accepted without this prefix,
// too.

#include "sharding/config/keys.h"

namespace rz::ds {
namespace {

using enum Kind;
constexpr double max_elements = 9.3e18;
constexpr double max_mesh_size = 1 << 20;
constexpr const char* zeropp = "ZeRO++ belongs to a later release";

constexpr KeySpec elements(KeySpec key) { return key.within(0, max_elements); }

constexpr KeySpec zero[] = {
    applied<&DsConfig::stage>("stage",
                              "0: replicas; shards of 1: optimizer state, 2: gradients too, 3: values too")
        .within(0, 3),
    applied<&StrategyOptions::reduce_bucket_size>(
        "reduce_bucket_size",
        "largest bucket of gradients, in elements; null: 25 MiB, at stage 2 at most an eighth of the "
        "model (DeepSpeed: 5e8)")
        .within(1, max_elements)
        .from_hidden_size([](std::int64_t h) { return h * h; }),
    applied<&StrategyOptions::overlap_comm>(
        "overlap_comm", "reduce while backward runs; null: true (DeepSpeed: at stage 3 only)")
        .or_null(),
    elements(applied<&StrategyOptions::allgather_bucket_size>(
                 "allgather_bucket_size",
                 "largest gather, in elements; the smaller of it and reduce_bucket_size holds for both"))
        .within(1, max_elements),
    always("contiguous_gradients", "true", "gradients lie in contiguous buckets"),
    always("reduce_scatter", "true", "each rank receives its shard only"),
    always("allgather_partitions", "true", "updated values are gathered"),
    always("load_from_fp32_weights", "true", "masters are loaded in f32"),
    applied<&Draft::ignore_unused_parameters>(
        "ignore_unused_parameters",
        "false: a parameter that no loss reaches on some rank is an error, with names and ranks; true: "
        "see ringzero.unused_parameters"),
    elements(applied<&StrategyOptions::sub_group_size>(
        "sub_group_size",
        "elements of a tile of an update, a multiple of 64; offloaded memory is copied by tiles")),
    section("offload_param", "null", "without effect below stage 3"),
    section("offload_optimizer", "null", "without effect at stage 0"),
    elements(applied<&GatherLimits::prefetch_bucket_size>(
                 "stage3_prefetch_bucket_size",
                 "values are gathered before their use while fewer elements wait for theirs")
                 .from_hidden_size([](std::int64_t h) { return h * h * 9 / 10; })),
    elements(applied<&GatherLimits::param_persistence_threshold>(
                 "stage3_param_persistence_threshold",
                 "every rank holds the values of parameters of up to this many elements whole")
                 .from_hidden_size([](std::int64_t h) { return 10 * h; })),
    elements(applied<&GatherLimits::model_persistence_threshold>("stage3_model_persistence_threshold",
                                                                 "elements of all such parameters")),
    elements(applied<&GatherLimits::max_live_parameters>(
        "stage3_max_live_parameters",
        "gathered elements, beyond which none is prefetched or kept; a model that has fewer stays "
        "gathered from forward to backward")),
    elements(applied<&GatherLimits::max_reuse_distance>(
        "stage3_max_reuse_distance", "values that are used again within this many elements stay gathered")),
    accepted("stage3_gather_16bit_weights_on_model_save", boolean, "false", "a saved model is always whole"),
    accepted("stage3_module_granularity_threshold", "0", "scopes are those of the model"),
    accepted("stage3_use_all_reduce_for_fetch_params", "false", "shards are gathered in place"),
    accepted("stage3_allgather_sequential", "false", "shards are gathered in place"),
    section("leaf_module", "null", ""),
    accepted("round_robin_gradients", "false", "gradients are not copied to other memory"),
    applied<&StrategyOptions::zero_hpz_partition_size>("zero_hpz_partition_size",
                                                       "stage 3: gathers of backward stay within so many "
                                                       "neighbouring ranks, which divide another copy of the "
                                                       "values; 0 or 1: off")
        .within(0, max_mesh_size),
    refused("zero_quantized_weights", "false", "[false]", zeropp),
    refused("zero_quantized_nontrainable_weights", "false", "[false]", zeropp),
    refused("zero_quantized_gradients", "false", "[false]", zeropp),
    refused("zeropp_loco_param", "null", "[null]", zeropp),
    applied<&Draft::mics_shard_size>("mics_shard_size",
                                     "ringzero.mesh.shard, at every stage, and replicate is what remains; "
                                     "-1 or 0: the mesh decides")
        .within(-1, max_mesh_size),
    always("mics_hierarchical_params_gather", "false",
           "gathers between nodes send each value once to a node by themselves"),
    refused("zenflow", "null", "[null]", "updates are not delayed"),
    accepted("use_multi_rank_bucket_allreduce", "true", "each rank receives its shard only"),
    accepted("elastic_checkpoint", "false", "checkpoints hold whole parameters"),
    accepted("legacy_stage1", "false", "there is one implementation"),
    accepted("memory_efficient_linear", "true", "backward keeps no gathered values"),
    accepted("pipeline_loading_checkpoint", "false", "ranks read what they store"),
    accepted("override_module_apply", "true", "Python only"),
    accepted("compute_grad_norm", "true",
             "the norm decides whether an update is finite, and is always computed"),
    accepted("parameter_alignment", "false", "parameters are always aligned"),
    accepted("log_trace_cache_warnings", "false"),
    accepted("enable_sanity_checks", "false", "ranks always compare models and passes"),
    accepted("save_muon_momentum_buffer_in_memory", "false", "states stay in memory"),
};

template <auto Offload>
constexpr KeySpec device(const char* note) {
  return applied<Offload, &OffloadOptions::device>("device", note).one_of("[\"none\", \"cpu\", \"nvme\"]");
}
constexpr KeySpec path = accepted("nvme_path", "null", "nvme is refused");
template <auto Offload>
constexpr KeySpec pinned = applied<Offload, &OffloadOptions::pin_memory>(
    "pin_memory", "copies overlap with computation; without it the host waits for them");

constexpr KeySpec offload_param[] = {
    device<&StrategyOptions::offload_param>(
        "cpu: values of a rank lie in host memory, persistent ones excepted; on the host all is there "
        "already"),
    path,
    pinned<&StrategyOptions::offload_param>,
    accepted("buffer_count", "5", "of nvme"),
    accepted("buffer_size", "100000000", "of nvme"),
    accepted("max_in_cpu", "1000000000", "of nvme"),
};
constexpr KeySpec offload_optimizer[] = {
    device<&StrategyOptions::offload_optimizer>(
        "cpu: state and masters lie in host memory, and are updated on the device; on the host all is there "
        "already"),
    path,
    pinned<&StrategyOptions::offload_optimizer>,
    applied<&StrategyOptions::offload_optimizer, &OffloadOptions::ratio>(
        "ratio", "least share of the state that is offloaded, in whole buckets; below 1 at stage 3 only")
        .within(0, 1),
    accepted("buffer_count", "4", "of nvme"),
    accepted("pipeline_read", "false", "of nvme"),
    accepted("pipeline_write", "false", "of nvme"),
    accepted("fast_init", "false", "of nvme"),
    refused("super_offload", "false", "[false]", "belongs to another machine"),
    accepted("cpuadam_cores_perc", "0.8", "of super_offload"),
};
constexpr KeySpec leaf_module[] = {
    accepted("classes", "[]", "scopes are those of the model"),
    accepted("names", "[]"),
    accepted("name_suffixes", "[]"),
};

constexpr ObjectSpec table[] = {
    {"zero_optimization", "", zero, true},
    {"zero_optimization.offload_param", "", offload_param, true},
    {"zero_optimization.offload_optimizer", "", offload_optimizer, true},
    {"zero_optimization.leaf_module", "", leaf_module, true},
};

}  // namespace

std::span<const ObjectSpec> zero_objects() { return table; }

}  // namespace rz::ds
