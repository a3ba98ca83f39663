#include "sharding/engine/monitor/csv_monitor.h"

#include <cerrno>
#include <cstring>

#include "comm/core/error.h"
#include "sharding/io/durable_file.h"

namespace rz {

CsvMonitor::CsvMonitor(const std::string& output_path, const std::string& job_name)
    : folder_(output_path.empty() ? job_name : concat(output_path, "/", job_name)) {
  make_folders(folder_);
}

std::FILE* CsvMonitor::file(std::string_view name) {
  for (File& f : files_)
    if (f.name == name) return f.stream.get();
  const std::string path = concat(folder_, "/Train_Samples_", name, ".csv");
  File& f = files_.emplace_back(File{std::string(name), {std::fopen(path.c_str(), "ae"), std::fclose}});
  require(f.stream != nullptr, Errc::io, path, ": cannot be written: ", std::strerror(errno));
  std::fseek(f.stream.get(), 0, SEEK_END);
  if (std::ftell(f.stream.get()) == 0) std::fprintf(f.stream.get(), "step,%s\n", f.name.c_str());
  return f.stream.get();
}

void CsvMonitor::write(std::string_view name, std::int64_t samples, double value) {
  std::FILE* const to = file(name);
  std::fprintf(to, "%lld,%s\n", static_cast<long long>(samples), rounded(value, 17).c_str());
  require(std::fflush(to) == 0, Errc::io, folder_, "/Train_Samples_", name,
          ".csv: cannot be written: ", std::strerror(errno));
}

}  // namespace rz
