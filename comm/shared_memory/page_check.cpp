#include "comm/shared_memory/page_check.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>

#include "comm/core/integer_math.h"
#include "comm/core/range.h"
#include "comm/core/text.h"
#include "comm/os/fd.h"
#include "comm/os/process.h"

#ifdef __SANITIZE_ADDRESS__
extern "C" int __sanitizer_get_ownership(const volatile void*);  // gcc has no header for it
#endif

namespace rz {

namespace {

/// In front of a malloc block, and at the start of a mapping that malloc made for one.
constexpr std::size_t malloc_header_bytes = 16;

Range page_range(std::span<const std::byte> s) {
  const auto begin = reinterpret_cast<std::uintptr_t>(s.data());
  return {begin / page_bytes() * page_bytes(), round_up(begin + s.size(), page_bytes())};
}

// These read bytes outside the caller's allocation, so they are excluded from the sanitizers.

__attribute__((no_sanitize("address", "thread"))) bool all_zero(std::uintptr_t begin, std::uintptr_t end) {
  for (; begin < end; ++begin)
    if (*reinterpret_cast<const volatile unsigned char*>(begin)) return false;
  return true;
}

#ifdef __SANITIZE_ADDRESS__

/// ASan's allocator has other headers, but a query for its blocks. The poisoned bytes around one are unused.
bool is_mmapped_block(std::uintptr_t begin, std::uintptr_t, Range) {
  return __sanitizer_get_ownership(reinterpret_cast<const void*>(begin));
}

#else

/// Whether glibc's malloc took the block from mmap. Then two words precede it: the distance from the start of
/// the mapping to these words, and the distance from them to its end, in which flag 2 alone is set. Newer
/// glibc versions exclude the words from the second distance, and mark huge pages by bit 0 of the first word.
__attribute__((no_sanitize("thread"))) bool is_mmapped_block(std::uintptr_t begin, std::uintptr_t end,
                                                             Range whole) {
  if (begin % malloc_header_bytes != 0) return false;
  const auto* const words = reinterpret_cast<const volatile std::size_t*>(begin - malloc_header_bytes);
  const std::size_t before = words[0] / malloc_header_bytes * malloc_header_bytes, size = words[1];
  if (size % 8 != 2) return false;
  const std::uintptr_t chunk = begin - malloc_header_bytes, first = chunk - before, last = chunk + size - 2;
  const auto ends_a_page = [](std::uintptr_t at) { return at % page_bytes() == 0; };
  return ends_a_page(first) && first <= whole.begin && before <= chunk && last + malloc_header_bytes >= end &&
         (ends_a_page(last) || ends_a_page(last + malloc_header_bytes));
}

#endif

/// Why the first or last page cannot be replaced; empty if they can. They must hold no other data: its owner
/// may write to it while it is copied, and after a fork() would share it with the parent.
std::string check_edge_pages(std::span<const std::byte> memory, Range whole) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data()), end = begin + memory.size();
  const bool alone_in_first = all_zero(whole.begin, begin) ||
                              (begin - whole.begin >= malloc_header_bytes &&
                               all_zero(whole.begin + malloc_header_bytes, begin - malloc_header_bytes) &&
                               is_mmapped_block(begin, end, whole));
  if (alone_in_first && all_zero(end, whole.end)) return {};
  return concat("its ", alone_in_first ? "last" : "first",
                " page holds other data, too; use memory that has its pages for itself: by mmap, by "
                "std::aligned_alloc(",
                page_bytes(),
                ", …) of whole pages, or by malloc from M_MMAP_THRESHOLD on (which grows "
                "as memory is freed, unless mallopt() sets it)");
}

/// One line of /proc/self/maps.
struct Mapping {
  Range range{};
  std::string permissions, name;
  std::uint64_t inode = 0;

  std::string unmappable_reason() const {
    if (permissions.size() < 4) return "/proc/self/maps was not understood";
    if (permissions[3] != 'p')
      return concat("it is shared memory already", name.empty() ? "" : concat(" (", name, ")"),
                    name.find("memfd:ringzero") == std::string::npos
                        ? ""
                        : ": of Communicator::allocate, or registered before");
    if (name.rfind("[stack", 0) == 0) return "it lies on the stack";
    if (!name.empty() && name != "[heap]" && name.rfind("[anon:", 0) != 0)
      return concat("it is a mapping of ", name, ", not anonymous memory");
    if (permissions != "rw-p")
      return concat("its pages are ", permissions, ", not readable and writable alone");
    return {};
  }
};

/// Parses "begin-end permissions offset device inode name", a line of maps or a heading in smaps.
bool parse_mapping(const std::string& line, Mapping& m) {
  const auto words = words_of(line);
  if (words.size() < 5) return false;
  const auto dash = std::min(words[0].find('-'), words[0].size() - 1);
  const auto begin = parse_number<std::uintptr_t>(words[0].substr(0, dash), 16);
  const auto end = parse_number<std::uintptr_t>(words[0].substr(dash + 1), 16);
  const auto inode = parse_number<decltype(m.inode)>(words[4]);
  if (!begin || !end || !inode) return false;
  m.range.begin = *begin, m.range.end = *end, m.inode = *inode;
  m.permissions = words[1];
  m.name = words.size() > 5 ? line.substr(static_cast<std::size_t>(words[5].data() - line.data())) : "";
  return true;
}

struct MapsFile {
  const Creator creator{};
  const UniqueFd file{open("/proc/self/maps", O_RDONLY | O_CLOEXEC)};
};
constinit std::atomic<const MapsFile*> maps_file{nullptr};

/// Contents of /proc/self/maps; empty if it cannot be read. The file stays open, so that a registration can
/// end when no descriptor is free. A child of fork() opens its own, and keeps its parent's: a file that was
/// being replaced at fork() would be of unknown state. Not thread-safe.
std::string read_maps() {
  const MapsFile* maps = maps_file.load(std::memory_order_acquire);
  if (!maps || !maps->creator.is_this_process()) {
    auto opened = std::make_unique<const MapsFile>();
    if (!opened->file) return {};
    if (maps) leak_reachable(const_cast<MapsFile*>(maps));
    maps_file.store(maps = opened.release(), std::memory_order_release);
  }
  std::string text;
  char part[16 << 10];
  for (ssize_t n; (n = pread(maps->file.get(), part, sizeof part, static_cast<off_t>(text.size()))) > 0;)
    text.append(part, static_cast<std::size_t>(n));
  return text;
}

/// The first reason that `why_not` returns for a mapping of the range, or that part of the range is not
/// mapped. Empty if there is none.
template <class F>
std::string first_unmappable(Range whole, const F& why_not) {
  std::istringstream maps(read_maps());
  if (maps.view().empty()) return concat("/proc/self/maps cannot be read: ", std::strerror(errno));
  std::uintptr_t known = whole.begin;
  Mapping m;
  for (std::string line; known < whole.end && std::getline(maps, line);) {
    if (!parse_mapping(line, m) || m.range.end <= known) continue;
    if (m.range.begin > known) break;
    if (const std::string why = why_not(m); !why.empty()) return why;
    known = m.range.end;
  }
  return known < whole.end ? "not all of it is mapped memory of this process" : "";
}

/// Whether any page of the range is locked. Reads smaps, which walks all pages, only if the process has
/// locked memory.
bool is_locked(Range whole) {
  std::ifstream status("/proc/self/status");
  bool any = false;
  for (std::string line; std::getline(status, line);)
    if (line.rfind("VmLck:", 0) == 0) any = line.find_first_of("123456789") != std::string::npos;
  if (!any) return false;
  std::ifstream smaps("/proc/self/smaps");
  Mapping m;
  bool within = false;
  for (std::string line; std::getline(smaps, line);) {
    if (Mapping next; parse_mapping(line, next)) m = next, within = intersect(m.range, whole).count() > 0;
    if (within && line.rfind("VmFlags:", 0) == 0 && line.find(" lo") != std::string::npos) return true;
  }
  return false;
}

/// Whether the range overlaps the calling thread's stack. Only the main thread's stack has a name in maps.
bool is_on_thread_stack(Range whole) {
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return false;
  void* base = nullptr;
  std::size_t size = 0;
  const bool known = pthread_attr_getstack(&attributes, &base, &size) == 0;
  pthread_attr_destroy(&attributes);
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  return known && intersect(whole, {begin, begin + size}).count() > 0;
}

}  // namespace

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

std::span<std::byte> pages_of(std::span<std::byte> memory) {
  const Range whole = page_range(memory);
  return {reinterpret_cast<std::byte*>(whole.begin), whole.end - whole.begin};
}

std::string check_remappable(std::span<const std::byte> memory) {
  if (memory.empty()) return "it has no bytes";
  const Range whole = page_range(memory);
  if (is_on_thread_stack(whole)) return "it lies on the stack";
  if (auto why = first_unmappable(whole, [](const Mapping& m) { return m.unmappable_reason(); });
      !why.empty())
    return why;
  if (is_locked(whole)) return "its pages are locked (mlock), which their replacement would not be";
  return check_edge_pages(memory, whole);
}

bool is_mapping_of(int fd, std::span<const std::byte> memory) {
  struct stat file {};
  if (fstat(fd, &file) != 0) return false;
  const auto other = [&](const Mapping& m) { return m.inode == file.st_ino ? "" : "another"; };
  return first_unmappable(page_range(memory), other).empty();
}

}  // namespace rz
