#include "sharding/checkpoint/torch_files/torch_types.h"

#include <algorithm>
#include <array>

namespace rz {
namespace {

constexpr std::array<TorchType, 20> torch_types{{{"torch.DoubleStorage", "torch.float64", "F64", 8},
                                                 {"torch.FloatStorage", "torch.float32", "F32", 4},
                                                 {"torch.HalfStorage", "torch.float16", "F16", 2},
                                                 {"torch.BFloat16Storage", "torch.bfloat16", "BF16", 2},
                                                 {"torch.LongStorage", "torch.int64", "I64", 8},
                                                 {"torch.IntStorage", "torch.int32", "I32", 4},
                                                 {"torch.ShortStorage", "torch.int16", "I16", 2},
                                                 {"torch.CharStorage", "torch.int8", "I8", 1},
                                                 {"torch.ByteStorage", "torch.uint8", "U8", 1},
                                                 {"torch.BoolStorage", "torch.bool", "BOOL", 1},
                                                 {"torch.ComplexFloatStorage", "torch.complex64", "C64", 8},
                                                 {"torch.ComplexDoubleStorage", "torch.complex128", "", 16},
                                                 {"", "torch.uint16", "U16", 2},
                                                 {"", "torch.uint32", "U32", 4},
                                                 {"", "torch.uint64", "U64", 8},
                                                 {"", "torch.float8_e4m3fn", "F8_E4M3", 1},
                                                 {"", "torch.float8_e5m2", "F8_E5M2", 1},
                                                 {"", "torch.float8_e4m3fnuz", "F8_E4M3FNUZ", 1},
                                                 {"", "torch.float8_e5m2fnuz", "F8_E5M2FNUZ", 1},
                                                 {"", "torch.float8_e8m0fnu", "F8_E8M0", 1}}};

constexpr std::array<std::string_view, 7> torch_calls{rebuild_from_type,
                                                      "torch._utils._rebuild_tensor",
                                                      "torch._utils._rebuild_tensor_v2",
                                                      "torch._utils._rebuild_tensor_v3",
                                                      "torch._utils._rebuild_parameter",
                                                      "torch.Size",
                                                      "torch.device"};

}  // namespace

const TorchType* torch_type(std::string_view name) {
  const auto* found = std::ranges::find_if(torch_types, [&](const TorchType& t) {
    return !name.empty() && (name == t.storage || name == t.dtype);
  });
  return found == torch_types.end() ? nullptr : found;
}

bool is_untyped_storage(std::string_view name) {
  return name == "torch.storage.UntypedStorage" || name == "torch.UntypedStorage";
}

bool is_tensor_type(std::string_view name) {
  return name == "torch.Tensor" || name == "torch.nn.parameter.Parameter";
}

PickleUse use_in_weights(std::string_view name) {
  if (torch_type(name) || is_untyped_storage(name) || is_tensor_type(name)) return PickleUse::value;
  return std::ranges::find(torch_calls, name) == torch_calls.end() ? PickleUse::refused : PickleUse::call;
}

PickleUse use_in_deepspeed(std::string_view name) {
  if (name.starts_with("deepspeed.")) return PickleUse::object;
  // Some versions of Python have a member of an enumeration as getattr(class, name).
  if (name == "builtins.getattr" || name == "__builtin__.getattr") return PickleUse::call;
  return use_in_weights(name);
}

}  // namespace rz
