#pragma once
/// Names of the tensors of a training in checkpoints.

#include <string>
#include <string_view>

#include "comm/core/text.h"

namespace rz {

inline std::string model_tensor(std::string_view parameter) { return concat("model/", parameter); }
inline std::string buffer_tensor(std::string_view buffer) { return concat("buffer/", buffer); }
inline std::string optimizer_tensor(std::string_view state, std::string_view parameter) {
  return concat("optimizer/", state, "/", parameter);
}

}  // namespace rz
