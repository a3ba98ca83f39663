#pragma once
/// Forwarding of the output of a rank to a log file, to the console, or as whole lines with a rank prefix.

#include <string>
#include <string_view>

namespace rz::rzrun {

/// Owns a file descriptor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  ~UniqueFd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();
  int release();

 private:
  int fd_ = -1;
};

/// The terminal, pipe or file of rzrun's own output. A slow reader must not keep rzrun from handling signals:
/// while write() waits it also polls `interrupt`, and drops the rest of the text if that becomes readable.
class Console {
 public:
  Console(int fd, int interrupt) : fd_(fd), interrupt_(interrupt) {}
  /// Returns false once the read end is closed.
  bool write(std::string_view text);

 private:
  int fd_;
  int interrupt_;
  bool closed_ = false;
};

/// Reads one stream of one rank from its pipe and forwards the data.
class Forwarder {
 public:
  /// Longer lines are split, so that a rank that prints no newline cannot exhaust memory.
  static constexpr std::size_t max_line_bytes = std::size_t{1} << 20;

  /// `pipe` is set to non-blocking mode. `console` may be null; `log` may be empty. With a prefix, output is
  /// forwarded in whole lines.
  Forwarder(UniqueFd pipe, Console* console, UniqueFd log, std::string prefix);
  int fd() const { return pipe_.get(); }
  bool open() const { return static_cast<bool>(pipe_); }
  /// Forwards at most one buffer of the available data, so that ranks take turns; closes the pipe at end of
  /// file.
  void pump();
  /// Forwards everything left in the pipe, then the last line even if it has no newline.
  void finish();

 private:
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
};

}  // namespace rz::rzrun
