#include "sharding/engine/reports/tensorboard.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <limits>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "sharding/io/file.h"

namespace rz {
namespace {

constexpr std::array<std::uint32_t, 256> crc32c_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t rest = i;
    for (int bit = 0; bit < 8; ++bit) rest = rest % 2 ? rest >> 1 ^ 0x82f63b78u : rest >> 1;
    table[i] = rest;
  }
  return table;
}
constexpr std::array<std::uint32_t, 256> crc_table = crc32c_table();

// ---- protocol buffers: https://protobuf.dev/programming-guides/encoding

template <class T>
std::string little_endian(T value) {
  std::string bytes;
  for (std::size_t i = 0; i < sizeof value; ++i) bytes += static_cast<char>(value >> 8 * i & 0xff);
  return bytes;
}

std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}

/// The number of a field and how its value is coded, before the value.
enum class WireType { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };
std::string field_key(std::uint64_t field, WireType wire) {
  return varint(field << 3 | static_cast<unsigned>(wire));
}

std::string bytes_field(std::uint64_t field, std::string_view bytes) {
  return field_key(field, WireType::bytes) + varint(bytes.size()) + std::string(bytes);
}

/// Wall time and step of an Event; its content follows.
std::string event_of(std::int64_t step) {
  const std::chrono::duration<double> time = std::chrono::system_clock::now().time_since_epoch();
  return field_key(1, WireType::fixed64) + little_endian(std::bit_cast<std::uint64_t>(time.count())) +
         field_key(2, WireType::varint) + varint(static_cast<std::uint64_t>(step));
}

/// Event.summary, a Summary of values with tag and simple_value.
std::string summary_of(std::span<const Scalar> values) {
  std::string all;
  for (const Scalar& v : values)
    all += bytes_field(1, bytes_field(1, v.tag) + field_key(2, WireType::fixed32) +
                              little_endian(std::bit_cast<std::uint32_t>(static_cast<float>(v.value))));
  return bytes_field(5, all);
}

std::string tf_record(const std::string& data) {
  const std::string length = little_endian(static_cast<std::uint64_t>(data.size()));
  return length + little_endian(masked_crc32c(length)) + data + little_endian(masked_crc32c(data));
}

// ---- names

constexpr std::string_view event_file_prefix = "events.out.tfevents.";

/// Seconds since 1970, or one more than those of the last file in the folder.
std::int64_t time_of_name(const std::string& folder) {
  std::int64_t time =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(event_file_prefix)) continue;
    const std::string rest = name.substr(event_file_prefix.size());
    const auto other = parse_number<std::int64_t>(rest.substr(0, rest.find('.')));
    if (other && *other < std::numeric_limits<std::int64_t>::max()) time = std::max(time, *other + 1);
  }
  return time;
}

std::string host_name() {
  std::array<char, 256> name{};
  const bool known = ::gethostname(name.data(), name.size() - 1) == 0 && name[0] != 0;
  return known ? name.data() : "localhost";
}

}  // namespace

std::uint32_t masked_crc32c(std::string_view bytes) {
  std::uint32_t crc = ~0u;
  for (const char byte : bytes) crc = crc_table[(crc ^ static_cast<unsigned char>(byte)) & 0xff] ^ crc >> 8;
  return std::rotr(~crc, 15) + 0xa282ead8u;
}

TensorBoardMonitor::TensorBoardMonitor(const std::string& output_path, const std::string& job_name)
    : folder_(output_path.empty() ? job_name
              : job_name.empty()  ? output_path
                                  : concat(output_path, "/", job_name)) {
  make_folders(folder_);
}

std::string TensorBoardMonitor::open(std::int64_t step) {
  if (file_ && first_step_ < 0) return "";
  const std::int64_t first = std::exchange(first_step_, -1);
  const std::int64_t from = first < 0 ? step : first;
  // A SessionLog of status START makes TensorBoard drop what it has of this step and of later ones.
  const std::string start =
      tf_record(event_of(from) + bytes_field(7, field_key(1, WireType::varint) + varint(1)));
  if (file_) return start;
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%010lld", static_cast<long long>(time_of_name(folder_)));
  path_ = concat(folder_, "/", event_file_prefix, seconds, ".", host_name(), ".", ::getpid());
  file_.reset(std::fopen(path_.c_str(), "wxe"));
  require(file_ != nullptr, Errc::io, path_, ": cannot be written: ", std::strerror(errno));
  return tf_record(event_of(from) + bytes_field(3, "brain.Event:2")) + start;
}

void TensorBoardMonitor::write(std::span<const Scalar> values, std::int64_t step) {
  const std::string records = open(step) + tf_record(event_of(step) + summary_of(values));
  const bool written = std::fwrite(records.data(), 1, records.size(), file_.get()) == records.size() &&
                       std::fflush(file_.get()) == 0;
  require(written, Errc::io, path_, ": cannot be written: ", std::strerror(errno));
}

}  // namespace rz
