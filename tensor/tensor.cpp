#include "tensor/tensor.h"

#include "comm/device/memory.h"

namespace rz {

Shape::Shape(std::initializer_list<std::size_t> extents)
    : Shape(std::span(extents.begin(), extents.size())) {}

Shape::Shape(std::span<const std::size_t> extents) : dims_(static_cast<int>(extents.size())) {
  require(extents.size() <= extents_.size(), Errc::invalid_argument, "a shape has at most 4 extents, got ",
          extents.size());
  std::copy(extents.begin(), extents.end(), extents_.begin());
}

std::size_t Shape::count() const {
  std::size_t n = 1;
  for (int i = 0; i < dims_; ++i) n *= (*this)[i];
  return n;
}

Shape Shape::with_last(std::size_t last) const {
  require(dims_ > 0, Errc::invalid_argument, "a scalar has no last extent");
  return with(dims_ - 1, last);
}

Shape Shape::with(int i, std::size_t extent) const {
  require(i >= 0 && i < dims_, Errc::invalid_argument, "a shape of ", dims_, " extents has no extent ", i);
  Shape s = *this;
  s.extents_[static_cast<std::size_t>(i)] = extent;
  return s;
}

std::string name(const Shape& s) {
  std::string out = "[";
  for (int i = 0; i < s.dims(); ++i) out += concat(i ? ", " : "", s[i]);
  return out + "]";
}

Tensor Tensor::empty(Shape shape, DType dtype, const Allocator& allocate) {
  return share(allocate(shape.count() * size_of(dtype)), 0, shape, dtype, allocate.device);
}

Tensor Tensor::zeros(Shape shape, DType dtype, const Allocator& allocate) {
  Tensor t = empty(shape, dtype, allocate);
  const Stream stream = Stream::borrow(t.device_, nullptr);
  memset_async(t.data_, 0, t.bytes(), stream);
  stream.synchronize();
  return t;
}

Tensor Tensor::borrow(void* data, Shape shape, DType dtype, Device device) {
  Tensor t;
  t.data_ = static_cast<std::byte*>(data);
  t.shape_ = shape;
  t.dtype_ = dtype;
  t.device_ = device;
  return t;
}

Tensor Tensor::share(std::shared_ptr<std::byte> memory, std::size_t offset, Shape shape, DType dtype,
                     Device device) {
  Tensor t = borrow(memory.get() + offset * size_of(dtype), shape, dtype, device);
  t.owner_ = std::move(memory);
  return t;
}

/// Without memory there may be elements only if the tensor was never assigned one.
void Tensor::require_elements() const {
  require(count() == 0, Errc::invalid_argument,
          "an undefined tensor has no elements; a parameter of a strategy has values only where the strategy "
          "holds them: engine.strategy().values().whole(parameter, engine.stream()) reads all of them");
}

void Tensor::require_contiguous(const char* purpose) const {
  if (!contiguous())
    fail(Errc::invalid_argument, purpose, " of ", rz::name(shape_), " with rows ", row_stride_,
         " elements apart: copy it to a contiguous tensor first (ops::copy)");
}

Tensor Tensor::on_host(const Stream& stream) const {
  if (data_ == nullptr) require_elements();
  if (!contiguous()) return packed_on_host(stream);
  if (device_.kind == Device::host) return *this;
  const Tensor copy = empty(shape_, dtype_);
  memcpy_async(copy.data_, data_, bytes(), stream);
  stream.synchronize();
  return copy;
}

Tensor Tensor::packed_on_host(const Stream& stream) const {
  const std::size_t columns = shape_[-1], rows = count() / columns;
  Tensor all = borrow(data_, {(rows - 1) * row_stride_ + columns}, dtype_, device_);
  all = all.on_host(stream);
  const Tensor packed = empty(shape_, dtype_);
  const std::size_t bytes = columns * size_of(dtype_), step = row_stride_ * size_of(dtype_);
  for (std::size_t r = 0; r < rows; ++r) std::copy_n(all.data_ + r * step, bytes, packed.data_ + r * bytes);
  return packed;
}

void Tensor::assign(std::span<const std::byte> from, const Stream& stream) const {
  if (data_ == nullptr) require_elements();
  require_contiguous("an assignment");
  require(from.size() == bytes(), Errc::invalid_argument, "a tensor of ", bytes(), " bytes was assigned ",
          from.size());
  memcpy_async(data_, from.data(), from.size(), stream);
}

Tensor Tensor::reshape(Shape shape) const {
  const bool same_rows = contiguous() || (shape.dims() > 0 && shape[-1] == shape_[-1]);
  if (shape.count() != count() || !same_rows)
    fail(Errc::invalid_argument, "cannot reshape ", rz::name(shape_), " to ", rz::name(shape),
         same_rows ? "" : concat(": its rows are ", row_stride_, " elements apart"));
  Tensor t = *this;
  t.shape_ = shape;
  return t;
}

Tensor Tensor::view(std::size_t begin, Shape shape) const {
  require_contiguous("a view");
  if (begin + shape.count() > count())
    fail(Errc::invalid_argument, "a view of ", rz::name(shape), " from element ", begin,
         " does not fit into ", rz::name(shape_));
  Tensor t = *this;
  t.data_ += begin * size_of(dtype_);
  t.shape_ = shape;
  return t;
}

Tensor Tensor::columns(std::size_t begin, std::size_t count) const {
  if (shape_.dims() == 0 || begin + count > shape_[-1])
    fail(Errc::invalid_argument, "columns ", begin, " to ", begin + count, " of ", rz::name(shape_));
  Tensor t = *this;
  t.data_ += begin * size_of(dtype_);
  t.shape_ = shape_.with_last(count);
  const bool one_row = t.count() <= count;  // or none
  t.row_stride_ = one_row || row_stride() == count ? 0 : row_stride();
  return t;
}

}  // namespace rz
