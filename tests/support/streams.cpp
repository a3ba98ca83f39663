#include "tests/support/streams.h"

#include <gtest/gtest.h>

#include <cstring>
#include <list>
#include <random>
#include <vector>

namespace rz::test {

namespace {

struct Message {
  CallSignature signature;
  std::uint64_t begin, end;  ///< in the stream
  bool by_reference;
};

/// The stream from `from` to `to` on `lane`; both ranks compute it.
std::vector<Message> plan(int from, int to, int lane, const Traffic& traffic) {
  std::mt19937 random(traffic.seed + static_cast<unsigned>(from * 1009 + to * 31 + lane));
  std::vector<Message> messages;
  std::uint64_t at = 0;
  for (int i = 0; i < traffic.messages; ++i) {
    // Sizes of every magnitude: tiny, small, around the bounds, long.
    const std::size_t limit = random() % 2 ? traffic.max_bytes : std::size_t{1} << random() % 14;
    const std::size_t size = 1 + random() % std::min(limit, traffic.max_bytes);
    CallSignature s;
    s.sequence = static_cast<std::uint32_t>(i);
    s.root = from;
    s.count = size;
    s.algorithm = static_cast<std::uint32_t>(lane);
    messages.push_back({s, at, at + size, random() % 2 == 0});
    at += size;
  }
  return messages;
}

/// The bytes of every stream: a random table of prime length that each stream enters elsewhere, so that whole
/// spans are written and compared at once.
constexpr std::size_t table_bytes = 65'521;
const std::vector<std::byte>& table() {
  static const std::vector<std::byte> bytes = [] {
    std::mt19937 random(99);
    std::vector<std::byte> b(table_bytes);
    for (auto& x : b) x = static_cast<std::byte>(random());
    return b;
  }();
  return bytes;
}

/// Calls f(expected, offset, n) for runs that cover `size` bytes of the stream from `position` on.
template <class F>
void for_runs(int from, int to, int lane, std::uint64_t position, std::size_t size, const F& f) {
  position += static_cast<unsigned>(from * 7919 + to * 997 + lane * 31);
  for (std::size_t done = 0; done < size;) {
    const std::size_t at = (position + done) % table_bytes, n = std::min(size - done, table_bytes - at);
    f(table().data() + at, done, n);
    done += n;
  }
}

class Sender {
 public:
  Sender(Transport& t, int rank, int peer, int lane, const Traffic& traffic)
      : t_(t), rank_(rank), peer_(peer), lane_(lane), messages_(plan(rank, peer, lane, traffic)) {}

  /// True while some transfer is unfinished.
  bool step() {
    const auto released = t_.released(peer_, Channel(lane_));
    EXPECT_LE(released, posted_);
    EXPECT_GE(released, released_) << "released() went back";
    released_ = released;
    // Released memory is overwritten, so that a rank which still reads it gets wrong data.
    while (!held_.empty() && held_.front().end <= released) {
      std::memset(held_.front().memory.get(), 0xee, held_.front().size);
      held_.pop_front();
    }
    if (next_ == messages_.size()) return released < posted_;
    const Message& m = messages_[next_];
    const std::size_t size = m.end - m.begin;
    if (!submitted_) {
      held_.push_back({m.by_reference ? t_.allocate(size)
                                      : std::shared_ptr<std::byte>(new std::byte[size],
                                                                   std::default_delete<std::byte[]>()),
                       size, m.end});
      for_runs(rank_, peer_, lane_, m.begin, size, [&](const std::byte* from, std::size_t at, std::size_t n) {
        std::memcpy(held_.back().memory.get() + at, from, n);
      });
      submitted_ = true;
    }
    const std::size_t done = posted_ - m.begin;
    posted_ += t_.post(peer_, Channel(lane_), m.signature, {held_.back().memory.get() + done, size - done});
    if (posted_ == m.end) ++next_, submitted_ = false;
    return true;
  }

 private:
  struct Held {
    std::shared_ptr<std::byte> memory;
    std::size_t size;
    std::uint64_t end;
  };
  Transport& t_;
  int rank_, peer_, lane_;
  std::vector<Message> messages_;
  std::size_t next_ = 0;
  bool submitted_ = false;
  std::uint64_t posted_ = 0, released_ = 0;
  std::list<Held> held_;
};

class Receiver {
 public:
  Receiver(Transport& t, int rank, int peer, int lane, const Traffic& traffic)
      : t_(t),
        rank_(rank),
        peer_(peer),
        lane_(lane),
        messages_(plan(peer, rank, lane, traffic)),
        random_(traffic.seed) {}

  bool step() {
    if (next_ == messages_.size()) return false;
    const Message& m = messages_[next_];
    if (random_() % 3 == 0) {
      into_.resize(std::min<std::size_t>(m.end - at_, 1 + random_() % 100'000));
      const std::size_t n = t_.receive(peer_, Channel(lane_), into_);
      check({into_.data(), n});
    } else {
      const ReceiveView in = t_.peek(peer_, Channel(lane_));
      if (in.bytes.empty()) return true;
      EXPECT_EQ(in.signature, m.signature) << where();
      EXPECT_LE(in.bytes.size(), m.end - at_) << where();
      const ReceiveView again = t_.peek(peer_, Channel(lane_));
      EXPECT_EQ(again.bytes.data(), in.bytes.data()) << where();
      // At times only a part.
      const std::size_t n =
          random_() % 4 ? in.bytes.size() : std::max<std::size_t>(1, in.bytes.size() / 128 * 64);
      check(in.bytes.first(n));
      t_.consume(peer_, Channel(lane_), n);
    }
    if (at_ == m.end) ++next_;
    return true;
  }

 private:
  void check(std::span<const std::byte> bytes) {
    for_runs(peer_, rank_, lane_, at_, bytes.size(),
             [&](const std::byte* expected, std::size_t at, std::size_t n) {
               if (std::memcmp(bytes.data() + at, expected, n) == 0 || failed_) return;
               failed_ = true;
               ADD_FAILURE() << "wrong bytes " << where();
             });
    at_ += bytes.size();
  }
  std::string where() const {
    return concat("at ", at_, " of lane ", lane_, " from rank ", peer_, " to rank ", rank_);
  }
  Transport& t_;
  int rank_, peer_, lane_;
  std::vector<Message> messages_;
  std::mt19937 random_;
  std::size_t next_ = 0;
  std::uint64_t at_ = 0;
  bool failed_ = false;
  std::vector<std::byte> into_;
};

}  // namespace

void exchange_streams(Transport& t, int rank, int size, const Traffic& traffic) {
  std::list<Sender> senders;
  std::list<Receiver> receivers;
  for (int peer = 0; peer < size; ++peer)
    for (int lane = 0; lane < channel_count; ++lane) {
      if (peer == rank) continue;
      senders.emplace_back(t, rank, peer, lane, traffic);
      receivers.emplace_back(t, rank, peer, lane, traffic);
    }
  drive(
      t,
      [&] {
        bool busy = false;
        for (int i = 0; i < 16; ++i) {
          busy = false;
          for (auto& s : senders) busy |= s.step();
          for (auto& r : receivers) busy |= r.step();
        }
        return !busy;
      },
      120);
}

std::unique_ptr<Transport> connect(int rank, int size, Store& store, const ConnectOptions& options,
                                   Deadline deadline) {
  const PeerInfo peers = exchange_peer_info(rank, size, store, options.group(), options.host_id, deadline);
  return connect_transport(peers, store, {.interface = options.interface, .congestion = options.congestion},
                           deadline);
}

void post_all(Transport& t, int peer, Channel lane, const CallSignature& signature,
              std::span<const std::byte> bytes) {
  drive(t, [&] {
    bytes = bytes.subspan(t.post(peer, lane, signature, bytes));
    return bytes.empty();
  });
}

void receive_all(Transport& t, int peer, Channel lane, std::span<std::byte> into) {
  drive(t, [&] {
    into = into.subspan(t.receive(peer, lane, into));
    return into.empty();
  });
}

void sync_all(Transport& t, int rank, int size) {
  std::byte b{1};
  for (int peer = 0; peer < size; ++peer)
    if (peer != rank) post_all(t, peer, Channel::point_to_point, {}, {&b, 1});
  for (int peer = 0; peer < size; ++peer)
    if (peer != rank) receive_all(t, peer, Channel::point_to_point, {&b, 1});
  drive(t, [&] {
    bool all = true;
    for (int peer = 0; peer < size; ++peer)
      all &= peer == rank || t.released(peer, Channel::point_to_point) > 0;
    return all;
  });
}

}  // namespace rz::test
