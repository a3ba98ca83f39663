#pragma once
/// Instruction sets: what a processor has of those that kernels of ringzero and OpenBLAS are chosen by. Pure
/// functions.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/doctor/host_facts.h"

namespace rz::doctor {

/// In the order of what they can do, of x86; other machines have one of their own.
enum class Vectors { sse, avx, avx2, avx512, other };

/// The instructions of /proc/cpuinfo that matter here, in its order.
std::vector<std::string> read_instructions(std::string_view cpuinfo);

Vectors vectors_of(const HostFacts&);
bool has_instruction(const HostFacts&, std::string_view);
/// "AVX2", "AVX-512 with BF16": hosts with different ones run different kernels.
std::string describe_instructions(const HostFacts&);

/// What OpenBLAS's kernels of this name of OPENBLAS_CORETYPE need; nothing if it knows none of that name.
std::optional<Vectors> vectors_of_core(std::string_view name);

}  // namespace rz::doctor
