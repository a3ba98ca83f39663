#include "sharding/engine/csv_monitor.h"

#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>

#include "comm/core/error.h"
#include "sharding/io/durable_file.h"

namespace rz {

CsvMonitor::CsvMonitor(const std::string& output_path, const std::string& job_name)
    : folder_(output_path.empty() ? job_name : concat(output_path, "/", job_name)) {
  make_folders(folder_);
}

namespace {

/// Whole lines of fewer samples, of a file that may not exist.
std::string csv_lines_before(const std::string& path, std::int64_t samples) {
  std::ifstream file(path);
  std::string all;
  for (std::string line; std::getline(file, line) && !file.eof();) {
    std::int64_t of = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), of);
    const bool header = all.empty() && line.starts_with("step,");
    if (header || (error == std::errc() && *end == ',' && of < samples)) all += line + "\n";
  }
  return all;
}

}  // namespace

std::FILE* CsvMonitor::file(std::string_view name, std::int64_t samples) {
  for (File& f : files_)
    if (f.name == name) return f.stream.get();
  const std::string path = concat(folder_, "/Train_Samples_", name, ".csv");
  const std::string kept = csv_lines_before(path, samples);
  File& f = files_.emplace_back(File{std::string(name), {std::fopen(path.c_str(), "we"), std::fclose}});
  require(f.stream != nullptr, Errc::io, path, ": cannot be written: ", std::strerror(errno));
  if (kept.empty()) std::fprintf(f.stream.get(), "step,%s\n", f.name.c_str());
  std::fputs(kept.c_str(), f.stream.get());
  return f.stream.get();
}

void CsvMonitor::write(std::string_view name, std::int64_t samples, double value) {
  std::FILE* const to = file(name, samples);
  std::fprintf(to, "%lld,%s\n", static_cast<long long>(samples), rounded(value, 17).c_str());
  const bool written = std::fflush(to) == 0;
  require(written, Errc::io, folder_, "/Train_Samples_", name,
          ".csv: cannot be written: ", std::strerror(errno));
}

}  // namespace rz
