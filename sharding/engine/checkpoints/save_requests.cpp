#include "sharding/engine/checkpoints/save_requests.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "sharding/config/ds_config.h"

namespace rz {

using std::chrono::system_clock;

namespace {
constexpr const char* end_time_variable = "SLURM_JOB_END_TIME";
/// Beyond it, system_clock would overflow: it counts nanoseconds.
constexpr std::int64_t max_seconds = 9'000'000'000;
}  // namespace

std::optional<system_clock::time_point> slurm_job_end_time_from(const Variables& variables) {
  const auto text = variables(end_time_variable);
  if (!text) return {};
  std::int64_t seconds = -1;
  const char* end = text->data() + text->size();
  const auto [rest, error] = std::from_chars(text->data(), end, seconds);
  require(error == std::errc() && rest == end && seconds >= 0 && seconds <= max_seconds, Errc::config,
          end_time_variable, "='", *text,
          "' is not a number of seconds since 1970; unset it to train without an end");
  if (seconds == 0) return {};
  return system_clock::time_point(std::chrono::seconds(seconds));
}

std::optional<system_clock::time_point> slurm_job_end_time() {
  return slurm_job_end_time_from(environment_variable);
}

SaveRequestOptions save_request_options(const CheckpointConfig& c) {
  SaveRequestOptions o{.save_steps = static_cast<std::uint64_t>(c.save_steps),
                       .save_interval = std::chrono::minutes(c.save_minutes),
                       .allocation_margin = std::chrono::seconds(c.allocation_margin)};
  if (c.stop_before_allocation_end) o.allocation_end = slurm_job_end_time();
  return o;
}

namespace {

/// The maximum over the ranks is the last reason in order, and the lowest rank that has it.
std::int64_t encode_request(SaveReason reason, int rank) {
  return std::int64_t{static_cast<int>(reason)} << 32 | (std::numeric_limits<int>::max() - rank);
}

SaveDecision decode_request(std::int64_t code) {
  return {static_cast<SaveReason>(code >> 32),
          std::numeric_limits<int>::max() - static_cast<int>(code & 0xffffffff)};
}

}  // namespace

std::string describe(const SaveDecision& d) {
  switch (d.reason) {
    case SaveReason::none:
      return "";
    case SaveReason::save_steps:
      return "save_steps";
    case SaveReason::save_interval:
      return "save_interval";
    case SaveReason::user1:
      return concat("SIGUSR1 on rank ", d.rank);
    case SaveReason::interrupt:
      return concat("SIGINT on rank ", d.rank);
    case SaveReason::terminate:
      return concat("SIGTERM on rank ", d.rank);
    case SaveReason::allocation_end:
      return "the end of the allocation";
  }
  return "";
}

SaveRequests::SaveRequests(Communicator& communicator, SaveRequestOptions options,
                           std::function<ReceivedSignals()> received)
    : communicator_(communicator), options_(std::move(options)), received_(std::move(received)) {
  require(options_.save_interval.count() >= 0, Errc::config, "save_interval must not be negative, but is ",
          options_.save_interval.count(), " s");
  require(options_.allocation_margin.count() >= 0, Errc::config,
          "allocation_margin must not be negative, but is ", options_.allocation_margin.count(), " s");
  last_save_ = options_.steady_now();
}

SaveDecision SaveRequests::decide(std::uint64_t step) {
  if (decision_.stops()) return decision_;
  decision_ = agree(own_reason(step));
  if (decision_.saves()) last_save_ = options_.steady_now();
  return decision_;
}

bool SaveRequests::stop_requested(bool signals_only) {
  if (decision_.stops()) return true;
  return agree(stops(received(), signals_only) ? SaveReason::terminate : SaveReason::none).stops();
}

bool SaveRequests::stops(const ReceivedSignals& signals, bool signals_only) {
  user1_ = signals.user1;
  return signals.terminate || signals.interrupt || (!signals_only && allocation_ends());
}

bool SaveRequests::stop_requested_in_update(std::int64_t micro_batch, std::chrono::duration<double> elapsed) {
  if (decision_.stops()) return true;
  constexpr std::int64_t second = 1'000'000'000, at_most = 32;  // later ones may take longer
  const auto ahead = [&] { return std::clamp<std::int64_t>(second / micro_batch_ns_, 1, at_most); };
  if (micro_batch == 1) next_look_ = ahead();
  if (micro_batch < next_look_) return false;
  std::array<std::int64_t, 2> both{stops(received(), false),
                                   std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count()};
  if (communicator_.size() > 1)
    communicator_.all_reduce(Buffer(both.data(), both.size()), ReduceOp::max).wait();
  micro_batch_ns_ = std::max<std::int64_t>(1, both[1] / micro_batch);
  next_look_ = micro_batch + ahead();
  return both[0] != 0;
}

ReceivedSignals SaveRequests::received() {
  ReceivedSignals signals = received_ ? received_() : ReceivedSignals{};
  signals.user1 |= std::exchange(user1_, false);
  return signals;
}

bool SaveRequests::allocation_ends() const {
  const auto& o = options_;
  return o.allocation_end && o.system_now() >= *o.allocation_end - o.allocation_margin;
}

SaveReason SaveRequests::own_reason(std::uint64_t step) {
  const ReceivedSignals signals = received();
  const auto& o = options_;
  if (allocation_ends()) return SaveReason::allocation_end;
  if (signals.terminate) return SaveReason::terminate;
  if (signals.interrupt) return SaveReason::interrupt;
  if (signals.user1 && decision_.reason != SaveReason::user1) return SaveReason::user1;
  if (o.save_interval.count() > 0 && communicator_.rank() == 0 &&
      o.steady_now() - last_save_ >= o.save_interval)
    return SaveReason::save_interval;
  if (o.save_steps > 0 && step % o.save_steps == 0) return SaveReason::save_steps;
  return SaveReason::none;
}

SaveDecision SaveRequests::agree(SaveReason own) const {
  std::int64_t code = encode_request(own, communicator_.rank());
  if (communicator_.size() > 1) communicator_.all_reduce(Buffer(&code, 1), ReduceOp::max).wait();
  return decode_request(code);
}

}  // namespace rz
