// Runs: alone

// Guarantees of TCP alone: the listening address, and rejection of connections from outside the group.

#include <gtest/gtest.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "comm/bootstrap/peer_info.h"
#include "comm/bootstrap/rendezvous.h"
#include "comm/core/error.h"
#include "comm/net/handshake.h"
#include "comm/transport/tcp/control_socket.h"
#include "comm/transport/tcp/data_socket.h"
#include "comm/transport/tcp/tcp_transport.h"
#include "tests/support/error_of.h"
#include "tests/support/fuzz.h"
#include "tests/support/ranks.h"
#include "tests/support/streams.h"

namespace rz {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

Deadline soon() { return Deadline::after(seconds(60)); }

/// A store that runs a function before it publishes this rank's address.
class HookStore final : public Store {
 public:
  HookStore(std::shared_ptr<Store> inner, std::function<void(Store&)> hook)
      : inner_(std::move(inner)), hook_(std::move(hook)) {}
  void set(std::string_view key, std::string_view value) override {
    if (key.rfind("address/", 0) == 0) hook_(*inner_);
    inner_->set(key, value);
  }
  std::string get(std::string_view key, Deadline d) override { return inner_->get(key, d); }
  std::int64_t add(std::string_view key, std::int64_t n) override { return inner_->add(key, n); }

 private:
  std::shared_ptr<Store> inner_;
  std::function<void(Store&)> hook_;
};

std::string tcp_address(const std::string& entry) { return entry.substr(entry.find(' ') + 1); }

TEST(Tcp, UnauthenticatedPeersAreRejected) {
  test::run_ranks(3, [](int rank, std::shared_ptr<Store> store) {
    std::vector<UniqueFd> idle_connections;
    const auto attack = [&](Store& s) {
      if (rank != 2) return;
      const auto address =
          net::resolve(net::parse_host_port(tcp_address(s.get("address/0", soon())))).front();
      struct {
        char magic[8] = {'r', 'i', 'n', 'g', 'z', 'e', 'r', 'o'};
        std::uint8_t version = 3, purpose = 2, index = 0, tls = 0;
        std::uint32_t size = 3, rank = 2, peer = 0;
        std::uint64_t group = 0;  // not this job's
        std::uint8_t nonce[32] = {};
      } hello;
      static_assert(sizeof hello == 64);
      const std::string wrong_job(reinterpret_cast<const char*>(&hello), sizeof hello);
      for (const auto& bytes : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100'000, '\xff'),
                                wrong_job, wrong_job.substr(0, 20), std::string()}) {
        idle_connections.push_back(net::connect_tcp(address, soon()));
        ASSERT_TRUE(idle_connections.back());
        send(idle_connections.back().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      }
      for (int i = 0; i < 100; ++i) idle_connections.push_back(net::connect_tcp(address, soon()));  // a scan
    };
    HookStore hooked(store, attack);
    const auto t = test::connect(rank, 3, hooked, {"tcp"});
    test::exchange_streams(*t, rank, 3, {5, 50'000, 3});
  });
}

/// Acts as rank 1 of 2 up to the handshake; returns its sockets in order of index.
std::vector<net::Connection> play_rank_1(Store& store) {
  const PeerInfo peer_info = exchange_peer_info(1, 2, store, {"tcp", 1}, "", soon());
  const auto entries = store_all_gather(1, 2, store, "address", " ", soon());
  const std::string address = tcp_address(entries[0]);
  std::vector<net::Connection> calls;
  for (int i = 0; i < 3; ++i)
    calls.push_back(
        {0, i, net::start_connect(net::resolve(net::parse_host_port(address)).front()), {}, address});
  auto met = net::handshake({peer_info.job_id, 1, 2, {}}, -1, std::move(calls), {}, 1, soon());
  await_connected(1, 2, store, soon(), [] {});
  std::sort(met.begin(), met.end(), [](auto& a, auto& b) { return a.index < b.index; });
  return met;
}

/// From a non-blocking socket; fewer bytes if it ends first.
std::size_t read_exactly(int socket, std::span<std::byte> into) {
  std::size_t got = 0;
  while (got < into.size()) {
    pollfd p{socket, POLLIN, 0};
    if (poll(&p, 1, 10'000) != 1) break;
    const ssize_t n = recv(socket, into.data() + got, into.size() - got, 0);
    if (n <= 0) break;
    got += static_cast<std::size_t>(n);
  }
  return got;
}

TEST(Tcp, DamagedFramesNameTheirSender) {
  std::mt19937 random(7);
  for (int variant = 0; variant < 8; ++variant) {
    tcp::FrameHeader header;
    header.length = 4;
    std::string bytes;
    if (variant == 0) header.magic ^= 1;
    if (variant == 1) header.length = 0;
    if (variant == 2) header.length = tcp::max_frame_bytes + 1;
    if (variant == 3) header.length = 0xffffffff;
    if (variant == 4) header.offset = 99;
    bytes.assign(reinterpret_cast<const char*>(&header), sizeof header);
    if (variant > 4)
      for (int i = 0; i < 1000; ++i) bytes += static_cast<char>(random());
    if (variant > 4) bytes.erase(0, sizeof header);
    test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
      if (rank == 1) {
        const auto sockets = play_rank_1(*store);
        send(sockets[2].socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
        store->get("seen", soon());
        return;
      }
      const auto t = test::connect(0, 2, *store, {"tcp", "", 1});
      try {
        test::drive(*t, [&] { return !t->peek(1, Channel::collective).bytes.empty(); });
        ADD_FAILURE() << "variant " << variant << " was taken for a frame";
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
        EXPECT_EQ(e.culprit(), 1);
        EXPECT_NE(std::string(e.what()).find("damaged frame"), std::string::npos) << e.what();
      }
      store->set("seen", "");
    });
  }
}

struct Frames {
  std::string bytes;
  std::size_t payload = 0;  ///< of all, if none is damaged
};
/// One to five frames, of which some are too long, bytes are changed, and which may be cut off.
Frames damaged_frames(std::mt19937& random) {
  Frames all;
  std::string& bytes = all.bytes;
  for (auto frames = 1 + random() % 5; frames > 0; --frames) {
    constexpr std::array<std::size_t, 5> sizes{8, 2000, 6000, tcp::max_frame_bytes, 4 * tcp::max_frame_bytes};
    tcp::FrameHeader header;
    header.length = 1 + static_cast<std::uint32_t>(random() % sizes[random() % sizes.size()]);
    header.offset = all.payload;
    bytes.append(reinterpret_cast<const char*>(&header), sizeof header).append(header.length, 'p');
    all.payload += header.length;
    for (auto n = random() % 3; n > 0; --n) {  // mostly of the header
      char& c = bytes[bytes.size() - header.length - (random() % 8 ? random() % 16 + 24 : 0)];
      c = static_cast<char>(random() % 2 ? random() : static_cast<unsigned char>(c) ^ 1u << random() % 8);
    }
  }
  if (random() % 4 == 0) bytes.resize(random() % bytes.size());
  return all;
}

/// The payload of the frames before the first damaged one.
std::size_t payload_of(std::string_view bytes) {
  std::size_t payload = 0;
  for (tcp::FrameHeader h; bytes.size() >= sizeof h;) {
    std::memcpy(&h, bytes.data(), sizeof h);
    if (h.magic != tcp::frame_magic || !h.length || h.length > tcp::max_frame_bytes || h.offset != payload)
      break;
    bytes.remove_prefix(sizeof h);
    const std::size_t here = std::min<std::size_t>(h.length, bytes.size());
    bytes.remove_prefix(here);
    payload += here;
  }
  return payload;
}

/// In pieces of random size, until the other end refuses them.
void send_in_pieces(int socket, const std::string& bytes, std::mt19937 random) {
  for (std::size_t sent = 0; sent < bytes.size();) {
    std::size_t piece = std::min(bytes.size() - sent, random() % 2 ? bytes.size() : 1 + random() % 5000);
    while (piece > 0) {
      pollfd p{socket, POLLOUT, 0};
      if (poll(&p, 1, 20'000) != 1) return;
      const ssize_t n = send(socket, bytes.data() + sent, piece, MSG_NOSIGNAL);
      if (n <= 0) return;
      sent += static_cast<std::size_t>(n), piece -= static_cast<std::size_t>(n);
    }
  }
}

// Damaged frames, then the end of the connection.
TEST(TcpFuzz, AnyFramesAreReadOrNameTheirSender) {
  test::Fuzz fuzz(20);
  long read = 0, damaged = 0;
  while (fuzz.next() && !HasFailure()) {
    const Frames frames = damaged_frames(fuzz.random);
    test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
      if (rank == 1) {
        auto sockets = play_rank_1(*store);
        send_in_pieces(sockets[2].socket.get(), frames.bytes, fuzz.random);
        sockets[2].socket.close();
        store->get("seen", Deadline::after(seconds(60)));
        return;
      }
      const auto t = test::connect(0, 2, *store, {"tcp", "", 1});
      std::size_t got = 0;
      try {
        for (const Deadline until = Deadline::after(seconds(60)); !until.expired();) {
          t->progress(0);
          const std::size_t n = t->peek(1, Channel::collective).bytes.size();
          t->consume(1, Channel::collective, n);
          got += n;
        }
        ADD_FAILURE() << "the end of the connection was not noticed";
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
        EXPECT_EQ(e.culprit(), 1) << e.what();
        damaged += std::string(e.what()).find("damaged frame") != std::string::npos;
      }
      EXPECT_LE(got, payload_of(frames.bytes));
      read += got == frames.payload;
      store->set("seen", "");
    });
  }
  EXPECT_GT(read, 0);
  EXPECT_GT(damaged, 0);
}

// A link with one broken socket is lost, even though the process lives.
TEST(Tcp, ABrokenSocketIsALostPeer) {
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    if (rank == 1) {
      auto sockets = play_rank_1(*store);
      sockets[2].socket.close();
      store->get("seen", soon());
      return;
    }
    const auto t = test::connect(0, 2, *store, {"tcp", "", 1});
    try {
      test::drive(
          *t, [&] { return !t->peek(1, Channel::collective).bytes.empty(); }, 5);
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_EQ(e.culprit(), 1) << e.what();
    }
    store->set("seen", "");
  });
}

TEST(Tcp, ASilentRankIsNamedAtTheDeadline) {
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    const test::ConnectOptions options{"tcp", "", 1};
    if (rank == 1) {  // takes part in the rendezvous, but never connects
      exchange_peer_info(1, 2, *store, options.group(), "", soon());
      store_all_gather(1, 2, *store, "address", " ", soon());
      return;
    }
    try {
      test::connect(0, 2, *store, options, Deadline::after(milliseconds(300)));
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::timeout);
      EXPECT_NE(std::string(e.what()).find("no connection with rank 1"), std::string::npos) << e.what();
    }
  });
}

TEST(Tcp, ListensOnTheChosenInterfaceOnly) {
  EXPECT_TRUE(choose_address("", true, "").loopback());
  EXPECT_TRUE(choose_address("lo", true, "").loopback());
  EXPECT_EQ(choose_address("127.", true, "").host(), "127.0.0.1");
  const auto all = net::interfaces();
  for (const auto& i : all) {
    if (i.address.loopback()) continue;
    EXPECT_FALSE(choose_address("", false, "").loopback());
    EXPECT_EQ(choose_address("", false, i.address.host()).host(), i.address.host()) << "the way to the store";
    EXPECT_EQ(choose_address(i.address.host(), false, "").host(), i.address.host());
  }
  EXPECT_EQ(choose_address("127", true, "").host(), "127.0.0.1");
  EXPECT_THROW(choose_address("12", true, ""), Error) << "an address begins with whole numbers";
  EXPECT_THROW(choose_address("127.0.0.", false, ""), Error) << "loopback between machines";
  try {
    choose_address("eth77", true, "");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_NE(std::string(e.what()).find("lo (127.0.0.1)"), std::string::npos) << e.what();
  }
  EXPECT_THROW(choose_address("lo", false, ""), Error) << "loopback between machines";
  const UniqueFd listener = net::listen_tcp(choose_address("", true, ""));
  EXPECT_EQ(net::local_address(listener.get()).host(), "127.0.0.1");
}

// Unread data grows with arriving data.
TEST(Tcp, ASecondPeekExtendsTheFirst) {
  std::vector<std::byte> bytes(60'000);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7);
  constexpr std::size_t first = 5000;
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    if (rank == 1) {
      const auto sockets = play_rank_1(*store);
      const int data = sockets[2].socket.get();
      tcp::FrameHeader header;
      header.length = static_cast<std::uint32_t>(bytes.size());
      ASSERT_EQ(send(data, &header, sizeof header, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof header));
      ASSERT_EQ(send(data, bytes.data(), first, MSG_NOSIGNAL), static_cast<ssize_t>(first));
      store->get("seen", soon());
      ASSERT_EQ(send(data, bytes.data() + first, bytes.size() - first, MSG_NOSIGNAL),
                static_cast<ssize_t>(bytes.size() - first));
      store->get("seen all", soon());
      return;
    }
    const auto t = test::connect(0, 2, *store, {"tcp", "", 1});
    test::drive(*t, [&] { return t->peek(1, Channel::collective).bytes.size() >= first / 64 * 64; });
    store->set("seen", "");
    test::drive(*t, [&] { return t->peek(1, Channel::collective).bytes.size() > first; });
    std::size_t got = 0;
    test::drive(*t, [&] {
      const auto piece = t->peek(1, Channel::collective).bytes;
      EXPECT_TRUE(std::equal(piece.begin(), piece.end(), bytes.begin() + static_cast<std::ptrdiff_t>(got)));
      t->consume(1, Channel::collective, piece.size());
      got += piece.size();
      return got == bytes.size();
    });
    store->set("seen all", "");
  });
}

// A frame that arrives in two parts is complete only with both.
TEST(Tcp, AReplyMayArriveInFragments) {
  constexpr std::uint64_t question = 0x0123456789abcdef;
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    if (rank == 1) {
      const auto sockets = play_rank_1(*store);
      const int data = sockets[2].socket.get();
      tcp::FrameHeader header;
      header.length = sizeof question;
      std::array<std::byte, sizeof header + sizeof question> frame;
      for (std::uint64_t i = 0; i < 20; ++i) {
        ASSERT_EQ(read_exactly(data, frame), frame.size());
        header.offset = i * sizeof question;
        std::memcpy(frame.data(), &header, sizeof header);
        const std::size_t cut = i * frame.size() / 20;
        send(data, frame.data(), cut, MSG_NOSIGNAL);
        store->set(concat("sent ", i), "");
        store->get(concat("looked ", i), soon());
        send(data, frame.data() + cut, frame.size() - cut, MSG_NOSIGNAL);
      }
      store->get("seen all", soon());
      return;
    }
    const auto t = test::connect(0, 2, *store, {"tcp", "", 1});
    for (std::uint64_t i = 0; i < 20; ++i) {
      std::uint64_t sent = question + i, got = 0;
      test::post_all(*t, 1, Channel::collective, {}, std::as_bytes(std::span(&sent, 1)));
      store->get(concat("sent ", i), soon());
      for (int look = 0; look < 40; ++look) {
        t->progress(0);
        ASSERT_TRUE(t->peek(1, Channel::collective).bytes.empty());
      }
      store->set(concat("looked ", i), "");
      test::receive_all(*t, 1, Channel::collective, std::as_writable_bytes(std::span(&got, 1)));
      EXPECT_EQ(got, sent);
    }
    store->set("seen all", "");
  });
}

TEST(Tcp, RepliesDoNotHideAFailure) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    std::uint64_t bytes = 5;
    if (rank == 1) {
      const auto sockets = play_rank_1(*store);
      tcp::ControlFrame failure;
      failure.kind = tcp::ControlFrame::failure;
      failure.culprit = 1;
      failure.code = static_cast<std::uint32_t>(Errc::aborted);
      send(sockets[0].socket.get(), &failure, sizeof failure, MSG_NOSIGNAL);
      store->set("query_sent", "");
      std::array<std::byte, sizeof(tcp::FrameHeader) + sizeof bytes> frame;
      const int data = sockets[2].socket.get();
      while (read_exactly(data, frame) == frame.size()) send(data, frame.data(), frame.size(), MSG_NOSIGNAL);
      return;
    }
    const auto t = test::connect(0, 2, *store, {"tcp", "", 1});
    store->get("query_sent", soon());
    const auto call = [&] {
      for (int i = 0; i < 1000; ++i) {
        test::post_all(*t, 1, Channel::collective, {}, std::as_bytes(std::span(&bytes, 1)));
        test::receive_all(*t, 1, Channel::collective, std::as_writable_bytes(std::span(&bytes, 1)));
      }
    };
    EXPECT_EQ(test::error_of(call).code(), Errc::aborted);
  });
}

TEST(Tcp, ARankThatExitsWithoutReplyingIsLost) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    std::uint64_t bytes = 5;
    if (rank == 1) {
      const auto sockets = play_rank_1(*store);
      std::array<std::byte, sizeof(tcp::FrameHeader) + sizeof bytes> frame;
      EXPECT_EQ(read_exactly(sockets[2].socket.get(), frame), frame.size());
      return;
    }
    const auto t = test::connect(0, 2, *store, {"tcp", "", 1});
    const auto call = [&] {
      test::post_all(*t, 1, Channel::collective, {}, std::as_bytes(std::span(&bytes, 1)));
      test::receive_all(*t, 1, Channel::collective, std::as_writable_bytes(std::span(&bytes, 1)));
    };
    EXPECT_EQ(test::error_of(call).code(), Errc::peer_lost);
  });
}

std::string congestion_of_system() {
  const net::SocketAddress here = choose_address("", true, "");
  const UniqueFd fresh(socket(here.storage.ss_family, SOCK_STREAM, 0));
  return net::congestion_control(fresh.get());
}

/// Another congestion control that the host permits; empty: none.
std::string another_congestion_control() {
  std::ifstream in("/proc/sys/net/ipv4/tcp_allowed_congestion_control");
  for (std::string name; in >> name;)
    if (name != congestion_of_system()) return name;
  return {};
}

/// Of every connected TCP socket of this process.
std::set<std::string> congestion_of_connections() {
  std::set<std::string> found;
  for (int fd = 0; fd < 1024; ++fd) {
    net::SocketAddress peer;
    peer.size = sizeof peer.storage;
    if (getpeername(fd, peer.get(), &peer.size) != 0) continue;
    if (const std::string name = net::congestion_control(fd); !name.empty()) found.insert(name);
  }
  return found;
}

/// The congestion control of the group's sockets while it is connected, both ends of every link.
std::set<std::string> congestion_of_group(const test::ConnectOptions& options) {
  std::set<std::string> found;
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    const auto t = test::connect(rank, 2, *store, options);
    test::exchange_streams(*t, rank, 2, {5, 50'000, 8});
    if (rank == 0) found = congestion_of_connections();
    test::sync_all(*t, rank, 2);
  });
  return found;
}

TEST(Tcp, CongestionControlIsTheSystemsByDefault) {
  ASSERT_FALSE(congestion_of_system().empty());
  EXPECT_EQ(congestion_of_group({"tcp", "", 2}), std::set{congestion_of_system()});
}

TEST(Tcp, CongestionControlIsTheOneThatIsAskedFor) {
  const std::string other = another_congestion_control();
  if (other.empty()) GTEST_SKIP() << "this host permits one congestion control only";
  test::ConnectOptions options{"tcp", "", 2};
  options.congestion = other;
  EXPECT_EQ(congestion_of_group(options), std::set{other});
}

TEST(Tcp, AnUnknownCongestionControlIsAnError) {
  for (const std::string name : {"pigeon", "auto", ""})
    test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
      test::ConnectOptions options{"tcp", "", 2};
      options.congestion = name;
      const Error e = test::error_of([&] { test::connect(rank, 2, *store, options); });
      EXPECT_EQ(e.code(), Errc::config);
      const std::string message = e.what();
      EXPECT_NE(message.find(concat("RZ_CONGESTION='", name, "'")), std::string::npos) << message;
      EXPECT_NE(message.find("'system'"), std::string::npos) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    });
}

// Containers of one kernel share its processors, but not each other's quotas.
TEST(PeerInfo, RanksOfOneKernelOversubscribeEachOther) {
  const auto peer_info = [](std::vector<std::string> machines, int quota) {
    PeerInfo r;
    r.machines = std::move(machines);
    r.cpu_limits.assign(r.machines.size(), CpuLimits{{0, 1}, quota});
    return r;
  };
  EXPECT_FALSE(peer_info({"k/a/1", "k/b/2"}, 0).oversubscribed(0));
  EXPECT_FALSE(peer_info({"k/a/1", "k/b/2"}, 1).oversubscribed(0));
  EXPECT_TRUE(peer_info({"k/a/1", "k/a/1"}, 1).oversubscribed(0));
  EXPECT_TRUE(peer_info({"k/a/1", "k/b/2", "k/c/3"}, 0).oversubscribed(1));
  EXPECT_FALSE(peer_info({"k/a/1", "l/b/2", "m/c/3"}, 0).oversubscribed(1));
  EXPECT_TRUE(peer_info({"k/a/1", "k/a/1", "k/a/1", "l/b/2"}, 0).oversubscribed(0));
  EXPECT_FALSE(peer_info({"k/a/1", "k/a/1", "k/a/1", "l/b/2"}, 0).oversubscribed(3));
}

TEST(Tcp, RunsOverIpv6) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    const auto t = test::connect(rank, 2, *store, {"tcp", "::1"});
    test::exchange_streams(*t, rank, 2, {5, 50'000, 4});
  });
}

TEST(Tcp, TooFewDescriptorsAreReportedEarly) {
  test::expect_processes(2, [](int rank, std::shared_ptr<Store> store) {
    const rlimit limit{32, 32};
    setrlimit(RLIMIT_NOFILE, &limit);
    try {
      test::connect(rank, 2, *store, {"tcp", "", 16});
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::system);
      EXPECT_NE(std::string(e.what()).find("ulimit"), std::string::npos) << e.what();
      return;
    }
    ADD_FAILURE() << "18 sockets within 32 files";
  });
}

TEST(Tcp, TheSoftLimitOfOpenFilesIsRaised) {
  test::expect_processes(2, [](int rank, std::shared_ptr<Store> store) {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = 32;
    setrlimit(RLIMIT_NOFILE, &limit);
    const auto t = test::connect(rank, 2, *store, {"tcp", "", 16});
    test::exchange_streams(*t, rank, 2, {5, 50'000, 3});
  });
}

TEST(Tcp, TheSoftLimitIsRaisedForSharedMemoryToo) {
  test::expect_processes(2, [](int rank, std::shared_ptr<Store> store) {
    const int next = UniqueFd(dup(0)).get();
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = static_cast<rlim_t>(next) + 4;
    setrlimit(RLIMIT_NOFILE, &limit);
    const auto t = test::connect(rank, 2, *store, {"shm"});
    test::exchange_streams(*t, rank, 2, {5, 50'000, 3});
  });
}

TEST(Tcp, IdleConnectionsDoNotExhaustDescriptors) {
  test::expect_processes(2, [](int rank, std::shared_ptr<Store> store) {
    std::vector<UniqueFd> idle_connections;
    const auto attack = [&](Store& s) {
      if (rank == 0) {  // its listener is open, its peers' sockets are not
        const int next = UniqueFd(dup(0)).get();
        const rlimit limit{static_cast<rlim_t>(next) + 40, static_cast<rlim_t>(next) + 40};
        setrlimit(RLIMIT_NOFILE, &limit);
        return;
      }
      const auto address =
          net::resolve(net::parse_host_port(tcp_address(s.get("address/0", soon())))).front();
      for (int i = 0; i < 60; ++i) idle_connections.push_back(net::connect_tcp(address, soon()));
    };
    HookStore hooked(store, attack);
    const auto t = test::connect(rank, 2, hooked, {"tcp"});
    test::exchange_streams(*t, rank, 2, {5, 50'000, 3});
  });
}

// Where the peer reads little, the kernel accepts a part of a frame; no other frame may follow that part.
TEST(Tcp, ControlFramesStayWhole) {
  constexpr int rounds = 60;
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    if (rank == 1) {
      const auto sockets = play_rank_1(*store);
      std::vector<std::byte> bytes;
      for (std::size_t k = 0; k < rounds; ++k) {
        store->get(concat("full ", k), soon());
        bytes.resize(bytes.size() + 3000 + k * 777);
        const auto last = std::span(bytes).last(3000 + k * 777);
        ASSERT_EQ(read_exactly(sockets[0].socket.get(), last), last.size());
        store->set(concat("read ", k), "");
      }
      tcp::ControlFrame frame;
      for (std::size_t at = 0;; at += sizeof frame) {
        if (at + sizeof frame > bytes.size()) {
          const std::size_t had = bytes.size();
          bytes.resize(at + sizeof frame);
          ASSERT_EQ(read_exactly(sockets[0].socket.get(), std::span(bytes).subspan(had)), bytes.size() - had);
        }
        std::memcpy(&frame, bytes.data() + at, sizeof frame);
        ASSERT_EQ(frame.magic, tcp::control_magic) << "byte " << at;
        if (frame.kind == tcp::ControlFrame::failure) break;
      }
      EXPECT_STREQ(frame.reason, "the end");
      store->set("checked", "");
      return;
    }
    const auto t = test::connect(0, 2, *store, {"tcp", "", 1});
    for (int k = 0; k < rounds; ++k) {
      for (int i = 0; i < (k ? 300 : 20'000); ++i) t->query_waits();  // more than the kernel accepts
      store->set(concat("full ", k), "");
      store->get(concat("read ", k), soon());
    }
    t->abort({0, Errc::aborted, "the end"});
    for (const Deadline end = soon(); !end.expired();) {
      EXPECT_THROW(t->progress(0), Error);  // sends the postponed bytes
      try {
        store->get("checked", Deadline::after({}));
        return;
      } catch (const Error&) {
      }
    }
    ADD_FAILURE() << "the failure did not reach rank 1";
  });
}

void set_loopback(bool up) {
  const UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  std::strcpy(request.ifr_name, "lo");
  request.ifr_flags = up ? IFF_UP | IFF_LOOPBACK | IFF_RUNNING : IFF_LOOPBACK;
  if (ioctl(socket.get(), SIOCSIFFLAGS, &request) != 0) fail_errno("ioctl(SIOCSIFFLAGS)");
}

/// A network namespace with nothing but loopback; false if this user may not create one.
bool enter_network() {
  if (unshare(CLONE_NEWNET) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return false;
  set_loopback(true);
  return true;
}

// Every socket has data in flight, so keep-alive does not probe.
TEST(Tcp, AVanishedHostIsLostWithDataUnacknowledged) {
  const auto endings = test::run_processes(1, [](int, std::shared_ptr<Store>) {
    if (!enter_network()) _exit(77);
    test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
      const auto t = test::connect(rank, 2, *store, {"tcp", "", 1});
      store->add("connected", 1);
      while (store->add("connected", 0) < 2) std::this_thread::sleep_for(milliseconds(1));
      if (rank == 0) set_loopback(false), store->set("down", "");
      store->get("down", soon());
      t->query_waits();
      std::byte b{};
      for (const Channel lane : {Channel::collective, Channel::point_to_point})
        test::post_all(*t, 1 - rank, lane, {}, {&b, 1});
      try {
        test::drive(
            *t, [] { return false; }, 30);
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
        return;
      }
      ADD_FAILURE() << "rank " << rank << " waits for a host that is not there";
    });
  });
  if (endings[0].exit_code == 77) GTEST_SKIP() << "this user may not make a network namespace";
  EXPECT_EQ(endings[0].exit_code, 0) << endings[0].error;
}

// A socket that connects to a port of its own ephemeral range may get that very port and connect to itself.
TEST(Address, ARankRefusesToConnectToItself) {
  int low = 0;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> low;
  ASSERT_GT(low, 0);
  net::SocketAddress address = net::resolve({"127.0.0.1", 0}).front();
  for (int port = low;; port += 2) {  // the kernel uses ports of this parity for outgoing connections first
    address.set_port(port);
    const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (bind(socket.get(), address.get(), address.size) == 0) break;
  }
  for (int i = 0; i < 30'000; ++i) {
    const UniqueFd socket = net::connect_tcp(address, soon());
    ASSERT_FALSE(socket) << "after " << i << " tries " << net::local_address(socket.get()).text()
                         << " is connected, and no process listens there";
  }
}

TEST(Address, ParsesAndJoins) {
  EXPECT_EQ(net::parse_host_port("host:1").host, "host");
  EXPECT_EQ(net::parse_host_port("[::1]:29500").host, "::1");
  EXPECT_EQ(net::parse_host_port("[::1]:29500").port, 29500);
  EXPECT_EQ(net::join_host_port("fe80::1%eth0", 5), "[fe80::1%eth0]:5");
  EXPECT_EQ(net::resolve({"::1", 80}).front().text(), "[::1]:80");
  for (const char* bad : {"", "host", "host:", ":5", "::1:5", "host:-1", "host:65536", "host:5x"})
    EXPECT_THROW(net::parse_host_port(bad), Error) << bad;
}

}  // namespace
}  // namespace rz
