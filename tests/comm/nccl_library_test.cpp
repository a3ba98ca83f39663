// Libraries that are not the required NCCL, loaded for real. tests/emulated_gpu/nccl_backend_test.cpp tests a
// complete one.

#include <gtest/gtest.h>

#include <utility>

#include "comm/backends/nccl/api/api.h"
#include "comm/core/error.h"

namespace rz {
namespace {

void expect_refused(const std::string& file, const std::string& words) {
  try {
    static_cast<void>(nccl::load_nccl(file));
    ADD_FAILURE() << file << " was accepted";
  } catch (const Error& e) {
    const std::string said = e.what();
    EXPECT_EQ(e.code(), Errc::unsupported) << said;
    EXPECT_NE(said.find(words), std::string::npos) << said;
    EXPECT_NE(said.find("; install NCCL 2.18 or newer"), std::string::npos) << said;
    EXPECT_EQ(said.find('\n'), std::string::npos) << said;
  }
}

TEST(NcclLibrary, ThatIsMissingIsOneLine) {
  expect_refused("libnccl-of-nobody.so.2", "the NCCL backend could not load libnccl-of-nobody.so.2: ");
}

TEST(NcclLibrary, ThatIsSomethingElseIsOneLine) {
  expect_refused("libm.so.6", "libm.so.6 has no ncclGetVersion");
}

// Its version is read before the functions that it lacks.
TEST(NcclLibrary, ThatIsTooOldIsOneLine) {
  expect_refused(RZ_BINARY_DIR "/stubs/old_nccl.so",
                 "this machine has NCCL 2.7.8, but ringzero knows 2.18 and newer ones below 3");
}

}  // namespace
}  // namespace rz
