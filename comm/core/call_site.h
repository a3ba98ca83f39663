#pragma once
/// The line of a program that makes a call.

#include <bit>
#include <cstdint>
#include <string>
#include <version>
#ifdef __cpp_lib_source_location
#include <source_location>
#endif

namespace rz {

/// Last parameter of the functions that communicate: leave it out, and it is the caller's line. One register,
/// as std::source_location, and of one type for all compilers: code of one without that (clang before 16) has
/// no lines.
class CallSite {
 public:
#ifdef __cpp_lib_source_location
  static CallSite current(std::source_location here = std::source_location::current()) noexcept {
    return std::bit_cast<CallSite>(here);
  }
#else
  static CallSite current() noexcept { return {}; }
#endif

  /// 0 if it is not known.
  std::uint32_t line() const noexcept;
  const char* file_name() const noexcept;
  const char* function_name() const noexcept;

 private:
  [[maybe_unused]] const void* where_ = nullptr;
};

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
