#include "sharding/engine/signal_handler.h"

#include <signal.h>

#include <atomic>

#include "comm/core/error.h"

namespace rz {
namespace {

/// The state of the one SignalHandler. A signal reaches the process, and its handler has no argument by which
/// it could find an object.
struct RecordedSignals {
  std::atomic<bool> in_use{false}, user1{false}, terminate{false};
  std::atomic<int> unrecorded{0};  // objects of UnrecordedTermination; ranks may be threads
  struct sigaction before_user1 {
  }, before_terminate{};
};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler must not lock");

RecordedSignals& recorded_signals() {
  static constinit RecordedSignals state;
  return state;
}

/// Async-signal-safe.
void record_signal(int signal) {
  RecordedSignals& state = recorded_signals();
  (signal == SIGTERM ? state.terminate : state.user1).store(true, std::memory_order_relaxed);
}

void replace_action(int signal, const struct sigaction* action, struct sigaction* before) {
  if (::sigaction(signal, action, before) != 0) fail_errno("sigaction");
}

struct sigaction recording_action() {
  struct sigaction action {};
  action.sa_handler = record_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  return action;
}

}  // namespace

SignalHandler::SignalHandler() {
  RecordedSignals& state = recorded_signals();
  require(!state.in_use.exchange(true), Errc::invalid_argument,
          "this process has a SignalHandler already; a signal is recorded once per process");
  state.user1 = state.terminate = false;
  const struct sigaction action = recording_action();
  replace_action(SIGUSR1, &action, &state.before_user1);
  replace_action(SIGTERM, &action, &state.before_terminate);
}

SignalHandler::~SignalHandler() {
  RecordedSignals& state = recorded_signals();
  ::sigaction(SIGUSR1, &state.before_user1, nullptr);
  ::sigaction(SIGTERM, &state.before_terminate, nullptr);
  state.in_use = false;
}

ReceivedSignals SignalHandler::received() {
  RecordedSignals& state = recorded_signals();
  return {state.user1.exchange(false, std::memory_order_relaxed),
          state.terminate.load(std::memory_order_relaxed)};
}

UnrecordedTermination::UnrecordedTermination() {
  RecordedSignals& state = recorded_signals();
  if (state.unrecorded.fetch_add(1) == 0 && state.in_use)
    ::sigaction(SIGTERM, &state.before_terminate, nullptr);
}

UnrecordedTermination::~UnrecordedTermination() {
  RecordedSignals& state = recorded_signals();
  if (state.unrecorded.fetch_sub(1) > 1 || !state.in_use) return;
  const struct sigaction action = recording_action();
  ::sigaction(SIGTERM, &action, nullptr);
}

}  // namespace rz
