#pragma once
/// Reads the file of a flight recorder (comm/os/flight_recorder.h), of a process that may have ended.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace rz::flight {

struct File;

/// A return address on the stack of a crash, in the numbers of its file; "?": no file has it.
struct Frame {
  std::string file;
  std::uint64_t address = 0;
};

/// How far a communicator got: its last collective whose end the host sees.
struct Position {
  std::string communicator;  ///< as messages have it: 'world'
  int size = 0;              ///< its ranks
  std::uint32_t number = 0;  ///< of the call
  std::string call;          ///< "all_reduce #204 (1024 f32, sum) of 'world' at train.cpp:88"
  bool running = false;      ///< it has not ended, or the communicator failed in it
};

struct Report {
  /// "in all_reduce #204 (1024 f32, sum) of 'world' at train.cpp:88, update 17, backward"; without a call
  /// that runs "after …", with the last calls. Empty if the process has recorded nothing.
  std::string activity;
  /// The living communicators' calls; if none lives, those of the ended ones.
  std::vector<Position> positions;
  int signal = 0;             ///< of a crash whose stack is known; 0: none
  std::uint64_t address = 0;  ///< of the crash
  std::vector<Frame> stack;   ///< innermost first
};

/// The recorder's file that the descriptor is; null if it cannot be read, or is none of this version.
std::unique_ptr<File> read_file(int fd);

/// Whatever the file holds. It comes from another process.
Report read_report(const File&);
/// The same of its bytes; an empty report if they are none of a file of this version.
Report read_report(std::span<const std::byte>);

}  // namespace rz::flight
