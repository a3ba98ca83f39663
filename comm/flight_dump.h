#pragma once
/// Files of the last calls, in the format of PyTorch's flight recorder.
///
/// FOLDER/flight_rank_R is a pickle of dicts, lists, texts and numbers, which torch's analyser reads (python
/// -m torch.distributed.flight_recorder.fr_trace FOLDER), and so does the program `flight`, without PyTorch.
/// For each living communicator of rank R it has the members and the last 256 collectives: number, kind,
/// counts, types, state and the program's line. Beside torch's keys it has "messages", the last sends and
/// receives, which torch's analyser would match among all ranks of a group, and "ringzero": update, phase,
/// and why the file was written. Calls of groups of more than 256 ranks that split() made are left out. There
/// is no clock in the path of a call, so times are 0.

#include <string>
#include <string_view>

namespace rz {

/// Writes the files of the ranks that this process has: one, unless ranks are threads. Each replaces its
/// predecessor at once. Makes the folder. Errc::io. Thread-safe, also while calls are in flight.
void dump_flight(const std::string& folder, const std::string& reason = "dump_flight()");

namespace flight {

struct File;

/// The same of a process that has ended, from the file of its recorder.
void dump(const File&, const std::string& folder, const std::string& reason);

/// The first failure of a communicator of this process: writes the files if RZ_FLIGHT names a folder. Later
/// calls do nothing. An error is dropped: the failure itself is thrown.
void dump_failure(std::string_view reason) noexcept;

/// While it exists, SIGUSR1 writes the files, also while all threads of the program wait, unless the program
/// has a handler of its own or ignores the signal. Nothing without RZ_FLIGHT. For programs; one at a time.
class DumpOnSignal {
 public:
  /// Errc::config if RZ_FLIGHT is no folder in which files can be made.
  DumpOnSignal();
  ~DumpOnSignal();
  DumpOnSignal(const DumpOnSignal&) = delete;

  /// For a handler of SIGUSR1 that replaces this one. Async-signal-safe. Nothing if there is no object.
  static void request() noexcept;

 private:
  bool active_ = false;
};

}  // namespace flight
}  // namespace rz
