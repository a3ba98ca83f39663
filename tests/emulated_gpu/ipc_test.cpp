// Memory of the emulated devices among processes. The test process itself makes no CUDA call, except where it
// must have memory before it forks.

#include "comm/core/deadline.h"
#include "tests/emulated_gpu/device_code.h"
// after CUDA's words
#include <gtest/gtest.h>
#include <signal.h>

#include <cstring>
#include <vector>

#include "comm/device/launch.h"
#include "comm/device/memory.h"
#include "tests/emulated_gpu/emulated_gpu.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using cuda::Grid;
using cuda::IpcHandle;
using cuda::runtime;
using cuda::success;

constexpr Device device{Device::cuda, 0};
constexpr std::size_t n = 700;  // neither whole pages nor whole alignments

__global__ void add_one(float* x, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) x[i] += 1;
}
void add_one_to(float* x, std::size_t count, const Stream& s) {
  launch("add_one", add_one, Grid{{64}, {32}, 0}, s, x, static_cast<int>(count));
}

struct Floats {
  explicit Floats(float value) {
    const std::vector<float> values(n, value);
    memcpy_async(data(), values.data(), n * sizeof(float), stream);
    stream.synchronize();
  }
  float* data() const { return reinterpret_cast<float*>(memory.get()); }
  std::vector<float> read() const {
    std::vector<float> values(n);
    memcpy_async(values.data(), data(), n * sizeof(float), stream);
    return values;
  }
  Stream stream = Stream::create(device);
  std::shared_ptr<std::byte> memory = allocate_on(device, n * sizeof(float));
};

void put_handle(Store& store, const char* key, const IpcHandle& handle) {
  store.set(key, std::string(reinterpret_cast<const char*>(handle.bytes), sizeof handle.bytes));
}
IpcHandle get_handle(Store& store, const char* key) {
  IpcHandle handle;
  const std::string bytes = store.get(key, Deadline::after(std::chrono::seconds(20)));
  std::memcpy(handle.bytes, bytes.data(), sizeof handle.bytes);
  return handle;
}
void await(Store& store, const char* key) {
  static_cast<void>(store.get(key, Deadline::after(std::chrono::seconds(20))));
}

/// Rank 0 has memory; rank 1 maps it and changes it, which leaves `after` in it.
template <class F>
void on_shared_memory(float after, const F& f) {
  test::expect_processes(2, [&](int rank, std::shared_ptr<Store> store) {
    if (rank == 0) {
      const Floats x(3);
      IpcHandle handle;
      ASSERT_EQ(runtime().ipc_get_handle(&handle, x.data()), success);
      put_handle(*store, "handle", handle);
      await(*store, "done");
      EXPECT_EQ(x.read(), std::vector<float>(n, after));
      return;
    }
    void* base = nullptr;
    ASSERT_EQ(runtime().ipc_open_handle(&base, get_handle(*store, "handle")), success);
    f(static_cast<float*>(base));
    EXPECT_EQ(runtime().ipc_close(base), success);
    store->set("done", "");
  });
}

TEST(EmulatedIpc, AnotherProcessReadsAndWrites) {
  on_shared_memory(4, [](float* x) {
    const Floats own(0);
    memcpy_async(own.data(), x, n * sizeof(float), own.stream);
    EXPECT_EQ(own.read(), std::vector<float>(n, 3));
    add_one_to(x, n, own.stream);
    own.stream.synchronize();
    Device owner;
    ASSERT_EQ(runtime().get_owner(&owner, x + n - 1), success);
    EXPECT_EQ(owner, device);
    EXPECT_NE(runtime().memset_async(x, 0, (n + 1) * sizeof(float), own.stream.native()), success);
    EXPECT_NE(runtime().free(x), success) << "it is the other's to free";
  });
}

TEST(EmulatedIpcDeathTest, OnlyKernelsAndCopiesTouchIt) {
  on_shared_memory(3, [](float* x) {
    EXPECT_DEATH(x[2] = 1, "host code touched byte 8 of 2800 bytes on cuda:0 of another process");
  });
}

TEST(EmulatedIpcDeathTest, AKernelThatLeavesItIsNamed) {
  on_shared_memory(3, [](float* x) {
    const auto run = [&] {
      const Stream s = Stream::create(device);
      add_one_to(x, 2000, s);
      s.synchronize();
    };
    EXPECT_DEATH(run(), "kernel add_one, block");
  });
}

TEST(EmulatedIpcDeathTest, NothingIsThereOnceItIsClosed) {
  on_shared_memory(3, [](float* x) {
    const auto run = [&] {
      if (runtime().ipc_close(x) != success || runtime().ipc_close(x) == success) return;
      const Stream s = Stream::create(device);
      add_one_to(x, n, s);
      s.synchronize();
    };
    EXPECT_DEATH(run(), "kernel add_one.* that were freed");
  });
}

TEST(EmulatedIpc, MemoryThatIsOpenElsewhereMayNotBeFreed) {
  const auto endings = test::run_processes(2, [](int rank, std::shared_ptr<Store> store) {
    if (rank == 1) {
      void* base = nullptr;
      EXPECT_EQ(runtime().ipc_open_handle(&base, get_handle(*store, "handle")), success);
      store->set("opened", "");
      return;
    }
    const Floats x(3);
    IpcHandle handle;
    EXPECT_EQ(runtime().ipc_get_handle(&handle, x.data()), success);
    put_handle(*store, "handle", handle);
    await(*store, "opened");
  });
  EXPECT_EQ(endings[0].signal, SIGABRT);
  EXPECT_EQ(endings[1].exit_code, 0) << endings[1].error;
}

TEST(EmulatedIpc, WhatCudaRefusesIsRefused) {
  test::expect_processes(2, [](int rank, std::shared_ptr<Store> store) {
    constexpr cuda::Status invalid_value = 1, device_uninitialized = 201;
    void* base = nullptr;
    if (rank == 1) {
      await(*store, "freed");
      EXPECT_EQ(runtime().ipc_open_handle(&base, get_handle(*store, "handle")), invalid_value);
      return;
    }
    IpcHandle handle;
    {
      const Floats x(3);
      const auto pinned = allocate_pinned(device, 100);
      EXPECT_EQ(runtime().ipc_get_handle(&handle, x.data() + 1), invalid_value);
      EXPECT_EQ(runtime().ipc_get_handle(&handle, pinned.get()), invalid_value);
      EXPECT_EQ(runtime().ipc_get_handle(&handle, x.data()), success);
      EXPECT_EQ(runtime().ipc_open_handle(&base, handle), device_uninitialized);
      EXPECT_EQ(runtime().ipc_close(x.data()), invalid_value);
    }
    put_handle(*store, "handle", handle);
    store->set("freed", "");
  });
}

TEST(EmulatedIpc, AForkSharesNothingWithItsParent) {
  const Floats x(3);
  test::expect_processes(2, [&](int, auto) {
    const Floats own(1);
    const Stream s = Stream::create(device);
    add_one_to(x.data(), n, s);
    add_one_to(own.data(), n, s);
    s.synchronize();
    EXPECT_EQ(own.read(), std::vector<float>(n, 2));
  });
  EXPECT_EQ(x.read(), std::vector<float>(n, 3));
}

}  // namespace
}  // namespace rz
