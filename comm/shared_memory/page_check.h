#pragma once
/// Checks by /proc/self/maps whether pages of this process can be replaced by others at the same addresses.

#include <cstddef>
#include <span>
#include <string>

namespace rz {

/// Page size of this system.
std::size_t page_bytes();

/// The range, extended to whole pages.
std::span<std::byte> pages_of(std::span<std::byte>);

/// Returns why the pages of the range cannot be replaced; empty if they can. They must be private, anonymous,
/// readable and writable, not executable and not locked. They must not be a stack; only the main thread's and
/// the caller's stacks are detected. Outside the range, the first and the last page must contain only zeros,
/// or the header of a block that malloc took from mmap (glibc's header is recognized).
std::string check_remappable(std::span<const std::byte>);

/// Whether all pages of the range are a mapping of this file. Needs no free descriptor after the first call
/// of check_remappable().
bool is_mapping_of(int fd, std::span<const std::byte>);

}  // namespace rz
