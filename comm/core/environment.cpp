#include "comm/core/environment.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "comm/core/error.h"
#include "comm/core/lazy.h"
#include "comm/core/text.h"

namespace rz {

namespace {

template <class T>
void read_number(const char* variable, T least, T most, T& value) {
  const char* text = std::getenv(variable);
  if (!text) return;
  T parsed{};
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, parsed);
  require(error == std::errc{} && stop == end && parsed >= least && parsed <= most, Errc::config, variable,
          "='", text, "' is not a number from ", least, " to ", most);
  value = parsed;
}

void read_flag(const char* variable, bool& value) {
  int number = value;
  read_number(variable, 0, 1, number);
  value = number == 1;
}

void read_text(const char* variable, std::string& value) {
  if (const char* text = std::getenv(variable)) value = text;
}

void read_order(const char* variable, ReductionOrder& value) {
  std::string text = name(value);
  read_text(variable, text);
  for (const ReductionOrder order : {ReductionOrder::rank, ReductionOrder::pairwise})
    if (text == name(order)) {
      value = order;
      return;
    }
  fail(Errc::config, variable, "='", text, "' is not one of rank, pairwise");
}

/// A misspelt variable would be ignored silently. Other names that begin with RZ_ belong to the program.
void refuse_misspelt_variables() {
  static constexpr std::string_view known[] = {
      "RZ_BACKEND",         "RZ_TRANSPORT",  "RZ_INTERFACE",       "RZ_SOCKETS",   "RZ_CONGESTION",
      "RZ_ALGORITHM",       "RZ_TUNING",     "RZ_DETERMINISTIC",   "RZ_TIMEOUT_S", "RZ_RENDEZVOUS_TIMEOUT_S",
      "RZ_HOST_ID",         "RZ_ALLOW_TF32", "RZ_REDUCTION_ORDER", "RZ_LAUNCH",    "RZ_WAIT_REPORT_S",
      "RZ_THREAD_PLACEMENT"};
  for (char** variable = environ; variable && *variable; ++variable) {
    const std::string_view entry = *variable, name = entry.substr(0, entry.find('='));
    if (!name.starts_with("RZ_") || std::ranges::find(known, name) != std::end(known)) continue;
    for (const std::string_view other : known)
      require(
          3 * static_cast<std::size_t>(edit_distance(name.substr(3), other.substr(3))) >= other.size() - 2 &&
              !(name.size() > 6 && other.starts_with(name)),
          Errc::config, name, " is no variable of ringzero; did you mean ", other, "?");
  }
}

}  // namespace

Environment Environment::read() {
  refuse_misspelt_variables();
  Environment e;
  read_text("RZ_BACKEND", e.backend);
  read_text("RZ_TRANSPORT", e.transport);
  read_text("RZ_INTERFACE", e.interface);
  read_number("RZ_SOCKETS", 1, 16, e.sockets);
  read_text("RZ_CONGESTION", e.congestion);
  read_text("RZ_ALGORITHM", e.algorithm);
  read_text("RZ_TUNING", e.tuning);
  read_flag("RZ_DETERMINISTIC", e.deterministic);
  read_order("RZ_REDUCTION_ORDER", e.reduction_order);
  read_flag("RZ_ALLOW_TF32", e.allow_tf32);
  read_flag("RZ_THREAD_PLACEMENT", e.thread_placement);
  read_number("RZ_TIMEOUT_S", 0.001, 1e9, e.timeout_s);
  read_number("RZ_WAIT_REPORT_S", 0.001, 1e9, e.wait_report_s);
  read_number("RZ_RENDEZVOUS_TIMEOUT_S", 0.001, 1e9, e.rendezvous_timeout_s);
  read_text("RZ_HOST_ID", e.host_id);
  read_text("NCCL_HOSTID", e.nccl_host_id);
  int shares = e.nccl_shares_gpus;
  read_number("NCCL_MULTI_RANK_GPU_ENABLE", 0, 1, shares);
  e.nccl_shares_gpus = shares == 1;
  return e;
}

const Environment& environment() {
  static constinit Lazy<Environment> e;
  return e.get(Environment::read);
}

}  // namespace rz
