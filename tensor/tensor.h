#pragma once
/// Tensors: dtype, shape, and memory that is owned, borrowed or shared. Copying a Tensor shares the memory.
/// Elements are contiguous, except that the rows (all leading dimensions) of a tensor made by columns() are
/// row_stride() elements apart.

#include <array>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

#include "../comm/core/error.h"
#include "../comm/core/types.h"
#include "../comm/device/stream.h"

namespace rz {

/// Up to four dimensions in row-major order. A scalar has none. A range of its extents.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<std::size_t> extents);
  explicit Shape(std::span<const std::size_t> extents);

  int dims() const { return dims_; }
  /// dims(), as the size of the range. count() is the number of elements.
  std::size_t size() const { return static_cast<std::size_t>(dims_); }
  const std::size_t* begin() const { return extents_.data(); }
  const std::size_t* end() const { return extents_.data() + dims_; }
  /// Negative indices count from the last dimension.
  std::size_t operator[](int i) const { return extents_[static_cast<std::size_t>(i < 0 ? i + dims_ : i)]; }
  std::size_t count() const;
  /// The same shape with another last extent. Errc::invalid_argument for a scalar.
  Shape with_last(std::size_t) const;
  /// The same shape with another extent of dimension i, from 0. Errc::invalid_argument if there is none.
  Shape with(int i, std::size_t extent) const;
  bool operator==(const Shape&) const = default;

 private:
  std::array<std::size_t, 4> extents_{};
  int dims_ = 0;
};
std::string name(const Shape&);  ///< "[4, 64, 768]"

class Tensor {
 public:
  /// An undefined tensor.
  Tensor() = default;
  /// Allocates uninitialized memory.
  static Tensor empty(Shape, DType = DType::f32, const Allocator& = allocate_host);
  /// Allocates memory and sets it to zero; on a device it synchronizes the null stream.
  static Tensor zeros(Shape, DType = DType::f32, const Allocator& = allocate_host);
  /// Borrows the caller's memory, which must outlive every copy.
  static Tensor borrow(void* data, Shape, DType = DType::f32, Device = {});
  /// Shares ownership of `memory`; the elements start at `offset`, in elements.
  static Tensor share(std::shared_ptr<std::byte> memory, std::size_t offset, Shape, DType = DType::f32,
                      Device = {});

  bool defined() const { return data_ != nullptr; }
  const Shape& shape() const { return shape_; }
  std::size_t count() const { return shape_.count(); }
  /// Bytes of the elements, without those between rows.
  std::size_t bytes() const { return count() * size_of(dtype_); }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }

  /// Elements between the beginnings of two rows; the last extent (1 for a scalar) if contiguous.
  std::size_t row_stride() const { return row_stride_ ? row_stride_ : shape_.dims() ? shape_[-1] : 1; }
  bool contiguous() const { return row_stride_ == 0; }

  /// The elements; those of row r begin at r · row_stride(). For device memory the address is valid in
  /// kernels only. Errc::invalid_argument unless T is the dtype, and for an undefined tensor.
  template <class T>
  T* data() const {
    if (data_ == nullptr) require_elements();
    require(dtype_ == dtype_of<T>, Errc::invalid_argument, "a tensor of ", name(dtype_), " was read as ",
            name(dtype_of<T>));
    return reinterpret_cast<T*>(data_);
  }
  std::byte* raw() const { return data_; }
  /// Number of references to the memory; 0 if it is borrowed.
  long use_count() const { return owner_.use_count(); }

  /// A contiguous tensor on the host: this tensor if it is one, otherwise a copy, after synchronizing the
  /// stream.
  Tensor on_host(const Stream&) const;
  /// Copies the elements from host memory in stream order; `from` may be reused on return.
  /// Errc::invalid_argument if the sizes differ, or if this tensor is not contiguous.
  void assign(std::span<const std::byte> from, const Stream&) const;
  template <class T>
  void assign(std::span<const T> from, const Stream& stream) const {
    require(dtype_ == dtype_of<T>, Errc::invalid_argument, "a tensor of ", rz::name(dtype_), " was assigned ",
            rz::name(dtype_of<T>));
    assign(std::as_bytes(from), stream);
  }

  /// The same memory with another shape. Errc::invalid_argument if the counts differ, or if this tensor is
  /// not contiguous and the last extents differ.
  Tensor reshape(Shape) const;
  /// Elements [begin, begin + shape.count()) of the flat memory. Errc::invalid_argument if out of range, or
  /// if this tensor is not contiguous.
  Tensor view(std::size_t begin, Shape) const;
  /// Columns [begin, begin + count) of every row, in the same memory. Errc::invalid_argument for a scalar or
  /// if out of range.
  Tensor columns(std::size_t begin, std::size_t count) const;
  /// This tensor as a buffer for comm. Errc::invalid_argument if it is undefined or not contiguous.
  Buffer buffer() const {
    if (data_ == nullptr) require_elements();
    require_contiguous("a buffer");
    return {data_, count(), dtype_, device_};
  }

 private:
  void require_elements() const;
  void require_contiguous(const char* purpose) const;
  Tensor packed_on_host(const Stream&) const;

  std::shared_ptr<std::byte> owner_;
  std::byte* data_ = nullptr;
  Shape shape_;
  std::size_t row_stride_ = 0;  ///< 0: contiguous
  DType dtype_ = DType::f32;
  Device device_{};
};

}  // namespace rz
