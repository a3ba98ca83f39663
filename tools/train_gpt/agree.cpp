#include "tools/train_gpt/agree.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "comm/core/error.h"

namespace rz::train_gpt {
namespace {

/// The error of the first rank that has one, on every rank.
void share_error(Communicator& comm, std::int32_t culprit, const std::optional<Error>& mine) {
  const bool here = culprit == comm.rank();
  std::int64_t head[2] = {here ? static_cast<std::int64_t>(mine->code()) : 0,
                          here ? static_cast<std::int64_t>(std::strlen(mine->what())) : 0};
  comm.broadcast(Buffer(head, 2), culprit).wait();
  std::string text(static_cast<std::size_t>(head[1]), '\0');
  if (here) text = mine->what();
  comm.broadcast(Buffer(text.data(), text.size(), DType::u8), culprit).wait();
  throw Error(static_cast<Errc>(head[0]), culprit == 0 ? text : str("rank ", culprit, ": ", text), culprit);
}

}  // namespace

void check_together(Communicator& comm, const std::function<void()>& check) {
  std::optional<Error> mine;
  try {
    check();
  } catch (const Error& e) {
    mine = e;
  } catch (const std::exception& e) {
    mine = Error(Errc::system, e.what());
  }
  std::int32_t first = mine ? comm.rank() : comm.size();
  comm.all_reduce(Buffer(&first, 1), ReduceOp::min).wait();
  if (first < comm.size()) share_error(comm, first, mine);
}

int fair_threads(Communicator& comm) {
  struct Where {
    std::array<char, 64> host;
    cpu_set_t processors;
  };
  Where mine{};
  ::gethostname(mine.host.data(), mine.host.size() - 1);
  if (::sched_getaffinity(0, sizeof mine.processors, &mine.processors) != 0) CPU_SET(0, &mine.processors);
  std::vector<Where> all(static_cast<std::size_t>(comm.size()));
  comm.all_gather(ConstBuffer(&mine, sizeof mine, DType::u8),
                  Buffer(all.data(), all.size() * sizeof mine, DType::u8))
      .wait();
  const auto sharers =
      std::ranges::count_if(all, [&](const Where& w) { return std::memcmp(&w, &mine, sizeof mine) == 0; });
  return std::max(1, CPU_COUNT(&mine.processors) / static_cast<int>(sharers));
}

}  // namespace rz::train_gpt
