// Runs: ci

#include "comm/net/door.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <thread>
#include <vector>

#include "tests/support/forked.h"
#include "tests/support/strangers.h"

namespace rz::net {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t group = 7;

Deadline soon() { return Deadline::after(30s); }

/// A door and a listener at it. Nothing happens there until the test calls advance().
struct Place {
  Secret secret = Secret::random();
  AuthenticationKey key{&secret, Purpose::data, "a door"};
  UniqueFd listener = listen_tcp(resolve({"127.0.0.1", 0}).front());
  SocketAddress at = local_address(listener.get());
  Door door;

  explicit Place(std::size_t members = 0, std::chrono::milliseconds time_to_prove = 1h,
                 std::optional<Deadline> members_until = {})
      : door({.key = key,
              .group = group,
              .members = members,
              .time_to_prove = time_to_prove,
              .members_until = members_until}) {
    door.add(listener.get());
  }

  UniqueFd call(const std::string& bytes = {}) const {
    UniqueFd socket = connect_tcp(at, soon());
    EXPECT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), std::ssize(bytes));
    return socket;
  }
  std::vector<UniqueFd> calls(std::size_t number, const std::string& bytes = {}) const {
    std::vector<UniqueFd> all;
    while (all.size() < number) all.push_back(call(bytes));
    return all;
  }
  std::list<Door::Arrival> advance() { return door.advance(AcceptRate::while_starting); }
  std::list<Door::Arrival> advance_until_some_come() {
    for (const auto end = soon(); !end.expired(); wait_for_door(door.poll_ms(1000)))
      if (auto proven = advance(); !proven.empty()) return proven;
    return {};
  }
  /// Whether there is something to do at the door before the time is over.
  bool wait_for_door(int ms) const {
    pollfd p{door.descriptor(), POLLIN, 0};
    return ::poll(&p, 1, ms) == 1;
  }
};

struct Member {
  UniqueFd socket;
  Authentication end;

  explicit Member(const Place& place)
      : socket(place.call()), end(Authentication::client(place.key, {.rank = 3, .group = group})) {
    end.advance(socket.get());  // sends the hello
  }
  /// Reads the reply, and sends the proof.
  void prove() { end.complete(socket.get(), soon()); }
};

std::size_t open_ones(const std::vector<UniqueFd>& sockets) {
  return static_cast<std::size_t>(
      std::ranges::count_if(sockets, [](auto& s) { return !test::ManyHosts::has_ended(s.get()); }));
}

TEST(Door, LetsInWhoProvesAndCountsTheOthers) {
  Place place;
  Member member(place);
  const UniqueFd scan =
      place.call("GET / HTTP/1.1\r\n\r\nxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx");
  EXPECT_TRUE(place.wait_for_door(20'000));
  EXPECT_TRUE(place.advance().empty());
  member.prove();
  const auto proven = place.advance_until_some_come();
  ASSERT_EQ(proven.size(), 1u);
  EXPECT_EQ(proven.front().authentication.claim().rank, 3u);
  EXPECT_EQ(place.door.strangers().refused(), 1u);
  EXPECT_EQ(place.door.unproven(), 0u);
  EXPECT_FALSE(place.wait_for_door(0)) << "what has been let in is no business of the door";
}

TEST(Door, WhatHasArrivedCountsAlthoughItsTimeIsOver) {
  Place place(0, 100ms);
  Member member(place);
  const UniqueFd silent = place.call();
  EXPECT_TRUE(place.advance().empty());
  member.prove();
  std::this_thread::sleep_for(200ms);
  EXPECT_EQ(place.advance().size(), 1u);
  EXPECT_EQ(place.door.strangers().refused(), 1u) << "the silent one has had its time";
}

TEST(Door, AMemberMayTakeLongerThanAStranger) {
  Place place(0, 0ms, soon());
  Member member(place);
  const UniqueFd other = place.call(test::plausible_hello(Purpose::data, group + 1));
  ASSERT_TRUE(place.wait_for_door(20'000));
  for (const auto end = soon(); place.door.strangers().refused() == 0 && !end.expired();) place.advance();
  std::this_thread::sleep_for(20ms);
  place.advance();
  EXPECT_EQ(place.door.unproven(), 1u) << "it has named the group";
  member.prove();
  EXPECT_EQ(place.advance_until_some_come().size(), 1u);
}

TEST(Door, KeepsFewConnectionsWithoutAProof) {
  Place place(2);
  const auto held = place.calls(3 * Door::max_unproven);
  for (const auto end = soon();
       place.door.strangers().refused() < 2 * Door::max_unproven - 2 && !end.expired();)
    place.advance();
  EXPECT_EQ(place.door.unproven(), Door::max_unproven + 2);
  EXPECT_EQ(open_ones(held), Door::max_unproven + 2);
}

// A hello for another group is that of a stranger.
TEST(Door, StrangersWithAHelloDoNotDisplaceMembersWithOne) {
  Place place;
  const auto members = place.calls(10, test::plausible_hello(Purpose::data, group));
  for (const auto end = soon(); place.door.unproven() < 10 && !end.expired();) place.advance();
  const auto strangers = place.calls(100, test::plausible_hello(Purpose::data, group + 1));
  for (const auto end = soon(); place.door.strangers().refused() < 46 && !end.expired();) place.advance();
  EXPECT_EQ(open_ones(members), 10u);
  EXPECT_EQ(open_ones(strangers), Door::max_unproven - 10);
}

/// All descriptors that this process may have.
std::vector<UniqueFd> all_descriptors() {
  std::vector<UniqueFd> all;
  while (all.empty() || all.back()) all.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  return all;
}

TEST(Door, WithoutADescriptorItDropsAStranger) {
  Place place;
  const auto stranger = place.call();
  EXPECT_TRUE(place.advance().empty());
  EXPECT_EQ(place.door.unproven(), 1u);
  Member member(place);
  EXPECT_EQ(test::in_forked_child([&] {
              const auto taken = all_descriptors();
              place.advance();
              return place.door.unproven() == 1 && place.door.strangers().refused() == 1 &&
                     place.door.text().find("no connection can be accepted") == std::string::npos;
            }),
            0);
}

TEST(Door, WithoutADescriptorItRestsAndSaysWhy) {
  Place place;
  Member member(place);
  EXPECT_EQ(test::in_forked_child([&] {
              auto taken = all_descriptors();
              place.advance();
              if (place.door.text() !=
                  "; no connection can be accepted: Too many open files (ulimit -n raises the "
                  "limit)")
                return false;
              if (place.wait_for_door(0) || place.door.poll_ms(1000) > 100) return false;  // no busy loop
              taken.clear();
              while (place.door.unproven() == 0)
                place.wait_for_door(place.door.poll_ms(1000)), place.advance();
              member.prove();
              return place.advance_until_some_come().size() == 1 && place.door.text().empty();
            }),
            0);
}

}  // namespace
}  // namespace rz::net
