#include "tools/rzrun/ranks/error_file.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>

#include "comm/core/text.h"

namespace rz::rzrun {
namespace {

constexpr std::size_t max_file_bytes = std::size_t{1} << 20, max_message_bytes = 4096;

}  // namespace

std::optional<ErrorReport> read_error_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string text(max_file_bytes, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(in.gcount()));
  const auto file = nlohmann::json::parse(text, nullptr, false);
  if (!file.is_object() || !file.contains("message")) return {};
  const auto& outer = file["message"];
  const auto& inner = outer.is_object() && outer.contains("message") ? outer["message"] : outer;
  if (!inner.is_string()) return {};
  ErrorReport report{inner.get<std::string>(), -1};
  report.message.resize(std::min(report.message.size(), max_message_bytes));
  std::erase_if(report.message,
                [](char c) { return (static_cast<unsigned char>(c) < 32 && c != '\n') || c == 127; });
  const auto extra = outer.is_object() && outer.contains("extraInfo") ? outer["extraInfo"] : nlohmann::json();
  if (extra.is_object() && extra.contains("culprit") && extra["culprit"].is_number_integer())
    report.culprit = extra["culprit"].get<int>();
  return report;
}

bool write_error_file(const std::string& path, const std::string& message, int error_code) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto timestamp = concat(std::chrono::duration_cast<std::chrono::seconds>(now).count());
  nlohmann::json file;
  file["message"]["message"] = message;
  file["message"]["extraInfo"] = {{"py_callstack", ""}, {"timestamp", timestamp}};
  if (error_code) file["message"]["errorCode"] = error_code;
  std::ofstream out(path);
  out << file.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << std::flush;
  return out.good();
}

}  // namespace rz::rzrun
