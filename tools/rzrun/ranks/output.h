#pragma once
/// Forwarding of the output of a rank to a log file, to the console, or as whole lines with a rank prefix.

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "comm/os/fd.h"

namespace rz::rzrun {

/// The terminal, pipe or file of rzrun's own output. Text is queued, and written as fast as it is read, so
/// that a slow reader neither loses text nor keeps rzrun from its ranks and its signals.
class Console {
 public:
  /// Forwarders wait while that much is queued, and so do ranks, once their pipes are full.
  static constexpr std::size_t max_pending_bytes = std::size_t{1} << 20;

  explicit Console(int fd);
  /// A queue without a stream: for take(), not for flush().
  Console() = default;
  /// Queues the text, however much is queued. Once the console is closed, text is dropped.
  void write(std::string_view text);
  /// Writes what the reader accepts without waiting.
  void flush();
  /// What is queued.
  std::string_view pending() const { return std::string_view(queue_).substr(written_); }
  bool full() const { return pending().size() >= max_pending_bytes; }
  /// The descriptor to poll for POLLOUT; -1 if nothing is queued.
  int fd() const { return pending().empty() ? -1 : descriptor(); }
  /// 0, or the errno of the write that failed; EPIPE if the read end is closed.
  int error() const { return error_; }
  /// Drops what is queued.
  void drop();
  /// Removes what is queued and returns it.
  std::string take();
  /// The queue accepts no more: its reader is gone.
  void close();

 private:
  enum class Kind { file, socket, non_blocking, other };

  int descriptor() const { return own_ ? own_.get() : fd_; }
  long write_some(std::string_view text);

  int fd_ = -1;
  UniqueFd own_;  // the same pipe or terminal, opened again so that others' writes to it may block
  Kind kind_ = Kind::other;
  std::string queue_;
  std::size_t written_ = 0;  // bytes at the front of the queue
  int error_ = 0;
};

/// True if both descriptors are of one pipe, socket or terminal, whose text one console must write, so that
/// lines stay whole.
bool is_same_stream(int fd, int other);

/// Reads one stream of one rank from its pipe and forwards the data.
class Forwarder {
 public:
  /// Longer lines are split, so that a rank that prints no newline cannot exhaust memory.
  static constexpr std::size_t max_line_bytes = std::size_t{1} << 20;

  /// `pipe` is set to non-blocking mode. `console` may be null; `log` may be empty. With a prefix, output is
  /// forwarded in whole lines.
  Forwarder(UniqueFd pipe, Console* console, UniqueFd log, std::string prefix);
  void set_console(Console* console) { console_ = console; }
  /// The descriptor to poll for POLLIN; -1 if nothing is to be read now.
  int fd() const { return waits() ? -1 : pipe_.get(); }
  /// Forwards at most one buffer of the available data, so that ranks take turns; closes the pipe at end of
  /// file. Does nothing while the console is full.
  void pump();
  /// Forwards everything left in the pipe, then the last line even if it has no newline.
  void finish();
  /// 0, or the errno of the write to the log file that failed, once; the log then ends there.
  int log_error() { return std::exchange(log_error_, 0); }

 private:
  bool waits() const { return console_ && console_->full(); }
  bool read_some();
  void forward(std::string_view bytes);
  void print_lines();
  void print_line(std::string_view line);
  void to_console(std::string_view text);

  UniqueFd pipe_;
  Console* console_;
  UniqueFd log_;
  std::string prefix_;
  std::string partial_;
  int log_error_ = 0;
};

}  // namespace rz::rzrun
