#include "comm/transport/flight_report.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>

#include "comm/core/long_wait.h"
#include "comm/core/text.h"
#include "comm/flight_entry.h"
#include "comm/os/flight_recorder.h"
#include "comm/transport/call_signature.h"

namespace rz::flight {

namespace {

constexpr std::size_t max_shown = 3, max_frames_read = 64;

std::uint64_t value_of(const std::atomic<std::uint64_t>& n) { return n.load(std::memory_order_relaxed); }

/// Without what is no visible character, since this is printed on a terminal.
std::string printable(std::string_view text) {
  std::string kept(text.substr(0, text.find('\0')));
  std::erase_if(kept, [](unsigned char c) { return c < 32 || c == 127; });
  return kept;
}

struct Recorded {
  std::string text, at;
  std::uint32_t number = 0;
  bool running = false;
};

/// " at train.cpp:88"; empty without a site.
std::string site_text(const File& file, std::size_t site) {
  if (site == 0 || site > max_sites) return {};
  const Site& s = file.site[site - 1];
  const std::string path = printable(std::string_view(s.file, sizeof s.file));
  const std::uint32_t line = s.line.load(std::memory_order_relaxed);
  return path.empty() ? "" : concat(" at ", path.substr(path.rfind('/') + 1), ":", line);
}

/// The last call as error messages have it; nothing if there was none, or if the numbers are none of a call.
std::optional<Recorded> recorded_call(const File& file, const Row& row, bool of_message) {
  const Calls& calls = of_message ? row.message : row.collective;
  const std::uint32_t begun = calls.begun.load(std::memory_order_relaxed);
  const std::optional<CallEntry> call = begun ? entry_of(calls.call[(begun - 1) % max_calls]) : std::nullopt;
  if (!call) return {};
  const CollectiveCall& c = call->call;
  const std::string at = site_text(file, call->site);
  const bool running = calls.ended.load(std::memory_order_relaxed) != call->number + 1;
  if (!of_message)
    return Recorded{describe(make_signature(c, std::max(row.size, 1), call->number)), at, call->number,
                    running};
  const bool sends = c.kind == Collective::send;
  return Recorded{concat(name(c.kind), sends ? " to " : " from ", c.root, " (",
                         sends ? c.in.count : c.out.count, " ", name(c.in.dtype), ")"),
                  at, call->number, running};
}

std::string owner_of(const Row& row) {
  const std::string name = printable(std::string_view(row.name, sizeof row.name));
  return name == WaitReportOptions().communicator ? name : concat("'", name, "'");
}

void append_list(std::string& text, const char* begin, const std::vector<std::string>& calls) {
  for (std::size_t i = 0; i < std::min(calls.size(), max_shown); ++i)
    text += (i ? " and " : text.empty() ? begin : concat(", ", begin)) + calls[i];
  if (calls.size() > max_shown) text += concat(" and ", calls.size() - max_shown, " more");
}

/// The calls that run; if none does, the last one of each communicator; and what was last issued to devices.
std::string calls_of(const File& file) {
  std::vector<std::string> running, ended, issued;
  for (const Row& row : file.row) {
    if (row.used.load(std::memory_order_relaxed) != 1) continue;
    for (const bool of_message : {false, true})
      if (const auto call = recorded_call(file, row, of_message))
        (row.in_streams  ? issued
         : call->running ? running
                         : ended)
            .push_back(concat(call->text, " of ", owner_of(row), call->at));
  }
  std::string text;
  append_list(text, "in ", running);
  if (running.empty()) append_list(text, "after ", ended);
  append_list(text, "last issued ", issued);
  return text;
}

std::vector<Position> positions_of(const File& file) {
  std::vector<Position> living, ended;
  for (const Row& row : file.row) {
    const std::uint32_t used = row.used.load(std::memory_order_relaxed);
    const auto call = recorded_call(file, row, false);
    if (!call || row.in_streams || used > 1) continue;
    const std::string owner = owner_of(row);
    (used ? living : ended)
        .push_back(
            {owner, row.size, call->number, concat(call->text, " of ", owner, call->at), call->running});
  }
  return living.empty() ? ended : living;
}

std::string activity_of(const File& file) {
  std::string text = calls_of(file);
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (const std::uint64_t update = value_of(file.update)) add(concat("update ", update));
  char phase[max_phase + 1] = {};
  for (std::size_t i = 0; i < std::size(file.phase); ++i) {
    const std::uint64_t word = value_of(file.phase[i]);
    std::memcpy(phase + i * sizeof word, &word, sizeof word);
  }
  if (const std::string p = printable(std::string_view(phase, max_phase)); !p.empty()) add(p);
  return text;
}

std::vector<Frame> stack_of(const File& file) {
  std::vector<Frame> frames;
  const std::string_view all(file.stack, ::strnlen(file.stack, stack_bytes));
  for (const std::string& line : parts_of(all, '\n')) {
    const auto plus = line.rfind("+0x");
    std::uint64_t address = 0;
    if (plus == std::string::npos || frames.size() == max_frames_read) continue;
    const char *const first = line.data() + plus + 3, *const last = line.data() + line.size();
    if (std::from_chars(first, last, address, 16).ptr != last) continue;
    frames.push_back({printable(line.substr(0, plus)), address});
  }
  return frames;
}

std::unique_ptr<File> file_of(std::span<const std::byte> bytes) {
  if (bytes.size() != sizeof(File)) return nullptr;
  auto file = std::make_unique<File>();
  std::memcpy(static_cast<void*>(file.get()), bytes.data(), sizeof(File));
  const bool sound = std::memcmp(file->magic, "rzflight", sizeof file->magic) == 0 &&
                     file->version == version && file->rows == row_count;
  return sound ? std::move(file) : nullptr;
}

}  // namespace

std::unique_ptr<File> read_file(int fd) {
  std::vector<std::byte> bytes(sizeof(File));
  if (::pread(fd, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) return nullptr;
  return file_of(bytes);
}

Report read_report(const File& file) {
  Report report{.activity = activity_of(file), .positions = positions_of(file)};
  if (const int signal = file.signal.load(std::memory_order_relaxed); signal > 0) {
    report.signal = signal;
    report.address = value_of(file.address);
    report.stack = stack_of(file);
  }
  return report;
}

Report read_report(std::span<const std::byte> bytes) {
  const auto file = file_of(bytes);
  return file ? read_report(*file) : Report();
}

}  // namespace rz::flight
