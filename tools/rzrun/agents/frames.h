#pragma once
/// The frames between rzrun and its agents, one of which runs on each host.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/core/error.h"
#include "comm/net/stream.h"
#include "comm/os/fd.h"
#include "tools/rzrun/ranks/ranks.h"

namespace rz::rzrun {

// ---- values as bytes, for the payloads: the same function lists the fields for both directions

class WireWriter {
 public:
  std::string bytes;

  template <class... T>
  void operator()(const T&... values) {
    (put(values), ...);
  }

 private:
  template <class T>
  void put(const T& value) {
    if constexpr (std::is_arithmetic_v<T>) {
      const auto wide = static_cast<std::int64_t>(value);
      bytes.append(reinterpret_cast<const char*>(&wide), sizeof wide);
    } else {
      put(static_cast<std::int64_t>(value.size()));
      for (const auto& part : value) put(part);
    }
  }
  void put(const std::string& text) {
    put(static_cast<std::int64_t>(text.size()));
    bytes += text;
  }
  template <class A, class B>
  void put(const std::pair<A, B>& both) {
    put(both.first);
    put(both.second);
  }
};

/// Errc::io if the bytes are not those of the values.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : rest_(bytes) {}

  template <class... T>
  void operator()(T&... values) {
    (get(values), ...);
  }
  void end() const { require(rest_.empty(), Errc::io, "a frame is too long"); }

 private:
  template <class T>
  void get(T& value) {
    if constexpr (std::is_arithmetic_v<T>) {
      std::int64_t wide = 0;
      std::memcpy(&wide, take(sizeof wide).data(), sizeof wide);
      value = static_cast<T>(wide);
    } else {
      value.clear();
      // Each part has 8 bytes or more, so a false count costs no memory.
      for (auto n = count(); n > 0; --n) get(value.emplace_back());
    }
  }
  void get(std::string& text) { text = take(static_cast<std::size_t>(count())); }
  template <class A, class B>
  void get(std::pair<A, B>& both) {
    get(both.first);
    get(both.second);
  }

  std::int64_t count() {
    std::int64_t n = 0;
    get(n);
    require(n >= 0 && static_cast<std::uint64_t>(n) <= rest_.size(), Errc::io, "a frame is cut off");
    return n;
  }
  std::string_view take(std::size_t n) {
    require(n <= rest_.size(), Errc::io, "a frame is cut off");
    const auto taken = rest_.substr(0, n);
    rest_.remove_prefix(n);
    return taken;
  }

  std::string_view rest_;
};

// ---- frames

struct Frame {
  enum class Kind : unsigned char {
    // From rzrun.
    job = 1,        ///< start the ranks
    signal,         ///< signal all processes of the ranks; SIGKILL: until none is left
    handlers,       ///< signal the processes that have a handler
    accepted,       ///< so many bytes of output were accepted
    output_closed,  ///< nobody reads the stream any more
    end,            ///< the job has ended: exit status, and a line
    // From the agent.
    hello,          ///< addresses of the host; its place: mpirun's rank, srun's node, or empty; as idle
    join,           ///< instead of hello: a host at which the user has started rzrun (join_request.h)
    output,         ///< whole lines of one stream
    exit,           ///< a rank has ended
    start_failure,  ///< the ranks cannot be started
    stop,           ///< a signal to the agent requests the end of the job
    leave,          ///< by this signal the host leaves a job that goes on without it
    left,           ///< all ranks have ended, and have left processes behind
    idle,           ///< no process is left; a free port for the next job, or 0 and why there is none
    // From both.
    message,    ///< a line for standard error
    suspended,  ///< this end is being stopped as by Ctrl-Z, and sends nothing until it goes on
    beat,       ///< sent every 2 s
    last = beat,
  };
  Kind kind;
  std::string payload;
};

/// An agent sends this first. What comes before is text, such as a shell's banner.
inline constexpr std::string_view frames_begin = "\x01rzrun agent 6\n";

/// Longer frames are an error: a job has a whole environment, output a line of 1 MiB or several.
inline constexpr std::size_t max_frame_bytes = std::size_t{16} << 20;

/// Takes frames out of a stream of bytes.
class FrameParser {
 public:
  /// For a stream whose first byte is that of a frame, as rzrun's.
  void begin() { begun_ = true; }
  void feed(std::string_view bytes);
  /// Up to frames_begin, the text before it; nullopt once frames have begun.
  std::optional<std::string> text_before();
  /// The next whole frame. Errc::io if the bytes are no frame.
  std::optional<Frame> next();

 private:
  std::string bytes_;
  std::size_t used_ = 0;
  bool begun_ = false;
};

/// Appends the frame as bytes.
void append_frame(std::string& bytes, Frame::Kind, std::string_view payload);

/// A job as the payload of a frame, with the environment to set before it starts.
std::string pack_job(const Job&, const Variables&);
Job unpack_job(std::string_view payload, Variables&);

std::string pack_end(const RankEnd&);
RankEnd unpack_end(std::string_view payload);

/// The payload of a frame that has a number.
std::string with_number(int);

/// Both directions of a connection, without waiting.
class FrameStream {
 public:
  /// Two pipes, or standard streams.
  FrameStream(UniqueFd in, UniqueFd out);
  /// A socket, encrypted or not.
  explicit FrameStream(net::Stream);

  FrameParser parser;
  /// Reads what is there, up to a few buffers, and what encryption has read ahead, of which poll() does not
  /// know.
  void receive();
  void send(Frame::Kind, std::string_view payload = {});
  /// Sends frames_begin.
  void send_begin() { queue_ += frames_begin; }
  void flush();
  void append_descriptors(std::vector<pollfd>&) const;
  /// True once nothing more can be received.
  bool ended() const { return in_ended_; }
  /// Why it has ended, as the end of a sentence about the peer.
  std::string why_ended() const;
  bool all_sent() const { return out_ended_ || (sent_ == queue_.size() && !socket_.unsent()); }
  void close();

 private:
  std::ptrdiff_t receive_some(char*, std::size_t);
  std::ptrdiff_t send_some(const char*, std::size_t);
  void end_in(const std::string& why);

  net::Stream socket_;  ///< or in_ and out_
  UniqueFd in_, out_;
  bool in_ended_ = false, out_ended_ = false;
  std::string queue_;
  std::size_t sent_ = 0;
  std::string error_;  ///< of receiving
};

/// How long a peer has been silent. A process that was itself stopped, or whose host was, accuses nobody.
class Silence {
 public:
  static constexpr std::chrono::seconds beat_time{2}, limit{10};

  void end() { since_ = Clock::now(), is_announced_ = false; }
  /// The peer has announced it.
  void announce() { is_announced_ = true; }
  /// True after `limit` of silence. Call it every beat_time.
  bool too_long();

 private:
  using Clock = std::chrono::steady_clock;
  bool is_announced_ = false;
  Clock::time_point since_ = Clock::now(), looked_ = since_;
};

/// Whether this process was itself stopped for longer than the other hosts wait for a sign of it, so that
/// their end is no fault of theirs.
class OwnStop {
 public:
  /// Call it every Silence::beat_time.
  void look();
  /// The others know of the stop that has just ended.
  void forgive() { looked_ = Clock::now(); }
  /// For a while after such a stop, a line about it; else empty.
  std::string text() const;

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point looked_ = Clock::now(), ended_{};
  std::chrono::seconds time_{};
};

}  // namespace rz::rzrun
