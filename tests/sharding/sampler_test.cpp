
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "comm/core/error.h"
#include "sharding/data/batch_sampler.h"
#include "sharding/data/continuous_batch_sampler.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

/// The formulas of torch's DistributedSampler, over a given order of the samples.
std::vector<std::uint64_t> transcription(std::vector<std::uint64_t> order, int ranks, int rank,
                                         bool drop_last) {
  const auto n = static_cast<double>(order.size()), w = static_cast<double>(ranks);
  const bool cut = drop_last && order.size() % static_cast<std::size_t>(ranks) != 0;
  const auto each = static_cast<std::size_t>(cut ? std::ceil((n - w) / w) : std::ceil(n / w));
  const std::size_t total = each * static_cast<std::size_t>(ranks);
  const std::vector<std::uint64_t> head = order;
  while (order.size() < total) order.insert(order.end(), head.begin(), head.end());
  order.resize(total);
  std::vector<std::uint64_t> mine;
  for (std::size_t i = static_cast<std::size_t>(rank); i < total; i += static_cast<std::size_t>(ranks))
    mine.push_back(order[i]);
  return mine;
}

std::vector<std::uint64_t> order_of(std::uint64_t n, bool shuffle, std::uint64_t seed) {
  std::vector<std::uint64_t> order(n);
  for (std::uint64_t i = 0; i < n; ++i) order[i] = shuffle ? Permutation(n, seed)(i) : i;
  return order;
}

void expect_like_transcription(const SamplerOptions& o, std::uint64_t epoch) {
  const DistributedSampler sampler(o);
  const auto expected =
      transcription(order_of(o.samples, o.shuffle, o.seed + epoch), o.ranks, o.rank, o.drop_last);
  ASSERT_EQ(sampler.per_rank(), expected.size());
  for (std::uint64_t i = 0; i < expected.size(); ++i)
    ASSERT_EQ(sampler.index(epoch, i), expected[i])
        << "N " << o.samples << " W " << o.ranks << " r " << o.rank << " position " << i;
}

TEST(Sampler, IsTheTranscribedFormulas) {
  for (const std::uint64_t n : {1, 2, 3, 5, 7, 8, 9, 16, 17, 63, 64, 65, 100})
    for (const int w : {1, 2, 3, 4, 5, 8, 16, 33})
      for (const bool shuffle : {false, true})
        for (const bool drop_last : {false, true})
          for (int r = 0; r < w; ++r)
            expect_like_transcription(
                {.samples = n, .ranks = w, .rank = r, .shuffle = shuffle, .drop_last = drop_last, .seed = 11},
                3);
}

TEST(Sampler, PermutationsArePermutations) {
  for (const std::uint64_t n : {1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 1000})
    for (std::uint64_t key = 0; key < 5; ++key) {
      const Permutation permutation(n, key);
      std::set<std::uint64_t> seen;
      for (std::uint64_t i = 0; i < n; ++i) {
        ASSERT_LT(permutation(i), n);
        seen.insert(permutation(i));
      }
      EXPECT_EQ(seen.size(), n);
    }
}

TEST(Sampler, PermutationsReachEveryPlaceEvenly) {
  // 6 values in 6 places over 6000 keys: 1000 each; a deviation of 5 sigma (144) would be a fault.
  int hits[6][6] = {};
  for (std::uint64_t key = 0; key < 6000; ++key)
    for (std::uint64_t i = 0; i < 6; ++i) ++hits[i][Permutation(6, key)(i)];
  for (const auto& row : hits)
    for (const int count : row) EXPECT_NEAR(count, 1000, 144);
}

TEST(Sampler, EpochsAndSeedsDiffer) {
  const DistributedSampler a({.samples = 1000, .seed = 1});
  const DistributedSampler b({.samples = 1000, .seed = 2});
  int same_epoch = 0, same_seed = 0;
  for (std::uint64_t i = 0; i < 1000; ++i) {
    same_epoch += a.index(0, i) == a.index(1, i);
    same_seed += a.index(0, i) == b.index(0, i);
    EXPECT_EQ(a.index(1, i), b.index(0, i)) << "seed + epoch alone decides";
  }
  EXPECT_LT(same_epoch, 20);
  EXPECT_LT(same_seed, 20);
}

TEST(Sampler, RanksCoverEverySampleOnce) {
  std::multiset<std::uint64_t> seen;
  for (int r = 0; r < 4; ++r) {
    const DistributedSampler sampler({.samples = 20, .ranks = 4, .rank = r});
    for (std::uint64_t i = 0; i < sampler.per_rank(); ++i) seen.insert(sampler.index(0, i));
  }
  EXPECT_EQ(seen.size(), 20u);
  EXPECT_EQ(std::set<std::uint64_t>(seen.begin(), seen.end()).size(), 20u);
}

TEST(Sampler, RefusesNoSamplesAndWrongRanks) {
  EXPECT_THROW(DistributedSampler({.samples = 0}), Error);
  EXPECT_THROW(DistributedSampler({.samples = 4, .ranks = 2, .rank = 2}), Error);
}

/// The batches of an epoch in the order of the micro-batches of all ranks.
std::vector<BatchSampler::Batch> in_order(const std::function<std::unique_ptr<BatchSampler>(int)>& of_rank,
                                          int ranks, std::uint64_t accumulation, std::uint64_t epoch) {
  std::vector<BatchSampler::Batch> all;
  const std::uint64_t updates = of_rank(0)->batches() / accumulation;
  for (std::uint64_t u = 0; u < updates; ++u)
    for (int r = 0; r < ranks; ++r)
      for (std::uint64_t m = 0; m < accumulation; ++m)
        all.push_back(of_rank(r)->at(epoch, u * accumulation + m));
  return all;
}

void expect_same(const std::vector<BatchSampler::Batch>& a, const std::vector<BatchSampler::Batch>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].indices, b[i].indices) << "batch " << i;
    EXPECT_EQ(a[i].padding, b[i].padding) << "batch " << i;
  }
}

/// 8 micro-batches of 3 samples per update.
std::vector<BatchSampler::Batch> consecutive(int ranks, bool drop_last, std::uint64_t epoch) {
  const auto accumulation = static_cast<std::size_t>(8 / ranks);
  return in_order(
      [&](int rank) -> std::unique_ptr<BatchSampler> {
        return std::make_unique<ConsecutiveBatchSampler>(BatchSamplerOptions{.samples = 50,
                                                                             .batch_size = 3,
                                                                             .ranks = ranks,
                                                                             .rank = rank,
                                                                             .drop_last = drop_last,
                                                                             .seed = 7},
                                                         accumulation);
      },
      ranks, accumulation, epoch);
}

TEST(ConsecutiveBatchSampler, DoesNotDependOnTheNumberOfRanks) {
  for (const bool drop_last : {false, true})
    for (const std::uint64_t epoch : {0u, 3u}) {
      const auto one = consecutive(1, drop_last, epoch);
      EXPECT_EQ(one.size(), drop_last ? 16u : 24u);
      for (const int ranks : {2, 4, 8}) expect_same(one, consecutive(ranks, drop_last, epoch));
    }
}

TEST(ConsecutiveBatchSampler, HasEverySampleOnceAndRepeatsTheFirstAsPadding) {
  const auto batches = consecutive(4, false, 1);
  std::vector<std::uint64_t> all, kept;
  for (const auto& b : batches) {
    all.insert(all.end(), b.indices.begin(), b.indices.end());
    kept.insert(kept.end(), b.indices.begin(), b.indices.end() - static_cast<std::ptrdiff_t>(b.padding));
  }
  EXPECT_EQ(all.size(), 72u);
  EXPECT_TRUE(std::equal(all.begin(), all.begin() + 22, all.begin() + 50));
  std::ranges::sort(kept);
  for (std::uint64_t i = 0; i < 50; ++i) EXPECT_EQ(kept.at(i), i);
  EXPECT_EQ(kept.size(), 50u);
}

TEST(ConsecutiveBatchSampler, NeedsAnUpdate) {
  EXPECT_STREQ(
      test::error_of([] {
        ConsecutiveBatchSampler({.samples = 23, .batch_size = 3, .ranks = 2, .drop_last = true}, 4);
      }).what(),
      "23 samples are less than one update of 24; give more data or a smaller batch, or set drop_last to "
      "false");
  EXPECT_EQ(test::error_of([] { ConsecutiveBatchSampler({.samples = 23, .batch_size = 3}, 0); }).code(),
            Errc::invalid_argument);
}

TEST(ContinuousBatchSampler, ConsecutiveSamplesDoNotDependOnTheNumberOfRanks) {
  const auto batches = [](int ranks, std::uint64_t epoch) {
    const auto accumulation = static_cast<std::size_t>(8 / ranks);
    return in_order(
        [&](int rank) -> std::unique_ptr<BatchSampler> {
          return std::make_unique<ContinuousBatchSampler>(ContinuousBatchOptions{.samples = 53,
                                                                                 .batch_size = 3,
                                                                                 .accumulation = accumulation,
                                                                                 .ranks = ranks,
                                                                                 .rank = rank,
                                                                                 .drop_last = true,
                                                                                 .seed = 7,
                                                                                 .consecutive = true});
        },
        ranks, accumulation, epoch);
  };
  for (const std::uint64_t epoch : {0u, 1u, 2u})
    for (const int ranks : {2, 4, 8}) expect_same(batches(1, epoch), batches(ranks, epoch));
  std::vector<std::uint64_t> first;  // samples of the first pass over the data
  for (const std::uint64_t epoch : {0u, 1u})
    for (const auto& b : batches(2, epoch)) first.insert(first.end(), b.indices.begin(), b.indices.end());
  first.resize(53);
  EXPECT_FALSE(std::ranges::is_sorted(first));
  std::ranges::sort(first);
  for (std::uint64_t i = 0; i < 53; ++i) EXPECT_EQ(first[i], i);
}

// ---- runs that go on with other ranks and batches

struct Cut {
  int ranks;
  std::size_t batch_size, accumulation;
  std::uint64_t of_update() const { return static_cast<std::uint64_t>(ranks) * batch_size * accumulation; }
};

enum class Kind { distributed, consecutive, continuous, continuous_in_order, continuous_consecutive };

std::shared_ptr<const BatchSampler> sampler_of(Kind kind, const Cut& cut, int rank, std::uint64_t samples) {
  const BatchSamplerOptions o{
      .samples = samples, .batch_size = cut.batch_size, .ranks = cut.ranks, .rank = rank, .seed = 3};
  if (kind == Kind::distributed) return std::make_shared<DistributedBatchSampler>(o);
  if (kind == Kind::consecutive) return std::make_shared<ConsecutiveBatchSampler>(o, cut.accumulation);
  return std::make_shared<ContinuousBatchSampler>(
      ContinuousBatchOptions{.samples = samples,
                             .batch_size = cut.batch_size,
                             .accumulation = cut.accumulation,
                             .ranks = cut.ranks,
                             .rank = rank,
                             .shuffle = kind != Kind::continuous_in_order,
                             .seed = 3,
                             .consecutive = kind == Kind::continuous_consecutive});
}

/// A run over all ranks, as Loader has it.
class AllRanks {
 public:
  AllRanks(Kind kind, const Cut& cut, std::uint64_t samples) : cut_(cut) {
    for (int r = 0; r < cut.ranks; ++r) ranks_.push_back(sampler_of(kind, cut, r, samples));
  }
  LoaderPosition position() const {
    const std::uint64_t size = ranks_[0]->batches();
    for (const auto& rank : ranks_) EXPECT_EQ(rank->position(next_ / size, next_ % size), at(next_));
    return at(next_);
  }
  void set_position(const LoaderPosition& to) {
    for (auto& rank : ranks_) {
      const auto resumed = rank->starting_at(to);
      if (resumed.sampler) rank = resumed.sampler;
      next_ = resumed.epoch * rank->batches() + resumed.batch;
    }
  }
  /// Counts the samples of an update, by pass and sample, without padding.
  void update(std::map<std::uint64_t, std::map<std::uint64_t, int>>& seen) {
    const std::uint64_t size = ranks_[0]->batches();
    for (std::size_t m = 0; m < cut_.accumulation; ++m, ++next_)
      for (const auto& rank : ranks_) {
        const BatchSampler::Batch b = rank->at(next_ / size, next_ % size);
        for (std::size_t i = 0; i + b.padding < b.indices.size(); ++i)
          ++seen[b.passes.empty() ? next_ / size : b.passes[i]][b.indices[i]];
      }
  }

 private:
  LoaderPosition at(std::uint64_t n) const {
    return ranks_[0]->position(n / ranks_[0]->batches(), n % ranks_[0]->batches());
  }
  Cut cut_;
  std::vector<std::shared_ptr<const BatchSampler>> ranks_;
  std::uint64_t next_ = 0;
};

TEST(ResumedSamplers, HaveEverySampleOfEveryPassOnceWithAnyRanksAndBatches) {
  const Cut cuts[] = {{1, 1, 1}, {2, 2, 4}, {4, 2, 4}, {3, 1, 2}, {2, 4, 1}, {1, 5, 3}};
  for (const Kind kind : {Kind::distributed, Kind::consecutive, Kind::continuous, Kind::continuous_in_order,
                          Kind::continuous_consecutive})
    for (const std::uint64_t samples : {96u, 101u})
      for (const Cut& before : cuts)
        for (const Cut& after : cuts)
          for (const std::uint64_t saved : {1u, 3u, 7u, 40u}) {
            SCOPED_TRACE(testing::Message()
                         << "sampler " << static_cast<int>(kind) << ", " << samples << " samples, "
                         << before.ranks << "×" << before.batch_size << "×" << before.accumulation << " to "
                         << after.ranks << "×" << after.batch_size << "×" << after.accumulation << " after "
                         << saved);
            std::map<std::uint64_t, std::map<std::uint64_t, int>> seen;
            AllRanks first(kind, before, samples), second(kind, after, samples);
            for (std::uint64_t u = 0; u < saved; ++u) first.update(seen);
            const LoaderPosition position = first.position();
            second.set_position(position);
            EXPECT_EQ(second.position(), position);
            while (second.position().epoch < position.epoch + 3) second.update(seen);
            // The shuffled passes that run on repeat samples where the ranks do not divide them.
            const auto padding = [&](std::uint64_t pass) {
              if (kind != Kind::continuous) return 0;
              const int max = std::max(pass <= position.epoch ? before.ranks - 1 : 0,
                                       pass >= position.epoch ? after.ranks - 1 : 0);
              return max;
            };
            for (std::uint64_t pass = 0; pass < position.epoch + 3; ++pass) {
              ASSERT_EQ(seen[pass].size(), samples) << "pass " << pass;
              int twice = 0;
              for (const auto& [sample, times] : seen[pass]) twice += times - 1;
              ASSERT_LE(twice, padding(pass)) << "pass " << pass;
            }
          }
}

TEST(ResumedSamplers, GoOnAsTheRunDidWithTheSameRanksAndBatches) {
  for (const Kind kind : {Kind::distributed, Kind::consecutive, Kind::continuous, Kind::continuous_in_order,
                          Kind::continuous_consecutive})
    for (const std::uint64_t samples : {96u, 101u}) {
      const auto whole = sampler_of(kind, {3, 2, 2}, 1, samples);
      for (std::uint64_t n = 0; n < 100; n += 2) {
        const std::uint64_t size = whole->batches();
        const auto resumed = whole->starting_at(whole->position(n / size, n % size));
        ASSERT_EQ(resumed.epoch * size + resumed.batch, n) << static_cast<int>(kind) << ' ' << samples;
        const BatchSampler& after = resumed.sampler ? *resumed.sampler : *whole;
        for (std::uint64_t m = n; m < n + 50; ++m) {
          ASSERT_EQ(after.at(m / size, m % size).indices, whole->at(m / size, m % size).indices);
          ASSERT_EQ(after.position(m / size, m % size), whole->position(m / size, m % size));
        }
      }
    }
}

}  // namespace
}  // namespace rz
