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

Tensor Tensor::on_host(const Stream& stream) const {
  if (device_.kind == Device::host) return *this;
  const Tensor copy = empty(shape_, dtype_);
  memcpy_async(copy.data_, data_, bytes(), stream);
  stream.synchronize();
  return copy;
}

void Tensor::assign(std::span<const std::byte> from, const Stream& stream) const {
  require(from.size() == bytes(), Errc::invalid_argument, "a tensor of ", bytes(), " bytes was assigned ",
          from.size());
  memcpy_async(data_, from.data(), from.size(), stream);
}

Tensor Tensor::reshape(Shape shape) const {
  if (shape.count() != count())
    fail(Errc::invalid_argument, "cannot reshape ", rz::name(shape_), " to ", rz::name(shape));
  Tensor t = *this;
  t.shape_ = shape;
  return t;
}

Tensor Tensor::view(std::size_t begin, Shape shape) const {
  if (begin + shape.count() > count())
    fail(Errc::invalid_argument, "a view of ", rz::name(shape), " from element ", begin,
         " does not fit into ", rz::name(shape_));
  Tensor t = *this;
  t.data_ += begin * size_of(dtype_);
  t.shape_ = shape;
  return t;
}

}  // namespace rz
