// Runs: ci

#include "tensor/box.h"

#include <gtest/gtest.h>

#include <ranges>
#include <span>
#include <vector>

#include "tensor/tensor.h"

namespace rz {
namespace {

using Extents = std::vector<std::uint64_t>;

/// All boxes of a shape.
std::vector<Box> boxes_of(const Extents& shape) {
  std::vector<Box> boxes{{shape, {}, {}}};
  for (const std::uint64_t n : shape) {
    std::vector<Box> longer;
    for (const Box& b : boxes)
      for (std::uint64_t begin = 0; begin < n; ++begin)
        for (std::uint64_t end = begin + 1; end <= n; ++end) {
          longer.push_back(b);
          longer.back().offset.push_back(begin), longer.back().extent.push_back(end - begin);
        }
    boxes = longer;
  }
  return boxes;
}

std::vector<std::uint64_t> indices_of(const Box& b) {
  std::vector<std::uint64_t> all;
  for (std::uint64_t e = 0; e < b.count(); ++e) all.push_back(b.index(e));
  return all;
}

std::size_t runs_of(const Box& b) {
  std::size_t runs = 0;
  b.for_each_run(0, b.count(), [&](auto...) { ++runs; });
  return runs;
}

static_assert(std::ranges::contiguous_range<const Shape> && std::ranges::sized_range<const Shape>);

TEST(Shape, IsARangeOfItsExtents) {
  const Shape shape{4, 64, 768};
  std::size_t product = 1;
  for (const std::size_t extent : shape) product *= extent;
  EXPECT_EQ(product, shape.count());
  EXPECT_EQ(shape.size(), 3u);
  EXPECT_EQ(std::vector<std::size_t>(shape.begin(), shape.end()), (std::vector<std::size_t>{4, 64, 768}));
  EXPECT_EQ(Shape(std::span<const std::size_t>(shape).first(2)), (Shape{4, 64}));
  EXPECT_EQ(Shape{}.size(), 0u);
}

TEST(Box, ElementsHaveTheirIndicesInTheTensor) {
  const Box part{{4, 5, 6}, {1, 0, 2}, {2, 5, 2}};
  std::uint64_t element = 0;
  for (std::uint64_t i = 1; i < 3; ++i)
    for (std::uint64_t j = 0; j < 5; ++j)
      for (std::uint64_t k = 2; k < 4; ++k)
        EXPECT_EQ(part.index(element++), (i * 5 + j) * 6 + k) << i << ' ' << j << ' ' << k;
  EXPECT_EQ(part.count(), element);
  EXPECT_EQ(Box::whole({}).count(), 1u);
  EXPECT_EQ(Box::whole({}).index(0), 0u);
}

TEST(Box, RunsCoverAnyRangeOnceInOrder) {
  for (const Extents& shape : {Extents{6}, Extents{3, 4}, Extents{3, 3, 4}, Extents{2, 1, 3, 2}})
    for (const Box& b : boxes_of(shape)) {
      const auto all = indices_of(b);
      for (std::uint64_t begin = 0; begin < all.size(); begin += 2) {
        std::vector<std::uint64_t> found;
        b.for_each_run(begin, all.size(), [&](std::uint64_t element, std::uint64_t index, std::uint64_t n) {
          EXPECT_EQ(element, begin + found.size());
          for (std::uint64_t i = 0; i < n; ++i) found.push_back(index + i);
        });
        ASSERT_EQ(found, std::vector(all.begin() + static_cast<std::ptrdiff_t>(begin), all.end()));
      }
    }
}

TEST(Box, TrailingWholeDimensionsAreOneRun) {
  EXPECT_EQ(runs_of({{50257, 768}, {1000, 0}, {25000, 768}}), 1u) << "rows of a table";
  EXPECT_EQ(runs_of({{50257, 768}, {0, 0}, {50257, 384}}), 50257u) << "columns";
  EXPECT_EQ(runs_of({{8, 3, 16, 4}, {0, 1, 0, 0}, {8, 1, 16, 4}}), 8u);
  EXPECT_EQ(runs_of({{8, 3, 16}, {0, 0, 8}, {8, 3, 8}}), 24u) << "heads of q, k and v";
  EXPECT_EQ(runs_of(Box::whole({8, 3, 16})), 1u);
  EXPECT_EQ(runs_of({{8, 0}, {0, 0}, {8, 0}}), 0u);
}

TEST(Box, BoxesOverlapIfTheyHaveAnElementInCommon) {
  const auto all = boxes_of({2, 3, 2});
  for (const Box& a : all)
    for (const Box& b : all) {
      const auto in_a = indices_of(a), in_b = indices_of(b);
      const bool common =
          std::ranges::any_of(in_a, [&](auto i) { return std::ranges::find(in_b, i) != in_b.end(); });
      ASSERT_EQ(a.overlaps(b), common);
    }
}

TEST(Box, OnlyBoxesWithinTheirShapeAreValid) {
  EXPECT_TRUE((Box{{4, 5}, {1, 5}, {3, 0}}.is_valid()));
  EXPECT_FALSE((Box{{4, 5}, {1, 0}, {4, 5}}.is_valid()));
  EXPECT_FALSE((Box{{4, 5}, {0, 6}, {4, 0}}.is_valid()));
  EXPECT_FALSE((Box{{4, 5}, {0}, {4}}.is_valid()));
  EXPECT_FALSE((Box{{4}, {2}, {~std::uint64_t{0}}}.is_valid()));
}

}  // namespace
}  // namespace rz
