#include "sharding/parallel/mesh.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <utility>

#include "comm/core/error.h"
#include "sharding/parallel/rank_consistency.h"

namespace rz {

namespace {

void check_names(const std::vector<MeshDimension>& dimensions) {
  for (std::size_t d = 0; d < dimensions.size(); ++d) {
    const MeshDimension& own = dimensions[d];
    require(!own.name.empty(), Errc::invalid_argument, "Mesh: dimension ", d, " of ", dimensions.size(),
            " has no name");
    require(own.size >= 1, Errc::invalid_argument, "Mesh: dimension \"", own.name, "\" has size ", own.size,
            ", expected 1 or more");
    for (std::size_t before = 0; before < d; ++before)
      require(dimensions[before].name != own.name, Errc::invalid_argument, "Mesh: dimensions ", before,
              " and ", d, " are both named \"", own.name, "\"");
  }
}

void check_size(const std::vector<MeshDimension>& dimensions, int ranks) {
  constexpr std::int64_t limit = std::numeric_limits<std::int32_t>::max();
  std::int64_t product = 1;
  for (const MeshDimension& d : dimensions) product = std::min(limit, product * d.size);
  require(product == ranks, Errc::invalid_argument, "Mesh: ", describe(dimensions), " has ", product,
          " ranks, but the communicator has ", ranks, "; the product of the sizes must be that number");
}

/// Refers to a communicator that outlives the result.
std::shared_ptr<Communicator> borrowed(Communicator& communicator) {
  return {std::shared_ptr<Communicator>(), &communicator};
}

/// `stride`: difference of the ranks of neighbours in the dimension.
std::shared_ptr<Communicator> line(Communicator& all, int size, int stride) {
  if (size == all.size()) return borrowed(all);
  const int coordinate = all.rank() / stride % size;
  return std::make_shared<Communicator>(*all.split(all.rank() - coordinate * stride, coordinate));
}

}  // namespace

std::string describe(const std::vector<MeshDimension>& dimensions) {
  std::string out;
  for (const MeshDimension& d : dimensions) out += concat(out.empty() ? "" : " x ", d.name, " ", d.size);
  return out;
}

Mesh::Mesh(Communicator& communicator)
    : all_(&communicator), dimensions_{{"data", communicator.size()}}, lines_{borrowed(communicator)} {}

Mesh::Mesh(Communicator& communicator, std::vector<MeshDimension> dimensions)
    : all_(&communicator), dimensions_(std::move(dimensions)) {
  require(!dimensions_.empty(), Errc::invalid_argument, "Mesh: no dimensions; a mesh has at least one");
  check_names(dimensions_);
  check_size(dimensions_, communicator.size());
  const std::array facts{Fact{"the grid", describe(dimensions_)}};
  require_same("the mesh", facts, "give every rank the same dimensions", communicator);
  int stride = communicator.size();
  for (const MeshDimension& d : dimensions_) {
    stride /= d.size;
    lines_.push_back(line(communicator, d.size, stride));
  }
}

std::size_t Mesh::find(std::string_view name) const {
  const auto found = std::ranges::find(dimensions_, name, &MeshDimension::name);
  require(found != dimensions_.end(), Errc::invalid_argument, "Mesh: no dimension is named \"", name,
          "\"; the mesh is ", describe(dimensions_));
  return static_cast<std::size_t>(found - dimensions_.begin());
}

}  // namespace rz
