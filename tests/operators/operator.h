#pragma once
/// Operators by rows of a table. A row is an operator at one size: its inputs, its value in double by its
/// definition, the calls of forward and backward. Operators::expect_right() makes the calls on the host with
/// 1 and 3 threads, on the emulated device or on a card, in the type of the test, and compares: values with
/// the definition, gradients with its finite differences. Each row is called with aligned tensors, with
/// tensors at odd addresses, between rows of NaN and in place, and its gradients are stored and added.

#include <functional>
#include <string>
#include <vector>

#include "comm/core/text.h"
#include "tensor/ops.h"
#include "tests/gpu/on_device.h"
#include "tests/support/reference.h"

namespace rz::test {

/// How far a result may be from its value, beside the rounding to its type. All 0: it has the bits of the
/// value rounded to the type.
struct Bound {
  double of_largest = 2e-6;  ///< of the largest magnitude of the result: f32 and short sums
  double of_each = 0;        ///< of the element's
  double absolute = 0;
};

/// The tensors of a call.
struct Operands {
  const Stream& stream;
  std::vector<Tensor> in;
  std::vector<Tensor> kept;  ///< what forward writes for backward
  Tensor out, d_out;
};

/// Which element of an input reaches element `out` of the value in difference `step`: in each step all these
/// elements move at once. Without `element` each input element has a step of its own.
struct Reach {
  std::size_t steps = 0;
  std::function<std::size_t(std::size_t out, std::size_t step)> element;
};
inline Reach its_own() {
  return {1, [](std::size_t out, std::size_t) { return out; }};
}
/// That in column `step` of its row; rows of the value have `out_columns`.
inline Reach its_row(std::size_t columns, std::size_t out_columns) {
  return {columns, [=](std::size_t out, std::size_t step) { return out / out_columns * columns + step; }};
}
inline Reach its_column(std::size_t columns) {
  return {1, [=](std::size_t out, std::size_t) { return out % columns; }};
}
inline Reach from(std::vector<std::size_t> places) {
  return {1, [p = std::move(places)](std::size_t out, std::size_t) { return p[out]; }};
}

enum class Alias { none, d_out, input };  ///< where a gradient may be stored
struct Gradient {
  std::size_t of;  ///< input
  std::function<void(const Operands&, const Tensor& d, ops::Into)> backward;
  Reach reach = {};
  Alias alias = Alias::none;
  bool parameter = false;  ///< may be f32 beside values of 16 bits
  bool f32_alone = false;  ///< of a parameter
  bool adds = true;        ///< has an Into
  Bound bound = {};
  /// The gradient, where it depends on the rounded value, or where differences are slow. Differences confirm
  /// it in f32 where the tensors are small and finite.
  std::function<Values(const std::vector<Values>& in, const Values& out, const Values& d_out)> formula = {};
};

struct Input {
  Values values;  ///< rounded to the type of the test
  Shape shape;
  bool f32 = false;  ///< to f32 instead
};
struct Kept {
  Shape shape;
  DType type = DType::f32;
};

struct Operator {
  std::string name;
  std::vector<Input> in;
  Shape out;
  std::function<void(const Operands&)> forward;
  std::function<Values(const std::vector<Values>& in)> value;
  std::vector<Gradient> gradients = {};
  std::vector<Kept> kept = {};
  Bound bound = {};
  bool in_place = false;         ///< the first input may be the output
  bool strides = false;          ///< matrices may have a row stride
  bool f32_out = false;          ///< the value is f32, whatever the inputs are
  bool unit_slopes = false;      ///< gradients of the value are -1, 0 and 1
  double slope = 0;              ///< 0: random gradients of the value; or this one of all its elements
  bool bits_of_threads = false;  ///< the results have the same bits for every number of threads
};

class Operators : public OnDevice, public testing::WithParamInterface<DType> {
 protected:
  const DType dtype = GetParam();
  const double rounding = rounding_of(dtype), smallest = smallest_of(dtype);

  void expect_right(const Operator&);

  /// Maximum error of rounding to nearest, relative to the value; and where f16 is subnormal.
  static double rounding_of(DType t) { return t == DType::f16 ? 0x1p-11 : t == DType::bf16 ? 0x1p-8 : 0; }
  static double smallest_of(DType t) { return t == DType::f16 ? 0x1p-25 : 0; }

  /// Not aligned to more than an element if `shift` is odd.
  Tensor place(const Values&, const Shape&, DType, std::size_t shift = 0) const;
  Tensor place(const Values& values, const Shape& shape, std::size_t shift = 0) const {
    return place(values, shape, dtype, shift);
  }
  Tensor empty(const Shape& shape) const { return empty_on(stream, shape, dtype); }
  Tensor statistics(const Shape& shape, DType t = DType::f32) const { return empty_on(stream, shape, t); }
  /// The sum as a tensor of the type has it.
  Values sum_of(const Values& a, const Values& b) const;
  Values get(const Tensor& t) const { return from_device(t, stream); }
  /// As the type holds them.
  Values rounded(const Values& values) const { return get(place(values, {values.size()})); }
  Values random(std::size_t n, unsigned seed, double range = 1) const {
    return rounded(random_values(n, seed, range));
  }
  void expect_close(const Tensor& got, const Values& expected, const Bound& b,
                    const std::string& what) const {
    expect_close(got.dtype(), get(got), expected, b, what);
  }
  /// Values that a tensor of the type had.
  void expect_close(DType, const Values& got, const Values& expected, const Bound&,
                    const std::string& what) const;

 private:
  struct Way;
  struct Places;
  struct Gradients;
  void call(const Operator&, const Way&, const std::vector<Values>& in, const Values& out,
            const Values& d_out, Gradients& gradients, std::vector<Values>& results);
};

/// The three types, as parameters of a suite.
inline const auto float_types = testing::Values(DType::f32, DType::f16, DType::bf16);
inline std::string type_name(const testing::TestParamInfo<DType>& info) { return name(info.param); }

/// Calls f; on the host with the vectors of every target of this CPU.
void each_target(const std::function<void()>& f);

/// Elements of x at these places, and the sums that are their gradient, of n elements.
Values moved(const Values& x, const std::vector<std::size_t>& places);
Values moved_back(const Values& d_out, const std::vector<std::size_t>& places, std::size_t n);

/// -1, 0 and 1: their products and sums are exact in every type.
Values units(std::size_t n, unsigned seed);

}  // namespace rz::test
