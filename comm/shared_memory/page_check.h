#pragma once
/// What memory of this process is, by /proc/self/maps: whether its pages may be replaced by others under the
/// same addresses.

#include <cstddef>
#include <span>
#include <string>

namespace rz {

/// Of a page of this system.
std::size_t page_bytes();

/// The whole pages that hold the range.
std::span<std::byte> pages_of(std::span<std::byte>);

/// Why the pages of the range cannot be replaced; empty: they can. They must be private, anonymous, readable
/// and writable, not executable, not locked, not a stack (of other threads' stacks this knows nothing), and
/// the first and the last page must hold nothing of anybody else's: outside the range only zeros, and words
/// of malloc's own where it took the block from mmap (which is told by what glibc's words say).
std::string check_remappable(std::span<const std::byte>);

/// Whether all of the range is a mapping of this file. Needs no free descriptor once check_remappable() has
/// been called.
bool is_mapping_of(int fd, std::span<const std::byte>);

}  // namespace rz
