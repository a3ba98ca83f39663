#include "sharding/parallel/rank_agreement.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "comm/core/error.h"
#include "comm/topology.h"

namespace rz {
namespace {

std::vector<std::uint64_t> all_sizes(Communicator& comm, std::uint64_t own) {
  std::vector<std::uint64_t> sizes(static_cast<std::size_t>(comm.size()));
  comm.all_gather(ConstBuffer(&own, 1), Buffer(sizes.data(), sizes.size())).wait();
  return sizes;
}

/// `all` has the texts, each padded to the longest.
std::vector<std::string> unpadded(const std::string& all, const std::vector<std::uint64_t>& sizes) {
  const std::uint64_t longest = *std::ranges::max_element(sizes);
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < sizes.size(); ++r) texts.push_back(all.substr(r * longest, sizes[r]));
  return texts;
}

/// Throws the error of rank `culprit` on every rank.
void share_error(Communicator& comm, std::int32_t culprit, const std::optional<Error>& mine) {
  const bool here = culprit == comm.rank();
  std::int64_t head[2] = {here ? static_cast<std::int64_t>(mine->code()) : 0,
                          here ? static_cast<std::int64_t>(std::strlen(mine->what())) : 0};
  comm.broadcast(Buffer(head, 2), culprit).wait();
  std::string text(static_cast<std::size_t>(head[1]), '\0');
  if (here) text = mine->what();
  comm.broadcast(Buffer(text.data(), text.size(), DType::u8), culprit).wait();
  throw Error(static_cast<Errc>(head[0]), culprit == 0 ? text : concat("rank ", culprit, ": ", text),
              culprit);
}

}  // namespace

std::vector<std::string> all_gather_text(Communicator& comm, const std::string& own) {
  const auto sizes = all_sizes(comm, own.size());
  std::string padded = own;
  padded.resize(*std::ranges::max_element(sizes));
  std::string all(padded.size() * sizes.size(), '\0');
  comm.all_gather(ConstBuffer(padded.data(), padded.size(), DType::u8),
                  Buffer(all.data(), all.size(), DType::u8))
      .wait();
  return unpadded(all, sizes);
}

std::vector<std::string> gather_text(Communicator& comm, const std::string& own, int root) {
  const auto sizes = all_sizes(comm, own.size());
  std::string padded = own;
  padded.resize(*std::ranges::max_element(sizes));
  std::string all(comm.rank() == root ? padded.size() * sizes.size() : 0, '\0');
  comm.gather(ConstBuffer(padded.data(), padded.size(), DType::u8), Buffer(all.data(), all.size(), DType::u8),
              root)
      .wait();
  return comm.rank() == root ? unpadded(all, sizes) : std::vector<std::string>();
}

std::string broadcast_text(Communicator& comm, const std::string& text, int root) {
  std::uint64_t size = text.size();
  comm.broadcast(Buffer(&size, 1), root).wait();
  std::string out = text;
  out.resize(size);
  comm.broadcast(Buffer(out.data(), out.size(), DType::u8), root).wait();
  return out;
}

void check_on_all_ranks(Communicator& comm, const std::function<void()>& check) {
  std::optional<Error> mine;
  try {
    check();
  } catch (const Error& e) {
    mine = e;
  } catch (const std::exception& e) {
    mine = Error(Errc::system, one_line(e));
  }
  std::int32_t first = mine ? comm.rank() : comm.size();
  comm.all_reduce(Buffer(&first, 1), ReduceOp::min).wait();
  if (first < comm.size()) share_error(comm, first, mine);
}

int fair_threads(Communicator& comm) {
  struct Where {
    std::array<char, 64> host;
    cpu_set_t processors;
    std::int32_t quota;
  };
  Where mine{};
  const CpuLimits own = cpu_limits();
  ::gethostname(mine.host.data(), mine.host.size() - 1);
  for (const int p : own.processors) CPU_SET(p, &mine.processors);
  mine.quota = own.quota;
  std::vector<Where> all(static_cast<std::size_t>(comm.size()));
  comm.all_gather(ConstBuffer(&mine, sizeof mine, DType::u8),
                  Buffer(all.data(), all.size() * sizeof mine, DType::u8))
      .wait();
  std::vector<CpuLimits> here;
  for (const Where& w : all) {
    if (w.host != mine.host) continue;
    here.push_back({.quota = w.quota});
    for (int p = 0; p < CPU_SETSIZE; ++p)
      if (CPU_ISSET(p, &w.processors)) here.back().processors.push_back(p);
  }
  return threads_for(own, here);
}

}  // namespace rz
