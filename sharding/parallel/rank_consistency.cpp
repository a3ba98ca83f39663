#include "sharding/parallel/rank_consistency.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>

#include "comm/core/error.h"

namespace rz {

namespace {

template <class T>
std::vector<T> gather_all(const std::vector<T>& mine, Communicator& communicator) {
  std::vector<T> all(mine.size() * static_cast<std::size_t>(communicator.size()));
  communicator.all_gather(ConstBuffer(mine.data(), mine.size()), Buffer(all.data(), all.size())).wait();
  return all;
}

std::uint64_t hash_of(const Fact& fact) {
  return hash_bytes(fact.value.data(), fact.value.size(), hash_bytes(fact.name.data(), fact.name.size()));
}

/// Fact i of every rank. Long texts are truncated.
std::vector<Fact> gather_fact(std::span<const Fact> facts, std::size_t i, Communicator& communicator) {
  constexpr std::size_t room = 256;
  std::vector<std::uint8_t> mine(2 * room);
  const auto put = [&](std::size_t at, const std::string& text) {
    std::copy_n(text.begin(), std::min(text.size(), room - 1),
                mine.begin() + static_cast<std::ptrdiff_t>(at));
  };
  if (i < facts.size()) put(0, facts[i].name);
  put(room, i < facts.size() ? facts[i].value : "missing");
  const auto all = gather_all(mine, communicator);
  std::vector<Fact> out;
  for (std::size_t at = 0; at < all.size(); at += mine.size())
    out.push_back({reinterpret_cast<const char*>(&all[at]), reinterpret_cast<const char*>(&all[at + room])});
  return out;
}

/// Two ranks that differ. If most ranks are alike, one of them and the first that is not, the culprit.
struct Difference {
  std::size_t first = 0, other = 0;
  int culprit = -1;
};

/// `hashes` of some ranks; nullopt if all are equal.
std::optional<Difference> find_difference(const std::vector<std::uint64_t>& hashes) {
  const auto differs_from = [&](std::size_t rank) {
    const auto other = std::ranges::find_if(hashes, [&](std::uint64_t h) { return h != hashes[rank]; });
    return static_cast<std::size_t>(other - hashes.begin());
  };
  if (differs_from(0) == hashes.size()) return {};
  for (std::size_t r = 0; r < hashes.size(); ++r)
    if (2 * std::ranges::count(hashes, hashes[r]) > std::ssize(hashes))
      return Difference{r, differs_from(r), static_cast<int>(differs_from(r))};
  return Difference{0, differs_from(0), -1};
}

/// The first difference between ranks of one group. Both by rank.
std::optional<Difference> find_difference(const std::vector<std::uint64_t>& hashes,
                                          const std::vector<std::uint64_t>& groups) {
  for (std::size_t first = 0; first < groups.size(); ++first) {
    if (std::ranges::find(groups, groups[first]) - groups.begin() != static_cast<std::ptrdiff_t>(first))
      continue;
    std::vector<std::size_t> ranks;
    std::vector<std::uint64_t> of_group;
    for (std::size_t r = first; r < groups.size(); ++r)
      if (groups[r] == groups[first]) ranks.push_back(r), of_group.push_back(hashes[r]);
    if (auto found = find_difference(of_group)) {
      if (found->culprit >= 0)
        found->culprit = static_cast<int>(ranks[static_cast<std::size_t>(found->culprit)]);
      return Difference{ranks[found->first], ranks[found->other], found->culprit};
    }
  }
  return {};
}

[[noreturn]] void throw_difference(const char* subject, const std::vector<Fact>& facts, Difference ranks,
                                   const char* advice) {
  if (ranks.first > ranks.other) std::swap(ranks.first, ranks.other);
  const Fact &first = facts[ranks.first], &other = facts[ranks.other];
  const std::string& name = first.name.empty() ? other.name : first.name;
  const bool renamed = !first.name.empty() && !other.name.empty() && first.name != other.name;
  throw Error(Errc::mismatch,
              concat(subject, " differs over the ranks: ", name, " is ", first.value, " on rank ",
                     ranks.first, " and ", renamed ? concat(other.name, " ") : "", other.value, " on rank ",
                     ranks.other, "; ", advice),
              ranks.culprit);
}

std::string describe(const Parameter& p) {
  return concat(p.name, " ", name(p.global_shape()), p.requires_grad ? "" : " (frozen)",
                p.value.defined() ? "" : " (no value)");
}

}  // namespace

void require_same(const char* subject, std::span<const Fact> facts, const char* advice,
                  Communicator& communicator, int group) {
  if (communicator.size() == 1) return;
  const auto counts = gather_all(std::vector<std::uint64_t>{facts.size()}, communicator);
  const auto groups = gather_all(std::vector<std::uint64_t>{static_cast<std::uint64_t>(group)}, communicator);
  const std::size_t max_count = *std::max_element(counts.begin(), counts.end());
  std::vector<std::uint64_t> hashes(max_count);
  std::transform(facts.begin(), facts.end(), hashes.begin(), hash_of);
  const auto all = gather_all(hashes, communicator);
  std::vector<std::uint64_t> of_fact(counts.size());
  for (std::size_t i = 0; i < max_count; ++i) {
    for (std::size_t r = 0; r < counts.size(); ++r) of_fact[r] = all[r * max_count + i];
    const auto difference = find_difference(of_fact, groups);
    if (!difference) continue;
    const auto has = gather_fact(facts, i, communicator);
    communicator.barrier()
        .wait();  // a rank that throws and leaves now cannot break the gather of another rank
    throw_difference(subject, has, *difference, advice);
  }
}

void require_same_model(std::span<Parameter* const> parameters, Communicator& communicator) {
  std::vector<Fact> facts;
  for (const Parameter* p : parameters) facts.push_back({concat("parameter ", facts.size()), describe(*p)});
  require_same("the model", facts, "every rank must build the same model", communicator);
}

void broadcast_values(std::span<Parameter* const> parameters, Communicator& communicator) {
  if (communicator.size() == 1) return;
  for (const Parameter* p : parameters)
    if (p->value.defined()) communicator.broadcast(p->value.buffer(), 0).wait();
}

void broadcast_buffers(std::span<const Tensor> buffers, Communicator& communicator, const Stream& stream,
                       int root) {
  if (communicator.size() == 1) return;
  std::vector<Work> works;
  for (const Tensor& buffer : buffers)
    if (buffer.defined() && buffer.count() > 0)
      works.push_back(communicator.broadcast(buffer.buffer(), root, stream));
  for (const Work& work : works) work.wait_on(stream);
}

/// FNV-1a over 64-bit words, in four independent lanes.
std::uint64_t hash_bytes(const void* data, std::size_t bytes, std::uint64_t seed) {
  constexpr std::uint64_t prime = 0x100000001b3u;
  std::array<std::uint64_t, 4> lane;
  for (std::size_t i = 0; i < lane.size(); ++i) lane[i] = (0xcbf29ce484222325u ^ seed) + i;
  const auto* from = static_cast<const std::byte*>(data);
  const auto mix = [&](std::uint64_t& h, std::uint64_t word) { h = std::rotl((h ^ word) * prime, 29); };
  std::array<std::uint64_t, 4> words;
  std::size_t at = 0;
  for (; at + sizeof words <= bytes; at += sizeof words) {
    std::memcpy(words.data(), from + at, sizeof words);
    for (std::size_t i = 0; i < lane.size(); ++i) mix(lane[i], words[i]);
  }
  words = {};
  if (at < bytes) std::memcpy(words.data(), from + at, bytes - at);
  for (std::size_t i = 0; i < lane.size(); ++i) mix(lane[i], words[i]);
  std::uint64_t hash = bytes;
  for (const std::uint64_t l : lane) mix(hash, l), mix(hash, l >> 32);
  return hash;
}

std::string hash_text(std::uint64_t hash) {
  std::array<char, 17> text;
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(hash));
  return text.data();
}

}  // namespace rz
