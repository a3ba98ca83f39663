#include "sharding/lm/update_report.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>

#include "comm/core/error.h"

namespace rz::lm {
namespace {

std::string number(const char* format, double x) {
  char text[64];
  std::snprintf(text, sizeof text, format, x);
  return std::isfinite(x) ? text : "null";
}

std::string printed(const char* format, double x) {
  char text[64];
  std::snprintf(text, sizeof text, format, x);
  return text;
}

/// Whole lines of steps before `step`, of a file that may not exist.
std::string lines_before(const std::string& path, std::uint64_t step) {
  std::ifstream file(path);
  std::string all;
  for (std::string line; std::getline(file, line) && line.ends_with('}');) {
    unsigned long long of = 0;
    if (std::sscanf(line.c_str(), "{\"step\": %llu,", &of) == 1 && of < step) all += line + "\n";
  }
  return all;
}

}  // namespace

std::string to_json(const UpdateReport& r) {
  return concat(R"({"step": )", r.step, R"(, "loss": )", number("%.17g", r.loss), R"(, "grad_norm": )",
                number("%.17g", r.grad_norm), R"(, "lr": )", number("%.17g", r.lr),
                R"(, "tokens_per_second": )", number("%.1f", r.tokens_per_second), R"(, "step_ms": )",
                number("%.3f", r.step_ms), R"(, "exposed_comm_ms": )", number("%.3f", r.exposed_comm_ms),
                r.loss_scale > 0 ? concat(R"(, "loss_scale": )", number("%.17g", r.loss_scale)) : "",
                r.eval_loss ? concat(R"(, "eval_loss": )", number("%.17g", *r.eval_loss)) : "",
                r.skipped ? R"(, "skipped": true)" : "", "}");
}

void require_finite(const UpdateReport& r) {
  if (r.diverged.empty()) return;
  fail(Errc::diverged, "step ", r.step + 1, ": training diverged: loss ", printed("%g", r.loss),
       ", grad_norm ", printed("%g", r.grad_norm), ": ", r.diverged,
       "; the run stops and nothing is saved. Set gradient_clipping, or train in bf16 with "
       "check_grad_overflow or in fp16, which skip such updates");
}

MetricsLog::MetricsLog(const std::string& path, std::uint64_t first_step)
    : path_(path), file_(nullptr, std::fclose) {
  if (path.empty()) return;
  const std::string earlier = first_step > 0 ? lines_before(path, first_step) : "";
  file_.reset(std::fopen(path.c_str(), "we"));
  const bool written =
      file_ != nullptr && std::fputs(earlier.c_str(), file_.get()) >= 0 && std::fflush(file_.get()) == 0;
  require(written, Errc::io, path, ": cannot be written: ", std::strerror(errno));
}

void MetricsLog::write(const UpdateReport& report) {
  if (!file_) return;
  const std::string line = to_json(report) + "\n";
  // Flush whole lines, so that a process that follows the file never reads a partial one.
  const bool written = std::fputs(line.c_str(), file_.get()) >= 0 && std::fflush(file_.get()) == 0;
  require(written, Errc::io, path_, ": cannot be written: ", std::strerror(errno));
}

}  // namespace rz::lm
