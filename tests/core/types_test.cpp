// Runs: ci

#include "comm/core/types.h"

#include <gtest/gtest.h>

#include <cmath>
#include <new>
#include <numeric>
#include <system_error>
#include <vector>

#include "comm/core/byte_size.h"
#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/device/stream.h"

namespace rz {
namespace {

TEST(Error, ExceptionsOfTheStandardLibraryAreOneLineWithARemedy) {
  EXPECT_TRUE(one_line(std::bad_alloc()).starts_with("out of memory; ")) << one_line(std::bad_alloc());
  EXPECT_EQ(one_line(std::runtime_error("one\ntwo")), "one two");
  const std::string thread =
      one_line(std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again)));
  EXPECT_NE(thread.find("ulimit -u"), std::string::npos) << thread;
}

TEST(Types, EveryDtypeIsFoundByItsName) {
  for (int i = 0; i < dtype_count; ++i) EXPECT_EQ(dtype_from_name(name(DType(i))), DType(i));
  EXPECT_EQ(dtype_from_name("bfloat16"), DType::bf16);
}

TEST(Types, AnUnknownDtypeListsTheChoices) {
  try {
    dtype_from_name("float23");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_NE(std::string(e.what()).find("bfloat16"), std::string::npos) << e.what();
  }
}

TEST(Text, NearestNameSuggestsCloseNamesOnly) {
  const std::vector<std::string> names{"gradient_clipping", "optimizer"};
  EXPECT_EQ(nearest_name("gradient_cliping", names), "gradient_clipping");
  EXPECT_EQ(nearest_name("opitmizer", names), "optimizer") << "a swap is one edit";
  EXPECT_EQ(nearest_name("optional", names), "") << "more than an edit for every four characters";
  EXPECT_EQ(nearest_name("zebra", names), "");
  EXPECT_EQ(edit_distance("ring", "rnig"), 1);
  EXPECT_EQ(edit_distance("ring", "sing_"), 2);
}

TEST(ByteSizes, AreBinaryWithoutBAndDecimalWithIt) {
  const std::pair<const char*, std::size_t> sizes[] = {{"7", 7},
                                                       {"512B", 512},
                                                       {"64K", 65536},
                                                       {"1.5k", 1536},
                                                       {"32m", 32u << 20},
                                                       {"1G", 1u << 30},
                                                       {"2T", std::size_t{2} << 40},
                                                       {"1KiB", 1024},
                                                       {"16GiB", std::size_t{16} << 30},
                                                       {"1KB", 1000},
                                                       {"200MB", 200'000'000},
                                                       {"1.5GB", 1'500'000'000},
                                                       {"80GB", 80'000'000'000},
                                                       {"0", 0},
                                                       {"18446744073709551615", ~std::size_t{0}}};
  for (const auto& [text, bytes] : sizes) EXPECT_EQ(parse_byte_size(text), bytes) << text;
  for (const char* text :
       {"", "x", "GB", "5 GB", "5gb", "5Gb", "5kib", "-1", "-3K", "3X", "3MM", "5GBx", "nan", "1e30G", "1.5",
        "18446744073709551616", "99999999TB", "99999999999999999.5T"})
    EXPECT_EQ(parse_byte_size(text), std::nullopt) << text;
}

TEST(ByteSizes, AreWrittenAsTheyAreRead) {
  for (const std::size_t bytes : {0u, 8u, 1000u, 1024u, 1536u, 65536u, 1u << 30, 3u << 30}) {
    EXPECT_EQ(parse_byte_size(exact_byte_size(bytes)), bytes);
  }
  EXPECT_EQ(exact_byte_size(65536), "64K");
  try {
    byte_size_of_flag("--min", "0", 1);
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "--min: '0' is no size; write bytes, or as in 64K, 16GiB or 80GB");
  }
}

TEST(Text, HumanBytes) {
  EXPECT_EQ(human_bytes(512), "512 B");
  EXPECT_EQ(human_bytes(1536), "1.5 KiB");
  EXPECT_EQ(human_bytes(25ull << 20), "25 MiB");
}

TEST(Text, FixedRoundsToADecimal) {
  EXPECT_EQ(fixed(0.128, 2), "0.13");
  EXPECT_EQ(fixed(-1.5, 3), "-1.500");
  EXPECT_EQ(fixed(1e300, 0).size(), 301u);
  EXPECT_EQ(fixed(NAN, 2), "nan");
}

TEST(Stream, ParallelForCoversEveryIndexOnce) {
  for (int threads : {1, 2, 5}) {
    const Stream s = Stream::host(threads);
    for (std::size_t n : {0, 1, 3, 64, 1000}) {
      for (std::size_t grain : {1, 16}) {
        std::vector<int> hits(n);
        s.parallel_for(n, grain, [&](std::size_t b, std::size_t e) {
          for (auto i = b; i < e; ++i) ++hits[i];
        });
        EXPECT_EQ(std::accumulate(hits.begin(), hits.end(), 0), static_cast<int>(n));
        EXPECT_TRUE(std::all_of(hits.begin(), hits.end(), [](int h) { return h == 1; }));
      }
    }
  }
}

}  // namespace
}  // namespace rz
