#include "comm/bootstrap.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "comm/core/error.h"
#include "comm/rendezvous_directory.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

using Set = std::map<std::string, std::string>;

Place place(const Set& variables) {
  return place_from([&](const std::string& name) -> std::optional<std::string> {
    const auto it = variables.find(name);
    if (it == variables.end()) return std::nullopt;
    return it->second;
  });
}

void expect(const Place& p, const char* launcher, int rank, int size, int local_rank, int local_size,
            const std::string& master) {
  EXPECT_EQ(p.launcher, launcher);
  EXPECT_EQ(p.rank, rank);
  EXPECT_EQ(p.size, size);
  EXPECT_EQ(p.local_rank, local_rank);
  EXPECT_EQ(p.local_size, local_size);
  EXPECT_EQ(p.master, master);
}

const Set torchrun{{"RANK", "3"},
                   {"WORLD_SIZE", "4"},
                   {"LOCAL_RANK", "1"},
                   {"LOCAL_WORLD_SIZE", "2"},
                   {"MASTER_ADDR", "10.0.0.1"},
                   {"MASTER_PORT", "29500"}};
const Set openmpi{{"OMPI_COMM_WORLD_RANK", "1"},
                  {"OMPI_COMM_WORLD_SIZE", "2"},
                  {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                  {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                  {"PMIX_RANK", "1"},
                  {"PMIX_NAMESPACE", "1234"}};
const Set slurm{{"SLURM_PROCID", "5"},
                {"SLURM_NTASKS", "8"},
                {"SLURM_LOCALID", "1"},
                {"SLURM_NODEID", "1"},
                {"SLURM_JOB_ID", "123456"},
                {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"},
                {"SLURM_NODELIST", "node[07-09,12],gpu1"}};

Set with(Set set, const std::string& name, const std::string& value) {
  set[name] = value;
  return set;
}
Set without(Set set, const std::string& name) {
  set.erase(name);
  return set;
}

TEST(Bootstrap, NothingIsAGroupOfOne) {
  expect(place({{"HOME", "/root"}, {"MASTER_ADDR", "x"}}), "none", 0, 1, 0, 1, "");
  EXPECT_NE(store_for(place({})), nullptr);
}

TEST(Bootstrap, ReadsEachLauncher) {
  expect(place(torchrun), "torchrun", 3, 4, 1, 2, "10.0.0.1:29500");
  expect(place(openmpi), "openmpi", 1, 2, 1, 2, "job:openmpi/1234");
  expect(place(with(with(openmpi, "MASTER_ADDR", "::1"), "MASTER_PORT", "5")), "openmpi", 1, 2, 1, 2,
         "[::1]:5");
  expect(place({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}}),
         "mpich", 0, 2, 0, 2, "job:mpich/" + launcher_process());
  expect(place(slurm), "slurm", 5, 8, 1, 4, "node07:23456");
  expect(place({{"PMIX_RANK", "1"},
                {"PMIX_NAMESPACE", "slurm.pmix.7.0"},
                {"SLURM_PROCID", "1"},
                {"SLURM_NTASKS", "2"},
                {"SLURM_LOCALID", "1"},
                {"SLURM_TASKS_PER_NODE", "2"}}),
         "pmix", 1, 2, 1, 2, "job:pmix/slurm.pmix.7.0");
}

TEST(Bootstrap, TorchrunComesBeforeTheLauncherAroundIt) {
  Set both = torchrun;
  both.insert(slurm.begin(), slurm.end());
  EXPECT_EQ(place(both).launcher, "torchrun");
}

TEST(Bootstrap, TorchrunsAgentKeepsItsPort) {
  EXPECT_EQ(place(with(torchrun, "TORCHELASTIC_USE_AGENT_STORE", "True")).master, "10.0.0.1:29501");
}

TEST(Bootstrap, SlurmsListsAreUnderstood) {
  const auto host = [](const std::string& list) { return place(with(slurm, "SLURM_NODELIST", list)).master; };
  EXPECT_EQ(host("a,b"), "a:23456");
  EXPECT_EQ(host("node3"), "node3:23456");
  EXPECT_EQ(host("rack[2,4]-ib,x"), "rack2-ib:23456");
  const auto tasks = [](const std::string& list, const std::string& node) {
    return place(with(with(slurm, "SLURM_STEP_TASKS_PER_NODE", list), "SLURM_NODEID", node)).local_size;
  };
  EXPECT_EQ(tasks("2(x3),5", "2"), 2);
  EXPECT_EQ(tasks("2(x3),5", "3"), 5);
  EXPECT_EQ(place(with(without(slurm, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_NTASKS_PER_NODE", "4")).local_size,
            4);
}

/// The error that these variables give; it must name every one of `words`.
void expect_error(const Set& variables, std::initializer_list<const char*> words) {
  try {
    place(variables);
    ADD_FAILURE() << "no error about " << *words.begin();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config);
    for (const char* word : words)
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << word << " in: " << e.what();
  }
}

TEST(Bootstrap, EachMissingVariableIsNamed) {
  for (const Set& full :
       {torchrun, without(without(openmpi, "PMIX_RANK"), "PMIX_NAMESPACE"), without(slurm, "SLURM_JOB_ID")})
    for (const auto& [name, value] : full) {
      const std::string launcher = place(full).launcher;
      if (name == "OMPI_COMM_WORLD_RANK" || name == "SLURM_PROCID" || name == "SLURM_NODEID") continue;
      expect_error(without(full, name), {name.c_str(), "missing", launcher.c_str()});
    }
  expect_error({{"RANK", "0"}}, {"WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "torchrun"});
  expect_error({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}, {"MPI_LOCALRANKID", "MPI_LOCALNRANKS", "mpich"});
  expect_error(with(openmpi, "MASTER_ADDR", "x"), {"MASTER_PORT"});
  expect_error(with(openmpi, "OMPI_COMM_WORLD_SIZE", "4"), {"MASTER_ADDR", "2 of 4"});
}

TEST(Bootstrap, EachMalformedVariableIsNamed) {
  for (const auto& name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"})
    for (const auto& value : {"", "x", "1x", "-1", "99999999999", " 1"})
      expect_error(with(torchrun, name, value), {name, "torchrun"});
  expect_error(with(torchrun, "RANK", "4"), {"RANK=4", "size"});
  expect_error(with(torchrun, "LOCAL_RANK", "2"), {"LOCAL_RANK=2"});
  expect_error(with(torchrun, "LOCAL_WORLD_SIZE", "5"), {"LOCAL_WORLD_SIZE=5"});
  expect_error(with(torchrun, "WORLD_SIZE", "0"), {"WORLD_SIZE='0'"});
  expect_error(with(torchrun, "MASTER_PORT", "65536"), {"MASTER_PORT='65536'"});
  for (const auto& list : {"", "x", "2(x", "2(x3", "1(x1)"})
    expect_error(with(slurm, "SLURM_STEP_TASKS_PER_NODE", list), {"SLURM_STEP_TASKS_PER_NODE"});
  expect_error(with(slurm, "SLURM_NODELIST", "node["), {"SLURM_NODELIST"});
}

// ---- the private rendezvous ----

class PrivateRendezvous : public testing::Test {
 protected:
  void SetUp() override {
    if (!mkdtemp(runtime_.data())) fail_errno("mkdtemp");
    setenv("XDG_RUNTIME_DIR", runtime_.c_str(), 1);
  }
  void TearDown() override { std::filesystem::remove_all(runtime_); }
  bool empty() const { return std::filesystem::is_empty(runtime_); }
  Place at(int rank, int size) const { return {rank, size, rank, size, "job:test/" + job_, "openmpi"}; }

  std::string job_ = "1";
  std::string runtime_ = (std::filesystem::temp_directory_path() / "rz-runtime-XXXXXX").string();
};

TEST_F(PrivateRendezvous, RanksMeetAndTidyUp) {
  test::run_ranks(4, [&](int rank, std::shared_ptr<Store> sync) {
    for (int round = 0; round < 100; ++round) {  // the same job again and again
      const auto store = store_for(at(rank, 4));
      store->set(str("r", rank), str(round, '/', rank));
      for (int r = 0; r < 4; ++r)
        EXPECT_EQ(store->get(str("r", r), Deadline::after(seconds(10))), str(round, '/', r));
      sync->add(str("done", round), 1);
      while (sync->add(str("done", round), 0) < 4) usleep(1000);
    }
  });
  EXPECT_TRUE(empty());
}

TEST_F(PrivateRendezvous, TheDirectoryIsPrivate) {
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> sync) {
    const auto store = store_for(at(rank, 2));
    int directories = 0;
    for (const auto& entry : std::filesystem::directory_iterator(runtime_)) {
      struct stat s {};
      stat(entry.path().c_str(), &s);
      EXPECT_EQ(s.st_mode & 0777, 0700u);
      ++directories;
    }
    EXPECT_EQ(directories, 1);
    sync->add("done", 1);
    while (sync->add("done", 0) < 2) usleep(1000);
  });
}

// A job whose ranks were killed leaves files; the next job of the same id starts afresh.
TEST_F(PrivateRendezvous, WhatADeadJobLeftIsPassedOver) {
  const auto endings = test::run_processes(2, [&](int rank, std::shared_ptr<Store>) {
    const auto store = store_for(at(rank, 2));
    store->set(str("r", rank), "stale");
    store->get(str("r", 1 - rank), Deadline::after(seconds(10)));
    kill(getpid(), SIGKILL);
  });
  for (const auto& e : endings) EXPECT_EQ(e.signal, SIGKILL) << e.error;
  EXPECT_FALSE(empty());
  test::expect_processes(2, [&](int rank, std::shared_ptr<Store>) {
    if (rank == 0) usleep(50'000);  // rank 1 finds the old one first
    const auto store = store_for(at(rank, 2));
    store->set(str("r", rank), "fresh");
    require(store->get(str("r", 1 - rank), Deadline::after(seconds(10))) == "fresh", Errc::io,
            "read what was stale");
    store->add("done", 1);
    while (rank == 0 && store->add("done", 0) < 2) usleep(1000);
  });
  EXPECT_TRUE(empty());
}

TEST_F(PrivateRendezvous, MissingRanksAreNamed) {
  test::run_ranks(4, [&](int rank, std::shared_ptr<Store>) {
    if (rank == 1 || rank == 3) return;
    if (rank == 2) {
      store_for(at(rank, 4), milliseconds(2000));
      return;
    }
    try {
      store_for(at(rank, 4), milliseconds(300));
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::timeout);
      EXPECT_NE(std::string(e.what()).find("rank 1 and 3"), std::string::npos) << e.what();
    }
  });
  try {
    store_for(at(1, 2), milliseconds(50));
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::timeout);
    EXPECT_NE(std::string(e.what()).find("rank 0"), std::string::npos) << e.what();
  }
  EXPECT_TRUE(empty());
}

TEST_F(PrivateRendezvous, ADirectoryThatIsOpenToOthersIsRefused) {
  std::string made;
  {
    const auto store = store_for({0, 1, 0, 1, "", ""});
    // Find the name by making it once.
    try {
      store_for(at(0, 2), milliseconds(20));
    } catch (const Error& e) {
      const std::string text = e.what();
      const auto begin = text.find(runtime_);
      made = text.substr(begin, text.find(',', begin) - begin);
    }
  }
  ASSERT_FALSE(made.empty());
  std::filesystem::create_directory(made);
  chmod(made.c_str(), 0777);
  try {
    store_for(at(0, 2), milliseconds(20));
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::rendezvous);
    EXPECT_NE(std::string(e.what()).find(made), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace rz
