#pragma once
/// Where the output of a rank goes: a log file, the console, whole lines with the rank before them.

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

/// The terminal, pipe or file that rzrun itself writes to. A reader that is slow must not keep rzrun from
/// hearing signals: while it waits to write it also watches `interrupt`, and drops what is left if that
/// becomes readable.
class Console {
 public:
  Console(int fd, int interrupt) : fd_(fd), interrupt_(interrupt) {}
  /// False once nobody reads any more.
  bool write(std::string_view text);

 private:
  int fd_;
  int interrupt_;
  bool closed_ = false;
};

/// One stream of one rank: reads its pipe and passes on what comes.
class Forwarder {
 public:
  /// A line longer than this is cut in two, so that a rank without newlines cannot fill the memory.
  static constexpr std::size_t max_line_bytes = std::size_t{1} << 20;

  /// `pipe` is set non-blocking. `console` may be null; `log` may be empty. With a prefix, lines stay whole.
  Forwarder(UniqueFd pipe, Console* console, UniqueFd log, std::string prefix);
  int fd() const { return pipe_.get(); }
  bool open() const { return static_cast<bool>(pipe_); }
  /// Passes on what is there now; closes the pipe at its end. At most one buffer a call, so that ranks take
  /// turns.
  void pump();
  /// Everything that is in the pipe, then the last line even if it has no newline.
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
