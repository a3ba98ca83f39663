// Runs: ci alone

#include "comm/store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <limits>
#include <list>
#include <random>
#include <thread>
#include <vector>

#include "comm/bootstrap/secret.h"
#include "comm/bootstrap/store_internal.h"
#include "comm/bootstrap/store_wire.h"
#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/net/authentication.h"
#include "comm/net/socket.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using store_wire::Reply;
using store_wire::StoreRequest;
using test::error_of;

using std::chrono::milliseconds;
using std::chrono::seconds;

Deadline soon() { return Deadline::after(seconds(60)); }

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
      b_ = tcp_store(concat(host, ':', tcp_store_port(*a_)));
    }
    if (kind == "prefix") {
      const auto inner = memory_store();
      inner->set("key", "not behind the prefix");
      a_ = prefix_store(inner, "p/"), b_ = prefix_store(prefix_store(inner, "p"), "/");
    }
  }
  test::Folder directory_;
  std::shared_ptr<Store> a_, b_;
};
INSTANTIATE_TEST_SUITE_P(Stores, EveryStore, testing::Values("memory", "file", "tcp4", "tcp6", "prefix"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(EveryStore, ReturnsTheValueThatWasSet) {
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

// One object, two threads: a waiting get must not block the set that it waits for.
TEST_P(EveryStore, ConsecutiveNumbersAreFoundTogetherOrOneByOne) {
  const std::string large(700'000, 'x');
  for (const int n : {9, 10, 12}) a_->set(concat("of/", n), concat(n));
  a_->set("of/11", "");
  a_->set("of/14", "behind a gap");
  a_->set("large/0", large), a_->set("large/1", large);
  const auto all_from = [](Store& store, const char* prefix, std::uint32_t first, std::size_t count) {
    std::vector<std::string> found;
    while (found.size() < count)
      for (auto& v : store.get_numbered(prefix, first + static_cast<std::uint32_t>(found.size()), soon()))
        found.push_back(std::move(v));
    return found;
  };
  EXPECT_EQ(all_from(*b_, "of/", 9, 4), (std::vector<std::string>{"9", "10", "", "12"}));
  EXPECT_EQ(all_from(*b_, "large/", 0, 2), (std::vector{large, large}));
  const Error e = error_of([&] { b_->get_numbered("of/", 13, Deadline::after(milliseconds(20))); });
  EXPECT_EQ(e.code(), Errc::timeout);
  EXPECT_TRUE(contains(e, "of/13'")) << e.what();
  std::thread other([&] { a_->set("of/13", "late"); });
  EXPECT_EQ(all_from(*b_, "of/", 13, 2), (std::vector<std::string>{"late", "behind a gap"}));
  other.join();
}

TEST(TcpStore, ConsecutiveNumbersAreOneRequest) {
  const auto store = tcp_store("127.0.0.1:0", true);
  for (int n = 0; n < 300; ++n) store->set(concat("of/", n), concat(n));
  const auto all = store->get_numbered("of/", 0, soon());
  ASSERT_EQ(all.size(), 300u);
  EXPECT_EQ(all.back(), "299");
}

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

TEST_P(EveryStore, ACounterBeyond64BitsIsAnErrorThatNamesTheKey) {
  constexpr std::int64_t max = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(a_->add("large", max), max);
  const Error e = error_of([&] { b_->add("large", 1); });
  EXPECT_EQ(e.code(), Errc::rendezvous);
  EXPECT_TRUE(contains(e, "large") && contains(e, "64 bits")) << e.what();
  EXPECT_EQ(b_->add("large", -max), 0);
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
    store->set(concat("done", rank), "yes");
    for (int r = 0; r < 4; ++r) store->get(concat("done", r), soon());
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
      files->set("port", concat(tcp_store_port(*store)));
    } else {
      store = tcp_store("localhost:" + files->get("port", soon()));
    }
    store->set(concat("rank", rank), concat(rank * rank));
    for (int r = 0; r < 3; ++r)
      require(store->get(concat("rank", r), soon()) == concat(r * r), Errc::io, "wrong value");
    store->add("finished", 1);
    while (rank == 0 && store->add("finished", 0) < 3) std::this_thread::sleep_for(milliseconds(1));
  });
}

TEST(TcpStore, StandardDescriptorsThatAreClosedStayClosed) {
  // A daemon may print all the same: not into the sockets of its store or its communicators.
  test::expect_processes(2, [](int rank, std::shared_ptr<Store> files) {
    for (int fd = 0; fd < 3; ++fd) close(fd);
    std::shared_ptr<Store> store;
    if (rank == 0) {
      store = tcp_store("localhost:0", true);
      files->set("port", concat(tcp_store_port(*store)));
    } else {
      store = tcp_store("localhost:" + files->get("port", soon()));
    }
    for (const char* transport : {"shm", "tcp"}) {
      auto comm = Communicator::connect(rank, 2, prefix_store(store, transport), {.transport = transport});
      comm.split(0, rank)->barrier().wait();
      for (int fd = 0; fd < 3; ++fd)
        require(fcntl(fd, F_GETFD) < 0, Errc::io, "descriptor ", fd, " is in use over ", transport);
      comm.barrier().wait();
    }
    store->add("finished", 1);
    while (rank == 0 && store->add("finished", 0) < 2) std::this_thread::sleep_for(milliseconds(1));
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
    server = tcp_store(concat("127.0.0.1:", port), true);
    server->set("key", "value");
  });
  const auto client = tcp_store(concat("127.0.0.1:", port));
  EXPECT_EQ(client->get("key", soon()), "value");
  other.join();
}

TEST(TcpStore, ErrorsNameTheAddress) {
  int port = 0;
  { port = tcp_store_port(*tcp_store("127.0.0.1:0", true)); }
  const std::string address = concat("127.0.0.1:", port);
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
  const auto client = tcp_store(concat("127.0.0.1:", tcp_store_port(*server)));
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

TEST(TcpStore, AMessageOfTheServerHasThePortThatItChose) {
  const auto store = tcp_store("127.0.0.1:0", true);
  const Error e = error_of([&] { store->get("absent", Deadline::after(milliseconds(1))); });
  EXPECT_TRUE(contains(e, concat("the store at 127.0.0.1:", tcp_store_port(*store)))) << e.what();
}

/// Of the secret in RZ_SECRET, which counts on loopback too.
net::AuthenticationKey key_of_stores() { return {process_secret().get(), net::Purpose::store, ""}; }

TEST(TcpStore, GarbageOnThePortIsRejected) {
  const auto store = tcp_store("127.0.0.1:0", true);
  const net::SocketAddress address = net::resolve({"127.0.0.1", tcp_store_port(*store)}).front();
  constexpr std::uint32_t magic = store_wire::request_magic;
  const StoreRequest headers[] = {
      {0, 4, 0, 0, 0, 0, 0},          {magic, 0, 0, 0, 0, 0, 0},
      {magic, 9, 0, 0, 0, 0, 0},      {magic, 4, 0xffffffff, 0, 0, 0, 0},
      {magic, 4, 0, 1, 0, 0, 0},      {magic, 4, 0, 0, 1, 0, 0},
      {magic, 1, 0, 1, 1 << 19, 0, 0}};  // the last is well-formed, but no hello message
  std::vector<std::string> garbage{"GET / HTTP/1.1\r\nHost: x\r\n\r\n", std::string(100'000, '\xff')};
  for (const StoreRequest& h : headers) garbage.emplace_back(reinterpret_cast<const char*>(&h), sizeof h);
  for (std::size_t i = 0; i < 2 * garbage.size(); ++i) {
    const UniqueFd socket = net::connect_tcp(address, soon());
    ASSERT_TRUE(socket);
    std::string bytes = garbage[i / 2];
    if (i % 2)  // of a client that has proved itself
      net::Authentication::client(key_of_stores(), {}).complete(socket.get(), soon());
    else
      bytes.resize(std::max<std::size_t>(bytes.size(), 64), '\0');
    send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    char c;
    ssize_t n = -1;  // it is disconnected
    for (const Deadline d = soon();
         !d.expired() && (n = recv(socket.get(), &c, 1, 0)) < 0 && errno == EAGAIN;)
      std::this_thread::sleep_for(milliseconds(1));
    EXPECT_TRUE(n == 0 || (n < 0 && errno == ECONNRESET)) << n;
  }
  // A client that sends half of a request and stays connected does no harm either.
  const UniqueFd half = net::connect_tcp(address, soon());
  send(half.get(), &headers[1], 10, MSG_NOSIGNAL);
  store->set("key", "value");
  EXPECT_EQ(store->get("key", soon()), "value");
}

/// A connection that this test writes to directly.
class RawClient {
 public:
  explicit RawClient(int port)
      : socket_(net::connect_tcp(net::resolve({"127.0.0.1", port}).front(), soon())) {
    require(static_cast<bool>(socket_), Errc::system, "connect: ", std::strerror(errno));
  }
  /// As a client that has the secret of the tests.
  const RawClient& authenticate() const {
    net::Authentication::client(key_of_stores(), {}).complete(fd(), soon());
    return *this;
  }
  int fd() const { return socket_.get(); }
  void send(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n > 0) bytes.remove_prefix(static_cast<std::size_t>(n));
      if (n < 0 && errno != EAGAIN) fail_errno("send");
      if (n < 0) wait(POLLOUT);
    }
  }
  /// Fewer bytes if the connection ends first.
  std::string read(std::size_t size) const {
    std::string bytes(size, 0);
    std::size_t got = 0;
    while (got < size) {
      const ssize_t n = recv(fd(), bytes.data() + got, size - got, 0);
      if (n > 0) got += static_cast<std::size_t>(n);
      if (n == 0 || (n < 0 && errno != EAGAIN)) break;
      if (n < 0) wait(POLLIN);
    }
    return bytes.substr(0, got);
  }

 private:
  void wait(short events) const {
    pollfd p{fd(), events, 0};
    require(poll(&p, 1, 30'000) == 1, Errc::timeout, "nothing came in 30 s");
  }
  UniqueFd socket_;
};

/// A store's reply; the value is stored in `value`.
Reply read_reply(const RawClient& client, std::string* value = nullptr) {
  Reply a;
  const std::string header = client.read(sizeof a);
  require(header.size() == sizeof a, Errc::io, "the connection ended");
  std::memcpy(&a, header.data(), sizeof a);
  const std::string text = client.read(a.value_bytes);
  if (value) *value = text;
  return a;
}

TEST(TcpStore, AStoreThatIsOpenedLongBeforeItsFirstUseWorks) {
  const auto server = tcp_store("127.0.0.1:0", {.serve = true, .hello_timeout = milliseconds(300)});
  const auto client = tcp_store(concat("127.0.0.1:", tcp_store_port(*server)));
  const RawClient stranger(tcp_store_port(*server));
  EXPECT_EQ(stranger.read(1), "");  // it is dropped: unauthenticated peers have that long
  client->set("key", "value");
  EXPECT_EQ(server->get("key", soon()), "value");
}

TEST(TcpStore, AnIdleConnectionThatWasClosedIsMadeAgain) {
  auto server = tcp_store("127.0.0.1:0", true);
  const std::string address = concat("127.0.0.1:", tcp_store_port(*server));
  const auto client = tcp_store(address);
  client->set("key", "first");
  server.reset();
  server = tcp_store(address, true);
  client->set("key", "second");
  EXPECT_EQ(server->get("key", soon()), "second");
}

// A client that sends many requests for a long value and reads no reply must not fill rank 0's memory.
TEST(TcpStore, ARequestWaitsForThePreviousReply) {
  constexpr int requests = 64;
  const auto store = tcp_store("127.0.0.1:0", true);
  const std::string value(1 << 20, 'v');
  store->set("long", value);
  const RawClient client(tcp_store_port(*store));
  client.authenticate();
  std::string bytes = to_bytes(StoreRequest{.kind = StoreRequest::hello}, "");
  for (int i = 0; i < requests; ++i) bytes += to_bytes(StoreRequest{.kind = StoreRequest::get}, "", "long");
  client.send(bytes + to_bytes(StoreRequest{.kind = StoreRequest::add, .number = 1}, "", "served"));
  for (int i = 0; i < 10; ++i) store->add("turns of the server", 1);
  EXPECT_EQ(store->add("served", 0), 0) << "all replies were made in the server's memory";
  EXPECT_EQ(read_reply(client).value_bytes, 0u);
  for (int i = 0; i < requests; ++i) {
    std::string text;
    ASSERT_EQ(read_reply(client, &text).status, Reply::ok) << i;
    ASSERT_EQ(text, value) << i;
  }
  EXPECT_EQ(read_reply(client).number, 1);
  EXPECT_EQ(store->add("served", 0), 1);
}

TEST(TcpStore, TheTableIsBounded) {
  const auto store = tcp_store("127.0.0.1:0", true);
  const std::string value(1 << 20, 'v');
  const Error e = error_of([&] {
    for (int i = 0; i < 65; ++i) store->set(concat("key ", i), value);
  });
  EXPECT_EQ(e.code(), Errc::rendezvous);
  EXPECT_TRUE(contains(e, "key 63") && contains(e, "full")) << e.what();
  store->set("key 0", "");  // room again
  store->set("key 63", value);
  EXPECT_EQ(store->get("key 63", soon()), value);
}

void limit_open_files(rlim_t soft, rlim_t hard) {
  const rlimit limit{soft, hard};
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) fail_errno("setrlimit");
}

TEST(TcpStore, IdleConnectionsDoNotExhaustDescriptors) {
  test::expect_processes(2, [](int rank, std::shared_ptr<Store> files) {
    if (rank == 0) {
      limit_open_files(128, 128);
      const auto store = tcp_store("127.0.0.1:0", true);
      files->set("port", concat(tcp_store_port(*store)));
      files->get("done", soon());
      return;
    }
    const int port = std::stoi(files->get("port", soon()));
    std::vector<RawClient> strangers;
    for (int i = 0; i < 200; ++i) strangers.emplace_back(port);
    const auto start = Deadline::Clock::now();
    tcp_store(concat("127.0.0.1:", port))->set("key", "value");
    EXPECT_LT(Deadline::Clock::now() - start, seconds(5));
    files->set("done", "");
  });
}

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

TEST(TcpStore, TheSoftLimitOfOpenFilesIsRaised) {
  test::expect_processes(1, [](int, std::shared_ptr<Store>) {
    limit_open_files(64, 1500);
    const auto store = tcp_store("127.0.0.1:0", {.serve = true, .size = 1000});
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    EXPECT_GE(limit.rlim_cur, 1000u);
    const Error e = error_of([] { tcp_store("127.0.0.1:0", {.serve = true, .size = 2000}); });
    EXPECT_EQ(e.code(), Errc::system);
    EXPECT_TRUE(contains(e, "2000 ranks") && contains(e, "1500") && contains(e, "ulimit")) << e.what();
  });
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool sanitized = true;  // a failed allocation ends the process there
#else
constexpr bool sanitized = false;
#endif

/// Whether the other side has closed the connection.
bool ended(const RawClient& client) {
  pollfd p{client.fd(), POLLRDHUP, 0};
  return poll(&p, 1, 0) == 1;
}

TEST(TcpStore, AnExceptionEndsOneClientOnly) {
  if (sanitized) GTEST_SKIP() << "sanitizers turn bad_alloc into an end of the process";
  test::expect_processes(1, [](int, std::shared_ptr<Store>) {
    const auto store = tcp_store("127.0.0.1:0", true);
    std::list<RawClient> clients;
    for (int i = 0; i < 200; ++i) {
      clients.emplace_back(tcp_store_port(*store))
          .authenticate()
          .send(to_bytes(StoreRequest{.kind = StoreRequest::hello}, ""));
      EXPECT_EQ(read_reply(clients.back()).status, Reply::ok);
    }
    std::string partial =
        to_bytes(StoreRequest{.kind = StoreRequest::set}, "", "key", std::string(1 << 20, 'v'));
    partial.pop_back();  // so that the server keeps it
    rlimit before{};
    getrlimit(RLIMIT_DATA, &before);
    const rlimit none{1, before.rlim_max};  // none beyond the memory in use
    setrlimit(RLIMIT_DATA, &none);
    const auto one_dropped = [&] { return std::any_of(clients.begin(), clients.end(), ended); };
    for (const RawClient& client : clients) {
      if (one_dropped()) break;
      try {
        client.send(partial);
      } catch (const Error&) {  // this one
      }
    }
    const Deadline deadline = soon();
    while (!one_dropped() && !deadline.expired()) std::this_thread::sleep_for(milliseconds(1));
    const bool dropped = one_dropped();
    setrlimit(RLIMIT_DATA, &before);
    EXPECT_TRUE(dropped) << "there was memory for all of them";
    store->set("key", "value");
    EXPECT_EQ(store->get("key", soon()), "value");
  });
}

TEST(TcpStore, AServerWithoutDescriptorsBacksOff) {
  test::expect_processes(2, [](int rank, std::shared_ptr<Store> files) {
    if (rank == 1) {
      const auto port = files->get("port", soon());
      tcp_store("127.0.0.1:" + port)->set("key", "value");
      return;
    }
    limit_open_files(128, 128);
    const auto store = tcp_store("127.0.0.1:0", true);
    files->set("port", concat(tcp_store_port(*store)));
    std::vector<UniqueFd> all;
    do all.emplace_back(dup(STDOUT_FILENO));
    while (all.back());
    const double before = cpu_seconds();
    std::this_thread::sleep_for(milliseconds(500));  // rank 1 calls meanwhile
    EXPECT_LT(cpu_seconds() - before, 0.1);
    all.clear();
    EXPECT_EQ(store->get("key", soon()), "value");
  });
}

TEST(TcpStore, AnOccupiedPortIsAwaited) {
  UniqueFd other = net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());
  const int port = net::local_address(other.get()).port();
  std::thread holder([&] {
    std::this_thread::sleep_for(milliseconds(100));
    other.close();
  });
  try {
    const auto store = tcp_store(concat("127.0.0.1:", port), true);
    EXPECT_EQ(tcp_store_port(*store), port);
  } catch (const Error& e) {
    ADD_FAILURE() << e.what();
  }
  holder.join();
}

/// A port whose listener neither accepts nor refuses further connections.
class SilentPort {
 public:
  explicit SilentPort(const net::SocketAddress& address)
      : listener_(socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener_.get(), address.get(), address.size) != 0) fail_errno("bind");
    if (listen(listener_.get(), 0) != 0) fail_errno("listen");
    const net::SocketAddress at = net::local_address(listener_.get());
    while ((fill_.push_back(net::connect_tcp(at, Deadline::after(milliseconds(200)))), fill_.back()))
      ;
  }

 private:
  UniqueFd listener_;
  std::vector<UniqueFd> fill_;
};

TEST(TcpStore, AnUnresponsiveAddressIsSkipped) {
  const auto addresses = net::resolve({"localhost", 0});
  if (addresses.size() < 2) GTEST_SKIP() << "localhost has one address here";
  // The server uses the first address, so the silent one becomes the first by serving on the last.
  const auto server = tcp_store(net::join_host_port(addresses.back().host(), 0), true);
  net::SocketAddress first = addresses.front();
  first.set_port(tcp_store_port(*server));
  const SilentPort silent(first);
  const auto start = Deadline::Clock::now();
  tcp_store(concat("localhost:", tcp_store_port(*server)), false, seconds(20))->set("key", "value");
  EXPECT_LT(Deadline::Clock::now() - start, seconds(10));
  EXPECT_EQ(server->get("key", soon()), "value");
}

TEST(FileStore, ValuesAreTheUsersAlone) {
  const test::Folder directory;
  file_store(directory.path())->set("key", "value");
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    struct stat s {};
    ASSERT_EQ(stat(entry.path().c_str(), &s), 0);
    EXPECT_EQ(s.st_mode & 0777, 0600u) << entry.path();
    ++files;
  }
  EXPECT_EQ(files, 1);
}

TEST(TcpStore, AnotherLaunchIsRefusedByName) {
  const auto server = tcp_store("127.0.0.1:0", {.serve = true, .launch = "job 7 step 1"});
  const std::string address = concat("127.0.0.1:", tcp_store_port(*server));
  for (const std::string launch : {"job 7 step 2", ""}) {
    const Error e = error_of([&] { tcp_store(address, {.timeout = milliseconds(50), .launch = launch}); });
    EXPECT_EQ(e.code(), Errc::rendezvous);
    EXPECT_TRUE(contains(e, "'job 7 step 1'") && contains(e, "'" + launch + "'") && contains(e, address))
        << e.what();
  }
  tcp_store(address, {.launch = "job 7 step 1"})->set("key", "value");
  EXPECT_EQ(server->get("key", soon()), "value");
}

// Every request carries the launch's name, not only the first of a connection.
TEST(TcpStore, ARequestOfAnotherLaunchIsRefused) {
  const auto server = tcp_store("127.0.0.1:0", {.serve = true, .launch = "ours"});
  const RawClient client(tcp_store_port(*server));
  client.authenticate().send(to_bytes(StoreRequest{.kind = StoreRequest::hello}, "ours"));
  EXPECT_EQ(read_reply(client).status, Reply::ok);
  client.send(to_bytes(StoreRequest{.kind = StoreRequest::set}, "theirs", "key", "value"));
  std::string launch;
  EXPECT_EQ(read_reply(client, &launch).status, Reply::wrong_launch);
  EXPECT_EQ(launch, "ours");
  EXPECT_EQ(client.read(1), "") << "it is disconnected";
  EXPECT_EQ(error_of([&] { server->get("key", Deadline::after({})); }).code(), Errc::timeout);
}

/// Two consecutive ports, of which `first`, made from its address, occupies the first.
template <class F>
int port_before_a_free_one(const F& first) {
  for (;;) {
    net::SocketAddress address = net::resolve({"127.0.0.1", 0}).front();
    const int port = net::local_address(net::listen_tcp(address).get()).port();
    address.set_port(port + 1);
    if (port == 65535 || !net::listen_tcp_if_free(address)) continue;
    address.set_port(port);
    first(address);
    return port;
  }
}

TEST(TcpStore, AForeignPortIsSkipped) {
  std::unique_ptr<SilentPort> silent;
  const int port =
      port_before_a_free_one([&](const net::SocketAddress& a) { silent.reset(new SilentPort(a)); });
  const std::string address = concat("127.0.0.1:", port);
  const auto server = tcp_store(address, {.serve = true, .launch = "ours", .ports = 2});
  EXPECT_EQ(tcp_store_port(*server), port + 1);
  tcp_store(address, {.launch = "ours", .ports = 2})->set("key", "value");
  EXPECT_EQ(server->get("key", soon()), "value");
}

TEST(TcpStore, ThePortOfAnotherLaunchIsSkipped) {
  std::shared_ptr<Store> theirs;
  const int port = port_before_a_free_one([&](const net::SocketAddress& a) {
    theirs = tcp_store(a.text(), {.serve = true, .launch = "theirs"});
  });
  const std::string address = concat("127.0.0.1:", port);
  const auto ours = tcp_store(address, {.serve = true, .launch = "ours", .ports = 2});
  tcp_store(address, {.launch = "ours", .ports = 2})->set("key", "value");
  EXPECT_EQ(ours->get("key", soon()), "value");
  EXPECT_EQ(error_of([&] { theirs->get("key", Deadline::after({})); }).code(), Errc::timeout);
}

/// The first of several free ports in a row, below those that the kernel gives to clients, of which other
/// tests have many; 0 if there are none.
int free_ports(int count, std::mt19937& random) {
  for (int tries = 0; tries < 1000; ++tries) {
    const int first = 10000 + static_cast<int>(random() % 20000u);
    std::vector<UniqueFd> held;
    try {
      for (int i = 0; i < count; ++i)
        held.push_back(net::listen_tcp(net::resolve({"127.0.0.1", first + i}).front()));
      return first;
    } catch (const Error&) {  // another one has it
    }
  }
  return 0;
}

// The last of several ports is found, too.
TEST(TcpStore, EveryPortIsSearched) {
  constexpr int ports = 8;
  TcpStoreOptions options{.launch = concat("ours ", getpid()), .ports = ports};
  std::mt19937 random(static_cast<unsigned>(getpid()));
  for (int tries = 0; tries < 20; ++tries) {
    const int first = free_ports(ports, random);
    ASSERT_NE(first, 0) << "no eight ports in a row are free";
    std::vector<std::shared_ptr<Store>> stores;
    try {
      for (int i = 0; i < ports; ++i) {
        const bool last = i == ports - 1;
        stores.push_back(tcp_store(concat("127.0.0.1:", first + i),
                                   {.serve = true,
                                    .timeout = seconds(1),
                                    .launch = last ? options.launch : concat("theirs ", getpid(), ' ', i)}));
      }
    } catch (const Error&) {
      continue;  // one of them has been taken since
    }
    tcp_store(concat("127.0.0.1:", first), options)->set("key", "value");
    EXPECT_EQ(stores.back()->get("key", soon()), "value");
    return;
  }
  FAIL() << "eight ports in a row were taken twenty times before they were used";
}

// "127.1" stands for a host name that /etc/hosts maps to a loopback address. The other hosts have another
// address for it.
TEST(TcpStoreLaunch, ALoopbackNameIsReachedFromOtherHosts) {
  const auto all = net::interfaces();
  const auto other = std::ranges::find_if(all, [](const auto& i) { return !i.address.loopback(); });
  if (other == all.end()) GTEST_SKIP() << "loopback is the only interface here";
  const auto listens_at = [](const Store& server, net::SocketAddress address) {
    address.set_port(tcp_store_port(server));
    return static_cast<bool>(net::connect_tcp(address, Deadline::after(std::chrono::seconds(5))));
  };
  const auto reaches = [&](const Store& server) {
    EXPECT_FALSE(listens_at(server, net::resolve({"127.0.0.2", 0}).front())) << "it listens at a wildcard";
    return listens_at(server, other->address);
  };
  const std::string secret(32, 's');
  EXPECT_TRUE(reaches(*tcp_store("127.1:0", {.serve = true, .remote = true, .secret = secret})));
  EXPECT_FALSE(reaches(*tcp_store("127.1:0", {.serve = true})));
  const auto numeric = tcp_store("127.0.0.1:0", {.serve = true, .remote = true, .secret = secret});
  EXPECT_FALSE(reaches(*numeric));
  const Error e = error_of([&] { numeric->get("absent", Deadline::after(milliseconds(0))); });
  EXPECT_NE(std::string(e.what()).find("listens at 127.0.0.1"), std::string::npos) << e.what();
}

TEST(TcpStore, SeveralPortsNeedALaunch) {
  EXPECT_EQ(error_of([] { tcp_store("127.0.0.1:0", {.serve = true, .ports = 2}); }).code(),
            Errc::invalid_argument);
  EXPECT_EQ(
      error_of([] { tcp_store("127.0.0.1:0", {.serve = true, .launch = std::string(2000, 'x')}); }).code(),
      Errc::config);
}

TEST(TcpStore, ReportsTheLocalAddressTowardsTheServer) {
  const auto store = tcp_store("127.0.0.1:0", true);
  EXPECT_EQ(tcp_store_local_address(*prefix_store(store, "x")), "127.0.0.1");
  EXPECT_EQ(tcp_store_local_address(*memory_store()), "");
  EXPECT_EQ(tcp_store_port(*memory_store()), 0);
}

}  // namespace
}  // namespace rz
