#include "comm/store.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <thread>
#include <vector>

#include "comm/core/error.h"
#include "comm/store_detail.h"
#include "comm/transports/socket.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using test::error_of;

using std::chrono::milliseconds;
using std::chrono::seconds;

Deadline soon() { return Deadline::after(seconds(10)); }

class Directory {
 public:
  Directory() : path_((std::filesystem::temp_directory_path() / "rz-store-XXXXXX").string()) {
    if (!mkdtemp(path_.data())) fail_errno("mkdtemp");
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

bool contains(const Error& e, const std::string& text) {
  return std::string(e.what()).find(text) != std::string::npos;
}

/// Every kind of store, opened twice: by the rank that serves and by another.
class EveryStore : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string kind = GetParam();
    if (kind == "memory") a_ = b_ = memory_store();
    if (kind == "file") a_ = file_store(directory_.path()), b_ = file_store(directory_.path());
    if (kind == "tcp4" || kind == "tcp6") {
      const std::string host = kind == "tcp4" ? "127.0.0.1" : "[::1]";
      a_ = tcp_store(host + ":0", true);
      b_ = tcp_store(str(host, ':', tcp_store_port(*a_)));
    }
    if (kind == "prefix") {
      const auto inner = memory_store();
      inner->set("key", "not behind the prefix");
      a_ = prefix_store(inner, "p/"), b_ = prefix_store(prefix_store(inner, "p"), "/");
    }
  }
  Directory directory_;
  std::shared_ptr<Store> a_, b_;
};
INSTANTIATE_TEST_SUITE_P(Stores, EveryStore, testing::Values("memory", "file", "tcp4", "tcp6", "prefix"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(EveryStore, GivesBackWhatWasSet) {
  const std::string binary("\0\1/%\n\xff", 6), large(300'000, 'x');
  a_->set("key", "value");
  b_->set(binary, binary);
  a_->set("empty", "");
  b_->set("large", large);
  EXPECT_EQ(b_->get("key", soon()), "value");
  EXPECT_EQ(a_->get(binary, soon()), binary);
  EXPECT_EQ(b_->get("empty", soon()), "");
  EXPECT_EQ(a_->get("large", soon()), large);
  b_->set("key", "another");
  EXPECT_EQ(a_->get("key", soon()), "another");
}

TEST_P(EveryStore, GetWaitsForTheKey) {
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(50));
    b_->set("late", "here");
  });
  EXPECT_EQ(a_->get("late", soon()), "here");
  other.join();
}

// One object, two threads: the wait of one must not keep the other from setting what it waits for.
TEST_P(EveryStore, AWaitBlocksNoOtherThreadOfTheSameStore) {
  std::thread other([&] { EXPECT_EQ(a_->get("late", soon()), "here"); });
  std::this_thread::sleep_for(milliseconds(30));
  const auto start = Deadline::Clock::now();
  a_->set("late", "here");
  EXPECT_LT(Deadline::Clock::now() - start, seconds(5));
  other.join();
}

TEST_P(EveryStore, ATimeoutNamesTheKey) {
  const auto start = Deadline::Clock::now();
  const Error e = error_of([&] { b_->get("absent", Deadline::after(milliseconds(60))); });
  EXPECT_EQ(e.code(), Errc::timeout);
  EXPECT_TRUE(contains(e, "absent")) << e.what();
  EXPECT_GE(Deadline::Clock::now() - start, milliseconds(59));
  EXPECT_LT(Deadline::Clock::now() - start, seconds(5));
  b_->set("absent", "x");  // and the store still works
  EXPECT_EQ(b_->get("absent", Deadline::after({})), "x");
}

TEST_P(EveryStore, AddsFromManyThreadsAreAllCounted) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 25; ++i) (t % 2 ? a_ : b_)->add("count", t + 1);
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(a_->add("count", 0), 250);
  EXPECT_EQ(a_->get("count", soon()), "250");
  EXPECT_EQ(b_->add("count", -251), -1);
}

TEST_P(EveryStore, AddToTextIsAnErrorThatNamesTheKey) {
  a_->set("text", "seven");
  const Error e = error_of([&] { b_->add("text", 1); });
  EXPECT_EQ(e.code(), Errc::rendezvous);
  EXPECT_TRUE(contains(e, "text")) << e.what();
  EXPECT_EQ(b_->get("text", soon()), "seven");
}

TEST(PrefixStore, KeepsGroupsApart) {
  const auto inner = memory_store();
  const auto a = prefix_store(inner, "a/"), b = prefix_store(inner, "b/");
  a->set("key", "1");
  b->set("key", "2");
  EXPECT_EQ(a->get("key", soon()), "1");
  EXPECT_EQ(inner->get("b/key", soon()), "2");
}

TEST(FileStore, WorksAcrossProcesses) {
  test::expect_processes(4, [](int rank, std::shared_ptr<Store> store) {
    for (int i = 0; i < 50; ++i) store->add("sum", 1);
    store->set(str("done", rank), "yes");
    for (int r = 0; r < 4; ++r) store->get(str("done", r), soon());
    require(store->add("sum", 0) == 200, Errc::io, "lost a count");
  });
}

TEST(FileStore, ADirectoryThatCannotBeMadeIsNamed) {
  const Error e = error_of([] { file_store("/proc/no/such/place"); });
  EXPECT_EQ(e.code(), Errc::rendezvous);
  EXPECT_TRUE(contains(e, "/proc/no/such/place")) << e.what();
}

TEST(TcpStore, ServesAcrossProcesses) {
  test::expect_processes(3, [](int rank, std::shared_ptr<Store> files) {
    std::shared_ptr<Store> store;
    if (rank == 0) {
      store = tcp_store("localhost:0", true);
      files->set("port", str(tcp_store_port(*store)));
    } else {
      store = tcp_store("localhost:" + files->get("port", soon()));
    }
    store->set(str("rank", rank), str(rank * rank));
    for (int r = 0; r < 3; ++r)
      require(store->get(str("rank", r), soon()) == str(r * r), Errc::io, "wrong value");
    store->add("finished", 1);
    while (rank == 0 && store->add("finished", 0) < 3) std::this_thread::sleep_for(milliseconds(1));
  });
}

TEST(TcpStore, WaitsForAServerThatComesLater) {
  int port = 0;
  {
    const auto first = tcp_store("127.0.0.1:0", true);
    port = tcp_store_port(*first);
  }
  std::shared_ptr<Store> server;
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(60));
    server = tcp_store(str("127.0.0.1:", port), true);
    server->set("key", "value");
  });
  const auto client = tcp_store(str("127.0.0.1:", port));
  EXPECT_EQ(client->get("key", soon()), "value");
  other.join();
}

TEST(TcpStore, ErrorsNameTheAddress) {
  int port = 0;
  { port = tcp_store_port(*tcp_store("127.0.0.1:0", true)); }
  const std::string address = str("127.0.0.1:", port);
  Error e = error_of([&] { tcp_store(address, false, milliseconds(50)); });
  EXPECT_EQ(e.code(), Errc::rendezvous);
  EXPECT_TRUE(contains(e, address) && contains(e, "refused")) << e.what();
  const auto server = tcp_store(address, true);
  e = error_of([&] { tcp_store(address, true, milliseconds(50)); });
  EXPECT_EQ(e.code(), Errc::rendezvous);
  EXPECT_TRUE(contains(e, address) && contains(e, "in use")) << e.what();
  e = error_of([&] { tcp_store("no.such.host.invalid:1", false, milliseconds(50)); });
  EXPECT_EQ(e.code(), Errc::rendezvous);
  EXPECT_TRUE(contains(e, "no.such.host.invalid")) << e.what();
  for (const char* bad : {"localhost", "localhost:", "localhost:x", "localhost:70000", ":1", "::1:29500"}) {
    e = error_of([&] { tcp_store(bad, false, milliseconds(50)); });
    EXPECT_EQ(e.code(), Errc::config) << bad;
    EXPECT_TRUE(contains(e, bad)) << e.what();
  }
}

TEST(TcpStore, AServerThatEndsIsAnError) {
  auto server = tcp_store("127.0.0.1:0", true);
  const auto client = tcp_store(str("127.0.0.1:", tcp_store_port(*server)));
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(30));
    server.reset();
  });
  const Error e = error_of([&] { client->get("key", soon()); });
  EXPECT_EQ(e.code(), Errc::rendezvous) << e.what();
  EXPECT_TRUE(contains(e, "key")) << e.what();
  other.join();
}

TEST(TcpStore, TooLongIsRefusedBeforeItIsSent) {
  const auto store = tcp_store("127.0.0.1:0", true);
  EXPECT_EQ(error_of([&] { store->set(std::string(2000, 'k'), ""); }).code(), Errc::invalid_argument);
  EXPECT_EQ(error_of([&] { store->set("key", std::string(2 << 20, 'v')); }).code(), Errc::invalid_argument);
  store->set("key", std::string(1 << 20, 'v'));
  EXPECT_EQ(store->get("key", soon()).size(), 1u << 20);
}

TEST(TcpStore, GarbageOnThePortDisturbsNobody) {
  const auto store = tcp_store("127.0.0.1:0", true);
  const SocketAddress address = resolve({"127.0.0.1", tcp_store_port(*store)}).front();
  struct Header {
    std::uint32_t magic, kind, key_bytes, value_bytes;
    std::int64_t number;
  };
  constexpr std::uint32_t magic = 0x31515a52;
  const Header headers[] = {{0, 1, 1, 1, 0},
                            {magic, 0, 1, 0, 0},
                            {magic, 9, 1, 0, 0},
                            {magic, 1, 0xffffffff, 0, 0},
                            {magic, 1, 1, 0xffffffff, 0},
                            {magic, 2, 1, 1, 0}};
  std::vector<std::string> garbage{"GET / HTTP/1.1\r\nHost: x\r\n\r\n", std::string(100'000, '\xff')};
  for (const Header& h : headers) garbage.emplace_back(reinterpret_cast<const char*>(&h), sizeof h);
  for (const auto& bytes : garbage) {
    const Descriptor socket = connect_tcp(address, soon());
    ASSERT_TRUE(socket);
    send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    char c;
    ssize_t n = -1;  // it is disconnected
    for (const Deadline d = soon();
         !d.expired() && (n = recv(socket.get(), &c, 1, 0)) < 0 && errno == EAGAIN;)
      std::this_thread::sleep_for(milliseconds(1));
    EXPECT_TRUE(n == 0 || (n < 0 && errno == ECONNRESET)) << n;
  }
  // One that says half of a request and stays is no harm either.
  const Descriptor half = connect_tcp(address, soon());
  send(half.get(), &headers[1], 10, MSG_NOSIGNAL);
  store->set("key", "value");
  EXPECT_EQ(store->get("key", soon()), "value");
}

TEST(TcpStore, KnowsTheWayToTheServer) {
  const auto store = tcp_store("127.0.0.1:0", true);
  EXPECT_EQ(tcp_store_local_address(*prefix_store(store, "x")), "127.0.0.1");
  EXPECT_EQ(tcp_store_local_address(*memory_store()), "");
  EXPECT_EQ(tcp_store_port(*memory_store()), 0);
}

}  // namespace
}  // namespace rz
