#include "tools/rzrun/agents/frames.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

namespace rz::rzrun {
namespace {

constexpr std::size_t header_bytes = 5;  // length of the payload, kind

template <class Archive, class J>
void fields_of_job(Archive& a, J& job) {
  auto& p = job.program;
  auto& o = job.output;
  a(job.ranks, p.command, p.role, p.bind, o.prefix, o.log_dir, job.max_restarts, p.variables,
    p.local_rank_at);
  a(o.files.of_all, o.files.of_rank, o.tees.of_all, o.tees.of_rank, o.prefix_tees, o.shown);
  a(job.local_ranks, job.first_rank, job.node, job.nodes, job.host, job.folder, job.slots);
  a(job.master_addr, job.master_port, job.run_id, job.launch, job.restarts);
}

template <class Archive, class E>
void fields_of_end(Archive& a, E& end) {
  a(end.rank, end.status.exit_code, end.status.signal, end.status.core_dumped, end.memory_kill, end.error,
    end.activity, end.stack, end.culprit, end.call, end.group, end.last_calls, end.state);
}

void set_non_blocking(int fd) {
  if (fd >= 0) ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

}  // namespace

void FrameParser::feed(std::string_view bytes) {
  bytes_.erase(0, std::exchange(used_, 0));
  bytes_ += bytes;
}

std::optional<std::string> FrameParser::text_before() {
  if (begun_) return {};
  auto end = bytes_.find(frames_begin);
  begun_ = end != std::string::npos;
  if (!begun_) end = bytes_.rfind(frames_begin.front());  // perhaps the start of frames_begin
  std::string text = bytes_.substr(0, end);
  bytes_.erase(0, begun_ ? end + frames_begin.size() : text.size());
  const bool is_other = !begun_ && bytes_.size() >= frames_begin.size();
  require(!is_other || !bytes_.starts_with(frames_begin.substr(0, frames_begin.size() - 2)), Errc::io,
          "its rzrun is of another version");
  if (is_other) text += std::exchange(bytes_, {});
  return text;
}

std::optional<Frame> FrameParser::next() {
  const std::string_view rest = std::string_view(bytes_).substr(used_);
  if (!begun_ || rest.size() < header_bytes) return {};
  std::uint32_t length = 0;
  std::memcpy(&length, rest.data(), sizeof length);
  const auto kind = static_cast<unsigned char>(rest[4]);
  require(length <= max_frame_bytes && kind >= 1 && kind <= static_cast<unsigned char>(Frame::Kind::last),
          Errc::io, "bytes that are no frame; is its rzrun of another version?");
  if (rest.size() < header_bytes + length) return {};
  used_ += header_bytes + length;
  return Frame{static_cast<Frame::Kind>(kind), std::string(rest.substr(header_bytes, length))};
}

void append_frame(std::string& bytes, Frame::Kind kind, std::string_view payload) {
  const auto length = static_cast<std::uint32_t>(payload.size());
  bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
  bytes.push_back(static_cast<char>(kind));
  bytes += payload;
}

std::string pack_job(const Job& job, const Variables& variables) {
  WireWriter writer;
  fields_of_job(writer, job);
  const auto secret = job.secret.bytes();
  writer(job.grace.count(), std::string(secret.begin(), secret.end()), variables);
  return std::move(writer.bytes);
}

Job unpack_job(std::string_view payload, Variables& variables) {
  WireReader reader(payload);
  Job job;
  std::int64_t grace_ms = 0;
  std::string secret;
  fields_of_job(reader, job);
  reader(grace_ms, secret, variables);
  reader.end();
  require(secret.size() == net::Secret::size, Errc::io, "a secret of ", secret.size(), " bytes");
  job.secret = net::Secret(std::span<const std::uint8_t, net::Secret::size>(
      reinterpret_cast<const std::uint8_t*>(secret.data()), net::Secret::size));
  job.grace = std::chrono::milliseconds(grace_ms);
  require(job.local_ranks >= 1 && job.local_ranks <= job.ranks && !job.program.command.empty(), Errc::io,
          "a job without ranks or program");
  return job;
}

std::string pack_end(const RankEnd& end) {
  WireWriter writer;
  fields_of_end(writer, end);
  return std::move(writer.bytes);
}

RankEnd unpack_end(std::string_view payload) {
  RankEnd end;
  WireReader reader(payload);
  fields_of_end(reader, end);
  reader.end();
  return end;
}

std::string with_number(int n) {
  WireWriter writer;
  writer(n);
  return std::move(writer.bytes);
}

FrameStream::FrameStream(UniqueFd in, UniqueFd out) : in_(std::move(in)), out_(std::move(out)) {
  set_non_blocking(in_.get());
  set_non_blocking(out_.get());
  in_ended_ = !in_, out_ended_ = !out_;
}

FrameStream::FrameStream(net::Stream socket) : socket_(std::move(socket)) { set_non_blocking(socket_.fd()); }

std::ptrdiff_t FrameStream::receive_some(char* to, std::size_t size) {
  return socket_ ? socket_.receive(to, size) : ::read(in_.get(), to, size);
}

std::ptrdiff_t FrameStream::send_some(const char* from, std::size_t size) {
  if (!socket_) return ::write(out_.get(), from, size);
  if (size) return socket_.send(from, size);
  return socket_.flush() ? 0 : -1;
}

void FrameStream::receive() {
  char bytes[1 << 16];
  for (int i = 0; !in_ended_ && (i < 8 || socket_.has_more()); ++i) {
    const auto n = receive_some(bytes, sizeof bytes);
    if (n > 0)
      parser.feed({bytes, static_cast<std::size_t>(n)});
    else if (n < 0 && errno == EINTR)
      continue;
    else if (n < 0 && errno == EAGAIN)
      return;
    else
      end_in(n == 0 ? "" : !socket_.error().empty() ? socket_.error() : std::strerror(errno));
  }
}

void FrameStream::end_in(const std::string& why) {
  error_ = why;
  in_ended_ = true;
  in_.close();
}

std::string FrameStream::why_ended() const {
  return error_.empty() ? "it has closed the connection" : "the connection has failed: " + error_;
}

void FrameStream::send(Frame::Kind kind, std::string_view payload) {
  if (!out_ended_) append_frame(queue_, kind, payload);
}

void FrameStream::flush() {
  while (!all_sent()) {
    const auto n = send_some(queue_.data() + sent_, queue_.size() - sent_);
    if (n >= 0)
      sent_ += static_cast<std::size_t>(n);
    else if (errno == EAGAIN)
      break;
    else if (errno != EINTR)
      out_ended_ = true;  // the end of the other direction is the reason
  }
  if (out_ended_) out_.close();
  if (out_ended_ || sent_ == queue_.size()) {
    queue_.clear();
    sent_ = 0;
  } else if (sent_ >= (std::size_t{1} << 20)) {
    queue_.erase(0, std::exchange(sent_, 0));
  }
}

void FrameStream::append_descriptors(std::vector<pollfd>& wait) const {
  const int in = socket_ ? socket_.fd() : in_.get(), out = socket_ ? socket_.fd() : out_.get();
  wait.push_back({in_ended_ ? -1 : in, POLLIN, 0});
  wait.push_back({all_sent() ? -1 : out, POLLOUT, 0});
}

void FrameStream::close() {
  in_ended_ = out_ended_ = true;
  socket_.close();
  in_.close();
  out_.close();
}

bool Silence::too_long() {
  const auto now = Clock::now();
  if (now - looked_ > 2 * beat_time) since_ = now;
  looked_ = now;
  return !is_announced_ && now - since_ > limit;
}

void OwnStop::look() {
  const auto before = std::exchange(looked_, Clock::now());
  if (looked_ - before <= Silence::limit) return;
  time_ = std::chrono::duration_cast<std::chrono::seconds>(looked_ - before);
  ended_ = looked_;
}

std::string OwnStop::text() const {
  if (!time_.count() || Clock::now() - ended_ > Silence::limit) return "";
  return concat("this rzrun was stopped for ", time_.count(), " s, and the other hosts wait ",
                Silence::limit.count(), " s for a sign of it; Ctrl-Z tells them, unlike SIGSTOP");
}

}  // namespace rz::rzrun
