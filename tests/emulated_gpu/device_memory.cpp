#include "tests/emulated_gpu/device_memory.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "tests/emulated_gpu/grid_run.h"
#include "tests/emulated_gpu/ipc.h"

namespace rz::emulated {

namespace {

constexpr std::size_t page = 4096, arena_bytes = std::size_t{64} << 30;

std::size_t pages_for(std::size_t bytes) { return (bytes + page - 1) / page * page; }
std::size_t as_aligned(std::size_t bytes) { return (std::max<std::size_t>(bytes, 1) + 255) / 256 * 256; }

struct Allocation {
  std::size_t bytes;
  int device;
  bool pinned;
  std::shared_ptr<IpcNote> note = nullptr;  // if other processes may have it open
  bool foreign = false;                     // another process's
};

}  // namespace

struct DeviceMemory::State {
  void renew();
  void after_fork();

  mutable std::mutex mutex;
  std::byte* arena = nullptr;
  int file = -1;         // the arena's pages
  std::size_t used = 0;  // of the arena; never freed
  std::map<const std::byte*, Allocation> live, freed;
  std::array<std::size_t, 64> in_use{};
  bool is_open = false;

  /// The allocation whose pages hold the address.
  const std::pair<const std::byte* const, Allocation>* find(const void* address) const {
    return find(live, address);
  }
  static const std::pair<const std::byte* const, Allocation>* find(
      const std::map<const std::byte*, Allocation>& live, const void* address) {
    const auto* const at = static_cast<const std::byte*>(address);
    auto next = live.upper_bound(at);
    if (next == live.begin()) return nullptr;
    --next;
    return at < next->first + next->second.bytes + 256 ? &*next : nullptr;
  }
  void protect(const std::pair<const std::byte* const, Allocation>& a, int mode) const {
    const auto begin = reinterpret_cast<std::uintptr_t>(a.first) / page * page;
    const auto end = reinterpret_cast<std::uintptr_t>(a.first) + a.second.bytes;
    mprotect(reinterpret_cast<void*>(begin), pages_for(end - begin), mode);
  }
};

namespace {

DeviceMemory::State* state_of_handler = nullptr;
struct sigaction before;

void complain(const char* text) {
  if (write(STDERR_FILENO, text, std::strlen(text)) < 0) std::abort();
}

/// Reports the address touched, and passes the fault to the previous handler.
void on_fault(int number, siginfo_t* info, void*) {
  const auto* const address = static_cast<const std::byte*>(info->si_addr);
  const DeviceMemory::State& s = *state_of_handler;
  if (address >= s.arena && address < s.arena + arena_bytes) {
    char text[400];
    const auto* const a = s.find(address);
    const bool in_kernel = s.is_open;
    if (a)
      std::snprintf(text, sizeof text, "emulated GPU: %s touched byte %td of %zu bytes on cuda:%d%s\n",
                    in_kernel ? GridRun::where() : "host code", address - a->first, a->second.bytes,
                    a->second.device, a->second.foreign ? " of another process" : "");
    else if (const auto* const f = s.find(s.freed, address))
      std::snprintf(
          text, sizeof text, "emulated GPU: %s touched byte %td of %zu bytes on cuda:%d that were freed\n",
          in_kernel ? GridRun::where() : "host code", address - f->first, f->second.bytes, f->second.device);
    else
      std::snprintf(text, sizeof text, "emulated GPU: %s touched device memory between allocations\n",
                    in_kernel ? GridRun::where() : "host code");
    complain(text);
  }
  sigaction(number, &before, nullptr);  // the access faults again
}

}  // namespace

DeviceMemory& DeviceMemory::instance() {
  static auto* const memory = new DeviceMemory();  // outlives every test
  return *memory;
}

/// Maps the arena with fresh pages, at its address if it has one.
void DeviceMemory::State::renew() {
  file = create_file(arena_bytes);
  const int fixed = arena ? MAP_FIXED : 0;
  void* const all = mmap(arena, arena_bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE | fixed, file, 0);
  if (all == MAP_FAILED) std::abort();
  arena = static_cast<std::byte*>(all);
}

/// Records of the parent's memory only name it in errors.
void DeviceMemory::State::after_fork() {
  ::close(file);
  renew();
  is_open = false;
  for (auto& a : live) a.second.note.reset();
}

DeviceMemory::DeviceMemory() : state_(new State()) {
  state_->renew();
  state_of_handler = state_;
  pthread_atfork([] { instance().state_->mutex.lock(); }, [] { instance().state_->mutex.unlock(); },
                 [] {
                   instance().state_->after_fork();
                   instance().state_->mutex.unlock();
                 });
  static std::array<std::byte, 64 << 10> stack;  // the fiber's own stack may have overflowed
  const stack_t alternative{stack.data(), 0, stack.size()};
  stack_t present{};
  if (sigaltstack(nullptr, &present) == 0 && (present.ss_flags & SS_DISABLE))  // a sanitizer has its own
    sigaltstack(&alternative, nullptr);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before);
}

// The end of an allocation, rounded up to 256 bytes as CUDA aligns, touches its last page's end.
void* DeviceMemory::allocate(int device, std::size_t bytes) {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  std::size_t& used = s.in_use[static_cast<std::size_t>(device)];
  const std::size_t rounded = as_aligned(bytes), span = pages_for(rounded);
  if (used + rounded > capacity || s.used + span + page > arena_bytes) return nullptr;
  std::byte* const first = s.arena + s.used;
  s.used += span + page;
  mprotect(first, span, PROT_READ | PROT_WRITE);
  std::memset(first, 0xFF, span);
  if (!s.is_open) mprotect(first, span, PROT_NONE);
  std::byte* const memory = first + (span - rounded);
  s.live[memory] = {bytes, device, false};
  used += rounded;
  return memory;
}

bool DeviceMemory::free(void* memory) {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  const auto it = s.live.find(static_cast<std::byte*>(memory));
  if (it == s.live.end() || it->second.pinned || it->second.foreign) return false;
  const std::size_t rounded = as_aligned(it->second.bytes), span = pages_for(rounded);
  if (it->second.note && it->second.note->retire() != 0) {
    complain("emulated GPU: memory was freed that another process has open\n");
    std::abort();
  }
  s.in_use[static_cast<std::size_t>(it->second.device)] -= rounded;
  s.protect(*it, PROT_NONE);
  const auto first = static_cast<std::byte*>(memory) + rounded - span - s.arena;
  fallocate(s.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, first, static_cast<off_t>(span + page));
  s.freed[it->first] = {it->second.bytes, it->second.device, false};
  s.live.erase(it);
  return true;
}

// ---- other processes

bool DeviceMemory::share(const void* memory, IpcPlace& place) {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  const auto it = s.live.find(static_cast<const std::byte*>(memory));
  if (it == s.live.end() || it->second.pinned || it->second.foreign) return false;
  Allocation& a = it->second;
  const auto offset = static_cast<std::uint64_t>(it->first - s.arena);
  if (!a.note) a.note = IpcNote::map(s.file, offset + as_aligned(a.bytes));
  if (!a.note) return false;
  a.note->publish();
  place = {getpid(), s.file, offset, a.bytes, a.device};
  return true;
}

void* DeviceMemory::open_shared(const IpcPlace& place) {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  const std::size_t rounded = as_aligned(place.bytes), span = pages_for(rounded);
  const int file = open_file_of(place);
  if (file < 0 || s.used + span + page > arena_bytes) return nullptr;
  std::byte* const first = s.arena + s.used;
  const std::uint64_t end = place.offset + rounded;
  std::shared_ptr<IpcNote> note = IpcNote::map(file, end);
  const bool well = note && note->open();
  if (well && mmap(first, span, s.is_open ? PROT_READ | PROT_WRITE : PROT_NONE, MAP_SHARED | MAP_FIXED, file,
                   static_cast<off_t>(end - span)) == MAP_FAILED)
    std::abort();
  ::close(file);
  if (!well) return nullptr;
  s.used += span + page;
  std::byte* const memory = first + (span - rounded);
  s.live[memory] = {place.bytes, place.device, false, std::move(note), true};
  return memory;
}

bool DeviceMemory::close_shared(void* memory) {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  const auto it = s.live.find(static_cast<std::byte*>(memory));
  if (it == s.live.end() || !it->second.foreign) return false;
  const std::size_t rounded = as_aligned(it->second.bytes), span = pages_for(rounded);
  std::byte* const first = static_cast<std::byte*>(memory) + rounded - span;
  if (mmap(first, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
    std::abort();
  if (it->second.note) it->second.note->close();
  s.freed[it->first] = {it->second.bytes, it->second.device, false, nullptr, true};
  s.live.erase(it);
  return true;
}

// ---- host memory

void* DeviceMemory::allocate_pinned(std::size_t bytes) {
  void* const memory = std::aligned_alloc(page, pages_for(std::max<std::size_t>(bytes, 1)));
  if (!memory) return nullptr;
  std::memset(memory, 0xFF, bytes);
  const std::lock_guard lock(state_->mutex);
  state_->live[static_cast<std::byte*>(memory)] = {bytes, 0, true};
  return memory;
}

bool DeviceMemory::free_pinned(void* memory) {
  const std::lock_guard lock(state_->mutex);
  const auto it = state_->live.find(static_cast<std::byte*>(memory));
  if (it == state_->live.end() || !it->second.pinned) return false;
  state_->live.erase(it);
  std::free(memory);
  return true;
}

DeviceMemory::Owner DeviceMemory::owner(const void* address) const {
  const std::lock_guard lock(state_->mutex);
  const auto* const a = state_->find(address);
  const auto* const at = static_cast<const std::byte*>(address);
  if (!a || at >= a->first + a->second.bytes) return {};
  return {!a->second.pinned, a->second.pinned, a->second.device, static_cast<std::size_t>(at - a->first),
          a->second.bytes};
}

std::size_t DeviceMemory::in_use(int device) const {
  const std::lock_guard lock(state_->mutex);
  return state_->in_use[static_cast<std::size_t>(device)];
}

std::size_t DeviceMemory::places_of(std::string_view bytes) {
  const std::lock_guard lock(state_->mutex);
  std::size_t places = 0;
  for (const auto& a : state_->live) {
    if (a.second.pinned || a.second.foreign) continue;
    state_->protect(a, PROT_READ | PROT_WRITE);
    const std::string_view all(reinterpret_cast<const char*>(a.first), a.second.bytes);
    for (auto at = all.find(bytes); at != all.npos; at = all.find(bytes, at + 1)) ++places;
    if (!state_->is_open) state_->protect(a, PROT_NONE);
  }
  return places;
}

void DeviceMemory::open() {
  const std::lock_guard lock(state_->mutex);
  if (state_->is_open) return;
  state_->is_open = true;
  for (const auto& a : state_->live)
    if (!a.second.pinned) state_->protect(a, PROT_READ | PROT_WRITE);
}

void DeviceMemory::close() {
  const std::lock_guard lock(state_->mutex);
  if (!state_->is_open) return;
  state_->is_open = false;
  for (const auto& a : state_->live)
    if (!a.second.pinned) state_->protect(a, PROT_NONE);
}

}  // namespace rz::emulated
