#include "comm/backends/peer_windows.h"

#include <exception>
#include <optional>

#include "comm/backends/homes.h"
#include "comm/core/error.h"
#include "comm/core/rounding.h"

namespace rz {

namespace {

// CUDA maps memory in pieces of 2 MiB: a smaller window would show the peers what lies beside it.
constexpr std::size_t unit = std::size_t{2} << 20;

/// What a rank wants, and what it could offer for it.
struct Request {
  std::size_t bytes;
  WindowBook::Set unused;
};

/// What no rank uses.
WindowBook::Set agree(Backend& host, const peer::Seat& seat, const Request& mine) {
  const std::vector<Request> all = tell_all(host, mine, seat.size);
  WindowBook::Set unused = ~WindowBook::Set{0};
  for (const Request& r : all) unused &= r.unused;
  for (int r = 0; r < seat.size; ++r) {
    const std::size_t theirs = all[static_cast<std::size_t>(r)].bytes;
    if (theirs != mine.bytes)
      throw Error(Errc::mismatch,
                  str("rank ", seat.rank, " called allocate_symmetric of ", mine.bytes, " bytes, but rank ",
                      r, " of ", theirs, " bytes"),
                  r);
  }
  return unused;
}

}  // namespace

/// A window that is in use: its memory and its entry in the book stay.
struct PeerWindows::Lease {
  std::shared_ptr<WindowBook> book;
  std::shared_ptr<std::byte> memory;
  int window;
  ~Lease() { book->give_back(window); }
};

std::shared_ptr<std::byte> PeerWindows::allocate(Backend& host, std::size_t bytes) {
  const std::lock_guard one_at_a_time(mutex_);
  const WindowBook::Set unused = agree(host, group_.seat(), {bytes, book_->unused()});
  std::optional<int> window = book_->fitting(bytes, unused);
  if (window)
    book_->take(*window);
  else if (book_->full())
    return nullptr;
  else
    window = open(host, round_up(std::max<std::size_t>(bytes, 1), unit));
  const auto& memory = own_[static_cast<std::size_t>(*window)];
  const std::shared_ptr<Lease> lease(new Lease{book_, memory, *window});
  set_bytes(memory.get(), 0, bytes, group_.control());
  group_.control().synchronize();
  return {lease, memory.get()};
}

int PeerWindows::open(Backend& host, std::size_t bytes) {
  std::shared_ptr<std::byte> memory;
  std::exception_ptr none;
  try {
    memory = allocate_on(group_.device(), bytes);
  } catch (const Error&) {
    none = std::current_exception();
  }
  Parts parts;
  try {
    parts = group_.exchange(host, memory);
  } catch (const Error&) {
    if (none) std::rethrow_exception(none);  // says why
    throw;
  }
  own_.push_back(memory);
  windows_.push_back(parts);
  tell_kernels(static_cast<int>(own_.size()) - 1, parts);
  return book_->add(memory.get(), bytes);
}

void PeerWindows::tell_kernels(int window, const Parts& parts) const {
  const peer::Seat& seat = group_.seat();
  std::uint64_t addresses[peer::most_ranks] = {};
  for (std::size_t r = 0; r < parts.size(); ++r)
    addresses[r] = reinterpret_cast<std::uint64_t>(parts[r].get());
  copy_bytes(seat.arenas[seat.rank] + seat.layout.window(window), addresses, sizeof addresses,
             group_.control());
  group_.control().synchronize();
}

void PeerWindows::let_go() noexcept { windows_.clear(); }

void PeerWindows::keep() noexcept {
  static_cast<void>(new std::vector<Parts>(windows_));
  static_cast<void>(new std::vector<std::shared_ptr<std::byte>>(own_));
}

}  // namespace rz
