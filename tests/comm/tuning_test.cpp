// Not under the thread sanitizer: Explain[.]

// The tuning table: its text, errors in it, whose table serves the group, overrides, and that a call runs the
// algorithm that explain() returns.

#include "comm/tuning/tuning.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/intranode/plan/call_plan.h"
#include "comm/schedule/chunk_layout.h"
#include "comm/tuning/intranode.h"
#include "comm/tuning/select.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using test::error_of;
using test::run_ranks;

constexpr const char* every_kind_of_line =
    "all_reduce intra_node ranks=2 bytes<=64K one_shot\n"
    "all_reduce intra_node ranks<=8 two_shot chunk=16K\n"
    "all_reduce intra_node schedule:two_shot\n"
    "all_reduce intra_node_registered bytes<=2047 staged\n"
    "all_reduce intra_node_registered zero_copy\n"
    "all_reduce inter_node ranks>=3 ranks<=8 traffic<=256K one_shot slice=32K\n"
    "broadcast any bytes>1K bytes<=1M tree\n"
    "barrier intra_node_schedule dissemination\n";

/// A file of this test, removed with it.
class File {
 public:
  explicit File(const std::string& text, const std::string& name = "table") {
    path_ = (std::filesystem::temp_directory_path() /
             concat("rz_tuning_", static_cast<int>(::getpid()), "_", name))
                .string();
    std::ofstream(path_) << text;
  }
  ~File() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

CommOptions quick(const std::string& transport = "auto") {
  CommOptions o;
  o.timeout = o.rendezvous_timeout = std::chrono::seconds(20);
  o.transport = transport;
  return o;
}

bool has_text(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}

// ---- text

TEST(Tuning, TextAndTableAreTheSame) {
  const tuning::Table t = tuning::parse_tuning(every_kind_of_line, "t");
  ASSERT_EQ(t.rules.size(), 8u);
  EXPECT_EQ(t.text(), every_kind_of_line);
  EXPECT_EQ(t.rules[0].max_bytes, 64u << 10);
  EXPECT_EQ(t.rules[0].min_ranks, 2);
  EXPECT_EQ(t.rules[1].chunk, 16u << 10);
  EXPECT_TRUE(t.rules[2].is_schedule);
  EXPECT_EQ(t.rules[5].max_traffic, 256u << 10);
  EXPECT_EQ(t.rules[5].slice, 32u << 10);
}

TEST(Tuning, CommentsAndBlankLinesAreIgnored) {
  const tuning::Table t =
      tuning::parse_tuning("# of a machine\n\n  \t\nreduce inter_node tree # small\r\n#", "t");
  EXPECT_EQ(t.text(), "reduce inter_node tree\n");
  EXPECT_TRUE(tuning::parse_tuning("# nothing\n", "t").empty());
}

TEST(Tuning, TheBuiltInTablesAreWrittenInTheSameLines) {
  tuning::Table t{"t", {tuning::built_in_rules().begin(), tuning::built_in_rules().end()}};
  for (tuning::Rule& r : t.rules) EXPECT_EQ(r.source, tuning::Source::built_in);
  EXPECT_EQ(tuning::parse_tuning(t.text(), "t").text(), t.text());
  EXPECT_TRUE(has_text(t.text(), "all_reduce inter_node ranks<=2 bytes<=256K one_shot\n")) << t.text();
}

TEST(Tuning, AWrongLineIsOneError) {
  const std::vector<std::pair<std::string, std::vector<const char*>>> wrong = {
      {"all_reduce", {"all_reduce intra_node bytes<=64K one_shot"}},
      {"all_redcue inter_node ring", {"'all_redcue'", "all_reduce", "broadcast"}},
      {"send inter_node ring", {"'send'", "choose one of"}},
      {"all_reduce nowhere ring",
       {"'nowhere'",
        "intra_node, intra_node_registered, intra_node_cma, intra_node_schedule, inter_node, "
        "multi_rank_nodes, any"}},
      {"all_reduce inter_node rnig", {"'rnig'", "'inter_node'", "one_shot, two_shot, chain, ring"}},
      {"all_reduce intra_node zero_copy", {"'zero_copy'", "one_shot, two_shot, schedule:one_shot"}},
      {"broadcast intra_node zero_copy", {"'zero_copy'", "choose one of staged, linear, tree"}},
      {"all_reduce intra_node_registered ring", {"'ring'", "zero_copy, staged"}},
      {"all_to_all_v intra_node_registered zero_copy", {"'zero_copy'", "choose one of staged"}},
      {"all_reduce intra_node_cma single_copy", {"'single_copy'", "choose one of staged"}},
      {"broadcast intra_node_cma zero_copy", {"'zero_copy'", "choose one of adaptive, single_copy, staged"}},
      {"all_reduce inter_node ring tree", {"'tree' is one algorithm too many"}},
      {"all_reduce inter_node bytes<=64", {"no algorithm", "ring"}},
      {"all_reduce inter_node bytes<=64X ring", {"'64X'", "K, M or G"}},
      {"all_reduce inter_node bytes<=99999999999G ring", {"is no size"}},
      {"all_reduce inter_node ranks<=0 ring", {"'0'", "ranks"}},
      {"all_reduce inter_node size<=0 ring", {"'size<=0'", "ranks=N", "chunk=B"}},
      {"all_reduce inter_node slice=100 ring", {"multiple of 64"}},
      {"all_reduce inter_node chunk=64 ring", {"a schedule takes slice=B"}},
      {"all_reduce intra_node chunk=64 schedule:ring", {"a schedule takes slice=B"}},
      {"all_reduce intra_node slice=64 two_shot", {"takes chunk=B"}},
  };
  for (const auto& [line, parts] : wrong) {
    const Error e = error_of([&] { tuning::parse_tuning("# first\n" + line, "file.txt"); });
    EXPECT_EQ(e.code(), Errc::config) << line;
    EXPECT_TRUE(has_text(e.what(), "file.txt, line 2: ")) << e.what();
    EXPECT_FALSE(has_text(e.what(), "\n")) << e.what();
    for (const char* part : parts) EXPECT_TRUE(has_text(e.what(), part)) << part << " in: " << e.what();
  }
}

TEST(Tuning, AFileThatCannotBeReadIsNamed) {
  EXPECT_EQ(error_of([] { tuning::read_tuning("/tmp"); }).code(), Errc::config);
  const Error e = error_of([] { tuning::read_tuning("/nowhere/table"); });
  EXPECT_EQ(e.code(), Errc::config);
  EXPECT_TRUE(has_text(e.what(), "'/nowhere/table'") && has_text(e.what(), "RZ_TUNING")) << e.what();
}

// ---- which rule matches

TEST(Tuning, TheFirstMatchingRuleApplies) {
  const tuning::Table t = tuning::parse_tuning(
      "all_reduce inter_node ranks=4 bytes<=1K tree\n"
      "all_reduce inter_node ranks=4 bytes<=1K one_shot\n"
      "all_reduce inter_node ranks=4 bytes<=1M chain\n",
      "t");
  const auto algorithm = [&](std::size_t bytes, int size, bool deterministic) {
    return std::string(
        tuning::select({Collective::all_reduce, bytes, size, false, deterministic, "", t.rules}).name);
  };
  EXPECT_EQ(algorithm(1024, 4, false), "tree");
  EXPECT_EQ(algorithm(1024, 4, true), "one_shot") << "tree does not sum in rank order";
  EXPECT_EQ(algorithm(1025, 4, true), "chain");
  EXPECT_EQ(algorithm((1 << 20) + 1, 4, true), "two_shot") << "the built-in table's";
  EXPECT_EQ(algorithm(1024, 16, false), "tree") << "the built-in table's";
  EXPECT_EQ(algorithm(1 << 30, 16, false), "ring");
}

// The rules that match a call in each scope.
TEST(Tuning, ARuleServesItsScopeOnly) {
  using enum tuning::Scope;
  const tuning::Table t = tuning::parse_tuning(
      "all_gather intra_node staged\n"
      "all_gather intra_node_registered staged\n"
      "all_gather intra_node_cma staged\n"
      "all_gather intra_node_schedule ring\n"
      "all_gather inter_node ring\n"
      "all_gather multi_rank_nodes ring\n"
      "all_gather any ring\n",
      "t");
  const auto serve = [&](tuning::Scope call) {
    std::set<tuning::Scope> served;
    for (const tuning::Rule& r : t.rules)
      if (tuning::matches(r, {Collective::all_gather, call, 1000, 4})) served.insert(r.scope);
    return served;
  };
  EXPECT_EQ(serve(intra_node), (std::set{intra_node}));
  EXPECT_EQ(serve(intra_node_registered), (std::set{intra_node_registered}));
  EXPECT_EQ(serve(intra_node_cma), (std::set{intra_node_cma}));
  EXPECT_EQ(serve(intra_node_schedule), (std::set{intra_node_schedule, any}));
  EXPECT_EQ(serve(inter_node), (std::set{inter_node, any}));
  EXPECT_EQ(serve(multi_rank_nodes), (std::set{multi_rank_nodes, inter_node, any}));
}

TEST(Tuning, IntranodeRulesAreNoSchedules) {
  const tuning::Table t = tuning::parse_tuning("all_reduce intra_node two_shot\nall_reduce any chain\n", "t");
  EXPECT_STREQ(tuning::select({Collective::all_reduce, 8, 3, true, true, "", t.rules}).name, "chain");
  const tuning::IntranodeTable table(3, t.rules, "t", {}, true);
  EXPECT_TRUE(table.find(Collective::all_reduce, 8).two_shot);
  EXPECT_FALSE(table.has_schedule(Collective::all_reduce));
}

TEST(Tuning, BuiltInIntranodeAlgorithms) {
  for (const int size : {2, 3, 8, 256}) {
    const tuning::IntranodeTable table(size);
    const std::size_t max = (size == 2 ? 64 : 32) << 10;
    for (int i = 0; i < collective_count; ++i) {
      const Collective c{static_cast<std::uint8_t>(i)};
      EXPECT_FALSE(table.has_schedule(c));
      EXPECT_FALSE(table.find(c, 0).try_zero_copy) << name(c);
      EXPECT_EQ(table.find(c, 64 << 10).try_zero_copy, c != Collective::all_to_all_v &&
                                                           c != Collective::barrier &&
                                                           c != Collective::send && c != Collective::recv)
          << name(c);
    }
    EXPECT_FALSE(table.find(Collective::all_reduce, max).two_shot);
    EXPECT_TRUE(table.find(Collective::all_reduce, max + 1).two_shot);
    EXPECT_FALSE(table.find(Collective::all_reduce, 2047).try_zero_copy);
    EXPECT_TRUE(table.find(Collective::all_reduce, 2048).try_zero_copy);
    EXPECT_FALSE(table.find(Collective::broadcast, 16383).try_zero_copy);
    EXPECT_TRUE(table.find(Collective::broadcast, 16384).try_zero_copy);
  }
}

TEST(Tuning, ChunksCoverAShardAndFitTheStagingRing) {
  for (const bool oversubscribed : {false, true})
    for (const int size : {2, 3, 8, 256})
      for (const bool split : {false, true})
        for (const std::size_t chunk : {std::size_t{0}, std::size_t{64}, std::size_t{1} << 30})
          for (const std::size_t part :
               {std::size_t{1}, std::size_t{57}, std::size_t{5000}, std::size_t{1} << 30}) {
            const std::size_t ring = 256 << 10, shares = split ? static_cast<std::size_t>(size) - 1 : 1;
            const auto [piece, rounds] = intranode::chunk_shard({.per_peer = split, .shard_bytes = part},
                                                                size, chunk, {ring, oversubscribed});
            EXPECT_EQ(piece % 64, 0u);
            EXPECT_GT(piece, 0u);
            EXPECT_GE(piece * rounds, part);
            EXPECT_LT(piece * (rounds - 1), part);
            EXPECT_LT(piece, part + 64) << "small parts do not lie pages apart";
            EXPECT_LE(piece * (3 * shares + 2), ring);
            EXPECT_TRUE(chunk != 64 || piece == 64);
          }
}

// ---- overrides

TEST(Tuning, ForcedNamesAreThoseOfTheCollective) {
  const tuning::AlgorithmOverrides one("chain", true);
  EXPECT_EQ(one.of(Collective::all_reduce), "chain");
  EXPECT_EQ(one.of(Collective::broadcast), "");
  const tuning::AlgorithmOverrides several(
      "all_reduce=zero_copy,broadcast=schedule:tree,barrier=dissemination", true);
  EXPECT_EQ(several.of(Collective::all_reduce), "zero_copy");
  EXPECT_EQ(several.of(Collective::broadcast), "schedule:tree");
  EXPECT_EQ(several.schedule_of(Collective::broadcast), "tree");
  EXPECT_EQ(tuning::AlgorithmOverrides("reduce=tree", false).of(Collective::reduce), "tree");
  const std::vector<std::pair<std::string, std::vector<const char*>>> wrong = {
      {"telepathy",
       {"all_reduce has no algorithm 'telepathy'", "one_shot, two_shot, schedule:one_shot", "zero_copy"}},
      {"broadcast=ring", {"broadcast has no algorithm 'ring'", "staged", "tree", "zero_copy or single_copy"}},
      {"reduce=single_copy", {"reduce has no algorithm 'single_copy'", "staged"}},
      {"barrier=zero_copy", {"barrier has no algorithm 'zero_copy'", "staged, dissemination"}},
      {"all_reduce=ring", {"'ring'", "rank order", "deterministic"}},
      {"all_reduce=schedule:ring", {"'ring'", "rank order"}},
      {"send=ring", {"send takes no algorithm"}},
      {"all_redcue=ring", {"'all_redcue'", "all_reduce"}},
      {"all_reduce=chain,tree", {"'tree'", "COLLECTIVE=ALGORITHM"}},
      {"all_reduce=", {"''", "one_shot"}},
      {"all_reduce=chain,all_reduce=one_shot", {"all_reduce is there twice"}},
  };
  for (const auto& [text, parts] : wrong) {
    const Error e = error_of([&] { tuning::AlgorithmOverrides(text, true); });
    EXPECT_EQ(e.code(), Errc::config) << text;
    for (const char* part : parts) EXPECT_TRUE(has_text(e.what(), part)) << part << " in: " << e.what();
  }
}

TEST(Tuning, AnIntranodeAlgorithmIsRefusedBetweenNodes) {
  run_ranks(2, [](int rank, auto store) {
    auto options = quick("tcp");
    options.algorithm = "zero_copy";
    const Error e = error_of([&] { Communicator::connect(rank, 2, store, options); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_TRUE(has_text(e.what(), "all_reduce=zero_copy requires that all ranks share memory")) << e.what();
    EXPECT_TRUE(has_text(e.what(), "ring")) << e.what();
  });
}

// ---- a call runs the algorithm that explain() returns

/// Sums and data movement of several sizes, correct whatever algorithm runs.
void check_calls(Communicator& comm, std::size_t n, bool allocated) {
  const auto size = static_cast<std::size_t>(comm.size()), rank = static_cast<std::size_t>(comm.rank());
  std::vector<std::shared_ptr<float>> held;
  const auto memory = [&](std::size_t count) {
    held.push_back(allocated
                       ? comm.allocate_array<float>(count + 1)
                       : std::shared_ptr<float>(new float[count + 1](), std::default_delete<float[]>()));
    return held.back().get();
  };
  float* const in = memory(n * size);
  float* const out = memory(n * size);
  for (std::size_t i = 0; i < n * size; ++i)
    in[i] = static_cast<float>(rank + 1) * static_cast<float>(i % 97);
  const float ranks = static_cast<float>(size * (size + 1) / 2);
  comm.all_reduce(ConstBuffer(in, n), {out, n}, ReduceOp::sum).wait();
  for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(out[i], ranks * static_cast<float>(i % 97));
  comm.reduce_scatter(ConstBuffer(in, n * size), {out, n}).wait();
  for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(out[i], ranks * static_cast<float>((rank * n + i) % 97));
  comm.all_gather(ConstBuffer(in, n), {out, n * size}).wait();
  for (std::size_t i = 0; i < n * size; ++i)
    ASSERT_EQ(out[i], static_cast<float>(i / n + 1) * static_cast<float>(i % n % 97));
  comm.broadcast(ConstBuffer(in, n), {out, n}, 0).wait();
  for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(out[i], static_cast<float>(i % 97));
  comm.reduce(ConstBuffer(in, n), {out, n}, 0).wait();
  for (std::size_t i = 0; rank == 0 && i < n; ++i) ASSERT_EQ(out[i], ranks * static_cast<float>(i % 97));
  comm.barrier().wait();
}

TEST(Explain, IntranodeRulesDoNotApplyBetweenNodes) {
  const File file(
      "all_gather intra_node_cma staged\nall_gather intra_node_registered staged\nall_gather intra_node "
      "staged\n");
  auto options = quick("tcp");
  options.tuning = file.path();
  lab::group(2, options, [&](Communicator& comm) {
    EXPECT_EQ(comm.explain(Collective::all_gather, 4000).reason,
              "built-in table: all_gather inter-node, up to 8 ranks");
    check_calls(comm, 1000, false);
  });
}

TEST(Explain, ForcedIntranodeAlgorithmsAreCorrect) {
  for (const std::string forced :
       {"one_shot", "two_shot", "zero_copy", "chain", "schedule:two_shot",
        "all_reduce=two_shot,reduce_scatter=linear,all_gather=linear,broadcast=linear,reduce=linear",
        "all_reduce=chain,reduce_scatter=schedule:linear,all_gather=ring,broadcast=tree,reduce=two_shot,"
        "barrier=dissemination",
        "broadcast=schedule:linear,reduce=staged,all_gather=staged",
        "broadcast=single_copy,all_gather=single_copy"})
    for (const int size : {2, 3})
      run_ranks(size, [&](int rank, auto store) {
        auto options = quick();
        options.algorithm = forced;
        auto comm = Communicator::connect(rank, size, store, options);
        for (const bool allocated : {false, true})
          for (const std::size_t n : {0, 1, 3, 14, 1000, 50021}) check_calls(comm, n, allocated);
      });
}

TEST(Explain, ShowsOverrides) {
  auto options = quick();
  options.algorithm = "all_reduce=zero_copy,broadcast=tree,reduce=staged";
  lab::group(2, options, [](Communicator& comm) {
    const AlgorithmChoice direct = comm.explain(Collective::all_reduce, 8, true);
    EXPECT_EQ(direct.algorithm, "zero_copy");
    EXPECT_EQ(direct.reason, "forced: all_reduce=zero_copy");
    const AlgorithmChoice not_reached = comm.explain(Collective::all_reduce, 8);
    EXPECT_EQ(not_reached.algorithm, "one_shot");
    EXPECT_TRUE(has_text(not_reached.reason, "zero_copy is forced, but not all")) << not_reached.reason;
    const AlgorithmChoice tree = comm.explain(Collective::broadcast, 1 << 20);
    EXPECT_EQ(tree.algorithm, "schedule:tree");
    EXPECT_EQ(tree.reason, "forced: broadcast=tree");
    EXPECT_EQ(tree.chunk_bytes, 64u << 10);
    EXPECT_EQ(comm.explain(Collective::reduce, 1 << 20, true).algorithm, "staged");
    EXPECT_EQ(comm.explain(Collective::send, 8).algorithm, "message");
  });
}

TEST(Explain, ShowsTheBuiltInTable) {
  lab::group(2, quick(), [](Communicator& comm) {
    const AlgorithmChoice small = comm.explain(Collective::all_reduce, 8, true);
    EXPECT_EQ(small.algorithm, "one_shot");
    EXPECT_EQ(small.transport, "shm");
    EXPECT_EQ(small.chunk_bytes, 0u) << "in one slot";
    EXPECT_EQ(small.reason, "built-in table: all_reduce intra-node, up to 64 KiB, up to 2 ranks");
    EXPECT_EQ(comm.explain(Collective::all_reduce, (64 << 10) + 1).algorithm, "two_shot");
    EXPECT_EQ(comm.explain(Collective::all_reduce, 1 << 20, true).algorithm, "zero_copy");
    const AlgorithmChoice adaptive = comm.explain(Collective::all_gather, 1 << 20);
    EXPECT_EQ(adaptive.algorithm, "staged");
    EXPECT_TRUE(has_text(adaptive.reason, "single_copy instead while")) << adaptive.reason;
    EXPECT_FALSE(has_text(comm.explain(Collective::all_gather, 1 << 10).reason, "single_copy"));
    EXPECT_EQ(comm.explain(Collective::barrier, 0).algorithm, "staged");
  });
}

TEST(Explain, IsTheSameOnEveryRankAndHost) {
  for (const std::string nodes : {"aaa", "aab", "abc"}) {
    std::vector<std::vector<std::string>> choices(3);
    lab::group(nodes, quick(), [&](Communicator& comm) {
      for (int c = 0; c < collective_count; ++c)
        for (const std::size_t bytes : {0, 8, 5000, 1 << 22})
          for (const bool allocated : {false, true}) {
            const AlgorithmChoice choice = comm.explain(Collective(c), bytes, allocated);
            choices[static_cast<std::size_t>(comm.rank())].push_back(
                concat(choice.algorithm, '/', choice.transport, '/', choice.chunk_bytes, '/', choice.reason));
          }
    });
    EXPECT_EQ(choices[0], choices[1]);
    EXPECT_EQ(choices[0], choices[2]);
    EXPECT_TRUE(has_text(choices[0][0], nodes == "aaa" ? "/shm/" : nodes == "abc" ? "/tcp/" : "/shm+tcp/"));
  }
}

// 1 + 2^-8 + 2^-8 in rank order is 1 + 2^-7 if bf16 is rounded once, and 1 if each partial sum is.
bool rounded_once(Communicator& comm) {
  std::vector<bf16> x(2000, comm.rank() == 0 ? bf16{0x3f80} : bf16{0x3b80});
  comm.all_reduce({x.data(), x.size()}).wait();
  return std::all_of(x.begin(), x.end(), [](bf16 v) { return v.bits == 0x3f81; });
}

TEST(Explain, SmallFloatsUseAnAlgorithmThatRoundsOnce) {
  const File file("all_reduce intra_node schedule:chain\nall_reduce inter_node chain\n");
  for (const std::string transport : {"shm", "tcp"})
    run_ranks(3, [&](int rank, auto store) {
      auto options = quick(transport);
      options.tuning = file.path();
      auto comm = Communicator::connect(rank, 3, store, options);
      const std::string chain = transport == "shm" ? "schedule:chain" : "chain";
      const auto taken = [&](DType dtype, ReduceOp op = ReduceOp::sum) {
        return comm.explain(Collective::all_reduce, 40000, false, dtype, op);
      };
      EXPECT_EQ(taken(DType::f32).algorithm, chain);
      EXPECT_EQ(taken(DType::i8).algorithm, chain);
      EXPECT_EQ(taken(DType::bf16, ReduceOp::max).algorithm, chain) << "nothing is rounded";
      EXPECT_EQ(comm.explain(Collective::all_reduce, 40000).algorithm, chain);
      for (const DType small : {DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2}) {
        EXPECT_EQ(taken(small).algorithm, "one_shot");
        EXPECT_EQ(taken(small, ReduceOp::prod).algorithm, "one_shot");
      }
      const std::string why = taken(DType::bf16).reason;
      EXPECT_TRUE(
          has_text(why, transport == "shm" ? "; not chain, which rounds bf16 on the way" : "built-in table"))
          << why;
      EXPECT_TRUE(rounded_once(comm));
    });
  auto options = quick();
  options.algorithm = "chain";
  lab::group(3, options, [](Communicator& comm) {
    EXPECT_EQ(comm.explain(Collective::all_reduce, 40000, false, DType::bf16).algorithm, "schedule:chain");
    EXPECT_FALSE(rounded_once(comm)) << "a forced algorithm is used";
  });
}

// ---- whose table is used

TEST(TuningOfAGroup, RankZerosTableIsUsedByAllRanks) {
  const File file(
      "all_reduce intra_node bytes<=1K two_shot chunk=128\n"
      "all_reduce intra_node bytes<=4K schedule:chain\n"
      "all_reduce intra_node one_shot chunk=1K\n"
      "all_reduce intra_node_registered staged\n"
      "broadcast intra_node bytes<=2K tree\n"
      "reduce intra_node_registered zero_copy\n"
      "all_gather intra_node staged chunk=64\n"
      "all_gather intra_node_cma bytes<=10K single_copy\n"
      "all_gather intra_node_cma staged\n");
  run_ranks(3, [&](int rank, auto store) {
    auto options = quick();
    if (rank == 0) options.tuning = file.path();
    auto comm = Communicator::connect(rank, 3, store, options);
    const AlgorithmChoice small = comm.explain(Collective::all_reduce, 1000, true);
    EXPECT_EQ(small.algorithm, "two_shot");
    EXPECT_EQ(small.chunk_bytes, 128u);
    EXPECT_EQ(small.reason, concat("tuning table ", file.path(), ": all_reduce intra-node, up to 1 KiB"));
    EXPECT_EQ(comm.explain(Collective::all_reduce, 4000).algorithm, "schedule:chain");
    EXPECT_EQ(comm.explain(Collective::all_reduce, 1 << 20).chunk_bytes, 1024u);
    EXPECT_EQ(comm.explain(Collective::reduce, 100, true).algorithm, "zero_copy");
    EXPECT_EQ(comm.explain(Collective::all_gather, 9999).algorithm, "single_copy");
    EXPECT_EQ(comm.explain(Collective::all_gather, 99999).algorithm, "staged");
    EXPECT_EQ(comm.explain(Collective::scatter, 100).reason, "built-in table: scatter intra-node");
    for (const bool allocated : {false, true})
      for (const std::size_t n : {0, 1, 100, 900, 50021}) check_calls(comm, n, allocated);
    // 1 + 2^-8 + 2^-8: a chain, which stores partial sums, would give 1, and is excluded.
    std::vector<bf16> x(1000, rank == 0 ? bf16{0x3f80} : bf16{0x3b80});
    comm.all_reduce({x.data(), x.size()}).wait();
    for (const bf16 v : x) ASSERT_EQ(v.bits, 0x3f81);
  });
}

TEST(TuningOfAGroup, ChunksAndSchedulesBetweenNodes) {
  const File file("all_reduce inter_node bytes<=1M chain slice=4K\nall_gather inter_node ring slice=64\n");
  auto options = quick("tcp");
  options.tuning = file.path();
  lab::group(3, options, [&](Communicator& comm) {
    const AlgorithmChoice chain = comm.explain(Collective::all_reduce, 1 << 20);
    EXPECT_EQ(chain.algorithm, "chain");
    EXPECT_EQ(chain.chunk_bytes, 4096u);
    EXPECT_EQ(comm.explain(Collective::all_reduce, (1 << 20) + 1).algorithm, "two_shot");
    for (const std::size_t n : {0, 1, 1000, 50021}) check_calls(comm, n, false);
  });
}

TEST(TuningOfAGroup, ADifferentTableIsNamedOnEveryRank) {
  const File first("reduce inter_node tree\n", "first"), second("reduce inter_node two_shot\n", "second");
  run_ranks(3, [&](int rank, auto store) {
    auto options = quick();
    if (rank != 1) options.tuning = (rank == 2 ? second : first).path();
    const Error e = error_of([&] { Communicator::connect(rank, 3, store, options); });
    EXPECT_EQ(e.code(), Errc::mismatch);
    EXPECT_TRUE(has_text(e.what(), "rank 2 has the tuning table '" + second.path())) << e.what();
    EXPECT_TRUE(has_text(e.what(), first.path()) && has_text(e.what(), "RZ_TUNING")) << e.what();
  });
}

TEST(TuningOfAGroup, AWrongFileIsRefusedBeforeConnecting) {
  const File file("all_reduce inter_node rnig\n");
  auto options = quick();
  options.tuning = file.path();
  const Error e = error_of([&] { Communicator::connect(0, 2, memory_store(), options); });
  EXPECT_EQ(e.code(), Errc::config);
  EXPECT_TRUE(has_text(e.what(), file.path() + ", line 1: ")) << e.what();
}

// ---- group sizes that a table does not have

std::string selected(const std::string& table, int size, std::size_t bytes, bool deterministic = false) {
  const auto rules = tuning::rules_for(tuning::parse_tuning(table, "t"), size);
  const tuning::SelectedAlgorithm s =
      tuning::select_by_rule({Collective::all_reduce, bytes, size, false, deterministic, "", rules});
  return concat(tuning::source_prefix(*s.rule, "t"), s.algorithm->name);
}

constexpr const char* two_four_and_sixteen =
    "all_reduce inter_node ranks=2 chain\n"
    "all_reduce inter_node ranks=4 bytes<=1K one_shot\nall_reduce inter_node ranks=4 two_shot\n"
    "all_reduce inter_node ranks=16 bytes<=64K tree\nall_reduce inter_node ranks=16 two_shot\n";
constexpr const char* other = "tuning table t, measured with another number of ranks: ";

TEST(RulesForASize, AreThoseOfTheNextLargerSize) {
  EXPECT_EQ(selected(two_four_and_sixteen, 4, 512), "tuning table t: one_shot");
  EXPECT_EQ(selected(two_four_and_sixteen, 3, 512), concat(other, "one_shot"));
  EXPECT_EQ(selected(two_four_and_sixteen, 3, 1 << 20), concat(other, "two_shot"));
  EXPECT_EQ(selected(two_four_and_sixteen, 5, 512), concat(other, "tree"));
  EXPECT_EQ(selected(two_four_and_sixteen, 5, 512, true), concat(other, "two_shot")) << "in rank order";
}

TEST(RulesForASize, AreThoseOfASmallerSizeUpToTwiceItsRanks) {
  EXPECT_EQ(selected(two_four_and_sixteen, 32, 512), concat(other, "tree"));
  EXPECT_EQ(selected(two_four_and_sixteen, 33, 512), "built-in table: tree");
  EXPECT_EQ(selected("all_reduce inter_node ranks=2 chain\n", 3, 512), "built-in table: one_shot")
      << "not those of two ranks";
}

TEST(RulesForASize, ComeAfterThoseOfTheFile) {
  const std::string table = concat("all_reduce inter_node ranks<=8 bytes<=64 ring\n", two_four_and_sixteen);
  EXPECT_EQ(selected(table, 5, 64), "tuning table t: ring");
  EXPECT_EQ(selected(table, 5, 512), "built-in table: one_shot") << "the file has rules for five ranks";
  EXPECT_EQ(selected(table, 9, 512), concat(other, "tree"));
}

TEST(RulesForASize, ServeIntranodeCalls) {
  const tuning::Table t = tuning::parse_tuning(
      "all_reduce intra_node ranks=8 bytes<=2K one_shot\nall_reduce intra_node ranks=8 two_shot chunk=4K\n",
      "t");
  for (const int size : {3, 16}) {
    const tuning::IntranodeTable table(size, tuning::rules_for(t, size), "t", {}, true);
    EXPECT_FALSE(table.find(Collective::all_reduce, 64).two_shot);
    EXPECT_TRUE(table.find(Collective::all_reduce, 4 << 10).two_shot);
    EXPECT_EQ(table.find(Collective::all_reduce, 4 << 10).chunk, 4096u);
    EXPECT_TRUE(has_text(table.find(Collective::all_reduce, 64).reason, "another number of ranks")) << size;
  }
}

}  // namespace
}  // namespace rz
