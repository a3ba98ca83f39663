#include "tools/train_lm/report/progress.h"

#include <cmath>

#include "tools/command_line/progress.h"

namespace rz::train_lm {
namespace {

std::string printed(const char* format, double x) {
  char text[64];
  std::snprintf(text, sizeof text, format, x);
  return text;
}

}  // namespace

std::string human_duration(double seconds) {
  const auto whole = static_cast<long long>(seconds + 0.5);
  char text[64];
  if (whole < 60) {
    std::snprintf(text, sizeof text, "%lld s", whole);
  } else if (whole < 3600) {
    std::snprintf(text, sizeof text, "%lld min %02lld s", whole / 60, whole % 60);
  } else {
    std::snprintf(text, sizeof text, "%lld h %02lld min", whole / 3600, whole / 60 % 60);
  }
  return text;
}

Progress::Progress(std::FILE* out, bool terminal, std::uint64_t steps, std::uint64_t first_step,
                   std::optional<std::int64_t> every)
    : out_(out),
      terminal_(terminal && !every),
      steps_(steps),
      first_step_(first_step),
      last_step_(first_step),
      every_(every) {}

bool Progress::line_is_due(const UpdateReport& r) const {
  if (r.step == first_step_ || r.step + 1 == steps_ || r.eval_loss) return true;
  if (every_) return (r.step + 1) % static_cast<std::uint64_t>(*every_) == 0;
  const auto since = Clock::now() - last_line_;
  const bool part = (r.step - last_step_) * 20 >= steps_;
  return (part && since >= std::chrono::seconds(1)) || since >= std::chrono::seconds(10);
}

void Progress::draw_bar(const UpdateReport& r) {
  constexpr int width = 24;
  const double done = static_cast<double>(r.step + 1), all = static_cast<double>(steps_);
  const double left = std::chrono::duration<double>(Clock::now() - start_).count() * (all - done) /
                      static_cast<double>(r.step + 1 - first_step_);
  std::fprintf(out_, "\r\x1b[K%s %llu/%llu  loss %.4f  %.0f tokens/s  ETA %s",
               progress_bar(done / all, width).c_str(), static_cast<unsigned long long>(r.step + 1),
               static_cast<unsigned long long>(steps_), r.loss, r.tokens_per_second,
               human_duration(left).c_str());
  if (r.step + 1 == steps_) std::fputc('\n', out_);
  std::fflush(out_);
}

void Progress::update(const UpdateReport& r) {
  if (terminal_) return draw_bar(r);
  if (!line_is_due(r)) return;
  last_line_ = Clock::now();
  last_step_ = r.step;
  const std::string norm = printed("%.4f", r.grad_norm);
  std::fprintf(
      out_, "step %llu/%llu  loss %.4f%s  grad_norm %s  %.0f tokens/s  %.1f ms%s%s\n",
      static_cast<unsigned long long>(r.step + 1), static_cast<unsigned long long>(steps_), r.loss,
      r.eval_loss ? printed("  eval_loss %.4f", *r.eval_loss).c_str() : "", norm.c_str(), r.tokens_per_second,
      r.step_ms,
      std::isnan(r.exposed_comm_ms) ? "" : printed("  exposed comm %.1f ms", r.exposed_comm_ms).c_str(),
      r.without_terms ? "  skipped: no target counts"
      : r.skipped     ? "  skipped: gradients overflow"
                      : "");
  std::fflush(out_);
}

}  // namespace rz::train_lm
