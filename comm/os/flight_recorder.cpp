#include "comm/os/flight_recorder.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "comm/core/environment.h"
#include "comm/core/text.h"
#include "comm/os/process.h"

namespace rz::flight {

namespace {

constexpr auto relaxed = std::memory_order_relaxed;
constexpr char magic[] = "rzflight";
constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr std::uint32_t taken = 2;  // of a row whose fields are being written
constexpr std::size_t phase_words = (max_phase + 1) / 8;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// The number that RZ_FLIGHT_FD names; -1 unless it is a file of make_file(). A program between the launcher
/// and this one may have closed it and opened another.
int descriptor() noexcept try {
  const auto text = environment_variable("RZ_FLIGHT_FD");
  const auto number = text ? parse_number<int>(*text) : std::nullopt;
  struct stat s {};
  if (!number || *number < 0 || ::fcntl(*number, F_GET_SEALS) != seals || ::fstat(*number, &s) != 0 ||
      s.st_size != sizeof(File))
    return -1;
  return *number;
} catch (...) {
  return -1;
}

/// The file of a process, mapped until its end. That of the launcher belongs to the process that has mapped
/// it, not to children of fork(), which have one in memory of their own.
struct Mapping {
  std::atomic<File*> file{nullptr};
  std::atomic<bool> is_of_launcher{false};
  std::atomic<std::uint64_t> generation{0};  // fork_generation() + 1 of the process; 0: not mapped
};
constinit Mapping mapping;
constinit ProcessMutex mapping_mutex, rows_mutex;

File* map_file_of_launcher() {
  const int fd = descriptor();
  if (fd < 0) return nullptr;
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  void* const at = ::mmap(nullptr, sizeof(File), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return nullptr;
  auto* const file = static_cast<File*>(at);
  const bool ours = std::memcmp(file->magic, magic, sizeof file->magic) == 0 && file->version == version &&
                    file->rows == row_count;
  return ours ? file : nullptr;
}

/// Pages that nothing is written to take no memory.
File* map_own_file() {
  void* const at = ::mmap(nullptr, sizeof(File), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  auto* const file = static_cast<File*>(at);
  std::memcpy(file->magic, magic, sizeof file->magic);
  file->version = version;
  file->rows = row_count;
  return file;
}

File* mapped_file() noexcept {
  const std::uint64_t now = fork_generation() + 1;
  if (mapping.generation.load(std::memory_order_acquire) == now) return mapping.file.load(relaxed);
  const std::lock_guard lock(mapping_mutex);
  const std::uint64_t before = mapping.generation.load(relaxed);
  if (before == now) return mapping.file.load(relaxed);
  File* const of_launcher = before == 0 ? map_file_of_launcher() : nullptr;
  mapping.is_of_launcher.store(of_launcher != nullptr, relaxed);
  mapping.file.store(of_launcher ? of_launcher : map_own_file(), relaxed);
  mapping.generation.store(now, std::memory_order_release);
  return mapping.file.load(relaxed);
}

/// The rank of the job that this thread is: that of the first group which it has connected.
struct ThreadRank {
  std::uint64_t generation = 0;  // fork_generation() + 1
  int rank = 0;
};
constinit thread_local ThreadRank thread_rank;
constinit thread_local const std::vector<int>* members_of_thread = nullptr;

int owner_of(int rank) {
  const std::uint64_t now = fork_generation() + 1;
  if (thread_rank.generation != now) thread_rank = {now, rank};
  return thread_rank.rank;
}

void set_members(Row& row) {
  const std::vector<int>* const members = members_of_thread;
  const auto size = static_cast<std::size_t>(row.size), rank = static_cast<std::size_t>(row.rank);
  const bool given = members && members->size() == size;
  row.owner = given ? (*members)[rank] : owner_of(row.rank);
  row.members = !given ? 0 : size > max_members ? -1 : row.size;
  if (row.members > 0) std::ranges::copy(*members, row.member);
}

Row* take_row(File& file, std::string_view name, int rank, int size, Recorder::Ends ends) noexcept {
  // A plugin that has a copy of this code takes rows, too.
  const auto row = std::find_if(std::begin(file.row), std::end(file.row), [](Row& r) {
    std::uint32_t free = 0;
    return r.used.compare_exchange_strong(free, taken);
  });
  if (row == std::end(file.row)) return nullptr;
  for (Calls* calls : {&row->collective, &row->message}) {
    calls->begun.store(0, relaxed);
    calls->ended.store(0, relaxed);
  }
  row->rank = rank;
  row->size = size;
  row->in_streams = ends == Recorder::Ends::in_streams;
  row->made = file.made.fetch_add(1, relaxed) + 1;
  set_members(*row);
  const std::size_t length = std::min(name.size(), max_name);
  std::memcpy(row->name, name.data(), length);
  row->name[length] = '\0';
  row->used.store(1, std::memory_order_release);
  return &*row;
}

}  // namespace

const File* file_of_process() noexcept { return mapped_file(); }

SteadyRows::SteadyRows() noexcept { rows_mutex.lock(); }
SteadyRows::~SteadyRows() { rows_mutex.unlock(); }

UniqueFd make_file() noexcept {
  UniqueFd fd(::memfd_create("ringzero-flight", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  struct {
    char magic[8];
    std::uint32_t version = flight::version, rows = row_count;
  } head;
  std::memcpy(head.magic, magic, sizeof head.magic);
  if (!fd || ::ftruncate(fd.get(), sizeof(File)) != 0 ||
      ::pwrite(fd.get(), &head, sizeof head, 0) != sizeof head || ::fcntl(fd.get(), F_ADD_SEALS, seals) != 0)
    return {};
  return fd;
}

Members::Members(std::vector<int> ranks_of_job) noexcept
    : ranks_(std::move(ranks_of_job)), before_(members_of_thread) {
  members_of_thread = &ranks_;
}
Members::~Members() { members_of_thread = before_; }

Recorder::Recorder(std::string_view name, int rank, int size, Ends ends) {
  File* const file = mapped_file();
  const std::lock_guard lock(rows_mutex);
  row_ = file ? take_row(*file, name, rank, size, ends) : nullptr;
  if (row_)
    sites_ = file->site;
  else
    row_ = (own_ = std::make_unique<Row>()).get();
}

/// A row that fork() has copied belongs to the parent.
Recorder::~Recorder() {
  const File* const file = mapped_file();
  const std::lock_guard lock(rows_mutex);
  if (!own_ && file && file->site == sites_) row_->used.store(0, relaxed);
}

std::optional<std::pair<std::uint32_t, std::uint8_t>> Recorder::last_collective() const noexcept {
  const std::uint32_t begun = row_->collective.begun.load(relaxed);
  if (begun == 0) return std::nullopt;
  const std::uint64_t what = row_->collective.call[(begun - 1) % max_calls].what.load(relaxed);
  return std::pair(static_cast<std::uint32_t>(what), static_cast<std::uint8_t>(what >> 32 & 15));
}

/// Looks at a few slots: if they are taken, this site is not recorded. First come, first served.
std::uint16_t Recorder::find_site(const CallSite& site) noexcept {
  if (!sites_ || site.line() == 0) return 0;
  const std::uint64_t key = reinterpret_cast<std::uintptr_t>(site.file_name()) << 17 ^ site.line();
  static_assert(max_sites == 1 << 10);
  std::uint64_t slot = key * 0x9e3779b97f4a7c15u >> 54;
  for (int tries = 0; tries < 8; ++tries, slot = (slot + 1) % max_sites) {
    Site& s = sites_[slot];
    std::uint64_t found = s.key.load(std::memory_order_acquire);
    if (found == 0 && s.key.compare_exchange_strong(found, 1)) {
      const std::string_view path = site.file_name(), function = site.function_name();
      const std::size_t length = std::min(path.size(), max_site_file);
      std::memcpy(s.file, path.data() + path.size() - length, length);
      std::memcpy(s.function, function.data(), std::min(function.size(), max_function));
      s.line.store(site.line(), relaxed);
      s.key.store(key, std::memory_order_release);
      found = key;
    }
    if (found == key) return static_cast<std::uint16_t>(slot + 1);
  }
  return 0;
}

Phase::Phase(std::string_view text) noexcept {
  File* const file = mapped_file();
  if (!file) return;
  std::uint64_t words[phase_words] = {};
  std::memcpy(words, text.data(), std::min(text.size(), max_phase));
  for (std::size_t i = 0; i < phase_words; ++i) {
    before_[i] = file->phase[i].load(relaxed);
    file->phase[i].store(words[i], relaxed);
  }
}

Phase::~Phase() {
  if (File* const file = mapped_file())
    for (std::size_t i = 0; i < phase_words; ++i) file->phase[i].store(before_[i], relaxed);
}

void set_update(std::uint64_t update) noexcept {
  if (File* const file = mapped_file()) file->update.store(update, relaxed);
}

// ---- crashes

namespace {

constexpr int crash_signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr std::size_t max_frames = 48, alternative_stack_bytes = std::size_t{128} << 10;

/// State of the handler, which may use no lock: it is set before the handler is installed.
constinit std::atomic<File*> crash_file{nullptr};
constinit std::atomic<bool> has_crashed{false};
constinit std::atomic<pid_t> crash_process{0};
alignas(64) char alternative_stack[alternative_stack_bytes];
char program_path[1024];  // the dynamic linker has no name for the program itself

/// Appends text to the stack of the file, which stays ended by a 0.
class StackText {
 public:
  explicit StackText(char* at) : at_(at), end_(at + stack_bytes - 1) {}
  bool append(const char* text) noexcept {
    while (*text && at_ < end_) *at_++ = *text++;
    return at_ < end_;
  }
  void append_hex(std::uint64_t n) noexcept {
    char digits[19] = {};
    char* d = digits + 18;
    do *--d = "0123456789abcdef"[n & 15];
    while (n >>= 4);
    *--d = 'x', *--d = '0';
    append(d);
  }
  char* position() const { return at_; }
  void rewind(char* to) noexcept {
    std::memset(to, 0, static_cast<std::size_t>(at_ - to));
    at_ = to;
  }

 private:
  char *at_, *const end_;
};

/// The object that has the address, and the address in the numbers of its file.
bool append_frame(StackText& text, std::uintptr_t address) noexcept {
#ifdef DLFO_STRUCT_HAS_EH_DBASE  // glibc 2.35 and newer; async-signal-safe
  dl_find_object found{};
  char* const line = text.position();
  if (_dl_find_object(reinterpret_cast<void*>(address), &found) == 0 && found.dlfo_link_map) {
    const char* const name = found.dlfo_link_map->l_name;
    text.append(name && *name ? name : program_path);
    text.append("+");
    text.append_hex(address - found.dlfo_link_map->l_addr);
  } else {
    text.append("?+");
    text.append_hex(address);
  }
  if (text.append("\n")) return true;
  text.rewind(line);  // no part of a line
  return false;
#else
  return text.append("?+") && (text.append_hex(address), text.append("\n"));
#endif
}

/// The program counter that the signal interrupted.
std::uintptr_t interrupted_at(const void* context) noexcept {
#if defined(__x86_64__)
  return static_cast<std::uintptr_t>(static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return static_cast<const ucontext_t*>(context)->uc_mcontext.pc;
#else
  return 0;
#endif
}

/// SA_RESETHAND has restored the default action. A fault of an instruction occurs again when this returns, so
/// that a core dump has the same state as without a handler; a signal that was sent is sent once more.
void record_crash(int signal, siginfo_t* info, void* context) {
  const int saved = errno;
  File* const file = crash_file.load(relaxed);
  if (file && crash_process.load(relaxed) == ::getpid() && !has_crashed.exchange(true)) {
    StackText text(file->stack);
    void* frames[max_frames];
    const int n = ::backtrace(frames, max_frames);
    const std::uintptr_t top = interrupted_at(context);
    // The handler's own frames, and that of the kernel's return, are left out.
    int first = 0;
    while (first < n && reinterpret_cast<std::uintptr_t>(frames[first]) != top) ++first;
    bool fits = true;
    if (first == n) first = 0, fits = append_frame(text, top);
    for (int i = first; fits && i < n; ++i) {
      // A return address is behind its call, which may be the last instruction of a function.
      const auto address = reinterpret_cast<std::uintptr_t>(frames[i]);
      fits = append_frame(text, address == top ? address : address - 1);
    }
    file->address.store(reinterpret_cast<std::uintptr_t>(info->si_addr), relaxed);
    file->signal.store(signal, std::memory_order_release);
  }
  const bool occurs_again = info->si_code > 0 && !(signal == SIGBUS && info->si_code == BUS_MCEERR_AO);
  if (!occurs_again) ::syscall(SYS_tgkill, ::getpid(), ::syscall(SYS_gettid), signal);
  errno = saved;
}

void use_alternative_stack() noexcept {
  stack_t current{};
  if (::sigaltstack(nullptr, &current) != 0 || !(current.ss_flags & SS_DISABLE)) return;
  stack_t own{};
  own.ss_sp = alternative_stack;
  own.ss_size = sizeof alternative_stack;
  ::sigaltstack(&own, nullptr);
}

}  // namespace

void record_crashes() {
  File* const file = mapped_file();
  if (!file || !mapping.is_of_launcher.load(relaxed) || !environment().crash_stack) return;
  void* frame = nullptr;
  ::backtrace(&frame, 1);  // loads the unwinder now, since that allocates
  const auto n = ::readlink("/proc/self/exe", program_path, sizeof program_path - 1);
  if (n < 0) std::strcpy(program_path, "?");
  crash_file.store(file);
  crash_process.store(::getpid());
  use_alternative_stack();
  for (const int signal : crash_signals) {
    struct sigaction present {};
    const bool is_default = ::sigaction(signal, nullptr, &present) == 0 && !(present.sa_flags & SA_SIGINFO) &&
                            present.sa_handler == SIG_DFL;
    if (!is_default) continue;
    struct sigaction own {};
    own.sa_sigaction = record_crash;
    own.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESETHAND;
    ::sigemptyset(&own.sa_mask);
    ::sigaction(signal, &own, nullptr);
  }
}

}  // namespace rz::flight
