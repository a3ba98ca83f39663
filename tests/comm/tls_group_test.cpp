// Groups whose connections are encrypted: the bits of every collective are those without encryption, and a
// bit that changes on its way ends a running collective on both ranks.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/net/socket.h"
#include "tests/lab/group.h"
#include "tests/support/between.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using namespace std::chrono_literals;

CommOptions over_tcp(const std::string& encryption) {
  CommOptions options;
  options.timeout = 30s;
  options.transport = "tcp";
  options.encryption = encryption;
  return options;
}

/// Every collective of `bytes` on three ranks: the bytes that each rank has afterwards.
std::map<int, std::vector<float>> results(const std::string& encryption, std::size_t bytes) {
  std::map<int, std::vector<float>> all;
  std::mutex mutex;
  constexpr int size = 3;
  lab::group(size, over_tcp(encryption), [&](Communicator& comm) {
    std::mt19937 random(static_cast<unsigned>(bytes) * 3 + static_cast<unsigned>(comm.rank()));
    std::uniform_real_distribution<float> value(-1, 1);
    std::vector<float> mine(bytes);  // a byte of the message is an element, so that no size is left out
    for (float& x : mine) x = value(random);
    std::vector<float> result;
    const auto keep = [&](const std::vector<float>& x) { result.insert(result.end(), x.begin(), x.end()); };

    std::vector<std::uint8_t> raw(bytes);
    for (auto& b : raw) b = static_cast<std::uint8_t>(random());
    comm.broadcast({raw.data(), bytes}, 1).wait();
    result.insert(result.end(), raw.begin(), raw.end());
    const std::size_t n = bytes / sizeof(float);
    std::vector<float> sum(mine.begin(), mine.begin() + static_cast<std::ptrdiff_t>(n));
    comm.all_reduce({sum.data(), n}).wait();
    keep(sum);
    std::vector<float> gathered(n * size);
    comm.all_gather({mine.data(), n}, {gathered.data(), n * size}).wait();
    keep(gathered);
    std::vector<float> part(n / size);
    comm.reduce_scatter({mine.data(), n / size * size}, {part.data(), n / size}).wait();
    keep(part);
    const std::lock_guard lock(mutex);
    all[comm.rank()] = std::move(result);
  });
  return all;
}

TEST(EncryptedGroup, HasTheBitsOfOneWithoutEncryption) {
  for (const std::size_t bytes : {0, 1, 4, 16'383, 16'384, 16'385, 65'576, 5'000'000})
    EXPECT_TRUE(results("always", bytes) == results("off", bytes)) << bytes;
}

/// Rank 1 finds an end in the middle where rank 0 listens.
class Misled final : public Store {
 public:
  explicit Misled(std::shared_ptr<Store> inner) : inner_(std::move(inner)) {}
  void set(std::string_view key, std::string_view value) override { inner_->set(key, value); }
  std::int64_t add(std::string_view key, std::int64_t n) override { return inner_->add(key, n); }
  std::string get(std::string_view key, Deadline deadline) override {
    const std::string value = inner_->get(key, deadline);
    if (!key.ends_with("address/0")) return value;
    const std::size_t at = value.find(' ') + 1;
    const std::lock_guard lock(mutex_);
    if (!between_) between_.emplace(net::parse_host_port(value.substr(at)).port);
    return value.substr(0, at) + between_->address().text();
  }
  test::Between& between() { return between_.value(); }

 private:
  std::shared_ptr<Store> inner_;
  std::mutex mutex_;
  std::optional<test::Between> between_;
};

// With a bit of the sum's contributions changed, unencrypted ranks would both go on with another sum.
TEST(EncryptedGroup, AChangedBitOfARunningCollectiveEndsItOnBothRanks) {
  constexpr std::size_t n = 1 << 20;
  for (const std::string encryption : {"always", "off"}) {
    std::array<std::string, 2> messages;
    std::atomic<int> wrong{0};
    std::shared_ptr<Misled> between;  // passes the last bytes of rank 1 on after its end
    test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
      const auto misled = rank == 1 ? between = std::make_shared<Misled>(store) : nullptr;
      auto comm = Communicator::connect(rank, 2, misled ? misled : store, over_tcp(encryption));
      std::vector<float> x(n, 1);
      comm.all_reduce({x.data(), n}).wait();
      EXPECT_EQ(std::ranges::count(x, 2.0f), std::ptrdiff_t{n});
      if (misled) misled->between().change_next(30'000);
      const auto reduce = [&] {
        for (int i = 0; i < 3; ++i) {
          std::ranges::fill(x, 1.0f);
          comm.all_reduce({x.data(), n}).wait();
          wrong += std::ranges::count(x, 2.0f) != std::ptrdiff_t{n};
        }
      };
      if (encryption == "off") return reduce();
      const Error e = test::error_of(reduce);
      messages[static_cast<std::size_t>(rank)] = e.what();
      EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
      EXPECT_TRUE(e.culprit() == 0 || e.culprit() == 1) << e.what();
    });
    if (encryption == "off") {
      EXPECT_GT(wrong, 0) << "the bit was not changed";
      continue;
    }
    EXPECT_EQ(wrong, 0);
    for (const std::string& message : messages) {
      EXPECT_NE(message.find("something between the hosts changes what they send"), std::string::npos)
          << message;
      EXPECT_NE(message.find("its encrypted connection to rank"), std::string::npos) << message;
    }
  }
}

}  // namespace
}  // namespace rz
