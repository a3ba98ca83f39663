// Whose process has the other end of a connection within this host: of every family and address, of another
// user, closed, and where the kernel answers no question and its list has to be read.

#include "comm/net/peer_user.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <cstddef>
#include <string>

#include "comm/core/error.h"
#include "comm/net/socket.h"
#include "tests/support/forked.h"

namespace rz::net {
namespace {

/// The two ends of a connection of this process.
struct Pair {
  UniqueFd caller, callee;
};

SocketAddress at(const char* host, int port = 0) { return resolve({host, port}).front(); }

Pair connected(const char* listens_at, const char* calls, const char* from = nullptr) {
  const UniqueFd listener = listen_tcp(at(listens_at));
  const SocketAddress to = at(calls, local_address(listener.get()).port());
  Pair pair{UniqueFd(socket(to.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0)), {}};
  const SocketAddress source = at(from ? from : calls);
  require((!from || bind(pair.caller.get(), source.get(), source.size) == 0) &&
              connect(pair.caller.get(), to.get(), to.size) == 0,
          Errc::system, "connect to ", to.text());
  pollfd p{listener.get(), POLLIN, 0};
  require(poll(&p, 1, 20'000) == 1, Errc::timeout, "nobody connects");
  pair.callee = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  require(static_cast<bool>(pair.callee), Errc::system, "accept4");
  return pair;
}

bool has_ipv6() {
  const UniqueFd s(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const SocketAddress loopback = at("::1");
  return s && bind(s.get(), loopback.get(), loopback.size) == 0;
}

/// Listener, called address and address of the caller.
struct Route {
  const char *listens_at, *calls, *from;
};
constexpr Route routes[] = {{"127.0.0.1", "127.0.0.1", nullptr},
                            {"127.0.0.1", "127.0.0.1", "127.0.0.2"},
                            {"::1", "::1", nullptr},
                            {"::ffff:127.0.0.1", "127.0.0.1", nullptr},
                            {"127.0.0.1", "::ffff:127.0.0.1", nullptr}};

/// Whether both ends of all connections are found to be this user's while they are open.
bool own_ends_are_found() {
  bool all = true;
  for (const Route& route : routes) {
    if (route.listens_at[0] == ':' && !has_ipv6()) continue;
    Pair pair = connected(route.listens_at, route.calls, route.from);
    const std::string name = concat(route.listens_at, " called as ", route.calls);
    const auto check = [&](bool right, const char* what) {
      EXPECT_TRUE(right) << name << ": " << what;
      all = all && right;
    };
    check(is_of_this_host(pair.caller.get()) && is_of_this_host(pair.callee.get()), "host");
    check(is_of_this_user(pair.caller.get()), "caller");
    check(is_of_this_user(pair.callee.get()), "callee");
    pair.caller.close();
    check(!is_of_this_user(pair.callee.get()), "closed");
  }
  return all;
}

TEST(PeerUser, OpenEndsOfThisProcessAreOfThisUser) { EXPECT_TRUE(own_ends_are_found()); }

/// Refuses sockets of netlink to this process, as sandboxes do.
bool refuse_netlink() {
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_socket, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[0])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_NETLINK, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAFNOSUPPORT),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(rules), rules};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0 && socket(AF_NETLINK, SOCK_RAW, 0) < 0;
}

TEST(PeerUser, WithoutNetlinkTheListOfConnectionsIsRead) {
  EXPECT_EQ(test::in_forked_child([] { return refuse_netlink() && own_ends_are_found(); }), 0);
}

TEST(PeerUser, AnEndThatHasSentAndLeftIsOfNobody) {
  for (const bool resets : {false, true}) {
    Pair pair = connected("127.0.0.1", "127.0.0.1");
    ASSERT_EQ(send(pair.caller.get(), "proof", 5, MSG_NOSIGNAL), 5);
    const linger at_once{1, 0};
    if (resets) setsockopt(pair.caller.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    pair.caller.close();
    EXPECT_FALSE(is_of_this_user(pair.callee.get())) << resets;
    EXPECT_TRUE(is_of_this_host(pair.callee.get())) << resets;
  }
}

TEST(PeerUser, AnotherUserIsNoneOfTheFamily) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  const UniqueFd listener = listen_tcp(at("127.0.0.1"));
  const SocketAddress to = local_address(listener.get());
  for (const bool with_netlink : {true, false}) {
    test::Gate done;
    const pid_t child = fork();
    if (child == 0) {
      if (setgid(65534) != 0 || setuid(65534) != 0) _exit(100);
      const UniqueFd caller = connect_tcp(to, Deadline::after(std::chrono::seconds(20)));
      done.wait();
      _exit(is_of_this_user(caller.get()) ? 1 : 0);
    }
    pollfd p{listener.get(), POLLIN, 0};
    ASSERT_EQ(poll(&p, 1, 20'000), 1);
    const UniqueFd callee(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const auto is_stranger = [&] { return !is_of_this_user(callee.get()) && is_of_this_host(callee.get()); };
    EXPECT_EQ(test::in_forked_child([&] { return (with_netlink || refuse_netlink()) && is_stranger(); }), 0);
    done.open();
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0) << "the other user takes root for itself";
  }
}

TEST(PeerUser, AnotherNetworkNamespaceTellsNothing) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to make a namespace";
  const Pair pair = connected("127.0.0.1", "127.0.0.1");
  const int ended = test::in_forked_child([&] {
    return unshare(CLONE_NEWNET) != 0 ||
           (!is_of_this_user(pair.caller.get()) && !is_of_this_user(pair.callee.get()));
  });
  EXPECT_EQ(ended, 0);
}

TEST(PeerUser, AddressesOfInterfacesAreOfThisHost) {
  for (const Interface& i : interfaces())
    if (!i.address.loopback() && i.address.host().find('%') == std::string::npos) {
      const std::string host = i.address.host();
      const Pair pair = connected(host.c_str(), host.c_str());
      EXPECT_TRUE(is_of_this_host(pair.callee.get()) && is_of_this_user(pair.callee.get())) << host;
    }
}

}  // namespace
}  // namespace rz::net
