#pragma once
/// Runs of a small GPT-2 with known losses: PyTorch's in float64 (tests/data/gpt2_tiny).

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "autograd_lite/models/gpt2.h"
#include "comm/communicator.h"
#include "sharding/engine/engine.h"
#include "sharding/lm/updates.h"
#include "tests/support/folder.h"
#include "tests/support/gpt2_tiny.h"

namespace rz::test {

using Reports = std::vector<lm::UpdateReport>;

/// The initial weights of a case as a checkpoint, rounded to `precision`.
void write_tiny_start(const Gpt2Config&, const std::string& path, DType precision);

struct TinyOptions {
  DsConfig ds;  ///< without precision, which follows from the next
  StrategyOptions strategy_options;
  StrategyKind strategy = StrategyKind::ddp;
  Decay decay = Decay::matrices;
  std::size_t seq_len = 0;
  bool graph = true;
  int threads = 1;  ///< of a rank
};
TinyOptions tiny_options(const TinyCase&, int ranks, StrategyKind);

struct TinyRun {
  TinyCase c;
  int ranks = 1;
  TinyOptions options;
  std::string checkpoint;  ///< the initial weights
  std::string tokens = tiny_tokens();
  bool recompute = false;
  std::function<CommOptions(int rank)> comm = [](int) { return CommOptions(); };
  /// Instead of `comm`: how a rank connects.
  std::function<Communicator(int rank, std::shared_ptr<Store>)> connect = {};
  std::function<void(Engine&)> each = {};               ///< after every update, on every rank
  std::function<void(Engine&, Gpt2&)> afterwards = {};  ///< on every rank
};

/// Runs the updates with threads as ranks; returns each rank's reports.
std::vector<Reports> train_all(const TinyRun&, std::int64_t steps);
/// Every rank must report the same losses and norms.
Reports train(const TinyRun&, std::int64_t steps);
/// From the case's start, with the case's options after `change`.
Reports train_tiny(const std::string& name, int ranks, StrategyKind, std::int64_t steps,
                   const std::function<void(TinyRun&)>& change = {});

/// A GPT-2 so small that hundreds of updates are fast, in many buckets.
TinyRun smallest_run(StrategyKind, int ranks, const Folder&);

void expect_same_bits(const Reports& a, const Reports& b, const std::string& what);

inline constexpr StrategyKind strategies[] = {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2,
                                              StrategyKind::zero3};

}  // namespace rz::test
