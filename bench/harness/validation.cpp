#include "bench/harness/validation.h"

#include "bench/harness/timing.h"
#include "comm/device/memory.h"

namespace rz::bench {
namespace {

/// Each operation has different values, so that the result of an earlier operation counts as wrong.
std::uint64_t seed_of(const Case& c, int operation) {
  return c.bytes * 31 + static_cast<std::uint64_t>(operation) * 2 + c.in_place;
}

}  // namespace

Validation::Validation(const Collective& collective, const Options& options, Communicator& comm,
                       const Stream& stream, int disjoint_operations, const Hooks& hooks)
    : collective_(collective),
      options_(options),
      comm_(comm),
      stream_(stream),
      operations_(options.grouped() ? disjoint_operations : 1),
      hooks_(hooks) {}

CheckResult Validation::check(const Case& c, BufferRotation rotation) const {
  CheckResult found;
  for (int i = 0; i < options_.checks; ++i) {
    std::uint64_t wrong = wrong_on_this_rank(c, rotation, i);
    comm_.all_reduce({&wrong, 1}, ReduceOp::sum).wait();
    found.failed_checks += wrong != 0;
    found.wrong_elements += wrong;
  }
  return found;
}

// Operations start in the same way as in the timing.
std::uint64_t Validation::wrong_on_this_rank(const Case& c, BufferRotation& rotation, int iteration) const {
  const int first = iteration * operations_, end = first + operations_;
  for (int i = first; i < end; ++i) prepare(c, rotation.at(i), i);
  const Work work = options_.grouped() ? start_group(collective_, comm_, rotation, first, operations_)
                                       : start_operation(collective_, rotation, first);
  work.wait_on(stream_);
  std::vector<std::vector<std::byte>> results;
  for (int i = first; i < end; ++i) results.push_back(result_of(rotation.at(i)));
  stream_.synchronize();
  work.wait();
  std::uint64_t wrong = 0;
  for (int i = first; i < end; ++i)
    wrong += wrong_elements(c, rotation.at(i), i, results[static_cast<std::size_t>(i - first)]);
  return wrong;
}

void Validation::prepare(const Case& c, const Call& call, int operation) const {
  const std::size_t element = size_of(c.dtype);
  memset_async(call.out, 0xa5, call.counts.recv * element, stream_);
  std::vector<std::byte> values(call.counts.send * element);
  input_of(c, operation, comm_.rank()).fill(values.data(), call.counts.send);
  memcpy_async(const_cast<std::byte*>(call.in), values.data(), values.size(), stream_);
}

std::vector<std::byte> Validation::result_of(const Call& call) const {
  std::vector<std::byte> result(call.counts.recv * size_of(call.dtype));
  memcpy_async(result.data(), call.out, result.size(), stream_);
  return result;
}

std::uint64_t Validation::wrong_elements(const Case& c, const Call& call, int operation,
                                         std::vector<std::byte>& result) const {
  if (hooks_.before_check) hooks_.before_check(comm_.rank(), {result.data(), call.counts.recv, c.dtype});
  std::uint64_t wrong = 0;
  for (const ExpectedRange& r : collective_.expected(call.counts, {comm_.rank(), comm_.size()}, c.root)) {
    const Pattern want = r.source == ExpectedRange::reduced
                             ? Pattern::combined(c.dtype, c.op, comm_.size(), seed_of(c, operation))
                             : input_of(c, operation, r.source);
    wrong += want.wrong(result.data() + r.at * size_of(c.dtype), r.count, r.from);
  }
  return wrong;
}

Pattern Validation::input_of(const Case& c, int operation, int rank) const {
  return Pattern::input(c.dtype, c.op, rank, comm_.size(), seed_of(c, operation));
}

}  // namespace rz::bench
