#include "sharding/world/rank_agreement.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "comm/core/error.h"
#include "comm/topology.h"

namespace rz {
namespace {

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
