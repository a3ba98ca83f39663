#include "tools/doctor/instructions.h"

#include <strings.h>

#include <algorithm>
#include <array>

#include "comm/core/text.h"

namespace rz::doctor {
namespace {

constexpr auto known = std::to_array<std::string_view>({"aes", "avx", "avx2", "fma", "avx512f", "avx512dq",
                                                        "avx512cd", "avx512bw", "avx512vl", "avx512_bf16",
                                                        "amx_bf16", "asimd", "sve", "sve2", "bf16"});

struct Core {
  std::string_view name;
  Vectors vectors;
};
/// The names of OpenBLAS's dynamic builds for x86.
constexpr auto cores =
    std::to_array<Core>({{"Katmai", Vectors::sse},        {"Coppermine", Vectors::sse},
                         {"Northwood", Vectors::sse},     {"Prescott", Vectors::sse},
                         {"Banias", Vectors::sse},        {"Atom", Vectors::sse},
                         {"Core2", Vectors::sse},         {"Penryn", Vectors::sse},
                         {"Dunnington", Vectors::sse},    {"Nehalem", Vectors::sse},
                         {"Athlon", Vectors::sse},        {"Opteron", Vectors::sse},
                         {"Opteron_SSE3", Vectors::sse},  {"Barcelona", Vectors::sse},
                         {"Nano", Vectors::sse},          {"Bobcat", Vectors::sse},
                         {"Sandybridge", Vectors::avx},   {"Bulldozer", Vectors::avx},
                         {"Piledriver", Vectors::avx},    {"Steamroller", Vectors::avx},
                         {"Excavator", Vectors::avx2},    {"Haswell", Vectors::avx2},
                         {"Zen", Vectors::avx2},          {"SkylakeX", Vectors::avx512},
                         {"Cooperlake", Vectors::avx512}, {"SapphireRapids", Vectors::avx512}});

}  // namespace

std::vector<std::string> read_instructions(std::string_view cpuinfo) {
  for (const std::string& line : parts_of(cpuinfo, '\n')) {
    const auto colon = line.find(':');
    if (!(line.starts_with("flags") || line.starts_with("Features")) || colon == std::string::npos) continue;
    std::vector<std::string> found;
    for (const std::string_view word : words_of(std::string_view(line).substr(colon + 1)))
      if (std::ranges::count(known, word)) found.emplace_back(word);
    return found;
  }
  return {};
}

bool has_instruction(const HostFacts& f, std::string_view name) {
  return std::ranges::count(f.instructions, name) > 0;
}

Vectors vectors_of(const HostFacts& f) {
  const auto has = [&](std::initializer_list<std::string_view> all) {
    return std::ranges::all_of(all, [&](std::string_view i) { return has_instruction(f, i); });
  };
  if (f.machine != "x86_64") return Vectors::other;
  if (has({"avx2", "fma", "avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"})) return Vectors::avx512;
  return has({"avx2", "fma"}) ? Vectors::avx2 : has({"avx"}) ? Vectors::avx : Vectors::sse;
}

std::string describe_instructions(const HostFacts& f) {
  constexpr const char* names[] = {"SSE", "AVX", "AVX2", "AVX-512"};
  const Vectors vectors = vectors_of(f);
  std::string text = vectors != Vectors::other ? names[static_cast<int>(vectors)] : f.machine;
  for (const auto& [instruction, name] :
       std::to_array<std::pair<const char*, const char*>>({{"avx512_bf16", "BF16"},
                                                           {"amx_bf16", "AMX"},
                                                           {"sve2", "SVE2"},
                                                           {"sve", "SVE"},
                                                           {"bf16", "BF16"}}))
    if (has_instruction(f, instruction))
      text += concat(text.find(" with ") == text.npos ? " with " : ", ", name);
  return text;
}

std::optional<Vectors> vectors_of_core(std::string_view name) {
  const auto core = std::ranges::find_if(cores, [&](const Core& c) {
    return c.name.size() == name.size() && ::strncasecmp(c.name.data(), name.data(), name.size()) == 0;
  });
  return core == cores.end() ? std::nullopt : std::optional(core->vectors);
}

}  // namespace rz::doctor
