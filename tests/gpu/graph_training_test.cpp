// Updates that are captured in a CUDA graph and run again give the bits of updates that are not.

#include "comm/core/cuda/runtime.h"
#include "tests/gpu/on_device.h"
#include "tests/support/train_tiny.h"

namespace rz::test {
namespace {

constexpr std::int64_t updates = 7;

struct Case {
  const char* name;
  std::string backend;
  StrategyKind kind;
  int ranks;
  Precision precision{};
  std::int64_t accumulation = 1;
  bool sgd = false;
  double dropout = 0;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

/// `graphs`: updates that ran as graphs, on rank 0.
Reports run(const Case& c, bool graph, int* graphs, double loss_scale = 0) {
  const Folder folder;
  TinyRun run = smallest_run(c.kind, c.ranks, folder);
  run.options.graph = graph;
  run.options.strategy_options.precision = c.precision;
  run.options.skip_overflow = c.precision.parameters == DType::f16;
  run.options.loss_scale.fixed = loss_scale;
  run.options.loss_scale.window = 2;
  run.options.batches.sizes = {run.c.batch, run.c.batch / c.ranks / c.accumulation, c.accumulation};
  run.c.config.embd_pdrop = run.c.config.attn_pdrop = run.c.config.resid_pdrop = c.dropout;
  if (c.sgd) run.options.optimizer = {.type = OptimizerConfig::Type::sgd, .lr = 0.1, .momentum = 0.9};
  run.comm = [&](int rank) {
    CommOptions o;
    o.backend = c.backend;
    o.device = {Device::cuda, rank % cuda::device_count()};
    o.timeout = std::chrono::seconds(60);
    return o;
  };
  run.each = [graphs](train_gpt::Trainer& trainer, int rank) {
    if (rank == 0) *graphs += trainer.ran_graph();
  };
  return train(run, updates);
}

class GraphTraining : public OnDevice, public testing::WithParamInterface<Case> {};

TEST_P(GraphTraining, GivesTheSameBits) {
  if (GetParam().backend == "nccl" && !emulated_device)
    GTEST_SKIP() << "NCCL needs a process a rank on a card of its own";
  int with = 0, without = 0;
  const Reports plain = run(GetParam(), false, &without), graph = run(GetParam(), true, &with);
  EXPECT_EQ(without, 0);
  EXPECT_EQ(with, updates - 3);
  expect_same_bits(plain, graph, "as a graph");
  EXPECT_LT(graph.back().loss, graph.front().loss);
}

constexpr Precision brain{DType::bf16, DType::bf16}, half{DType::f16, DType::f16};
const Case cases[] = {
    {"zero3", "peer_cuda", StrategyKind::zero3, 2},
    // The scale doubles every other update, and the graph is captured anew.
    {"f16", "peer_cuda", StrategyKind::zero1, 2, half},
    {"nccl_ddp", "nccl", StrategyKind::ddp, 2},
    {"ddp", "peer_cuda", StrategyKind::ddp, 2},
    {"zero1", "peer_cuda", StrategyKind::zero1, 2},
    {"zero2", "peer_cuda", StrategyKind::zero2, 2},
    {"one_rank", "peer_cuda", StrategyKind::ddp, 1},
    {"nccl_zero3", "nccl", StrategyKind::zero3, 2},
    {"bf16", "peer_cuda", StrategyKind::zero1, 2, brain},
    {"accumulation", "peer_cuda", StrategyKind::zero2, 2, {}, 2},
    {"sgd", "peer_cuda", StrategyKind::ddp, 2, {}, 1, true},
    {"dropout", "peer_cuda", StrategyKind::zero1, 2, {}, 2, false, 0.2},
};
INSTANTIATE_TEST_SUITE_P(Cases, GraphTraining,
                         testing::ValuesIn(std::begin(cases), checks_addresses ? cases + 3 : std::end(cases)),
                         [](const auto& info) { return info.param.name; });

/// Through the host no graph can go: every update is made of its kernels.
class GraphTrainingElsewhere : public OnDevice {};

TEST_F(GraphTrainingElsewhere, IsLeftOutWhereOperationsCannotBeCaptured) {
  int graphs = 0;
  run({"staged", "ring", StrategyKind::ddp, 2}, true, &graphs);
  EXPECT_EQ(graphs, 0);
}

}  // namespace
}  // namespace rz::test
