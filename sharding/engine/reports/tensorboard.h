#pragma once
/// Event files of TensorBoard.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace rz {

/// A value of a report. Parts of the tag are divided by '/': "Train/Samples/lr".
struct Scalar {
  std::string tag;
  double value = 0;
};

/// CRC-32C (RFC 3720, appendix B.4) with the mask of TFRecord files, that of each length and of each record.
std::uint32_t masked_crc32c(std::string_view bytes);

/// Writes scalars to a new file FOLDER/events.out.tfevents.SECONDS.HOST.PID, which TensorBoard shows while
/// the run goes on. TensorBoard reads the files of a folder in the order of their names as one run: the name
/// follows all that are there, and events of earlier files from the first step of this one on are obsolete.
/// The format is that of TensorFlow: records with their length and checksums (core/lib/io/record_writer.h),
/// each a protocol buffer Event (core/util/event.proto). Not thread-safe.
class TensorBoardMonitor {
 public:
  /// Creates the folder OUTPUT_PATH/JOB_NAME. Errc::io if that fails.
  TensorBoardMonitor(const std::string& output_path, const std::string& job_name);

  /// Events so far, also of earlier files, of `first_step` and after it are obsolete: the run goes on before
  /// it. By default those from the step of the first write() on.
  void restart(std::int64_t first_step) { first_step_ = first_step; }
  /// Writes values of a step, and flushes them. Values are rounded to f32. Errc::io names the file.
  void write(std::span<const Scalar>, std::int64_t step);

 private:
  /// The records that come before the next ones.
  std::string open(std::int64_t step);

  std::string folder_, path_;
  std::int64_t first_step_ = -1;  // that is not written yet; below 0: none
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_{nullptr, std::fclose};
};

}  // namespace rz
