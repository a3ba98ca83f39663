#include "tensor/kernels/check.h"

#include <algorithm>

#include "comm/device/meta.h"

namespace rz::ops {

namespace {

std::string describe(const Argument& a) {
  if (!a.tensor.defined()) return concat(a.name, " (undefined)");
  std::string text = concat(a.name, " ", name(a.tensor.shape()));
  if (a.tensor.dtype() != DType::f32) text += concat(" of ", name(a.tensor.dtype()));
  if (!a.tensor.contiguous()) text += concat(" with rows ", a.tensor.row_stride(), " elements apart");
  if (a.tensor.device() != Device{}) text += concat(" on ", name(a.tensor.device()));
  return text;
}

[[noreturn]] void refuse(const std::string& text, std::initializer_list<Argument> arguments) {
  std::string all = text;
  const char* separator = "";
  for (const Argument& a : arguments) all += separator + describe(a), separator = ", ";
  fail(Errc::invalid_argument, all);
}

}  // namespace

bool is_float(DType t) { return t == DType::f32 || t == DType::f16 || t == DType::bf16; }

void check(const char* op, std::initializer_list<Argument> arguments, bool fits, Rows rows, DTypes dtypes) {
  const Device device = arguments.begin()->tensor.device();
  bool usable = true;
  for (const Argument& a : arguments)
    usable = usable && a.tensor.defined() && a.tensor.device() == device &&
             (dtypes == DTypes::any || is_float(a.tensor.dtype()));
  const auto is_contiguous = [](const Argument& a) { return a.tensor.contiguous(); };
  if (usable && rows == Rows::contiguous && !std::ranges::all_of(arguments, is_contiguous))
    refuse(concat(op, ": needs contiguous rows; copy the tensor to a contiguous one (ops::copy): "),
           arguments);
  if (fits && usable) return;
  const char* const needs =
      dtypes == DTypes::any ? ": needs tensors of one device: " : ": needs f32, f16 or bf16 on one device: ";
  refuse(concat(op, usable ? ": these shapes do not fit together: " : needs), arguments);
}

void check_dtype(const char* op, DType dtype, std::initializer_list<Argument> arguments) {
  for (const Argument& a : arguments)
    if (a.tensor.defined() && a.tensor.dtype() != dtype)
      refuse(concat(op, ": ", a.name, " is ", name(a.tensor.dtype()), ", and must be ", name(dtype), ": "),
             arguments);
}

void check_gradient_dtype(const char* op, DType dtype, std::initializer_list<Argument> arguments) {
  for (const Argument& a : arguments)
    if (a.tensor.defined() && a.tensor.dtype() != DType::f32) check_dtype(op, dtype, {a});
}

void check_norm(const char* op, const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation,
                const Tensor& x, const Tensor& weight, const Tensor& bias, std::size_t channels, bool fit) {
  check(op,
        {{"out", out},
         {"mean", mean},
         {"inverse_deviation", inverse_deviation},
         {"x", x},
         {"weight", weight},
         {"bias", bias}},
        fit && is_vector(weight, channels) && is_vector(bias, channels));
  check_dtype(op, x.dtype(), {{"out", out}, {"weight", weight}, {"bias", bias}});
  check_dtype(op, DType::f32, {{"mean", mean}, {"inverse_deviation", inverse_deviation}});
}

void check_norm_backward(const char* op, const Tensor& d_x, const Tensor& d_out, const Tensor& x,
                         const Tensor& weight, const Tensor& mean, const Tensor& inverse_deviation,
                         std::size_t channels, bool fit) {
  check(op,
        {{"d_x", d_x},
         {"d_out", d_out},
         {"x", x},
         {"weight", weight},
         {"mean", mean},
         {"inverse_deviation", inverse_deviation}},
        fit && is_vector(weight, channels));
  check_dtype(op, x.dtype(), {{"d_x", d_x}, {"d_out", d_out}, {"weight", weight}});
  check_dtype(op, DType::f32, {{"mean", mean}, {"inverse_deviation", inverse_deviation}});
}

void check_norm_gradients(const char* op, const Tensor& d_weight, const Tensor& d_bias, const Tensor& x,
                          std::size_t channels) {
  if (d_weight.defined()) check(op, {{"d_weight", d_weight}, {"x", x}}, is_vector(d_weight, channels));
  if (d_bias.defined()) check(op, {{"d_bias", d_bias}, {"x", x}}, is_vector(d_bias, channels));
  check_gradient_dtype(op, x.dtype(), {{"d_weight", d_weight}, {"d_bias", d_bias}});
}

void check_indices(const char* op, const Argument& a, std::size_t count, std::size_t limit,
                   std::initializer_list<std::int32_t> others) {
  const Tensor& t = a.tensor;
  if (!t.defined() || t.dtype() != DType::i32 || t.count() != count || !t.contiguous())
    fail(Errc::invalid_argument, op, ": needs ", count, " i32: ", describe(a));
  if (t.device().kind != Device::host || is_meta(t.device())) return;
  const std::int32_t* indices = t.data<std::int32_t>();
  for (std::size_t i = 0; i < count; ++i)
    if ((indices[i] < 0 || static_cast<std::size_t>(indices[i]) >= limit) &&
        std::ranges::find(others, indices[i]) == others.end())
      fail(Errc::invalid_argument, op, ": ", a.name, "[", i, "] = ", indices[i], " is not in [0, ", limit,
           ")");
}

}  // namespace rz::ops
