#include "sharding/partition.h"

#include "comm/core/error.h"

namespace rz {

Range part(std::size_t count, int rank, int size) {
  require(size > 0 && count % static_cast<std::size_t>(size) == 0, Errc::invalid_argument, count,
          " elements cannot be shared out evenly over ", size, " ranks");
  const std::size_t each = count / static_cast<std::size_t>(size);
  return {each * static_cast<std::size_t>(rank), each * (static_cast<std::size_t>(rank) + 1)};
}

}  // namespace rz
