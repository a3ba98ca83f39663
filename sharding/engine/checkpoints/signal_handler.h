#pragma once
/// The signals by which a launcher or a user requests that a run saves.

namespace rz {

/// Signals that this process has received.
struct ReceivedSignals {
  bool user1 = false;      ///< SIGUSR1: save, and go on; with RZ_FLIGHT it also writes the last calls
  bool terminate = false;  ///< SIGTERM: save, then stop
  bool interrupt = false;  ///< SIGINT, Ctrl-C: save, then stop
};

/// Records SIGTERM, SIGUSR1 and the first SIGINT as long as it exists, in place of what they did before; its
/// end restores that. As DistributedSignalHandler of Megatron-LM. A second SIGINT does what it did before,
/// which ends most programs. Blocked or ignored signals of the process stay blocked, and are recorded if
/// ignored, except for SIGINT, which shells ignore for what runs in the background. System calls that a
/// signal interrupts are restarted (SA_RESTART). A signal that is not received() before the end of the object
/// is dropped. A child of fork() has the handler, and a copy of what was recorded.
///
/// A signal belongs to a process: Errc::invalid_argument if it has a SignalHandler already. received() is
/// thread-safe.
class SignalHandler {
 public:
  SignalHandler();
  ~SignalHandler();
  SignalHandler(const SignalHandler&) = delete;
  SignalHandler& operator=(const SignalHandler&) = delete;

  /// Those since the last call; a SIGTERM or SIGINT is returned by every later call too.
  ReceivedSignals received();
};

/// While an object of this class exists, SIGTERM and SIGINT do what they did before the SignalHandler; there
/// may be none. For phases that have nothing to save, such as loading a checkpoint: they end at once.
class UnrecordedTermination {
 public:
  UnrecordedTermination();
  ~UnrecordedTermination();
  UnrecordedTermination(const UnrecordedTermination&) = delete;
};

}  // namespace rz
