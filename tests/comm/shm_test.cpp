#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <random>
#include <vector>

#include "comm/core/error.h"
#include "comm/transports/connect.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {
TEST(Shm, First) {
  test::run_ranks(3, [](int rank, std::shared_ptr<Store> store) {
    auto t = connect_transport(rank, 3, *store, {}, Deadline::after(std::chrono::seconds(10)));
    EXPECT_EQ(t->describe(), "shm");
    const int to = (rank + 1) % 3, from = (rank + 2) % 3;
    auto mem = t->allocate(100000);
    std::memset(mem.get(), rank + 1, 100000);
    ASSERT_EQ(t->post(to, Lane::collective, {}, {mem.get(), 100000}), 100000u);
    EXPECT_EQ(t->released(to, Lane::collective), 0u);
    while (t->peek(from, Lane::collective).bytes.empty())
      t->progress(), t->wait(std::chrono::milliseconds(10));
    auto in = t->peek(from, Lane::collective);
    EXPECT_EQ(in.bytes.size(), 100000u);
    EXPECT_EQ(in.bytes[777], std::byte(from + 1));
    t->consume(from, Lane::collective, 100000);
    while (t->released(to, Lane::collective) < 100000) t->progress(), t->wait(std::chrono::milliseconds(10));
  });
}
}  // namespace
}  // namespace rz
