// Needs: rz_hosts

// Hostfiles, filters and node lists.

#include "tools/rzrun/hosts/hosts.h"

#include <gtest/gtest.h>

#include "comm/core/error.h"
#include "tests/support/error_of.h"
#include "tests/support/fuzz.h"

namespace rz::hosts {
namespace {

template <class F>
std::string refusal(const F& f) {
  return test::refusal(f, Errc::config);
}

std::string of_hostfile(std::string_view text) {
  return refusal([&] { parse_hostfile(text, "hosts"); });
}

std::vector<Host> three() { return parse_hostfile("a slots=2\nb slots=4\nc slots=4\n", "hosts"); }

/// "a:0,1 b:3"
std::string text_of(const std::vector<Host>& all) {
  std::string text;
  for (const Host& h : all) {
    text += (text.empty() ? "" : " ") + h.name + ":";
    for (std::size_t i = 0; i < h.slots.size(); ++i) text += concat(i ? "," : "", h.slots[i]);
  }
  return text;
}

TEST(Hostfile, LinesOfDeepSpeedAndOpenMpi) {
  const auto all = parse_hostfile(
      "# two workers\n\nworker-1 slots=4\r\n  worker-2\tslots=2 max_slots=8 # spare\n10.0.0.3 max-slots=1 "
      "slots=1",
      "f");
  EXPECT_EQ(text_of(parse_hostfile("\xEF\xBB\xBF"
                                   "a slots=1\r\n",
                                   "f")),
            "a:0")
      << "a byte order mark";
  EXPECT_EQ(text_of(all), "worker-1:0,1,2,3 worker-2:0,1 10.0.0.3:0");
  EXPECT_FALSE(all[0].filtered);
}

TEST(Hostfile, ErrorsNameFileLineAndWord) {
  EXPECT_EQ(of_hostfile("a slots=1\n# b\na slots=2"),
            "hosts:3: host 'a' is in line 1 too; a host has one line");
  EXPECT_EQ(of_hostfile("a slots=1\nb"),
            "hosts:2: 'b' has no slots; write 'b slots=N', where N is its number of ranks");
  EXPECT_EQ(of_hostfile("a slot=1"), "hosts:1: 'slot=1' is not understood; a line is 'NAME slots=N'");
  EXPECT_EQ(of_hostfile("a slots=1 slots=2"),
            "hosts:1: 'slots=2' is not understood; a line is 'NAME slots=N'");
  EXPECT_EQ(of_hostfile("a slots = 4"), "hosts:1: 'slots' is not understood; a line is 'NAME slots=N'");
  EXPECT_EQ(of_hostfile("a max_slots=4"), "hosts:1: 'a' has no slots=N");
  for (const char* n : {"0", "-1", "x", "", "4x", "4097", "99999999999999999999"})
    EXPECT_EQ(of_hostfile(concat("a slots=", n)),
              concat("hosts:1: 'slots=", n, "' must have a number from 1 to 4096"));
  EXPECT_EQ(of_hostfile("a slots=4 max_slots=2"), "hosts:1: slots=4 exceeds max_slots=2");
  EXPECT_EQ(of_hostfile("a:4"), "hosts:1: 'a:4' is MPICH's way; write 'a slots=4'");
  EXPECT_EQ(
      of_hostfile("a:22 slots=4"),
      "hosts:1: 'a:22' has a port; write 'a', and set the port by --ssh_port 22 or Port in ~/.ssh/config");
  EXPECT_EQ(
      of_hostfile("fe80::1 slots=4"),
      "hosts:1: 'fe80::1' is an IPv6 address; write a name of that host, as of /etc/hosts or ~/.ssh/config");
  EXPECT_EQ(refusal([] { read_hostfile("/"); }), "hostfile /: Is a directory");
  EXPECT_EQ(of_hostfile("me@a slots=4"),
            "hosts:1: 'me@a' has a user; write the host alone, and set User in ~/.ssh/config");
  EXPECT_EQ(of_hostfile("-oProxyCommand=x slots=4"),
            "hosts:1: '-oProxyCommand=x' is no host: a name does not begin with '-'");
  EXPECT_EQ(of_hostfile("a;b slots=4"),
            "hosts:1: 'a;b' is no host: a name has alphanumeric characters, '.', '-' and '_' only");
  for (const char* empty : {"", "\n\n", "# a slots=3\n"})
    EXPECT_EQ(of_hostfile(empty), "hosts: no host in it; a line is 'NAME slots=N'");
  EXPECT_EQ(refusal([] { read_hostfile("/tmp"); }), "hostfile /tmp: Is a directory");
  EXPECT_EQ(refusal([] { read_hostfile("/nowhere/hosts"); }),
            "hostfile /nowhere/hosts: No such file or directory");
}

TEST(Filters, TheOrderIsThatOfTheHostfile) {
  EXPECT_EQ(text_of(include(three(), "c@a:1,0,1")), "a:0,1 c:0,1,2,3");
  EXPECT_EQ(text_of(include(three(), "b:3@b:1")), "b:1,3");
  EXPECT_TRUE(include(three(), "b:3")[0].filtered);
  EXPECT_FALSE(include(three(), "b")[0].filtered);
  EXPECT_EQ(text_of(exclude(three(), "a@b:0,2")), "b:1,3 c:0,1,2,3");
  EXPECT_EQ(text_of(exclude(three(), "a:0,1")), "b:0,1,2,3 c:0,1,2,3");
  EXPECT_FALSE(exclude(three(), "a")[0].filtered);
}

TEST(Filters, ErrorsNameTheWord) {
  const auto in = [](std::string_view f) { return refusal([&] { include(three(), f); }); };
  EXPECT_EQ(in("d:0"), "--include: host 'd' is not known; there are: a, b, c");
  EXPECT_EQ(in("a:2"), "--include: host 'a' has no slot 2; it has 0 to 1");
  EXPECT_EQ(in("a:x"), "--include: 'x' in 'a:x' is no number of a slot");
  EXPECT_EQ(in("a:0,"), "--include: '' in 'a:0,' is no number of a slot");
  EXPECT_EQ(in("a:-1"), "--include: '-1' in 'a:-1' is no number of a slot");
  EXPECT_EQ(in("a:0:1"), "--include: 'a:0:1' has two colons; write NAME:SLOT,SLOT…, and '@' between hosts");
  EXPECT_EQ(in("a@"), "--include: a host is missing beside '@'; write NAME[:SLOT,SLOT…]@NAME…");
  EXPECT_EQ(in(""), "--include is empty; write NAME[:SLOT,SLOT…][@NAME…]");
  EXPECT_EQ(refusal([] { exclude(three(), "a@b@c"); }), "--exclude 'a@b@c' leaves no host");
  EXPECT_EQ(refusal([] { exclude(include(three(), "b:1,3"), "b:0"); }),
            "--exclude: host 'b' has no slot 0; it has 2 slots");
}

TEST(Filters, NumbersOfNodesAndSlots) {
  EXPECT_EQ(text_of(first_slots(first_nodes(three(), 2), 1)), "a:0 b:0");
  EXPECT_EQ(refusal([] { first_nodes(three(), 4); }), "--num_nodes 4: there are 3 hosts");
  EXPECT_EQ(refusal([] { first_slots(three(), 3); }), "--num_gpus 3: host 'a' has 2 slots");
}

TEST(MasterAddress, IsInANetworkOfTheOthers) {
  const std::vector<std::string> a{"192.168.7.1/24", "172.17.0.1/16", "10.1.0.1/16"},
      b{"172.17.0.1/16", "10.1.0.2/16"};
  EXPECT_EQ(master_address({a, b}), "10.1.0.1");
  EXPECT_EQ(master_address({a, {"10.2.0.2/16"}}), "192.168.7.1") << "none is shared: the first";
  EXPECT_EQ(master_address({a, {"192.168.7.2/24"}, b, b}), "10.1.0.1") << "the larger number of hosts";
  EXPECT_EQ(master_address({{}, b}), "");
  EXPECT_EQ(master_address({{"nonsense", "1.2.3.4/99", "/", "10.0.0.1/8"}}), "10.0.0.1");
}

TEST(MasterAddress, MayBeOfIPv6) {
  EXPECT_EQ(master_address({{"fd00::1/64"}, {"fd00::2/64"}}), "fd00::1");
  const std::vector<std::string> a{"fd00:7::1/64", "fd00:8::1/60", "fd00:9::1/64"};
  EXPECT_EQ(master_address({a, {"fd00:9::2/64"}}), "fd00:9::1");
  EXPECT_EQ(master_address({a, {"fd00:8:0:f::2/60", "fd00:9::2/63"}}), "fd00:8::1") << "part of a byte";
  EXPECT_EQ(master_address({a, {"fd00:8:0:1f::2/60"}}), "fd00:7::1") << "none is shared: the first";
  EXPECT_EQ(master_address({{"fd00::1/64", "10.0.0.1/8"}, {"fd00::2/64", "10.0.0.2/8"}}), "10.0.0.1");
  EXPECT_EQ(master_address({{"10.0.0.1/8", "fd00::1/64"}, {"fd00::2/64"}}), "fd00::1");
  EXPECT_EQ(master_address({{"fd00::1/129", "fd00::1/-1", "fd00::1", "::g/64"}}), "");
}

std::string nodes(std::string_view list) {
  std::string text;
  for (const auto& n : parse_slurm_nodes(list, "LIST")) text += (text.empty() ? "" : " ") + n;
  return text;
}

std::string no_nodes(std::string_view list) {
  return refusal([&] { parse_slurm_nodes(list, "LIST"); });
}

TEST(SlurmNodes, RangesAreExpanded) {
  EXPECT_EQ(nodes("node[1-3,7],x"), "node1 node2 node3 node7 x");
  EXPECT_EQ(nodes("n[08-11]"), "n08 n09 n10 n11");
  EXPECT_EQ(nodes("r[1-2]n[1,3]-ib"), "r1n1-ib r1n3-ib r2n1-ib r2n3-ib");
  EXPECT_EQ(nodes("one"), "one");
}

TEST(SlurmNodes, ErrorsNameTheEntry) {
  EXPECT_EQ(no_nodes(""), "LIST is empty; it must name a node");
  EXPECT_EQ(no_nodes("a[1-2"), "LIST: 'a[1-2': a bracket has no other one");
  EXPECT_EQ(no_nodes("a]1"), "LIST: 'a]1': a bracket has no other one");
  EXPECT_EQ(no_nodes("x,a[1-x]"), "LIST: 'a[1-x]': '1-x' is no number and no range");
  EXPECT_EQ(no_nodes("a[]"), "LIST: 'a[]': '' is no number and no range");
  EXPECT_EQ(no_nodes("a[3-1]"), "LIST: 'a[3-1]': the range '3-1' goes down");
  EXPECT_EQ(no_nodes("a[1-9999999]"),
            "LIST: 'a[1-9999999]': the range '1-9999999' has more than 65536 nodes");
  EXPECT_EQ(no_nodes("a[1-999][1-999]"), "LIST: 'a[1-999][1-999]': more than 65536 nodes");
  EXPECT_EQ(no_nodes("a,,b"), "LIST: '': the name is empty");
  EXPECT_EQ(no_nodes("a1,a[1-2]"), "LIST: node 'a1' is there twice");
}

TEST(SlurmCounts, NumbersAreRepeated) {
  EXPECT_EQ(parse_slurm_counts("2(x3),1", "LIST"), (std::vector<int>{2, 2, 2, 1}));
  EXPECT_EQ(parse_slurm_counts("16", "LIST"), std::vector<int>{16});
  for (const std::string text : {"", "x", "0", "-1", "2(x", "2(x)", "2(x0)", "2(3)", "2,", "2(x3)1", "99999"})
    EXPECT_NE(refusal([&] { parse_slurm_counts(text, "LIST"); }).find("is no number of tasks"),
              std::string::npos)
        << text;
  EXPECT_EQ(refusal([&] { parse_slurm_counts("1(x65536),1", "LIST"); }), "LIST: more than 65536 nodes");
  EXPECT_NE(refusal([&] { parse_slurm_counts("1(x99999999999)", "LIST"); }), "");
}

/// Random texts of the words of the grammars.
std::string random_text(std::mt19937& random) {
  static const std::vector<std::string> words{
      "a", "b", " slots=", "1", "2", "07", "\n", "#",       "@",           ":",           ",",    "[",
      "]", "-", "slots",   "=", " ", "c",  "-",  "9999999", "a slots=2\n", "b slots=3\n", "a:0,1"};
  std::string text;
  for (std::size_t n = random() % 12; n > 0; --n)
    text += random() % 24 ? words[random() % words.size()] : std::string(1, static_cast<char>(random()));
  return text;
}

/// Any text is read, or refused in one line; `refusal_of` returns this.
template <class F>
void fuzz(const F& refusal_of) {
  test::Fuzz fuzz(3000);
  long read = 0;
  while (fuzz.next()) {
    const std::string text = random_text(fuzz.random), why = refusal_of(text);
    ASSERT_EQ(why.find('\n'), std::string::npos) << why;
    read += why.empty();
  }
  EXPECT_GT(read, fuzz.tried() / 500);
  EXPECT_LT(read, fuzz.tried() / 2);
}

TEST(HostsFuzz, AnyHostfileIsReadOrRefused) {
  fuzz([](const std::string& text) { return of_hostfile(text); });
}
TEST(HostsFuzz, AnyFilterIsReadOrRefused) {
  fuzz([](const std::string& text) {
    refusal([&] { EXPECT_FALSE(exclude(three(), text).empty()); });
    return refusal([&] { EXPECT_FALSE(include(three(), text).empty()); });
  });
}
TEST(HostsFuzz, AnyListOfSlurmIsReadOrRefused) { fuzz(no_nodes); }

}  // namespace
}  // namespace rz::hosts
