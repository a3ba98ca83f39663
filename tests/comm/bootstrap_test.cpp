// Runs: alone

#include "comm/bootstrap.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>

#include "comm/bootstrap/local_rendezvous.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/net/listening.h"
#include "comm/net/socket.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

using Set = std::map<std::string, std::string>;

LaunchInfo place(const Set& variables) {
  return launch_info_from([&](const std::string& name) -> std::optional<std::string> {
    EXPECT_NO_THROW(environment_variable(name)) << "every variable is listed";
    const auto it = variables.find(name);
    if (it == variables.end()) return std::nullopt;
    return it->second;
  });
}

void expect(const LaunchInfo& p, const char* launcher, int rank, int size, int local_rank, int local_size,
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
// Hydra's; PALS sets them with its own.
const Set mpich{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}};
const Set pals{{"PALS_RANKID", "1"},    {"PALS_LOCAL_RANKID", "1"}, {"PALS_NODEID", "0"},
               {"PALS_APID", "11-22"},  {"PMI_RANK", "1"},          {"PMI_SIZE", "2"},
               {"PMI_LOCAL_RANK", "1"}, {"PMI_LOCAL_SIZE", "2"}};
const Set slurm{{"SLURM_PROCID", "5"},
                {"SLURM_NTASKS", "8"},
                {"SLURM_LOCALID", "1"},
                {"SLURM_NODEID", "1"},
                {"SLURM_JOB_ID", "123456"},
                {"SLURM_STEP_ID", "0"},
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
  EXPECT_NE(store_for_launch(place({})), nullptr);
}

TEST(Bootstrap, ReadsEachLauncher) {
  expect(place(torchrun), "torchrun", 3, 4, 1, 2, "10.0.0.1:29500");
  expect(place(openmpi), "openmpi", 1, 2, 1, 2, "job:pmix 1234");
  // Hosts without mpirun itself have variables of the step of Slurm that started its daemons.
  const Set two_hosts = with(openmpi, "OMPI_COMM_WORLD_SIZE", "4"),
            in_slurm = with(with(two_hosts, "SLURM_PROCID", "0"), "SLURM_STEP_NODELIST", "node1");
  for (const Set& here : {two_hosts, in_slurm}) expect(place(here), "openmpi", 1, 4, 1, 2, "mpi:");
  expect(place(with(with(openmpi, "MASTER_ADDR", "::1"), "MASTER_PORT", "5")), "openmpi", 1, 2, 1, 2,
         "[::1]:5");
  expect(place(with(mpich, "RZ_LAUNCH", "7")), "mpich", 0, 2, 0, 2, "job:RZ_LAUNCH 7");
  expect(place(pals), "pals", 1, 2, 1, 2, "job:pals 11-22");
  expect(place({{"MV2_COMM_WORLD_RANK", "1"},
                {"MV2_COMM_WORLD_SIZE", "2"},
                {"MV2_COMM_WORLD_LOCAL_RANK", "1"},
                {"MV2_COMM_WORLD_LOCAL_SIZE", "2"},
                {"RZ_LAUNCH", "7"}}),
         "mvapich", 1, 2, 1, 2, "job:RZ_LAUNCH 7");
  expect(place(slurm), "slurm", 5, 8, 1, 4, "node07:23456");
  expect(place({{"PMIX_RANK", "1"},
                {"PMIX_NAMESPACE", "slurm.pmix.7.0"},
                {"SLURM_PROCID", "1"},
                {"SLURM_NTASKS", "2"},
                {"SLURM_LOCALID", "1"},
                {"SLURM_TASKS_PER_NODE", "2"}}),
         "pmix", 1, 2, 1, 2, "job:pmix slurm.pmix.7.0");
}

// Slurm's mpi/pmi2 plugin sets PMI_FD, PMI_JOBID, PMI_RANK and PMI_SIZE beside srun's own variables.
const Set pmi2{{"PMI_FD", "6"},
               {"PMI_JOBID", "7.0"},
               {"PMI_RANK", "1"},
               {"PMI_SIZE", "2"},
               {"SLURM_PROCID", "1"},
               {"SLURM_NTASKS", "2"},
               {"SLURM_LOCALID", "1"},
               {"SLURM_NODEID", "0"},
               {"SLURM_JOB_ID", "7"},
               {"SLURM_STEP_ID", "0"},
               {"SLURM_STEP_TASKS_PER_NODE", "2"},
               {"SLURM_NODELIST", "n1"}};
// Flux's shell sets both sets for each task.
const Set flux{{"PMI_FD", "6"},          {"PMI_RANK", "3"},       {"PMI_SIZE", "4"},
               {"FLUX_TASK_RANK", "3"},  {"FLUX_JOB_SIZE", "4"},  {"FLUX_TASK_LOCAL_ID", "1"},
               {"FLUX_JOB_NNODES", "2"}, {"FLUX_JOB_ID", "f5XY"}, {"MASTER_ADDR", "n1"},
               {"MASTER_PORT", "5000"}};

TEST(Bootstrap, PmiOfSlurmAndFluxIsNotMpich) {
  EXPECT_EQ(place(flux).launcher, "flux");
  const LaunchInfo srun = place(pmi2);
  expect(srun, "slurm", 1, 2, 1, 2, srun.master);
  EXPECT_EQ(srun.master.rfind("job:", 0), 0u) << srun.master;
  const Set two_hosts = with(with(pmi2, "SLURM_STEP_TASKS_PER_NODE", "1(x2)"), "SLURM_NODEID", "1");
  expect(place(with(two_hosts, "SLURM_LOCALID", "0")), "slurm", 1, 2, 0, 1, "n1:20007");
}

TEST(Bootstrap, FluxIsUnderstood) {
  expect(place(flux), "flux", 3, 4, 1, 2, "n1:5000");
  const LaunchInfo one_node =
      place(with(with(without(without(flux, "MASTER_ADDR"), "MASTER_PORT"), "FLUX_JOB_NNODES", "1"),
                 "FLUX_TASK_LOCAL_ID", "3"));
  expect(one_node, "flux", 3, 4, 3, 4, one_node.master);
  EXPECT_EQ(one_node.master.rfind("job:", 0), 0u) << one_node.master;
}

TEST(Bootstrap, MpichUnderSlurmIsMpich) {
  Set hydra = pmi2;  // its proxies are started by srun
  hydra["SLURM_PROCID"] = "0", hydra["SLURM_NTASKS"] = "1", hydra["SLURM_STEP_TASKS_PER_NODE"] = "1";
  hydra["MPI_LOCALRANKID"] = "1", hydra["MPI_LOCALNRANKS"] = "2", hydra["RZ_LAUNCH"] = "7";
  expect(place(hydra), "mpich", 1, 2, 1, 2, "job:RZ_LAUNCH 7");
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
  EXPECT_EQ(host("n[1-2]m[3,4],x"), "n1m3:23456");
  EXPECT_EQ(host("n[1-2]m[3-4]"), "n1m3:23456");
  const auto tasks = [](const std::string& list, const std::string& node) {
    return place(with(with(slurm, "SLURM_STEP_TASKS_PER_NODE", list), "SLURM_NODEID", node)).local_size;
  };
  EXPECT_EQ(tasks("2(x3),5", "2"), 2);
  EXPECT_EQ(tasks("2(x3),5", "3"), 5);
  EXPECT_EQ(place(with(without(slurm, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_NTASKS_PER_NODE", "4")).local_size,
            4);
}

/// The error for these variables; it must contain every one of `words`.
void expect_error(const Set& variables, std::initializer_list<std::string> words) {
  test::expect_refused([&] { place(variables); }, Errc::config, words);
}

TEST(Bootstrap, RankZeroIsWhereSlurmsUserHasPutIt) {
  const std::string file = testing::TempDir() + "rz_bootstrap_hostfile";
  std::ofstream(file) << "# order of the ranks\n\nnode12\nnode07\n";
  const Set arbitrary = with(with(slurm, "SLURM_DISTRIBUTION", "arbitrary"), "SLURM_HOSTFILE", file);
  EXPECT_EQ(place(arbitrary).master, "node12:23456");
  EXPECT_EQ(place(with(arbitrary, "SLURM_PROCID", "0")).master, "node12:23456");
  std::ofstream(file) << "node09*4\n";
  EXPECT_EQ(place(arbitrary).master, "node09:23456");
  std::filesystem::remove(file);
  expect_error(arbitrary, {"SLURM_HOSTFILE", "arbitrary", "MASTER_ADDR=$(head -n 1 FILE)"});
  expect_error(without(arbitrary, "SLURM_HOSTFILE"), {"SLURM_HOSTFILE=''", "MASTER_ADDR"});
  const Set elsewhere = with(slurm, "SLURM_PROCID", "0");
  expect_error(elsewhere, {"rank 0 is on node 1", "SLURM_NODEID", "MASTER_ADDR"});
  EXPECT_EQ(place(with(with(elsewhere, "MASTER_ADDR", "gpu1"), "MASTER_PORT", "1")).master, "gpu1:1");
  EXPECT_EQ(place(with(with(slurm, "SLURM_DISTRIBUTION", "cyclic"), "SLURM_HOSTFILE", file)).master,
            "node07:23456");
}

TEST(Bootstrap, EachMissingVariableIsNamed) {
  for (const Set& full :
       {torchrun, with(without(without(openmpi, "PMIX_RANK"), "PMIX_NAMESPACE"), "RZ_LAUNCH", "7"), slurm})
    for (const auto& [name, value] : full) {
      const std::string launcher = place(full).launcher;
      if (name == "OMPI_COMM_WORLD_RANK" || name == "SLURM_PROCID" || name == "SLURM_NODEID" ||
          name == "SLURM_STEP_ID" || name == "RZ_LAUNCH")
        continue;
      expect_error(without(full, name), {name, "missing", launcher});
    }
  expect_error({{"RANK", "0"}}, {"WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "torchrun"});
  for (const auto& name : {"FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES"})
    expect_error(without(flux, name), {name, "missing", "flux"});
  expect_error(without(flux, "MASTER_ADDR"), {"MASTER_ADDR", "missing", "flux"});
  expect_error({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}, {"MPI_LOCALRANKID", "MPI_LOCALNRANKS", "mpich"});
  expect_error(with(openmpi, "MASTER_ADDR", "x"), {"MASTER_PORT"});
  expect_error(with(with(openmpi, "OMPI_COMM_WORLD_SIZE", "4"), "MASTER_PORT", "1"), {"MASTER_ADDR"});
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
  for (const auto& list : {"", "x", "2(x", "2(x3", "1(x1)", "2(x4),banana", "2,,5", "2(x0),5"})
    expect_error(with(slurm, "SLURM_STEP_TASKS_PER_NODE", list), {"SLURM_STEP_TASKS_PER_NODE"});
  expect_error(with(slurm, "SLURM_NODEID", "x"),
               {"SLURM_NODEID='x' is no node of SLURM_STEP_TASKS_PER_NODE"});
  expect_error(with(slurm, "SLURM_NODELIST", "node["), {"SLURM_NODELIST"});
  expect_error(with(flux, "FLUX_JOB_NNODES", "3"),
               {"FLUX_JOB_SIZE=4", "FLUX_JOB_NNODES=3", "LOCAL_WORLD_SIZE"});
}

TEST(Bootstrap, APartOfALaunchersEnvironmentIsRefused) {
  for (const char* name : {"ALPS_APP_PE", "MP_CHILD", "MPIRUN_RANK", "PMI_ID", "PMI_SIZE",
                           "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE", "MV2_COMM_WORLD_SIZE", "LOCAL_RANK"})
    expect_error({{name, "3"}}, {concat(name, "='3'"), "WORLD_SIZE", "group of one"});
}

TEST(Bootstrap, SlurmWithoutSrunIsAGroupOfOneOrRefused) {
  const Set batch = without(with(slurm, "SLURM_PROCID", "0"), "SLURM_STEP_ID");
  expect_error(batch, {"SLURM_NTASKS=8", "SLURM_STEP_ID is missing", "without srun"});
  expect_error(with(batch, "SLURM_STEP_ID", "4294967290"), {"SLURM_STEP_ID=4294967290", "without srun"});
  expect(place(with(batch, "SLURM_NTASKS", "1")), "none", 0, 1, 0, 1, "");
  expect(place(without(batch, "SLURM_NTASKS")), "none", 0, 1, 0, 1, "");
}

TEST(Bootstrap, AnAddressMayHaveTheBracketsOfAUrl) {
  EXPECT_EQ(place(with(torchrun, "MASTER_ADDR", "[::1]")).master, "[::1]:29500");
}

TEST(Bootstrap, NamesOfLoopbackAndOfNoHostAreKnown) {
  for (const char* text : {"0.0.0.0", "0", "::", "0:0:0:0:0:0:0:0"})
    EXPECT_TRUE(net::is_unspecified(text)) << text;
  for (const char* text : {"localhost", "127.0.0.1", "127.9.9.9", "::1", "ip6-localhost"})
    EXPECT_TRUE(net::names_loopback(text)) << text;
  for (const char* text : {"worker-0", "10.0.0.1", "fd00::1", "1", "localhosts", ""})
    EXPECT_FALSE(net::is_unspecified(text) || net::names_loopback(text)) << text;
}

TEST(Bootstrap, TheUnspecifiedAddressIsTheHostOfRankZero) {
  for (const char* any : {"0.0.0.0", "::"}) {
    const Set elsewhere = with(torchrun, "MASTER_ADDR", any), beside = with(elsewhere, "RANK", "1");
    expect_error(elsewhere, {concat("MASTER_ADDR=", any), "is each host itself", "rank 3 is not on"});
    EXPECT_EQ(place(beside).master, net::join_host_port(any, 29500));
    EXPECT_EQ(place(with(beside, "LOCAL_WORLD_SIZE", "4")).master, "localhost:29500");
  }
}

/// Calls `f` in a process `depth` generations below one that is named as a launcher's program.
test::Ending below_launcher(const char* name, int depth, const std::function<void()>& f) {
  return test::run_processes(1, [&](int, std::shared_ptr<Store>) {
    prctl(PR_SET_NAME, name);
    const std::function<void(int)> descend = [&](int left) {
      if (left == 0) return f();
      const auto ending = test::run_processes(1, [&](int, std::shared_ptr<Store>) { descend(left - 1); });
      require(ending[0].signal == 0 && ending[0].exit_code == 0, Errc::system, ending[0].error);
    };
    descend(depth);
  })[0];
}

TEST(Bootstrap, AJobWithoutANameIsThatOfItsLaunchersProcess) {
  std::string seen[2];
  for (std::string& master : seen) {
    const auto ending = below_launcher("hydra_pmi_proxy", 1, [&] {
      const LaunchInfo info = place(mpich);
      require(info.master == place(with(with(mpich, "PMI_RANK", "1"), "MPI_LOCALRANKID", "1")).master,
              Errc::system, "two ranks differ");
      fail(Errc::system, info.master);
    });
    const auto begin = ending.error.find("job:mpich/");
    ASSERT_NE(begin, std::string::npos) << ending.error;
    master = ending.error.substr(begin);
    EXPECT_NE(master.find("/pid:["), std::string::npos) << master;
  }
  EXPECT_NE(seen[0], seen[1]);
  expect_error(mpich, {"mpich", "RZ_LAUNCH", "container"});
}

// Ranks of one would join the other.
TEST(Bootstrap, JobsWithOneMasterAddressDifferByTheirLaunchersProcess) {
  const Set addressed = with(with(mpich, "MASTER_ADDR", "127.0.0.1"), "MASTER_PORT", "29500");
  std::string seen[2];
  for (std::string& launch : seen) {
    const auto ending = below_launcher("hydra_pmi_proxy", 1, [&] {
      const LaunchInfo info = place(addressed);
      require(info.master == "127.0.0.1:29500", Errc::system, info.master);
      require(info.launch == place(with(with(addressed, "PMI_RANK", "1"), "MPI_LOCALRANKID", "1")).launch,
              Errc::system, "two ranks differ");
      fail(Errc::system, "launch:", info.launch);
    });
    const auto begin = ending.error.find("launch:");
    ASSERT_NE(begin, std::string::npos) << ending.error;
    launch = ending.error.substr(begin);
    EXPECT_NE(launch.find("/pid:["), std::string::npos) << launch;
  }
  EXPECT_NE(seen[0], seen[1]);
  EXPECT_EQ(place(addressed).launch, "") << "without a launcher that is visible";
}

TEST(Bootstrap, GforkerStartsAllRanksOnThisHost) {
  const auto ending = below_launcher("mpiexec.gforker", 1, [] {
    const LaunchInfo info = place({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}});
    fail(Errc::system,
         concat(info.rank, ' ', info.size, ' ', info.local_rank, ' ', info.local_size, info.master));
  });
  EXPECT_NE(ending.error.find("1 2 1 2job:mpich/"), std::string::npos) << ending.error;
}

// ---- the private rendezvous ----

class PrivateRendezvous : public testing::Test, protected test::Folder {
 protected:
  void SetUp() override { setenv("XDG_RUNTIME_DIR", path().c_str(), 1); }
  bool empty() const { return std::filesystem::is_empty(path()); }
  LaunchInfo at(int rank, int size) const { return {rank, size, rank, size, "job:test/" + job_, "openmpi"}; }

  std::string job_ = "1";
};

TEST_F(PrivateRendezvous, RanksConnectAndCleanUp) {
  test::run_ranks(4, [&](int rank, std::shared_ptr<Store> sync) {
    for (int round = 0; round < 100; ++round) {  // the same job again and again
      const auto store = store_for_launch(at(rank, 4));
      store->set(concat("r", rank), concat(round, '/', rank));
      for (int r = 0; r < 4; ++r)
        EXPECT_EQ(store->get(concat("r", r), Deadline::after(seconds(60))), concat(round, '/', r));
      sync->add(concat("done", round), 1);
      while (sync->add(concat("done", round), 0) < 4) usleep(1000);
    }
  });
  EXPECT_TRUE(empty());
}

/// Two groups of two ranks, concurrently: the second starts once the first has connected.
void expect_two_groups(const std::function<Set(int group, int rank)>& variables) {
  test::run_ranks(4, [&](int r, std::shared_ptr<Store> sync) {
    const int group = r / 2, rank = r % 2;
    const Deadline soon = Deadline::after(seconds(20));
    if (group == 1) sync->get("first met", soon);
    const auto store = store_for_launch(place(variables(group, rank)), seconds(60));
    store->set(concat("r", rank), concat(group, '/', rank));
    for (int peer = 0; peer < 2; ++peer)
      EXPECT_EQ(store->get(concat("r", peer), soon), concat(group, '/', peer));
    sync->add("met", 1);
    if (group == 0 && sync->add("in the first", 1) == 2) sync->set("first met", "");
    while (sync->add("met", 0) < 4 && !soon.expired()) usleep(1000);
  });
}

TEST(Launches, AreNamedFromTheEnvironment) {
  const auto launch = [](const Set& set) { return place(set).launch; };
  EXPECT_EQ(launch(torchrun), "");
  EXPECT_EQ(launch(with(torchrun, "RZ_LAUNCH", "7f")), "RZ_LAUNCH 7f");
  const Set run = with(with(torchrun, "TORCHELASTIC_RUN_ID", "7f"), "TORCHELASTIC_RESTART_COUNT", "2");
  EXPECT_EQ(launch(run), "torchrun run 7f port 29500") << "each of several agents has a count of its own";
  EXPECT_EQ(launch(with(with(run, "WORLD_SIZE", "2"), "RANK", "1")), "torchrun run 7f port 29500 restart 2");
  EXPECT_EQ(launch(with(run, "RZ_LAUNCH", "9")), "torchrun run 7f port 29500 RZ_LAUNCH 9");
  EXPECT_EQ(launch(with(run, "RZ_LAUNCH", "7f")), "RZ_LAUNCH 7f") << "rzrun's";
  EXPECT_EQ(launch(openmpi), "pmix 1234");
  EXPECT_EQ(launch(with(with(slurm, "SLURM_STEP_ID", "3"), "SLURM_RESTART_COUNT", "1")),
            "slurm job 123456 step 3 restart 1");
  EXPECT_EQ(launch(flux), "flux job f5XY");
  EXPECT_EQ(launch({}), "");
}

/// Slurm's variables of a step of two ranks on two nodes, for the first rank.
Set step_of(int job, int step, int rank) {
  return {{"SLURM_PROCID", concat(rank)},  {"SLURM_NTASKS", "2"},
          {"SLURM_LOCALID", "0"},          {"SLURM_NODEID", concat(rank)},
          {"SLURM_JOB_ID", concat(job)},   {"SLURM_STEP_ID", concat(step)},
          {"SLURM_NODELIST", "127.0.0.1"}, {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"}};
}

TEST(Launches, TwoStepsOfOneJobStayApart) {
  expect_two_groups([](int group, int rank) { return step_of(getpid(), group, rank); });
}

TEST(Launches, ARestartedJobIsANewLaunch) {
  const Set last = step_of(getpid(), 0, 0);
  const auto dying = store_for_launch(place(last), seconds(60));
  const Error e = test::error_of([&] {
    store_for_launch(place(with(step_of(getpid(), 0, 1), "SLURM_RESTART_COUNT", "1")), milliseconds(300));
  });
  EXPECT_EQ(e.code(), Errc::rendezvous);
  for (const std::string& name : {concat("slurm job ", getpid(), " step 0 restart 0"),
                                  concat("slurm job ", getpid(), " step 0 restart 1")})
    EXPECT_NE(std::string(e.what()).find(name), std::string::npos) << name << " in: " << e.what();
  expect_two_groups([](int group, int rank) {
    return with(step_of(getpid(), 0, rank), "SLURM_RESTART_COUNT", concat(group + 1));
  });
}

/// torchrun's, with its agent at `port`; `local_size` of two ranks are here.
Set torchrun_at(int port, int rank, int local_size) {
  return {{"RANK", concat(rank)},
          {"WORLD_SIZE", "2"},
          {"LOCAL_RANK", concat(rank % local_size)},
          {"LOCAL_WORLD_SIZE", concat(local_size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", concat(port)},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"},
          {"TORCHELASTIC_RUN_ID", "none"},
          {"TORCHELASTIC_RESTART_COUNT", "0"}};
}

TEST(Launches, AnOccupiedPortIsRetried) {
  const UniqueFd other =
      net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());  // it accepts and never replies
  const int agent = net::local_address(other.get()).port() - 1;
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> sync) {
    const auto store = store_for_launch(place(torchrun_at(agent, rank, 1)), seconds(60));
    store->set(concat("r", rank), "here");
    EXPECT_EQ(store->get(concat("r", 1 - rank), Deadline::after(seconds(60))), "here");
    sync->add("done", 1);
    while (sync->add("done", 0) < 2) usleep(1000);
  });
}

TEST_F(PrivateRendezvous, RanksOfOneHostUnderTorchrunNeedNoPort) {
  const UniqueFd other = net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());
  const int agent = net::local_address(other.get()).port() - 1;
  EXPECT_EQ(place(torchrun_at(agent, 0, 2)).master.rfind("job:", 0), 0u);
  expect_two_groups([&](int group, int rank) { return torchrun_at(agent - group, rank, 2); });
  EXPECT_TRUE(empty());
}

TEST_F(PrivateRendezvous, TheDirectoryIsPrivate) {
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> sync) {
    const auto store = store_for_launch(at(rank, 2));
    int directories = 0;
    for (const auto& entry : std::filesystem::directory_iterator(path())) {
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

// A killed job leaves files; the next job with the same id starts with none of them.
TEST_F(PrivateRendezvous, FilesOfADeadJobAreIgnored) {
  const auto endings = test::run_processes(2, [&](int rank, std::shared_ptr<Store>) {
    const auto store = store_for_launch(at(rank, 2));
    store->set(concat("r", rank), "stale");
    store->get(concat("r", 1 - rank), Deadline::after(seconds(60)));
    kill(getpid(), SIGKILL);
  });
  for (const auto& e : endings) EXPECT_EQ(e.signal, SIGKILL) << e.error;
  EXPECT_FALSE(empty());
  test::expect_processes(2, [&](int rank, std::shared_ptr<Store>) {
    if (rank == 0) usleep(50'000);  // rank 1 finds the old one first
    const auto store = store_for_launch(at(rank, 2));
    store->set(concat("r", rank), "fresh");
    require(store->get(concat("r", 1 - rank), Deadline::after(seconds(60))) == "fresh", Errc::io,
            "read what was stale");
    store->add("done", 1);
    while (rank == 0 && store->add("done", 0) < 2) usleep(1000);
  });
  EXPECT_TRUE(empty());
}

// Every launch has a new name, so no later launch removes the files of one that was killed.
TEST_F(PrivateRendezvous, FilesOfKilledJobsAreRemoved) {
  test::run_processes(2, [&](int rank, std::shared_ptr<Store> files) {
    const auto store = store_for_launch(at(rank, 2));
    files->add("met", 1);
    while (files->add("met", 0) < 2) usleep(1000);
    kill(getpid(), SIGKILL);
  });
  EXPECT_FALSE(empty());
  job_ = "another";
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> sync) {
    const auto store = store_for_launch(at(rank, 2));
    sync->add("met", 1);
    while (sync->add("met", 0) < 2) usleep(1000);
  });
  EXPECT_TRUE(empty());
}

// Its writer may be alive.
TEST_F(PrivateRendezvous, FilesOfAnotherKernelAreKept) {
  const auto other = std::filesystem::path(path()) / concat("ringzero.", geteuid(), ".1");
  std::filesystem::create_directory(other);
  std::filesystem::permissions(other, std::filesystem::perms::owner_all);
  std::ofstream(other / "current") << "place\nanother boot\njob\n";
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> sync) {
    const auto store = store_for_launch(at(rank, 2));
    sync->add("met", 1);
    while (sync->add("met", 0) < 2) usleep(1000);
  });
  EXPECT_TRUE(std::filesystem::exists(other / "current"));
}

// A rank is killed while it removes the directory, or before it has written "current".
TEST_F(PrivateRendezvous, DirectoriesWithoutAProcessAreRemoved) {
  const auto other = std::filesystem::path(path()) / concat("ringzero.", geteuid(), ".1");
  for (const bool old : {false, true}) {
    std::filesystem::create_directory(other);
    std::filesystem::permissions(other, std::filesystem::perms::owner_all);
    std::filesystem::create_directory(other / "place");
    if (old)
      std::filesystem::last_write_time(other, std::filesystem::file_time_type::clock::now() - seconds(100));
    test::run_ranks(2, [&](int rank, std::shared_ptr<Store> sync) {
      const auto store = store_for_launch(at(rank, 2));
      sync->add("met", 1);
      while (sync->add("met", 0) < 2) usleep(1000);
    });
    EXPECT_EQ(std::filesystem::exists(other), !old);
    std::filesystem::remove_all(other);
  }
}

// The pid of a rank means nothing in the namespace of another one.
TEST_F(PrivateRendezvous, RanksMeetFromPidNamespacesOfTheirOwn) {
  const auto endings = test::run_processes(2, [&](int rank, std::shared_ptr<Store> done) {
    if (unshare(CLONE_NEWPID) != 0) {
      done->set("denied", "");
      return;
    }
    const auto ending = test::run_processes(1, [&](int, std::shared_ptr<Store>) {
      require(getpid() == 1, Errc::system, "no namespace of its own");
      const auto store = store_for_launch(at(rank, 2), seconds(60));
      store->set(concat("r", rank), "here");
      store->get(concat("r", 1 - rank), Deadline::after(seconds(60)));
      done->add("done", 1);
      while (done->add("done", 0) < 2) usleep(1000);
    });
    require(ending[0].signal == 0 && ending[0].exit_code == 0, Errc::system, ending[0].error);
  });
  for (const auto& e : endings) EXPECT_TRUE(e.signal == 0 && e.exit_code == 0) << e.error;
  EXPECT_TRUE(empty());
}

// Two jobs with one identity, or a program that a rank has started.
TEST_F(PrivateRendezvous, ASecondProcessWithTheSameRankIsRefused) {
  const auto endings = test::run_processes(2, [&](int rank, std::shared_ptr<Store> sync) {
    const auto store = store_for_launch(at(rank, 2));
    sync->add("met", 1);
    while (sync->add("met", 0) < 2) usleep(1000);
    const auto ending =
        test::run_processes(1, [&](int, std::shared_ptr<Store>) { store_for_launch(at(rank, 2)); });
    sync->add("tried", 1);
    while (sync->add("tried", 0) < 2) usleep(1000);
    fail(Errc::system, ending[0].error);
  });
  for (int rank = 0; rank < 2; ++rank) {
    const std::string& error = endings[static_cast<std::size_t>(rank)].error;
    EXPECT_NE(error.find(concat("is rank ", rank, " of job 'test/1' already")), std::string::npos) << error;
    EXPECT_NE(error.find("unset"), std::string::npos) << error;
  }
  EXPECT_TRUE(empty());
}

// Directories of one job are made and removed at once, by processes that do not wait for each other.
TEST_F(PrivateRendezvous, RacesOfOneJobLeaveNothing) {
  const auto endings = test::run_processes(4, [&](int, std::shared_ptr<Store>) {
    for (int round = 0; round < 50; ++round) try {
        store_for_launch(at(0, 2), milliseconds(0));
      } catch (const Error& e) {
        if (e.code() != Errc::timeout && e.code() != Errc::rendezvous) throw;
        const std::string text = e.what();
        if (text.find("already") == text.npos && text.find("did not register") == text.npos &&
            text.find("locked") == text.npos)
          throw;
      }
  });
  for (const auto& e : endings) EXPECT_TRUE(e.signal == 0 && e.exit_code == 0) << e.error;
  job_ = "the next";
  test::error_of([&] { store_for_launch(at(0, 2), milliseconds(0)); });
  EXPECT_TRUE(empty());
}

TEST(Rendezvous, AMissingTemporaryDirectoryIsNamed) {
  const auto endings = test::run_processes(1, [](int, std::shared_ptr<Store>) {
    unsetenv("XDG_RUNTIME_DIR");
    setenv("TMPDIR", "/nowhere/at/all", 1);
    store_for_launch({1, 2, 1, 2, "job:test", "openmpi"}, milliseconds(0));
  });
  EXPECT_NE(endings[0].error.find("TMPDIR='/nowhere/at/all'"), std::string::npos) << endings[0].error;
}

TEST_F(PrivateRendezvous, MissingRanksAreNamed) {
  test::run_ranks(4, [&](int rank, std::shared_ptr<Store>) {
    if (rank == 1 || rank == 3) return;
    if (rank == 2) {
      store_for_launch(at(rank, 4), milliseconds(2000));
      return;
    }
    try {
      store_for_launch(at(rank, 4), milliseconds(300));
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::timeout);
      EXPECT_EQ(e.culprit(), 1);
      EXPECT_NE(std::string(e.what()).find("rank 1 and 3"), std::string::npos) << e.what();
    }
  });
  try {
    store_for_launch(at(1, 2), milliseconds(50));
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::timeout);
    EXPECT_EQ(e.culprit(), 0);
    EXPECT_NE(std::string(e.what()).find("rank 0"), std::string::npos) << e.what();
  }
  EXPECT_TRUE(empty());
}

/// The name of a job's directory, by creating it once.
std::string directory_of(const LaunchInfo& info, const std::string& parent) {
  try {
    store_for_launch(info, milliseconds(20));
  } catch (const Error& e) {
    const std::string text = e.what();
    const auto begin = text.find(parent);
    return text.substr(begin, text.find(',', begin) - begin);
  }
  return "";
}

TEST_F(PrivateRendezvous, RanksMeetWhereAnotherUserHasTheName) {
  if (geteuid() != 0) GTEST_SKIP() << "a directory of another user needs root";
  const std::string theirs = directory_of(at(0, 2), path());
  for (const bool is_directory : {true, false}) {
    if (is_directory)
      std::filesystem::create_directory(theirs);
    else
      std::filesystem::create_symlink("/etc", theirs);
    ASSERT_EQ(lchown(theirs.c_str(), 12345, 12345), 0);
    for (int repeat = 0; repeat < 2; ++repeat)
      test::run_ranks(3, [&](int rank, std::shared_ptr<Store>) {
        const auto store = store_for_launch(at(rank, 3));
        store->add("met", 1);
        while (store->add("met", 0) < 3) usleep(1000);
        if (rank == 0) usleep(100000);  // the others have read it
      });
    std::filesystem::remove(theirs);
    EXPECT_TRUE(empty());
  }
}

TEST_F(PrivateRendezvous, ADirectoryThatIsOpenToOthersIsRefused) {
  const std::string made = directory_of(at(0, 2), path());
  ASSERT_FALSE(made.empty());
  std::filesystem::create_directory(made);
  chmod(made.c_str(), 0777);
  try {
    store_for_launch(at(0, 2), milliseconds(20));
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::rendezvous);
    EXPECT_NE(std::string(e.what()).find(made), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace rz
