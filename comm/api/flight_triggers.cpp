// When the files of the last calls are written: after a failure, and at a signal.

#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>

#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/flight_dump.h"
#include "comm/os/helper_thread.h"
#include "comm/os/process.h"

namespace rz::flight {

namespace {

/// fork_generation() + 1 of the process that has written its failure.
constinit std::atomic<std::uint64_t> failure_written{0};

constinit std::atomic<bool> dumps_on_signal{false}, stops{false};
sem_t requested;
struct sigaction before_dumps;
std::thread* dumper = nullptr;

void handle_signal(int) { DumpOnSignal::request(); }

void write_requested(const std::string& folder) noexcept {
  for (;;) {
    while (::sem_wait(&requested) != 0) {
    }
    if (stops.load()) return;
    try {
      dump_flight(folder, "SIGUSR1");
    } catch (const std::exception&) {  // the next request tries again
    }
  }
}

}  // namespace

void dump_failure(std::string_view reason) noexcept try {
  const std::string& folder = environment().flight;
  const std::uint64_t now = fork_generation() + 1;
  if (!folder.empty() && failure_written.exchange(now) != now) dump_flight(folder, std::string(reason));
} catch (const std::exception&) {
}

DumpOnSignal::DumpOnSignal() {
  const std::string& folder = environment().flight;
  if (folder.empty()) return;
  std::error_code ignored;
  std::filesystem::create_directories(folder, ignored);
  require(::access(folder.c_str(), W_OK | X_OK) == 0, Errc::config, "RZ_FLIGHT: ", folder,
          ": cannot be written: ", std::strerror(errno));
  struct sigaction own {};
  ::sigaction(SIGUSR1, nullptr, &before_dumps);
  ::sem_init(&requested, 0, 0);
  stops.store(false);
  dumper = new std::thread(helper_thread([folder] {
    name_this_thread("rz-flight");
    write_requested(folder);
  }));
  active_ = true;
  dumps_on_signal.store(true);
  if ((before_dumps.sa_flags & SA_SIGINFO) || before_dumps.sa_handler != SIG_DFL) return;
  own.sa_handler = handle_signal;
  own.sa_flags = SA_RESTART;
  ::sigaction(SIGUSR1, &own, nullptr);
}

DumpOnSignal::~DumpOnSignal() {
  if (!active_) return;
  ::sigaction(SIGUSR1, &before_dumps, nullptr);
  dumps_on_signal.store(false);
  stops.store(true);
  ::sem_post(&requested);
  dumper->join();
  delete std::exchange(dumper, nullptr);
}

void DumpOnSignal::request() noexcept {
  const int saved = errno;
  if (dumps_on_signal.load(std::memory_order_relaxed)) ::sem_post(&requested);
  errno = saved;
}

}  // namespace rz::flight
