#include "sharding/same_model.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/core/error.h"

namespace rz {

namespace {

std::string describe(const Parameter& p) {
  return str(p.name, " ", name(p.shape), p.requires_grad ? "" : " (frozen)",
             p.value.defined() ? "" : " (no value)");
}

/// FNV-1a.
std::uint64_t hash(const std::string& text) {
  std::uint64_t h = 0xcbf29ce484222325u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return h;
}

template <class T>
std::vector<T> gather_all(const std::vector<T>& mine, Communicator& communicator) {
  std::vector<T> all(mine.size() * static_cast<std::size_t>(communicator.size()));
  communicator.all_gather(ConstBuffer(mine.data(), mine.size()), Buffer(all.data(), all.size())).wait();
  return all;
}

/// What rank r has at place i, on every rank.
std::vector<std::string> descriptions(std::span<Parameter* const> parameters, std::size_t i,
                                      Communicator& communicator) {
  const std::string mine = i < parameters.size() ? describe(*parameters[i]) : "no such parameter";
  std::vector<std::uint8_t> line(256);
  std::copy_n(mine.begin(), std::min(mine.size(), line.size() - 1), line.begin());
  const auto all = gather_all(line, communicator);
  std::vector<std::string> out;
  for (std::size_t at = 0; at < all.size(); at += line.size())
    out.emplace_back(reinterpret_cast<const char*>(&all[at]));
  return out;
}

}  // namespace

void require_same_model(std::span<Parameter* const> parameters, Communicator& communicator) {
  const auto counts = gather_all(std::vector<std::uint64_t>{parameters.size()}, communicator);
  const std::size_t most = *std::max_element(counts.begin(), counts.end());
  std::vector<std::uint64_t> hashes(most);
  std::transform(parameters.begin(), parameters.end(), hashes.begin(),
                 [](const Parameter* p) { return hash(describe(*p)); });
  const auto all = gather_all(hashes, communicator);
  for (std::size_t i = 0; i < most; ++i)
    for (std::size_t r = 1; r < counts.size(); ++r) {
      if (all[r * most + i] == all[i]) continue;
      const auto has = descriptions(parameters, i, communicator);
      throw Error(Errc::mismatch,
                  str("the model differs over the ranks: parameter ", i, " is ", has[0], " on rank 0 and ",
                      has[r], " on rank ", r, "; every rank must build the same model"),
                  static_cast<int>(r));
    }
}

void broadcast_values(std::span<Parameter* const> parameters, Communicator& communicator) {
  if (communicator.size() == 1) return;
  for (const Parameter* p : parameters)
    if (p->value.defined()) communicator.broadcast(p->value.buffer(), 0).wait();
}

}  // namespace rz
