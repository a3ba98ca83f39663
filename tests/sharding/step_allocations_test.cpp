/// Memory in the steady state: from the third update on a training step (forward, backward, step) reuses the
/// tensors of earlier ones, and allocates only small records on the heap, in the numbers below.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstdlib>
#include <new>
#include <vector>

#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/nn/init.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"

namespace {
constexpr std::size_t large = 1024;  // bytes: the smallest gradient bucket has more
std::atomic<long> small_allocations{0}, large_allocations{0};

/// Null without memory.
void* counted_or_null(std::size_t bytes, std::size_t alignment) noexcept {
  ++(bytes < large ? small_allocations : large_allocations);
  bytes = (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
  return std::aligned_alloc(alignment, bytes);
}

void* counted(std::size_t bytes, std::size_t alignment) {
  if (void* p = counted_or_null(bytes, alignment)) return p;
  throw std::bad_alloc();
}
}  // namespace

// Every allocation of the comm library passes here: owners of blocks of pools and communicators are made with
// new. When inlined, g++ would report aligned_alloc() with delete, or new with free(), as a mismatched pair.
[[gnu::noinline]] void* operator new(std::size_t n) { return counted(n, alignof(std::max_align_t)); }
[[gnu::noinline]] void* operator new(std::size_t n, std::align_val_t a) {
  return counted(n, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void* operator new(std::size_t n, const std::nothrow_t&) noexcept {
  return counted_or_null(n, alignof(std::max_align_t));
}
[[gnu::noinline]] void* operator new(std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return counted_or_null(n, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

namespace rz {
namespace {

constexpr int ranks = 2, updates = 8;

/// Of both ranks in an update: up to two records for each queued call of the communicator, one for each block
/// of transient memory. 12 buckets are reduced (zero3: 7), their values published except in ddp, and 10 times
/// a scope is gathered; the ranks agree twice.
long max_small(StrategyKind kind) {
  switch (kind) {
    case StrategyKind::ddp:
      return ranks * 2 * (12 + 2);
    case StrategyKind::zero1:
      return ranks * 2 * (12 + 12 + 2);
    case StrategyKind::zero2:
      return ranks * (2 * (12 + 12 + 2) + 12);
    default:
      return ranks * (2 * (7 + 10 + 2) + 7 + 10);
  }
}

Gpt2Config small_config() {
  Gpt2Config c;
  c.n_layer = 2;
  c.n_head = 2;
  c.n_embd = 32;
  c.n_positions = 16;
  c.vocab_size = 64;
  return c;
}

/// So far, after each update.
struct Counts {
  struct Now {
    long small, large;   ///< heap allocations of both ranks, their communicators' threads included
    std::size_t blocks;  ///< requested by the tape's pool, on rank 0
    std::size_t held;    ///< bytes of the strategy's transient memory, on rank 0
  };
  std::vector<Now> after;
};

Counts train(StrategyKind kind, bool overlap) {
  Counts counts;
  counts.after.reserve(updates);
  std::barrier all_ranks(ranks);
  lab::group(ranks, [&](Communicator& comm) {
    const int rank = comm.rank();
    Gpt2 model(small_config());
    allocate_parameters(model);
    init_parameters(model, 1);
    StrategyOptions options{.overlap_comm = overlap};
    if (kind != StrategyKind::zero3) options.reduce_bucket_size = 4096, options.first_bucket_size = 1024;
    const auto strategy = make_strategy(kind, model, comm, options);
    Tape tape;
    strategy->attach(tape);
    const auto adamw = make_adamw({.weight_decay = 0.1});
    const Tensor tokens = Tensor::zeros({2, 16}, DType::i32);
    for (int update = 0; update < updates; ++update) {
      strategy->zero_grad();
      const auto out = model.forward(tape, tokens, tokens);
      strategy->begin_backward();
      tape.backward(out.loss.sum);
      tape.reset();
      strategy->finish_gradients();
      strategy->clip_and_step(*adamw, {.max_norm = 1});
      all_ranks.arrive_and_wait();
      if (rank == 0)
        counts.after.push_back({small_allocations, large_allocations, tape.pool().statistics().allocations,
                                strategy->memory().transient});
      all_ranks.arrive_and_wait();
    }
  });
  return counts;
}

class StepAllocations : public testing::TestWithParam<std::tuple<StrategyKind, bool>> {};

TEST_P(StepAllocations, AreFewAndSmallFromTheThirdUpdateOn) {
  const auto& [kind, overlap] = GetParam();
  const Counts counts = train(kind, overlap);
  for (std::size_t u = 2; u < updates; ++u) {
    SCOPED_TRACE(concat("update ", u));
    const auto &before = counts.after[u - 1], &after = counts.after[u];
    EXPECT_EQ(after.large - before.large, 0);
    EXPECT_EQ(after.blocks - before.blocks, 0u);
    if (!overlap) {  // with overlap, memory in flight depends on time
      EXPECT_EQ(after.held - before.held, 0u);
    }
    EXPECT_LE(after.small - before.small, max_small(kind));
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, StepAllocations,
                         testing::Combine(testing::Values(StrategyKind::ddp, StrategyKind::zero1,
                                                          StrategyKind::zero2, StrategyKind::zero3),
                                          testing::Bool()),
                         [](const auto& info) {
                           return concat(name(std::get<0>(info.param)),
                                         std::get<1>(info.param) ? "" : "_without_overlap");
                         });

}  // namespace
}  // namespace rz
