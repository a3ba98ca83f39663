#include "comm/bootstrap/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <optional>

#include "comm/net/handshake.h"
#include "comm/os/process.h"

namespace rz {

namespace {

/// The ranks from `first` on that have not published. Waits at most 1 ms for each.
std::vector<int> missing_ranks(int first, int size, Store& store, const std::string& what) {
  std::vector<int> ranks;
  for (int r = first; r < size; ++r) try {
      store.get(concat(what, '/', r), Deadline::after(std::chrono::milliseconds(r == first ? 0 : 1)));
    } catch (const Error&) {
      ranks.push_back(r);
    }
  return ranks;
}

std::string this_process() { return concat("process ", getpid(), " of ", machine_id()); }

/// The value of a key, if it exists before the deadline.
std::optional<std::string> find(Store& store, std::string_view key, Deadline deadline = Deadline::after({})) {
  try {
    return store.get(key, deadline);
  } catch (const Error& e) {
    if (e.code() != Errc::timeout) throw;
    return std::nullopt;
  }
}

constexpr std::string_view all_connected = "connected/all";  // a failure_entry(), if one rank cannot
constexpr auto max_leave = std::chrono::seconds(2);
constexpr auto check_period = std::chrono::milliseconds(500);
constexpr std::string_view failure_mark = "failed\n";

/// The error of another rank's connect(), which `rank` has published.
struct PublishedFailure : Error {
  PublishedFailure(const Error& e, const std::string& own, int of, std::string text)
      : Error(e.code(), own, e.culprit()), rank(of), reason(std::move(text)) {}
  int rank;
  std::string reason;
};

std::string failure_entry(int rank, const Error& e) {
  const auto* other = dynamic_cast<const PublishedFailure*>(&e);
  return concat(failure_mark, static_cast<int>(e.code()), ' ', e.culprit() < 0 ? rank : e.culprit(), ' ',
                other ? other->rank : rank, '\n', other ? other->reason : e.what());
}

/// Throws on rank `own` if the entry is one of failure_entry().
void check_entry(int own, const std::string& entry) {
  if (!entry.starts_with(failure_mark)) return;
  const auto end = entry.find('\n', failure_mark.size());
  const auto words = words_of(std::string_view(entry).substr(failure_mark.size(), end - failure_mark.size()));
  std::vector<int> numbers;
  for (const auto word : words) numbers.push_back(parse_number<int>(word).value_or(-1));
  require(end != entry.npos && numbers.size() == 3, Errc::rendezvous, "the entry '", entry,
          "' is none of a group; is another job using this store?");
  const std::string reason = entry.substr(end + 1);
  throw PublishedFailure(Error(static_cast<Errc>(numbers[0]), "", numbers[1]),
                         concat("rank ", own, ": rank ", numbers[2], " could not connect: ", reason),
                         numbers[2], reason);
}

}  // namespace

void publish_failure(int rank, Store& store, const Error& error) noexcept {
  for (const std::string& key :
       {concat("peer_info/", rank), concat("address/", rank), std::string(all_connected)})
    try {
      if (!find(store, key)) store.set(key, failure_entry(rank, error));
    } catch (const std::exception&) {  // the others have their deadlines
    }
}

void throw_published_failure(int rank, Store& store) {
  std::optional<std::string> entry;
  try {
    entry = find(store, all_connected);
  } catch (const Error& e) {                 // the store has ended
    if (e.code() == Errc::peer_lost) throw;  // of a watching_store()
  }
  if (entry) check_entry(rank, *entry);
}

void require_not_connected(int rank, Store& store) {
  const auto other = find(store, concat("connected/", rank));
  require(!other || *other == this_process(), Errc::rendezvous, other.value_or(""), " is rank ", rank,
          " of this group, which is complete, but ", this_process(),
          " has the same rank and store; two jobs that use one MASTER_ADDR and MASTER_PORT need different "
          "texts in "
          "RZ_LAUNCH, and groups of other processes on one store need prefix_store()");
}

void await_connected(int rank, int size, Store& store, Deadline deadline,
                     const std::function<void()>& check) {
  store.set(concat("connected/", rank), this_process());
  if (store.add("connected/count", 1) == size) store.set(all_connected, "");
  std::optional<std::string> entry;
  while (!(entry = find(
               store, all_connected,
               Deadline::after(std::min<Deadline::Clock::duration>(deadline.remaining(), check_period))))) {
    check();
    if (!deadline.expired()) continue;
    const auto missing = missing_ranks(0, size, store, "connected");
    throw Error(Errc::timeout,
                concat("rank ", rank, " of ", size, ": rank ", net::list_ranks(missing),
                       " did not connect with all ranks before the deadline"),
                missing.empty() ? -1 : missing.front());
  }
  check_entry(rank, *entry);
  try {
    if (rank != 0) {
      if (store.add("connected/left", 1) == size - 1) store.set("connected/end", "");
    } else {
      store.get("connected/end", Deadline::after(max_leave));
    }
  } catch (const Error&) {  // a rank is late; it has connected, but finds no store
  }
}

std::vector<std::string> store_all_gather(
    int rank, int size, Store& store, const std::string& what, const std::string& value, Deadline deadline,
    const std::function<void(int rank, const std::string& value)>& check) {
  store.set(concat(what, '/', rank), value);
  std::vector<std::string> values;
  int r = 0;
  while (r < size) try {
      for (std::string& value :
           store.get_numbered(concat(what, '/'), static_cast<std::uint32_t>(r), deadline)) {
        if (r == size) break;
        check_entry(rank, value);
        if (check) check(r, value);
        values.push_back(std::move(value));
        ++r;
      }
    } catch (const Error& e) {
      if (e.code() != Errc::timeout || dynamic_cast<const PublishedFailure*>(&e)) throw;
      const auto missing = missing_ranks(r, size, store, what);
      throw Error(Errc::timeout,
                  concat("rank ", rank, " of ", size, ": rank ",
                         net::list_ranks(missing.empty() ? std::vector{r} : missing),
                         " did not reach the rendezvous before the deadline (", e.what(), ")"),
                  r);
    }
  return values;
}

}  // namespace rz
