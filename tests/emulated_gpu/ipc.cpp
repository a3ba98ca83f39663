#include "tests/emulated_gpu/ipc.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

namespace rz::emulated {

namespace {
constexpr std::size_t page = 4096;
}

std::unique_ptr<IpcNote> IpcNote::map(int file, std::uint64_t offset) {
  void* const at = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(offset));
  if (at == MAP_FAILED) return nullptr;
  return std::unique_ptr<IpcNote>(new IpcNote(static_cast<Words*>(at)));
}

IpcNote::~IpcNote() { munmap(words_, page); }

bool IpcNote::open() {
  __atomic_fetch_add(&words_->openers, 1, __ATOMIC_ACQ_REL);
  if (__atomic_load_n(&words_->published, __ATOMIC_ACQUIRE) != 0) return true;
  close();
  return false;
}

std::uint32_t IpcNote::retire() {
  set(words_->published, 0);
  return __atomic_load_n(&words_->openers, __ATOMIC_ACQUIRE);
}

int open_file_of(const IpcPlace& place) {
  const std::string path = "/proc/" + std::to_string(place.process) + "/fd/" + std::to_string(place.file);
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

int create_file(std::size_t bytes) {
  const int file = memfd_create("emulated GPU", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return -1;
  return file;
}

}  // namespace rz::emulated
