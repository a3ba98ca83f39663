// Needs: old_nccl

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
    const std::string message = e.what();
    EXPECT_EQ(e.code(), Errc::unsupported) << message;
    EXPECT_NE(message.find(words), std::string::npos) << message;
    EXPECT_NE(message.find("; install NCCL 2.18 or newer"), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

TEST(NcclLibrary, AMissingLibraryIsOneLine) {
  expect_refused("libnccl-missing.so.2", "the NCCL backend could not load libnccl-missing.so.2: ");
}

TEST(NcclLibrary, AForeignLibraryIsOneLine) {
  expect_refused("libm.so.6", "libm.so.6 has no ncclGetVersion");
}

// Its version is read before the functions that it lacks.
TEST(NcclLibrary, ATooOldLibraryIsOneLine) {
  expect_refused(RZ_BINARY_DIR "/stubs/old_nccl.so",
                 "this machine has NCCL 2.7.8, but ringzero supports 2.18 and later versions below 3");
}

}  // namespace
}  // namespace rz
