#pragma once
/// Elements of files as f32.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

namespace rz {

/// F32, F16, BF16 or F64, by the names of safetensors.
bool is_float_dtype(std::string_view dtype);

/// Reads elements of such a dtype from `begin` on, rounded to f32, in blocks of up to 64 KiB:
/// `read(element, out)` reads elements from `element` on as they are in the file.
void read_as_f32(std::string_view dtype, std::uint64_t begin, std::span<float> out,
                 const std::function<void(std::uint64_t element, std::span<std::byte> out)>& read);

}  // namespace rz
