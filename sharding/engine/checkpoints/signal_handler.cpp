#include "sharding/engine/checkpoints/signal_handler.h"

#include <signal.h>

#include <atomic>

#include "comm/core/error.h"
#include "comm/flight_dump.h"

namespace rz {
namespace {

/// The state of the one SignalHandler. A signal reaches the process, and its handler has no argument by which
/// it could find an object.
struct RecordedSignals {
  std::atomic<bool> in_use{false}, user1{false}, terminate{false}, interrupt{false};
  std::atomic<int> unrecorded{0};  // objects of UnrecordedTermination; ranks may be threads
  struct sigaction before_user1 {
  }, before_terminate{}, before_interrupt{};
};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler must not lock");

RecordedSignals& recorded_signals() {
  static constinit RecordedSignals state;
  return state;
}

/// Async-signal-safe.
void record_signal(int signal) {
  RecordedSignals& state = recorded_signals();
  if (signal == SIGINT) ::sigaction(SIGINT, &state.before_interrupt, nullptr);
  auto& recorded = signal == SIGINT ? state.interrupt : signal == SIGTERM ? state.terminate : state.user1;
  recorded.store(true, std::memory_order_relaxed);
  if (signal == SIGUSR1) flight::DumpOnSignal::request();
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

bool is_ignored(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_IGN;
}

/// SIGTERM, and SIGINT unless it was ignored or has arrived.
void record_termination() {
  const RecordedSignals& state = recorded_signals();
  const struct sigaction action = recording_action();
  ::sigaction(SIGTERM, &action, nullptr);
  if (!is_ignored(state.before_interrupt) && !state.interrupt) ::sigaction(SIGINT, &action, nullptr);
}

void restore_termination() {
  const RecordedSignals& state = recorded_signals();
  ::sigaction(SIGTERM, &state.before_terminate, nullptr);
  ::sigaction(SIGINT, &state.before_interrupt, nullptr);
}

}  // namespace

SignalHandler::SignalHandler() {
  RecordedSignals& state = recorded_signals();
  require(!state.in_use.exchange(true), Errc::invalid_argument,
          "this process has a SignalHandler already; a signal is recorded once per process");
  state.user1 = state.terminate = state.interrupt = false;
  const struct sigaction action = recording_action();
  replace_action(SIGINT, nullptr, &state.before_interrupt);
  replace_action(SIGUSR1, &action, &state.before_user1);
  replace_action(SIGTERM, &action, &state.before_terminate);
  record_termination();
}

SignalHandler::~SignalHandler() {
  RecordedSignals& state = recorded_signals();
  ::sigaction(SIGUSR1, &state.before_user1, nullptr);
  restore_termination();
  state.in_use = false;
}

ReceivedSignals SignalHandler::received() {
  RecordedSignals& state = recorded_signals();
  return {state.user1.exchange(false, std::memory_order_relaxed),
          state.terminate.load(std::memory_order_relaxed), state.interrupt.load(std::memory_order_relaxed)};
}

UnrecordedTermination::UnrecordedTermination() {
  RecordedSignals& state = recorded_signals();
  if (state.unrecorded.fetch_add(1) == 0 && state.in_use) restore_termination();
}

UnrecordedTermination::~UnrecordedTermination() {
  RecordedSignals& state = recorded_signals();
  if (state.unrecorded.fetch_sub(1) == 1 && state.in_use) record_termination();
}

}  // namespace rz
