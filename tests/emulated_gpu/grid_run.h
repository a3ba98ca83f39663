#pragma once
/// One launch of a kernel: its blocks run one after the other, a block's threads as fibers in turn.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/device/cuda_runtime.h"

namespace rz::emulated {

class GridRun {
 public:
  /// Copies the arguments. `seed` decides the order in which threads of a block run.
  GridRun(const cuda::KernelCall&, const cuda::Grid&, std::uint64_t seed);
  ~GridRun();

  enum class Progress {
    done,
    more,     ///< some blocks have run, others have not
    waiting,  ///< every runnable thread waits for memory to change
  };
  /// Runs at most `blocks` blocks. Throws Errc::system that names kernel, block and threads: when their waits
  /// form a deadlock, they exchange values with an absent thread, or wrote beyond shared memory.
  Progress run(std::size_t blocks);

  const std::string& name() const { return name_; }
  /// "layer_norm, block (3, 0, 0), thread (17, 0, 0)": the code that runs now, for a fault.
  static const char* where() noexcept;
  /// Names the code that runs next, if it is no kernel.
  [[gnu::format(printf, 1, 2)]] static void describe(const char* format, ...) noexcept;

  struct Thread;
  struct Block;

 private:
  friend class Exchange;
  friend struct Kernel;
  void begin_block();
  bool run_warp(std::size_t first, bool backwards);
  Progress run_block();
  void end_block();

  const std::string name_;
  const cuda::Grid grid_;
  std::vector<std::byte> packed_;
  void (*run_thread_)(const void*);
  std::uint64_t seed_;
  std::size_t next_ = 0;
  std::unique_ptr<Block> block_;
  bool in_block_ = false;
};

}  // namespace rz::emulated
