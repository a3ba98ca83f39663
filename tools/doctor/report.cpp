#include "tools/doctor/report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "comm/core/text.h"
#include "sharding/io/text.h"

namespace rz::doctor {
namespace {

std::string padded(std::string text, std::size_t width) {
  text.resize(std::max(text.size(), width), ' ');
  return text;
}

std::string many(std::ptrdiff_t n, const char* one, const char* more) {
  return concat(n, ' ', n == 1 ? one : more);
}

std::string line_of(const Finding& f, std::size_t width) {
  std::string line =
      concat("  ", padded(name(f.verdict), 8), padded(f.check, width), f.found, "; needed: ", f.needed);
  line = escaped(line) + "\n";
  if (!f.remedy.empty()) line += padded("", 10 + width) + escaped(f.remedy) + ".\n";
  return line;
}

}  // namespace

bool runs(const Report& r) { return !std::ranges::count(r.findings, Verdict::missing, &Finding::verdict); }

std::string table(const Report& r) {
  std::size_t width = 0;
  for (const Finding& f : r.findings) width = std::max(width, f.check.size() + 2);
  std::string text, host = "\n";
  for (const Finding& f : r.findings) {
    if (f.host != host)
      text += concat(text.empty() ? "" : "\n", f.host.empty() ? "all hosts" : escaped(f.host), "\n");
    host = f.host;
    text += line_of(f, width);
  }
  const auto missing = std::ranges::count(r.findings, Verdict::missing, &Finding::verdict);
  const auto warnings = std::ranges::count(r.findings, Verdict::warning, &Finding::verdict);
  text +=
      concat("\ndoctor: a job of ", many(r.ranks, "rank", "ranks"),
             r.nodes > 1 ? concat(" on ", r.nodes, " hosts") : "", missing ? " would not run" : " would run");
  if (missing) text += concat(": ", many(missing, "check fails", "checks fail"));
  if (warnings) text += concat(missing ? ", " : "; ", many(warnings, "warning", "warnings"));
  return text + "\n";
}

std::string json(const Report& r) {
  using Json = nlohmann::json;
  Json document{{"runs", runs(r)}, {"ranks", r.ranks}, {"hosts", r.nodes}};
  document["findings"] = document["facts"] = document["pairs"] = Json::array();
  for (const Finding& f : r.findings)
    document["findings"].push_back({{"host", f.host},
                                    {"check", f.check},
                                    {"verdict", name(f.verdict)},
                                    {"found", f.found},
                                    {"needed", f.needed},
                                    {"remedy", f.remedy}});
  for (NamedFacts f : r.facts) {
    f.facts.secret_digest.clear();
    document["facts"].push_back({{"host", f.host}, {"facts", Json::parse(to_json(f.facts))}});
  }
  for (const PairMeasurement& m : r.pairs) document["pairs"].push_back(Json::parse(to_json(m)));
  return document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace rz::doctor
