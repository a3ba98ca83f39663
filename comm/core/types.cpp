#include "comm/core/types.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <new>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"

namespace rz {

namespace {

constexpr struct {
  DType dtype;
  const char* name;
  const char* nccl_tests_name;
} dtypes[] = {
    {DType::f32, "f32", "float"},        {DType::f64, "f64", "double"},
    {DType::f16, "f16", "half"},         {DType::bf16, "bf16", "bfloat16"},
    {DType::f8e4m3, "f8e4m3", "f8e4m3"}, {DType::f8e5m2, "f8e5m2", "f8e5m2"},
    {DType::i8, "i8", "int8"},           {DType::u8, "u8", "uint8"},
    {DType::i32, "i32", "int32"},        {DType::u32, "u32", "uint32"},
    {DType::i64, "i64", "int64"},        {DType::u64, "u64", "uint64"},
};
static_assert(std::size(dtypes) == dtype_count);

constexpr struct {
  ReduceOp::Kind kind;
  const char* name;
} ops[] = {{ReduceOp::sum, "sum"}, {ReduceOp::prod, "prod"}, {ReduceOp::max, "max"},
           {ReduceOp::min, "min"}, {ReduceOp::avg, "avg"},   {ReduceOp::premul_sum, "mulsum"}};

}  // namespace

std::string name(Device d) {
  if (d.kind == Device::host) return d.index < 0 ? "meta" : "host";
  return concat("cuda:", d.index);
}

const char* name(DType t) {
  for (const auto& d : dtypes)
    if (d.dtype == t) return d.name;
  return "?";
}

DType dtype_from_name(std::string_view text) {
  std::string choices;
  for (const auto& d : dtypes) {
    if (text == d.name || text == d.nccl_tests_name) return d.dtype;
    choices += concat(choices.empty() ? "" : ", ", d.nccl_tests_name);
  }
  fail(Errc::config, "unknown dtype '", text, "'; choose one of ", choices);
}

const char* name(ReduceOp op) {
  for (const auto& o : ops)
    if (o.kind == op.kind) return o.name;
  return "?";
}

ReduceOp op_from_name(std::string_view text) {
  std::string choices;
  for (const auto& o : ops) {
    if (text == o.name) return ReduceOp(o.kind);
    choices += concat(choices.empty() ? "" : ", ", o.name);
  }
  fail(Errc::config, "unknown reduction '", text, "'; choose one of ", choices);
}

std::shared_ptr<std::byte> allocate_host(std::size_t bytes) {
  constexpr std::size_t alignment = 256;
  const std::size_t rounded = round_up(std::max<std::size_t>(bytes, 1), alignment);
  const bool possible = bytes <= static_cast<std::size_t>(PTRDIFF_MAX);
  void* memory = possible ? std::aligned_alloc(alignment, rounded) : nullptr;
  require(memory != nullptr, Errc::system, "cannot allocate ", human_bytes(bytes), " of host memory");
  return {static_cast<std::byte*>(memory), [](std::byte* p) { std::free(p); }};
}

}  // namespace rz
