#pragma once
/// The first value of a parameter's elements, each a pure function of (seed, parameter name, element index):
/// any rank makes any slice, and gets the same bits as one that makes the whole.

#include <cstdint>
#include <span>
#include <string_view>

#include "autograd_lite/module.h"

namespace rz {

/// Elements [begin, begin + slice.size()) of the parameter, drawn as Parameter::initial says, from
/// Philox4x32-10 (Salmon et al., 2011, doi:10.1145/2063384.2063405) and, for normal ones, Box and Muller's
/// transform (1958, doi:10.1214/aoms/1177706645). Errc::invalid_argument if the slice exceeds the parameter.
void init_slice(const Parameter&, std::span<float> slice, std::size_t begin, std::uint64_t seed);

/// Number `index` of the named stream of uniform numbers in (0, 1).
double random_uniform(std::uint64_t seed, std::string_view stream, std::uint64_t index);

/// Gives every parameter of a module that has no value yet memory of its own, not initialised.
void allocate_parameters(Module&, const Allocator& = allocate_host);
/// init_slice() of the whole of every parameter.
void init_parameters(Module&, std::uint64_t seed, const Stream& = {});

}  // namespace rz
