#pragma once
/// Memory and padding of batches with ragged fields.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sharding/data/dataset.h"
#include "tensor/tensor.h"

namespace rz {

/// The field with the lengths of a ragged one.
std::string lengths_name(std::string_view field);
/// The fields of samples, and after them one with the lengths of each ragged one.
std::vector<Field> fields_of_batches(std::vector<Field>);
/// What a row of a field has at most.
Shape padded_shape(const Field&, const Collation&);
/// Errc::invalid_argument if padding_value is no value of the dtype.
void check_padding_value(const Field&);

/// All ragged fields of a row get the length 0.
void clear_lengths(std::span<const Field>, std::span<const Tensor> memory, std::size_t row);
/// Pads the first `rows` rows, and moves them, where the batch is narrower than the memory, so that they are
/// contiguous. Returns the shape of one row of each field.
std::vector<Shape> collate(std::span<const Field>, std::span<const Tensor> memory, std::size_t rows,
                           const Collation&);

}  // namespace rz
