#pragma once
/// The line of a program that makes a call.

#include <cstdint>
#include <source_location>
#include <string>

namespace rz {

/// Last parameter of the functions that communicate: leave it out, and it is the caller's line.
using CallSite = std::source_location;

/// " at train.cpp:88", without the file's folder; empty if there is no site.
std::string at(const CallSite&);

namespace call_site_detail {
struct OfThread {
  const CallSite* outer = nullptr;
  std::uint32_t calls = 0;
};
/// Without a constructor, so that an access costs no check.
inline constinit thread_local OfThread of_thread;
}  // namespace call_site_detail

/// While it exists, calls of this thread have this site: a function that makes them for its caller names the
/// caller's line, not its own. Of nested objects the outermost counts.
class OuterSite {
 public:
  explicit OuterSite(const CallSite& site) noexcept : site_(site) {
    if (!call_site_detail::of_thread.outer) call_site_detail::of_thread.outer = &site_;
  }
  ~OuterSite() {
    if (call_site_detail::of_thread.outer == &site_) call_site_detail::of_thread.outer = nullptr;
  }
  OuterSite(const OuterSite&) = delete;

 private:
  const CallSite site_;
};

/// Where a call comes from.
struct CallOrigin {
  CallSite site{};
  std::uint32_t order = 0;  ///< number of the call among those of its thread, from 1 on

  /// Of a call that this thread makes now.
  static CallOrigin of(const CallSite& site) noexcept {
    auto& thread = call_site_detail::of_thread;
    return {thread.outer ? *thread.outer : site, ++thread.calls};
  }
};

}  // namespace rz
