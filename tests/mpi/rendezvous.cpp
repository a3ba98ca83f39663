// MPI hands on where rank 0 is, and a secret. This program owns MPI.

#include <cstdlib>

#include "comm/bootstrap/store_internal.h"
#include "tests/mpi/world.h"

namespace rz {
namespace {

using namespace std::chrono_literals;
using test::error_of;
using test::world_rank;
using test::world_size;

/// The ranks of this host, each as if it were alone on one.
LaunchInfo on_several_hosts() { return {world_rank(), world_size(), 0, 1, "mpi:", "openmpi", "a launch"}; }

/// A variable of one rank, in place of those of the secret that all have.
class OneHasVariable {
 public:
  OneHasVariable(int rank, const char* name, const char* value) : name_(name) {
    for (const char* other : {"RZ_SECRET", "RZ_SECRET_FILE", "RZ_INSECURE"}) ::unsetenv(other);
    if (world_rank() == rank) ::setenv(name, value, 1);
  }
  ~OneHasVariable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

TEST(MpiRendezvous, RanksMeetWithASecretAndMpiStays) {
  const OneHasVariable none(-1, "RZ_SECRET", "");
  for (int round = 0; round < 2; ++round) {
    const auto store = store_for_launch(on_several_hosts(), 30s, "native");
    EXPECT_FALSE(is_insecure(*store));
    store->set(concat(world_rank()), concat("round ", round));
    for (int r = 0; r < world_size(); ++r)
      EXPECT_EQ(store->get(concat(r), Deadline::after(30s)), concat("round ", round));
    ASSERT_EQ(MPI_Barrier(MPI_COMM_WORLD), MPI_SUCCESS);
  }
}

TEST(MpiRendezvous, ARankWithAnotherChoiceIsNamedOnAll) {
  const int last = world_size() - 1;
  const struct {
    const char *name, *value, *words;
  } cases[] = {
      {"RZ_SECRET", "a secret of this test, of more than 32 characters", " has RZ_SECRET, but rank 0"},
      {"RZ_INSECURE", "1", " has RZ_INSECURE, but rank 0 has no RZ_SECRET"}};
  for (const auto& [name, value, words] : cases) {
    const OneHasVariable one(last, name, value);
    const Error e = error_of([] { store_for_launch(on_several_hosts(), 30s, "native"); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_EQ(e.culprit(), last);
    EXPECT_NE(std::string(e.what()).find(concat("rank ", last, words)), std::string::npos) << e.what();
  }
  const OneHasVariable none(-1, "RZ_SECRET", "");
  const Error e =
      error_of([&] { store_for_launch(on_several_hosts(), 30s, world_rank() == last ? "mpi" : "native"); });
  EXPECT_NE(std::string(e.what()).find(concat("rank ", last, " has the backend 'mpi'")), std::string::npos)
      << e.what();
}

TEST(MpiRendezvous, AMissingRankIsNamedOnTheOthers) {
  const OneHasVariable none(-1, "RZ_SECRET", "");
  const int missing = world_size() - 1;
  ASSERT_EQ(MPI_Barrier(MPI_COMM_WORLD), MPI_SUCCESS);
  if (world_rank() != missing) {
    const Error e = error_of([] { store_for_launch(on_several_hosts(), 2s, "native"); });
    EXPECT_EQ(e.code(), Errc::timeout);
    EXPECT_EQ(e.culprit(), missing);
    EXPECT_NE(std::string(e.what()).find(concat("rank ", missing, " of ", world_size(), " did not arrive")),
              std::string::npos)
        << e.what();
  }
  ASSERT_EQ(MPI_Barrier(MPI_COMM_WORLD), MPI_SUCCESS);
}

}  // namespace
}  // namespace rz
