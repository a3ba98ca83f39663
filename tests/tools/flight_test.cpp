// Runs: alone
// Needs: flight_lib flight

// The program flight, and what it reads.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/flight_dump.h"
#include "sharding/checkpoint/torch_files/pickle.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"
#include "tests/support/fuzz.h"
#include "tests/support/program.h"
#include "tests/support/ranks.h"
#include "tools/flight/compare_ranks.h"
#include "tools/flight/read_dump.h"

namespace rz {
namespace {

using flight_tool::compare_ranks;
using flight_tool::Dump;
using flight_tool::GroupReport;
using flight_tool::read_dumps;
using test::Folder;
using test::Program;

CommOptions named(const char* name) {
  CommOptions options;
  options.name = name;
  return options;
}

/// The values of a dump as text: "[{'a': 1}]".
std::string shown(const Pickle& p, PickleId id) {
  const auto list = [&](const std::vector<PickleId>& items) {
    std::string text;
    for (const PickleId i : items) text += (text.empty() ? "" : ", ") + shown(p, i);
    return "[" + text + "]";
  };
  if (p.get<PickleNone>(id)) return "None";
  if (const auto* b = p.get<bool>(id)) return *b ? "True" : "False";
  if (const auto* n = p.get<std::int64_t>(id)) return concat(*n);
  if (const auto* t = p.get<PickleText>(id)) return "'" + t->text + "'";
  if (const auto* l = p.get<PickleList>(id)) return list(l->items);
  std::string text;
  for (const auto& [key, value] : p.get<PickleDict>(id)->items)
    text += concat(text.empty() ? "" : ", ", shown(p, key), ": ", shown(p, value));
  return "{" + text + "}";
}

Pickle read(const std::string& path) {
  const InputFile file = InputFile::open(path);
  return read_pickle(file, 0, file.size(), [](std::string_view) { return PickleUse::refused; });
}

/// A call that each kind of collective makes, and the line of the first.
int call_all(Communicator& comm, std::vector<float>& x, std::vector<float>& y) {
  const int line = __LINE__ + 1;
  comm.all_reduce(x, ReduceOp::max).wait();
  comm.reduce_scatter(x, y).wait();
  comm.all_gather(y, x).wait();
  comm.broadcast(x, 1).wait();
  comm.reduce(x, x, 1).wait();
  comm.gather(y, x, 1).wait();
  comm.scatter(x, y, 1).wait();
  comm.all_to_all(x, x).wait();
  comm.barrier().wait();
  return line;
}

struct Expected {
  const char *name, *in, *out;
};

/// Entries of call_all() and of the barrier after it.
constexpr Expected expected_entries[] = {{"all_reduce", "4", "4"},
                                         {"_reduce_scatter_base", "4", "2"},
                                         {"_all_gather_base", "2", "4"},
                                         {"broadcast", "4", "4"},
                                         {"reduce", "4", "4"},
                                         {"gather", "2", "4"},
                                         {"scatter", "4", "2"},
                                         {"all_to_all", "4", "4"},
                                         {"all_reduce_barrier", "1", "1"},
                                         {"all_reduce_barrier", "1", "1"}};

void expect_fields_of_the_file(const Pickle& p) {
  const auto value = [&](PickleId dict, const char* key) { return shown(p, *p.find(dict, key)); };
  EXPECT_EQ(value(p.root, "version"), "'2.10'");
  EXPECT_EQ(value(p.root, "pg_config"), "{'world': {'name': 'world', 'desc': 'world', 'ranks': '[0, 1]'}}");
  EXPECT_EQ(value(p.root, "pg_status"),
            "{'world': {'last_enqueued_collective': 9, 'last_started_collective': 9, "
            "'last_completed_collective': 9}}");
  EXPECT_EQ(value(p.root, "earlier"), "[]");
  const PickleId own = *p.find(p.root, "ringzero");
  EXPECT_EQ(value(own, "reason"), "'why'");
  EXPECT_EQ(value(own, "rank"), "0");
}

/// Entry i of the file, which `function` made in `line`, unless that is 0.
void expect_entry(const Pickle& p, PickleId e, std::size_t i, const char* function, int line) {
  const auto value = [&](PickleId dict, const char* key) { return shown(p, *p.find(dict, key)); };
  EXPECT_EQ(value(e, "profiling_name"), concat("'nccl:", expected_entries[i].name, "'"));
  EXPECT_EQ(value(e, "input_sizes"), concat("[[", expected_entries[i].in, "]]"));
  EXPECT_EQ(value(e, "output_sizes"), concat("[[", expected_entries[i].out, "]]"));
  for (const char* types : {"input_dtypes", "output_dtypes"}) EXPECT_EQ(value(e, types), "['Float']");
  EXPECT_EQ(value(e, "process_group"), "['world', 'world']");
  EXPECT_EQ(value(e, "collective_seq_id"), concat(i));
  EXPECT_EQ(value(e, "op_id"), concat(i));
  EXPECT_EQ(value(e, "state"), "'completed'");
  EXPECT_EQ(value(e, "retired"), "True");
  EXPECT_EQ(value(e, "is_p2p"), "False");
  for (const char* zero : {"p2p_seq_id", "pg_id", "time_created_ns", "timeout_ms"})
    EXPECT_EQ(value(e, zero), "0");
  for (const char* none : {"time_discovered_started_ns", "time_discovered_completed_ns"})
    EXPECT_EQ(value(e, none), "None");
  const PickleId frame = p.get<PickleList>(*p.find(e, "frames"))->items[0];
  if (line) {
    EXPECT_EQ(value(frame, "line"), concat(line));
  }
  EXPECT_TRUE(value(frame, "filename").ends_with("tests/tools/flight_test.cpp'"));
  EXPECT_NE(value(frame, "name").find(function), std::string::npos);
}

TEST(FlightFile, HasEveryFieldOfTorchsFormat) {
  Folder folder;
  test::run_ranks(2, [&](int rank, auto store) {
    auto comm = Communicator::connect(rank, 2, store, named("world"));
    std::vector<float> x(4), y(2);
    const int line = call_all(comm, x, y);
    auto group = comm.group();
    rank == 0 ? group.send(y, 1) : group.recv(y, 0);
    group.launch().wait();
    comm.barrier().wait();
    if (rank == 0) dump_flight(folder.path(), "why");
    comm.barrier().wait();
    if (rank == 1) return;
    const Pickle p = read(folder / "flight_rank_0");
    expect_fields_of_the_file(p);
    const auto& entries = p.get<PickleList>(*p.find(p.root, "entries"))->items;
    ASSERT_EQ(entries.size(), std::size(expected_entries));
    for (std::size_t i = 0; i < 9; ++i)
      expect_entry(p, entries[i], i, "call_all", line + static_cast<int>(i));
    expect_entry(p, entries[9], 9, "FlightFile", 0);
    const auto value = [&](PickleId dict, const char* key) { return shown(p, *p.find(dict, key)); };
    EXPECT_EQ(value(entries[0], "ringzero"),
              "{'call': 'all_reduce', 'op': 'max', 'dtype': 'f32', 'root': -1, "
              "'in_count': 4, 'out_count': 4}");
    EXPECT_EQ(value(*p.find(entries[3], "ringzero"), "root"), "1");
    const auto& messages = p.get<PickleList>(*p.find(p.root, "messages"))->items;
    ASSERT_EQ(messages.size(), 1u);
    EXPECT_EQ(value(messages[0], "profiling_name"), "'nccl:send 0->1'");
    EXPECT_EQ(value(messages[0], "is_p2p"), "True");
  });
}

TEST(FlightFile, TheRecordIdsOfRanksAreEqualAndBeginWhereNoCallIsGone) {
  Folder folder;
  test::run_ranks(2, [&](int rank, auto store) {
    auto old = Communicator::connect(rank, 2, prefix_store(store, "old"), named("old"));
    auto comm = Communicator::connect(rank, 2, prefix_store(store, "new"), named("new"));
    std::vector<float> x(4);
    for (int i = 0; i < 3; ++i) old.all_reduce(x).wait();
    for (int i = 0; i < 400; ++i) comm.all_reduce(x).wait();
    old.barrier().wait();
    if (rank == 0) dump_flight(folder.path());
    old.barrier().wait();
  });
  const Pickle p = read(folder / "flight_rank_0"), q = read(folder / "flight_rank_1");
  const auto list = [](const Pickle& file, const char* key) {
    return file.get<PickleList>(*file.find(file.root, key))->items;
  };
  const auto entries = list(p, "entries");
  ASSERT_EQ(entries.size(), 256u);  // 255 of "new", and the last one of "old"
  EXPECT_EQ(shown(p, *p.find(entries[0], "record_id")), "149");
  EXPECT_EQ(shown(p, *p.find(entries[0], "collective_seq_id")), "145");
  EXPECT_EQ(shown(q, *q.find(list(q, "entries")[0], "record_id")), "149");
  EXPECT_EQ(list(p, "earlier").size(), 3u);
  const auto dump = read_dumps(folder.path()).at(0);
  EXPECT_EQ(dump.groups.at({"old", {0, 1}}).size(), 4u)
      << "flight shows those that torch's analyser does not";
}

/// A small file, with a text that is no UTF-8.
std::string small_file(const Folder& folder) {
  auto comm = Communicator::connect(0, 1, nullptr, named("a\xff"));
  std::vector<float> x(4);
  comm.all_reduce(x).wait();
  dump_flight(folder.path());
  return folder.get("flight_rank_0");
}

TEST(FlightFile, EveryPrefixIsRefusedInALine) {
  Folder folder;
  const std::string whole = small_file(folder);
  ASSERT_GT(whole.size(), 500u);
  EXPECT_EQ(read_dumps(folder.path()).size(), 1u);
  for (std::size_t n = 0; n < whole.size(); ++n) {
    folder.put("flight_rank_0", whole.substr(0, n));
    const std::string line = test::refusal([&] { read_dumps(folder.path()); });
    ASSERT_NE(line.find("flight_rank_0"), std::string::npos) << n << " bytes: " << line;
    if (n % 97 != 0) continue;
    Program p({test::built("flight"), folder.path()});
    EXPECT_EQ(p.wait(), 2) << n;
    EXPECT_EQ(p.out(), "");
    EXPECT_EQ(p.err(), "flight: " + line + "\n");
  }
  folder.put("flight_rank_0", whole + "x");
  EXPECT_NE(test::refusal([&] { read_dumps(folder.path()); }).find("has bytes behind its pickle"),
            std::string::npos);
}

TEST(FlightFile, AnyBytesAreReadOrRefused) {
  Folder folder;
  const std::string whole = small_file(folder);
  test::Fuzz fuzz(3000);
  long readable = 0;
  while (fuzz.next()) {
    folder.put("flight_rank_0", fuzz.changed(whole));
    if (test::refusal([&] { compare_ranks(read_dumps(folder.path())); }).empty()) ++readable;
  }
  EXPECT_GT(readable, fuzz.tried() / 10);
  EXPECT_LT(readable, fuzz.tried());
}

TEST(Flight, InputsThatAreNoneAreNamed) {
  Folder folder;
  test::expect_refusal("flight", {}, "FOLDER");
  test::expect_refusal("flight", {folder / "none"}, "/none: cannot be read: No such file");
  test::expect_refusal("flight", {folder.path()}, "has no files flight_rank_0");
  folder.put("flight_rank_0",
             "\x80\x02}(X\x07\x00\x00\x00versionX\x03\x00\x00\x00"
             "1.0u.");
  test::expect_refusal("flight", {folder.path()}, "/flight_rank_0: ");
}

// ---- comparison

/// Dumps of 4 ranks of a group, each with the calls of `texts`; an empty text: no call of that number.
std::map<int, Dump> dumps_of(const std::vector<std::vector<std::string>>& texts) {
  std::map<int, Dump> dumps;
  std::vector<int> all;
  for (std::size_t r = 0; r < texts.size(); ++r) all.push_back(static_cast<int>(r));
  for (const int rank : all) {
    const auto& of_rank = texts[static_cast<std::size_t>(rank)];
    if (of_rank == std::vector<std::string>{"no file"}) continue;
    Dump& d = dumps[rank];
    d.rank = rank;
    auto& calls = d.groups[{"world", all}];
    for (std::size_t n = 0; n < of_rank.size(); ++n)
      if (!of_rank[n].empty())
        calls[static_cast<std::int64_t>(n)] = {of_rank[n], concat("a.cpp:", n), "started",
                                               static_cast<std::int64_t>(n)};
  }
  return dumps;
}

std::vector<std::string> findings_of(const std::vector<std::vector<std::string>>& texts) {
  return compare_ranks(dumps_of(texts)).at(0).findings;
}

TEST(FlightComparison, RanksThatAgreeAreOnePlace) {
  const auto reports = compare_ranks(dumps_of({{"x", "y"}, {"x", "y"}, {"", "y"}}));
  ASSERT_EQ(reports.size(), 1u);
  EXPECT_TRUE(reports[0].findings.empty()) << reports[0].findings[0];
  ASSERT_EQ(reports[0].places.size(), 1u);
  EXPECT_EQ(reports[0].places[0].ranks, (std::vector{0, 1, 2}));
  EXPECT_EQ(reports[0].places[0].call, "y");
  EXPECT_EQ(reports[0].places[0].line, "a.cpp:1");
}

TEST(FlightComparison, TheMinorityDiffers) {
  EXPECT_EQ(findings_of({{"x", "y"}, {"x", "z"}, {"x", "y"}}),
            std::vector<std::string>{"rank 1 differs in 'world': z at a.cpp:1; most call y"});
  EXPECT_EQ(findings_of({{"x", "y"}, {"x", "z"}}).size(), 2u) << "of two ranks there is no majority";
}

TEST(FlightComparison, TheFirstDifferenceCounts) {
  const auto reports = compare_ranks(dumps_of({{"x", "y", "w"}, {"x", "z", "v"}, {"x", "y", "w"}}));
  EXPECT_EQ(reports[0].places[0].call, "y");
  EXPECT_EQ(reports[0].findings.size(), 1u);
}

TEST(FlightComparison, CallsThatAFileNoLongerHasAreNotCompared) {
  EXPECT_TRUE(findings_of({{"", "", "y"}, {"x", "z", "y"}}).empty());
}

TEST(FlightComparison, ALateRankIsNamedWithWhereItIs) {
  auto dumps = dumps_of({{"x", "y"}, {"x"}, {"x", "y"}});
  dumps[1].groups[{"engine", {1, 2}}][7] = {"all_gather #7", "b.cpp:9", "started", 5};
  dumps[2].groups[{"engine", {1, 2}}];
  dumps[1].update = 17, dumps[1].phase = "backward";
  const auto reports = compare_ranks(dumps);
  ASSERT_EQ(reports.size(), 2u);
  EXPECT_EQ(
      reports[1].findings,
      std::vector<std::string>{"rank 1 is late in 'world': it has not called #1; it is in all_gather #7 of "
                               "'engine' at b.cpp:9, update 17, backward"});
  EXPECT_EQ(reports[0].findings,
            std::vector<std::string>{
                "rank 2 is late in 'engine': it has not called #7; it is in y of 'world' at a.cpp:1"});
}

TEST(FlightComparison, ARankWithoutAFileIsNamed) {
  const auto found = findings_of({{"x"}, {"no file"}, {"x"}});
  ASSERT_EQ(found.size(), 1u);
  EXPECT_TRUE(found[0].starts_with("rank 1 of 'world' has no file")) << found[0];
}

TEST(FlightComparison, RanksAreListedAsRanges) {
  EXPECT_EQ(flight_tool::list_of({0, 1, 2, 3, 7, 9, 10}), "0-3, 7, 9-10");
  EXPECT_EQ(flight_tool::list_of({5}), "5");
}

// ---- the program

/// Runs 4 ranks with RZ_FLIGHT and then flight on their files.
std::pair<int, std::string> flight_after(const test::RankFunction& body) {
  Folder folder;
  ::setenv("RZ_FLIGHT", folder.path().c_str(), 1);
  test::expect_processes(4, [&](int rank, auto store) {
    body(rank, store);
    store->set(concat("ended/", rank), "");
    for (int r = 0; r < 4; ++r) store->get(concat("ended/", r), Deadline::after(std::chrono::seconds(30)));
  });
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 4) << "no temporary file";
  Program flight({test::built("flight"), folder.path()});
  const int status = flight.wait();
  EXPECT_EQ(flight.err(), "");
  return {status, flight.out()};
}

TEST(Flight, NamesTheRankThatCallsAnother) {
  const auto [status, out] = flight_after([](int rank, auto store) {
    auto world = Communicator::connect(rank, 4, store, named("world"));
    std::vector<float> x(4), all(16);
    world.barrier().wait();
    const Error e = test::error_of([&] {
      if (rank == 2) return world.all_gather(x, all).wait();
      world.all_reduce(x).wait();
    });
    EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
  });
  EXPECT_EQ(status, 1);
  EXPECT_NE(out.find("\nrank 2 differs in 'world': all_gather #1 (4 to 16 f32) at flight_test.cpp:"),
            std::string::npos)
      << out;
  EXPECT_NE(out.find("0-1, 3  all_reduce #1 (4 f32, sum)"), std::string::npos) << out;
  EXPECT_TRUE(out.starts_with("ranks 0-3: mismatched collectives: rank 2 called all_gather")) << out;
}

TEST(Flight, ARunWithoutAFailureWritesNothing) {
  Folder folder;
  ::setenv("RZ_FLIGHT", (folder / "flights").c_str(), 1);
  test::expect_processes(3, [](int rank, auto store) {
    auto world = Communicator::connect(rank, 3, store, named("world"));
    std::optional<Communicator> half = world.split(rank % 2, 0);
    world.barrier().wait();
    half.reset();
    if (rank == 1) ::usleep(1500'000);  // the others are gone, which this rank sees
  });
  EXPECT_FALSE(std::filesystem::exists(folder / "flights"));
}

TEST(Flight, NamesTheRankThatDoesNotCall) {
  const auto [status, out] = flight_after([](int rank, auto store) {
    CommOptions options = named("world");
    options.timeout = std::chrono::seconds(1);
    auto world = Communicator::connect(rank, 4, store, options);
    std::vector<float> x(4);
    world.all_reduce(x).wait();
    if (rank != 2) {
      EXPECT_EQ(test::error_of([&] { world.all_reduce(x).wait(); }).code(), Errc::timeout);
    } else {
      while (::access((environment().flight + "/flight_rank_2").c_str(), F_OK) != 0) ::usleep(1000);
    }
  });
  EXPECT_EQ(status, 1);
  EXPECT_NE(
      out.find("rank 2 is late in 'world': it has not called #1; its last call was all_reduce #0 (4 f32, "
               "sum) of 'world' at flight_test.cpp:"),
      std::string::npos)
      << out;
}

TEST(Flight, RanksThatAgreeAreNoFinding) {
  Folder folder;
  test::run_ranks(3, [&](int rank, auto store) {
    auto world = Communicator::connect(rank, 3, store, named("world"));
    world.barrier().wait();
    if (rank == 0) {
      dump_flight(folder.path());
      store->set("dumped", "");
    }
    store->get("dumped", Deadline::after(std::chrono::seconds(30)));
  });
  Program flight({test::built("flight"), folder.path()});
  EXPECT_EQ(flight.wait(), 0) << flight.out();
  EXPECT_TRUE(flight.out().ends_with("all ranks agree\n")) << flight.out();
}

}  // namespace
}  // namespace rz
