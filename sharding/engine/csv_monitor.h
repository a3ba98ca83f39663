#pragma once
/// DeepSpeed's csv_monitor: a file for each quantity.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace rz {

/// Appends to FOLDER/Train_Samples_NAME.csv a line "SAMPLES,VALUE" for each value, after a header "step,NAME"
/// in a new file. Lines of a run before that the first value is not beyond are removed: one that is resumed
/// writes them again. Not thread-safe.
class CsvMonitor {
 public:
  /// Creates the folder OUTPUT_PATH/JOB_NAME. Errc::io if that fails.
  CsvMonitor(const std::string& output_path, const std::string& job_name);

  /// `samples`: number of samples trained so far, over all ranks. Errc::io names the file.
  void write(std::string_view name, std::int64_t samples, double value);

 private:
  struct File {
    std::string name;
    std::unique_ptr<std::FILE, int (*)(std::FILE*)> stream;
  };
  std::FILE* file(std::string_view name, std::int64_t samples);

  std::string folder_;
  std::vector<File> files_;
};

}  // namespace rz
