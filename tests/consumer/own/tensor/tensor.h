#pragma once
// The project's own, as comm/options.h.

namespace consumer {
struct Tensor {
  int words = 8;
};
}  // namespace consumer
