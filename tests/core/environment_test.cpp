// Runs: ci alone

#include "comm/core/environment.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <regex>

#include "comm/core/error.h"

namespace rz {
namespace {

/// A variable of this process while the object lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name_); }

 private:
  const char* name_;
};

TEST(Environment, DefaultsAreThoseOfTheHeader) {
  const Environment e = Environment::read();
  EXPECT_EQ(e.backend, "auto");
  EXPECT_EQ(e.transport, "auto");
  EXPECT_EQ(e.sockets, 2);
  EXPECT_EQ(e.congestion, "system");
  EXPECT_EQ(e.encryption, "on");
  EXPECT_TRUE(e.deterministic);
  EXPECT_EQ(e.reduction_order, ReductionOrder::rank);
  EXPECT_FALSE(e.allow_tf32);
  EXPECT_EQ(e.timeout_s, 600);
  EXPECT_EQ(e.rendezvous_timeout_s, 30);
}

TEST(Environment, EveryVariableIsRead) {
  const Variable variables[] = {
      {"RZ_TRANSPORT", "tcp"},           {"RZ_INTERFACE", "lo"},    {"RZ_SOCKETS", "3"},
      {"RZ_ALGORITHM", "ring"},          {"RZ_PORTS", "9000-9010"}, {"RZ_TIMEOUT_S", "1.5"},
      {"RZ_DETERMINISTIC", "0"},         {"RZ_HOST_ID", "here"},    {"RZ_RENDEZVOUS_TIMEOUT_S", "2"},
      {"RZ_WAIT_REPORT_S", "3.5"},       {"RZ_BACKEND", "mpi"},     {"RZ_ALLOW_TF32", "1"},
      {"RZ_THREAD_PLACEMENT", "0"},      {"NCCL_HOSTID", "h1"},     {"NCCL_MULTI_RANK_GPU_ENABLE", "1"},
      {"RZ_CONGESTION", "reno"},         {"RZ_ENCRYPTION", "off"},  {"RZ_TUNING", "table"},
      {"RZ_REDUCTION_ORDER", "pairwise"}};
  const Environment e = Environment::read();
  EXPECT_EQ(e.backend, "mpi");
  EXPECT_EQ(e.transport, "tcp");
  EXPECT_EQ(e.interface, "lo");
  EXPECT_EQ(e.sockets, 3);
  EXPECT_EQ(e.ports.first, 9000);
  EXPECT_EQ(e.ports.last, 9010);
  EXPECT_EQ(e.congestion, "reno");
  EXPECT_EQ(e.encryption, "off");
  EXPECT_EQ(e.algorithm, "ring");
  EXPECT_EQ(e.tuning, "table");
  EXPECT_FALSE(e.deterministic);
  EXPECT_EQ(e.reduction_order, ReductionOrder::pairwise);
  EXPECT_EQ(e.wait_report_s, 3.5);
  EXPECT_TRUE(e.allow_tf32);
  EXPECT_FALSE(e.thread_placement);
  EXPECT_EQ(e.timeout_s, 1.5);
  EXPECT_EQ(e.rendezvous_timeout_s, 2);
  EXPECT_EQ(e.host_id, "here");
  EXPECT_EQ(e.nccl_host_id, "h1");
  EXPECT_TRUE(e.nccl_shares_gpus);
}

TEST(Environment, AMisspeltVariableIsNamed) {
  const std::pair<const char*, const char*> wrong[] = {
      {"RZ_TIMEOUT", "RZ_TIMEOUT_S"}, {"RZ_RENDEZVOUS_TIMEOUT", "RZ_RENDEZVOUS_TIMEOUT_S"},
      {"RZ_BACKENDS", "RZ_BACKEND"},  {"RZ_INTERFCE", "RZ_INTERFACE"},
      {"RZ_LAUNC", "RZ_LAUNCH"},      {"RZ_ALGO", "RZ_ALGORITHM"},
      {"RZ_HOSTID", "RZ_HOST_ID"}};
  for (const auto& [name, right] : wrong) {
    const Variable variable(name, "5");
    try {
      Environment::read();
      ADD_FAILURE() << name << " was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::config);
      EXPECT_EQ(std::string(e.what()),
                concat(name, " is no variable of ringzero; did you mean ", right, "?"));
    }
  }
  for (const char* other :
       {"RZ_LAUNCH", "RZ_MY_PROGRAM", "RZ_KILLS", "RZ_SHARED", "RZ_WRITE_EXPECTED", "RZ_MAIN"}) {
    const Variable variable(other, "5");
    EXPECT_NO_THROW(Environment::read()) << other;
  }
}

TEST(Environment, AMalformedVariableIsNamed) {
  const std::pair<const char*, const char*> wrong[] = {{"RZ_SOCKETS", "0"},
                                                       {"RZ_SOCKETS", "2x"},
                                                       {"RZ_ALLOW_TF32", "yes"},
                                                       {"RZ_DETERMINISTIC", "maybe"},
                                                       {"RZ_TIMEOUT_S", "-1"},
                                                       {"RZ_RENDEZVOUS_TIMEOUT_S", ""},
                                                       {"RZ_REDUCTION_ORDER", "tree"},
                                                       {"RZ_PORTS", "9010-9000"},
                                                       {"RZ_PORTS", "0-9"},
                                                       {"RZ_PORTS", "9000-"},
                                                       {"RZ_PORTS", "1-65536"},
                                                       {"RZ_ENCRYPTION", "yes"}};
  for (const auto& [name, value] : wrong) {
    const Variable variable(name, value);
    try {
      Environment::read();
      ADD_FAILURE() << name << "=" << value << " was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::config);
      EXPECT_NE(std::string(e.what()).find(name), std::string::npos) << e.what();
    }
  }
}

TEST(Environment, EveryVariableIsDocumented) {
  std::ifstream file(RZ_SOURCE_DIR "/comm/core/environment.h");
  const std::string header(std::istreambuf_iterator<char>(file), {});
  EXPECT_GT(reportable_variables().size(), 80u);
  for (const std::string_view name : reportable_variables())
    EXPECT_TRUE(std::regex_search(header, std::regex(concat("\\b", name, "\\b")))) << name;
}

TEST(Environment, AnUnlistedVariableIsNotRead) {
  const Variable variable("WORLD_SIZE", "3");
  EXPECT_EQ(environment_variable("WORLD_SIZE"), "3");
  EXPECT_EQ(environment_variable("RZ_LAUNCH"), std::nullopt);
  EXPECT_THROW(environment_variable("WORLD_SIZES"), Error);
  EXPECT_THROW(environment_variable("PATH"), Error);
}

// A report is read by others than the job's owner.
TEST(Environment, ReportsDoNotShowWhatIdentifiesAJob) {
  const auto shown = [](std::string_view name) { return std::ranges::count(reportable_variables(), name); };
  for (const char* name : {"RZ_BACKEND", "RZ_RENDEZVOUS_TIMEOUT_S", "OMP_NUM_THREADS", "SLURM_JOB_ID"})
    EXPECT_EQ(shown(name), 1) << name;
  for (const char* name : {"RZ_LAUNCH", "RZ_SECRET", "RZ_SECRET_FILE", "MASTER_ADDR", "PMIX_SERVER_URI"})
    EXPECT_EQ(shown(name), 0) << name;
}

}  // namespace
}  // namespace rz
