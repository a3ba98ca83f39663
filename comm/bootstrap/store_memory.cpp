#include <algorithm>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "comm/bootstrap/store_internal.h"
#include "comm/core/error.h"
#include "comm/os/process.h"
#include "comm/store.h"

namespace rz {

namespace {

/// Errc::rendezvous names the key if the text is not an integer.
std::int64_t parse_counter(std::string_view key, std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(error == std::errc{} && end == text.data() + text.size(), Errc::rendezvous, "the value of key '",
          key, "' is not an integer, so nothing can be added to it");
  return value;
}

class MemoryStore final : public Store {
 public:
  void set(std::string_view key, std::string_view value) override { table_.set(key, value); }
  std::string get(std::string_view key, Deadline deadline) override {
    if (auto value = table_.wait(key, deadline)) return *std::move(value);
    fail(Errc::timeout, missing_key(key, "the store of this process"));
  }
  std::int64_t add(std::string_view key, std::int64_t amount) override { return table_.add(key, amount); }

 private:
  KeyValueTable table_;
};

constexpr auto watch_period = std::chrono::milliseconds(200);

/// `check`: of watching_store(); empty: none.
class PrefixStore final : public Store {
 public:
  PrefixStore(std::shared_ptr<Store> store, std::string prefix, std::function<void()> check = {})
      : store_(std::move(store)), prefix_(std::move(prefix)), check_(std::move(check)) {}
  void set(std::string_view key, std::string_view value) override {
    store_->set(concat(prefix_, key), value);
  }
  std::string get(std::string_view key, Deadline deadline) override {
    return wait(deadline, [&](Deadline end) { return store_->get(concat(prefix_, key), end); });
  }
  std::vector<std::string> get_numbered(std::string_view prefix, std::uint32_t first,
                                        Deadline deadline) override {
    return wait(deadline,
                [&](Deadline end) { return store_->get_numbered(concat(prefix_, prefix), first, end); });
  }
  std::int64_t add(std::string_view key, std::int64_t amount) override {
    return store_->add(concat(prefix_, key), amount);
  }
  Store& inner() const { return *store_; }
  const std::string& prefix() const { return prefix_; }

 private:
  template <class Get>
  std::invoke_result_t<Get, Deadline> wait(Deadline deadline, const Get& get) {
    if (!check_) return get(deadline);
    for (;;) try {
        check_();
        return get(Deadline::after(std::min<Deadline::Clock::duration>(deadline.remaining(), watch_period)));
      } catch (const Error& e) {
        if (e.code() != Errc::timeout || deadline.expired()) throw;
      }
  }

  std::shared_ptr<Store> store_;
  std::string prefix_;
  std::function<void()> check_;
};

}  // namespace

std::vector<std::string> Store::get_numbered(std::string_view prefix, std::uint32_t first,
                                             Deadline deadline) {
  return {get(concat(prefix, first), deadline)};
}

std::int64_t add_to_counter(std::string_view key, std::string_view text, std::int64_t amount) {
  std::int64_t sum = 0;
  require(!__builtin_add_overflow(text.empty() ? 0 : parse_counter(key, text), amount, &sum),
          Errc::rendezvous, "the counter '", key, "' is ", text, ", and ", amount, " more is beyond 64 bits");
  return sum;
}

std::string missing_key(std::string_view key, std::string_view where) {
  return concat("key '", key, "' did not appear in ", where,
                " before the deadline; is every rank running, with the same rendezvous?");
}

/// Requires mutex_.
void KeyValueTable::put(const std::string& key, std::string value) {
  constexpr std::size_t bytes_of_an_entry = 128;
  const auto old = values_.find(key);
  const std::size_t others =
      bytes_ - (old == values_.end() ? 0 : bytes_of_an_entry + key.size() + old->second.size());
  const std::size_t more = bytes_of_an_entry + key.size() + value.size();
  require(more <= max_bytes_ - others, Errc::rendezvous, "the store is full: key '", key, "' needs ", more,
          " bytes, and ", others, " of ", max_bytes_, " are taken");
  values_[key] = std::move(value);
  bytes_ = others + more;
}

void KeyValueTable::set(std::string_view key, std::string_view value) {
  {
    const std::lock_guard lock(mutex_);
    put(std::string(key), std::string(value));
  }
  changed_.notify_all();
}

std::int64_t KeyValueTable::add(std::string_view key, std::int64_t amount) {
  std::int64_t sum = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto old = values_.find(std::string(key));
    sum = add_to_counter(key, old == values_.end() ? "" : old->second, amount);
    put(std::string(key), concat(sum));
  }
  changed_.notify_all();
  return sum;
}

std::optional<std::string> KeyValueTable::wait(std::string_view key, Deadline deadline) {
  const std::string name(key);
  std::unique_lock lock(mutex_);
  const auto there = [&] { return values_.count(name) > 0; };
  if (!changed_.wait_until(lock, deadline.at(), there)) return std::nullopt;
  return values_[name];
}

std::optional<std::string> KeyValueTable::find(std::string_view key) {
  const std::lock_guard lock(mutex_);
  const auto it = values_.find(std::string(key));
  if (it == values_.end()) return std::nullopt;
  return it->second;
}

const Store& innermost(const Store& store) {
  const auto* prefix = dynamic_cast<const PrefixStore*>(&store);
  return prefix ? innermost(prefix->inner()) : store;
}

std::shared_ptr<Store> Store::of_next_group(std::shared_ptr<Store> store, int rank) {
  std::string prefix;
  Store* counts = store.get();
  while (const auto* view = dynamic_cast<const PrefixStore*>(counts))
    prefix.insert(0, view->prefix()), counts = &view->inner();
  int earlier = 0;
  {
    const std::lock_guard lock(counts->groups_mutex_);
    if (std::exchange(counts->fork_generation_, fork_generation()) != fork_generation())
      counts->groups_.clear();
    earlier = counts->groups_[{prefix, rank}]++;
  }
  return earlier ? prefix_store(std::move(store), concat("group/", earlier, "/")) : store;
}

std::shared_ptr<Store> memory_store() { return std::make_shared<MemoryStore>(); }

std::shared_ptr<Store> watching_store(std::shared_ptr<Store> store, std::function<void()> check) {
  return std::make_shared<PrefixStore>(std::move(store), "", std::move(check));
}

std::shared_ptr<Store> prefix_store(std::shared_ptr<Store> store, std::string prefix) {
  return std::make_shared<PrefixStore>(std::move(store), std::move(prefix));
}

}  // namespace rz
