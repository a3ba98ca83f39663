#pragma once
/// Parameter initialization. Each element is a pure function of (seed, parameter name, element index), so a
/// rank that computes a slice gets the same bits as a rank that computes the whole parameter.

#include <cstdint>
#include <span>
#include <string_view>

#include "module.h"

namespace rz {

/// Computes elements [begin, begin + slice.size()) of the parameter from the distribution Parameter::initial.
/// Their random numbers are those of their indices in the named tensor, if the parameter is a part of it.
/// Random words: Philox4x32-10 (Salmon et al., 2011, doi:10.1145/2063384.2063405). Normal values: Box-Muller
/// transform (1958, doi:10.1214/aoms/1177706645). Errc::invalid_argument if the slice exceeds the parameter.
void init_slice(const Parameter&, std::span<float> slice, std::size_t begin, std::uint64_t seed);

/// Element `index` of the named stream of uniform random numbers in (0, 1).
double random_uniform(std::uint64_t seed, std::string_view stream, std::uint64_t index);

/// Allocates the value of every parameter that has none: f32, uninitialized. Buffers too, with
/// allocate_buffers(). Errc::invalid_argument if two parameters have the same name.
void allocate_parameters(Module&, const Allocator& = allocate_host);
/// Allocates every buffer that has no value and sets it to its initial value, in the order of the stream, on
/// whose device the memory must be.
void allocate_buffers(Module&, const Allocator& = allocate_host, const Stream& = {});
/// Initializes all elements of every parameter with init_slice(). Same error.
void init_parameters(Module&, std::uint64_t seed, const Stream& = {});

}  // namespace rz
