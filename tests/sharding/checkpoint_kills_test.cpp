// Runs: serial alone

/// Groups of processes that are killed while they save: every checkpoint that was complete remains, none is
/// visible in part, and the next save leaves no other file.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <set>
#include <thread>

#include "sharding/checkpoint/checkpoint_folder.h"
#include "sharding/checkpoint/checkpoint_reader.h"
#include "sharding/engine/checkpoints/engine_state.h"
#include "sharding/engine/engine.h"
#include "sharding/io/json.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/written_checkpoint.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using test::Folder;

constexpr std::size_t keep = 2;
const lab::MlpSizes sizes{.in = 64, .hidden = 256, .classes = 32, .samples = 60, .ignored = 0};

struct Group {
  int ranks = 1;
  bool async = false;
  std::string dir;  ///< of the checkpoints
};

std::string config(const Group& g) {
  return concat(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
                    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                    "zero_optimization": {"stage": )",
                g.ranks == 1 ? 0 : 3, R"(, "stage3_param_persistence_threshold": 0}})");
}

/// A rank's engine and data.
struct Run {
  Run(const Group& g, int rank, const std::string& store)
      : group(g), world(Communicator::connect(rank, g.ranks, file_store(store))) {}

  void update() { engine.train_batch(loader, std::ref(net)); }

  Group group;
  World world;
  lab::Mlp net{sizes};
  Engine engine = initialize(world, net, {.config = config(group), .seed = 5, .threads = 1, .log = nullptr});
  Loader loader = engine.loader(lab::samples(sizes));
};

/// The ranks as processes. Each runs body(run), and ends with status 0 unless that throws.
class Processes {
 public:
  using Body = std::function<void(Run&)>;
  Processes(const Group& group, const Body& body) {
    for (int rank = 0; rank < group.ranks; ++rank) pids_.push_back(start(group, rank, body));
  }
  ~Processes() { kill_all(); }
  Processes(const Processes&) = delete;

  void kill_all() {
    for (const pid_t pid : pids_) ::kill(pid, SIGKILL);
  }
  void kill_one(std::size_t rank) { ::kill(pids_[rank], SIGKILL); }
  /// How each ended, as waitpid() has it; a rank that hangs is killed.
  std::vector<int> wait() {
    std::vector<int> all;
    for (const pid_t pid : pids_) {
      int status = 0;
      for (const auto end = std::chrono::steady_clock::now() + 30s; ::waitpid(pid, &status, WNOHANG) == 0;
           std::this_thread::sleep_for(1ms))
        if (std::chrono::steady_clock::now() > end) {
          ADD_FAILURE() << "rank " << all.size() << " still runs";
          ::kill(pid, SIGKILL);
        }
      all.push_back(status);
    }
    pids_.clear();
    return all;
  }
  void expect_success() {
    for (const int status : wait()) EXPECT_EQ(status, 0);
  }

 private:
  pid_t start(const Group& group, int rank, const Body& body) {
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid != 0) return pid;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    try {
      {
        Run run(group, rank, store_.path());
        body(run);
      }
      ::_exit(0);
    } catch (const Error& e) {
      if (e.code() != Errc::peer_lost) std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
    } catch (const std::exception& e) {
      std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
    }
    ::_exit(1);
  }

  Folder store_;
  std::vector<pid_t> pids_;
};

/// Numbers from rank 0 to the test.
class Reports {
 public:
  Reports() {
    if (::pipe2(ends_.data(), O_NONBLOCK | O_CLOEXEC) != 0) fail_errno("pipe2");
  }
  Reports(const Reports&) = delete;
  ~Reports() {
    for (const int end : ends_) ::close(end);
  }
  void write(std::int64_t number) {
    if (::write(ends_[1], &number, sizeof number) != sizeof number) fail_errno("write");
  }
  /// The last one so far; -1: none.
  std::int64_t last() {
    for (std::int64_t next = 0; ::read(ends_[0], &next, sizeof next) == sizeof next;) last_ = next;
    return last_;
  }
  void wait_for_first() {
    for (const auto end = std::chrono::steady_clock::now() + 30s;
         last() < 0 && std::chrono::steady_clock::now() < end;)
      std::this_thread::sleep_for(200us);
    ASSERT_GE(last_, 0) << "the ranks did not start";
  }

 private:
  std::array<int, 2> ends_{};
  std::int64_t last_ = -1;
};

// ---- what the processes do

/// Trains and saves until it is killed. Reports the updates of the last checkpoint that is complete, 0 at
/// first.
void save_forever(Run& run, Reports& reports) {
  const Group& g = run.group;
  const auto report = [&](std::int64_t steps) {
    if (run.world.is_main()) reports.write(steps);
  };
  const auto loaded = run.engine.load_checkpoint(g.dir);
  report(loaded ? loaded->steps : 0);
  for (;;) {
    run.update();
    run.engine.save_checkpoint(g.dir, {.async = g.async, .save_total_limit = keep});
    // A save begins when the one before is complete.
    report(run.engine.global_steps() - (g.async ? 1 : 0));
  }
}

/// Goes on from the last checkpoint, which has `steps` updates, for one update, and saves it.
void go_on(Run& run, std::int64_t steps) {
  const Group& g = run.group;
  const auto loaded = run.engine.load_checkpoint(g.dir);
  require((loaded ? loaded->steps : 0) == steps, Errc::config, "loaded another checkpoint than that of ",
          steps);
  run.update();
  run.engine.save_checkpoint(g.dir, {.async = g.async, .save_total_limit = keep});
  run.engine.wait_for_checkpoint();
}

void write_values(Run& run, const std::string& file) {
  const std::vector<float> values = lab::values_of(run.engine, run.net);
  if (run.world.is_main())
    std::ofstream(file, std::ios::binary)
        .write(reinterpret_cast<const char*>(values.data()),
               static_cast<std::streamsize>(values.size() * sizeof(float)));
}

// ---- what the test sees

/// Every checkpoint that is visible is complete, and each byte is as it was written. Returns the updates in
/// the one that a run would load: 0 without any.
std::int64_t verified(const std::string& dir) {
  if (!fs::exists(dir)) return 0;
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename();
    if (name == latest_file || name.front() == '.') continue;
    auto reader = CheckpointReader::open(entry.path());
    for (std::size_t f = 0; f < reader.index().files.size(); ++f) reader.verify(f);
    const EngineState state = parse_engine_state(reader.index().state, name);
    EXPECT_EQ(step_tag(state.updates.count.steps), name);
  }
  const auto tags = checkpoint_tags(dir);
  const auto latest = read_tag_file(dir, latest_file);
  EXPECT_TRUE(!latest || fs::exists(fs::path(dir) / *latest)) << *latest;
  // Killed before the first checkpoint had its file: the next process writes it.
  EXPECT_TRUE(latest || tags.size() <= 1);
  return latest ? *steps_of_tag(*latest) : tags.empty() ? 0 : *steps_of_tag(tags.front());
}

/// Files with temporary names.
std::size_t temporary_files(const std::string& dir) {
  std::size_t n = 0;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(dir, missing))
    n += entry.path().filename().string().front() == '.';
  return n;
}

/// Only checkpoints with the files of their index, and `latest`.
void expect_nothing_else(const std::string& dir) {
  std::set<std::string> expected{latest_file}, found;
  const auto tags = checkpoint_tags(dir);
  EXPECT_LE(tags.size(), keep);
  for (const std::string& tag : tags) {
    expected.insert(tag);
    expected.insert(tag + "/" + checkpoint_index_file);
    const auto reader = CheckpointReader::open(dir + "/" + tag);
    for (const StoredFile& f : reader.index().files) expected.insert(tag + "/" + f.name);
  }
  for (const auto& entry : fs::recursive_directory_iterator(dir))
    found.insert(fs::relative(entry.path(), dir));
  EXPECT_EQ(found, expected);
}

struct Counts {
  int kills = 0, within_a_save = 0, of_one_rank = 0;
};

/// One kill, and a group that goes on. Returns the updates of its checkpoint.
std::int64_t kill_and_go_on(const Group& group, std::mt19937& random, Counts& counts) {
  Reports reports;
  {
    Processes processes(group, [&](Run& run) { save_forever(run, reports); });
    reports.wait_for_first();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 40'000));
    const bool one = group.ranks > 1 && random() % 2 == 0;
    if (one) {
      processes.kill_one(random() % static_cast<unsigned>(group.ranks));
      ++counts.of_one_rank;
    } else {
      processes.kill_all();
    }
    for (const int status : processes.wait()) EXPECT_NE(status, 0);
  }
  ++counts.kills;
  counts.within_a_save += temporary_files(group.dir) > 0;
  const std::int64_t steps = verified(group.dir);
  EXPECT_GE(steps, reports.last()) << "a complete checkpoint is lost";
  Processes(group, [&](Run& run) { go_on(run, steps); }).expect_success();
  EXPECT_EQ(verified(group.dir), steps + 1);
  expect_nothing_else(group.dir);
  return steps + 1;
}

std::string uninterrupted(const Group& group, std::int64_t steps) {
  const Folder folder;
  Processes(group, [&](Run& run) {
    while (run.engine.global_steps() < steps) run.update();
    write_values(run, folder / "values");
  }).expect_success();
  return read_text_file(folder / "values");
}

std::string values_of_last(const Group& group) {
  const Folder folder;
  Processes(group, [&](Run& run) {
    run.engine.load_checkpoint(group.dir);
    write_values(run, folder / "values");
  }).expect_success();
  return read_text_file(folder / "values");
}

class CheckpointKills : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(CheckpointKills, LoseNoCheckpointAndLeaveNoFile) {
  constexpr int in_one_folder = 5;
  const char* const more = std::getenv("RZ_KILLS");
  const int wanted = more ? std::atoi(more) / 4 : 4;
  const auto [ranks, async] = GetParam();
  std::mt19937 random(static_cast<unsigned>(2 * ranks + async));
  Counts counts;
  while (counts.kills < wanted && !HasFailure()) {
    const Folder folder;
    const Group group{.ranks = ranks, .async = async, .dir = folder / "checkpoints"};
    std::int64_t steps = 0;
    for (int i = 0; i < in_one_folder && counts.kills < wanted && !HasFailure(); ++i) {
      SCOPED_TRACE(concat("kill ", counts.kills));
      steps = kill_and_go_on(group, random, counts);
    }
    EXPECT_TRUE(values_of_last(group) == uninterrupted(group, steps)) << "after " << steps << " updates";
  }
  EXPECT_TRUE(wanted < 20 || counts.within_a_save > wanted / 10) << "the instants miss the saves";
  std::cout << ranks << (ranks == 1 ? " rank, " : " ranks, ") << (async ? "async: " : "sync: ")
            << counts.kills << " kills, " << counts.of_one_rank << " of one rank alone, "
            << counts.within_a_save << " left temporary files\n";
}

INSTANTIATE_TEST_SUITE_P(, CheckpointKills, testing::Combine(testing::Values(1, 4), testing::Bool()),
                         [](const auto& i) {
                           return concat("On", std::get<0>(i.param), std::get<1>(i.param) ? "Async" : "Sync");
                         });

}  // namespace
}  // namespace rz
