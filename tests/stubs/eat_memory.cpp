// For LD_PRELOAD: takes memory of its process until it is killed, once the file that EAT_MEMORY_ONCE names
// exists.
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

void eat(const char* file) {
  while (::access(file, F_OK) != 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  constexpr std::size_t piece = std::size_t{1} << 20;
  for (std::size_t eaten = 0; eaten < std::size_t{2} << 30; eaten += piece)
    if (void* const at = std::malloc(piece)) std::memset(at, 1, piece);
}

[[gnu::constructor]] void begin() {
  if (const char* const file = std::getenv("EAT_MEMORY_ONCE")) std::thread(eat, file).detach();
}

}  // namespace
