#include "sharding/model/flat_layout.h"

#include <gtest/gtest.h>

#include "comm/core/error.h"
#include "sharding/model/sharded_model.h"
#include "sharding/strategy/sharding_plan.h"
#include "sharding/strategy/update_tiles.h"

namespace rz {
namespace {

struct Members {
  explicit Members(const std::vector<Shape>& shapes) : own(shapes.size()) {
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      own[i].shape = shapes[i];
      pointers.push_back(&own[i]);
    }
  }
  std::vector<Parameter> own;
  std::vector<Parameter*> pointers;
};

/// Three members in one bucket of 512 elements: [0, 100), [128, 192), [192, 453).
const BucketLayout layout{{{DType::f32, 512, {1, 0, 2}}}, {{0, 128}, {0, 0}, {0, 192}}};
const Members members({{8, 8}, {100}, {9, 29}});

TEST(Partition, ShardsAreEqualAndCoverAll) {
  EXPECT_EQ(shard_range(12, 0, 3), (Range{0, 4}));
  EXPECT_EQ(shard_range(12, 2, 3), (Range{8, 12}));
  EXPECT_EQ(shard_range(0, 1, 2), (Range{0, 0}));
  EXPECT_THROW(shard_range(10, 0, 3), Error);
}

TEST(Partition, Intersections) {
  EXPECT_EQ(intersect({2, 9}, {4, 20}), (Range{4, 9}));
  EXPECT_EQ(intersect({2, 4}, {6, 8}).count(), 0u);
  EXPECT_EQ(intersect({6, 8}, {2, 4}).count(), 0u);
}

TEST(Partition, SlicesOfAllRanksCoverEveryElementOnce) {
  for (const int size : {1, 2, 4, 8}) {
    std::vector<std::vector<int>> seen;
    for (const Parameter* p : members.pointers) seen.emplace_back(p->count());
    for (int rank = 0; rank < size; ++rank)
      for (const ParameterSlice& slice :
           parameter_slices(layout, members.pointers, 0, shard_range(512, rank, size))) {
        const auto m = static_cast<std::size_t>(slice.member);
        EXPECT_EQ(slice.offset, layout.offsets[m].offset + slice.elements.begin);
        for (std::size_t i = slice.elements.begin; i < slice.elements.end; ++i) ++seen[m][i];
      }
    for (const auto& s : seen) EXPECT_EQ(s, std::vector<int>(s.size(), 1)) << size;
  }
}

TEST(Partition, SlicesAreCutAtTheRange) {
  const auto cut = parameter_slices(layout, members.pointers, 0, {64, 256});
  ASSERT_EQ(cut.size(), 3u);
  EXPECT_EQ(cut[0].member, 1);
  EXPECT_EQ(cut[0].elements, (Range{64, 100}));
  EXPECT_EQ(cut[0].offset, 64u);
  EXPECT_EQ(cut[1].member, 0);
  EXPECT_EQ(cut[1].elements, (Range{0, 64}));
  EXPECT_EQ(cut[2].elements, (Range{0, 64}));
  EXPECT_TRUE(parameter_slices(layout, members.pointers, 0, {460, 512}).empty());  // padding only
}

TEST(Partition, ExtentsIncludePadding) {
  const Range extents[] = {{0, 128}, {128, 192}, {192, 512}};
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(padded_extent(layout, 0, i), extents[i]);
}

TEST(Partition, MemberRunsJoinNeighboursThatAgree) {
  const MemberUpdate matrix{.group = 0}, vector{.group = 1};
  const std::vector<MemberUpdate> by_shape{matrix, vector, matrix};
  EXPECT_EQ(member_runs(layout, 0, {0, 512}, by_shape),
            (std::vector<MemberRun>{{{0, 128}, 1, vector}, {{128, 512}, 0, matrix}}));
  EXPECT_EQ(member_runs(layout, 0, {64, 128}, by_shape), (std::vector<MemberRun>{{{64, 128}, 1, vector}}));
  EXPECT_EQ(member_runs(layout, 0, {256, 512}, by_shape), (std::vector<MemberRun>{{{256, 512}, 2, matrix}}));
  EXPECT_EQ(member_runs(layout, 0, {0, 512}, std::vector<MemberUpdate>(3)).size(), 1u);
  const MemberUpdate late{.missed = 2};
  EXPECT_EQ(member_runs(layout, 0, {0, 512}, std::vector<MemberUpdate>{matrix, matrix, late}),
            (std::vector<MemberRun>{{{0, 192}, 1, matrix}, {{192, 512}, 2, late}}));
}

TEST(Partition, AMemberThatIsAloneIsARunOfItsOwn) {
  EXPECT_EQ(member_runs(layout, 0, {64, 512}, std::vector<MemberUpdate>(3, {.alone = true})),
            (std::vector<MemberRun>{{{64, 128}, 1, {.alone = true}},
                                    {{128, 192}, 0, {.alone = true}},
                                    {{192, 512}, 2, {.alone = true}}}));
}

TEST(Partition, MemberRunsOmitSkippedMembers) {
  EXPECT_EQ(member_runs(layout, 0, {0, 512}, std::vector<MemberUpdate>{{.skip = true}, {}, {}}),
            (std::vector<MemberRun>{{{0, 128}, 1, {}}, {{192, 512}, 2, {}}}));
  EXPECT_TRUE(member_runs(layout, 0, {0, 512}, std::vector<MemberUpdate>(3, {.skip = true})).empty());
}

TEST(Buckets, TheFirstOneIsNoLargerThanTheOthers) {
  for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero2}) {
    const auto buckets = [&](std::size_t reduced, std::size_t first) {
      return storage_options({.reduce_bucket_size = reduced, .first_bucket_size = first}, plan_of(kind), {},
                             2, Device::host)
          .buckets;
    };
    EXPECT_EQ(buckets(1000, 5000).first_bytes, 4000u) << name(kind);
    EXPECT_EQ(buckets(5000, 1000).first_bytes, 4000u) << name(kind);
    EXPECT_EQ(buckets(5000, 1000).cap_bytes, 20000u) << name(kind);
  }
}

}  // namespace
}  // namespace rz
