#include "sharding/data/batch.h"

#include <utility>

#include "sharding/data/field_names.h"

namespace rz {

Batch::Batch(std::shared_ptr<const std::vector<Field>> fields, std::vector<Tensor> tensors,
             std::vector<std::uint64_t> indices, std::size_t padding)
    : fields_(std::move(fields)),
      tensors_(std::move(tensors)),
      indices_(std::move(indices)),
      padding_(padding) {}

const Tensor& Batch::operator[](std::string_view field) const {
  for (std::size_t f = 0; f < tensors_.size(); ++f)
    if ((*fields_)[f].name == field) return tensors_[f];
  fail_unknown_field(field, fields_ ? std::span<const Field>(*fields_) : std::span<const Field>());
}

}  // namespace rz
