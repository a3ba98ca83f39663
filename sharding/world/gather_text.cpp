#include "sharding/world/gather_text.h"

#include <algorithm>
#include <cstdint>

namespace rz {
namespace {

std::vector<std::uint64_t> all_sizes(Communicator& comm, std::uint64_t own) {
  std::vector<std::uint64_t> sizes(static_cast<std::size_t>(comm.size()));
  comm.all_gather(ConstBuffer(&own, 1), Buffer(sizes.data(), sizes.size())).wait();
  return sizes;
}

/// `all` has the texts, each padded to the longest.
std::vector<std::string> unpadded(const std::string& all, const std::vector<std::uint64_t>& sizes) {
  const std::uint64_t longest = *std::ranges::max_element(sizes);
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < sizes.size(); ++r) texts.push_back(all.substr(r * longest, sizes[r]));
  return texts;
}

}  // namespace

std::vector<std::string> all_gather_text(Communicator& comm, const std::string& own) {
  const auto sizes = all_sizes(comm, own.size());
  std::string padded = own;
  padded.resize(*std::ranges::max_element(sizes));
  std::string all(padded.size() * sizes.size(), '\0');
  comm.all_gather(ConstBuffer(padded.data(), padded.size(), DType::u8),
                  Buffer(all.data(), all.size(), DType::u8))
      .wait();
  return unpadded(all, sizes);
}

std::vector<std::string> gather_text(Communicator& comm, const std::string& own, int root) {
  const auto sizes = all_sizes(comm, own.size());
  std::string padded = own;
  padded.resize(*std::ranges::max_element(sizes));
  std::string all(comm.rank() == root ? padded.size() * sizes.size() : 0, '\0');
  comm.gather(ConstBuffer(padded.data(), padded.size(), DType::u8), Buffer(all.data(), all.size(), DType::u8),
              root)
      .wait();
  return comm.rank() == root ? unpadded(all, sizes) : std::vector<std::string>();
}

std::string broadcast_text(Communicator& comm, const std::string& text, int root) {
  std::uint64_t size = text.size();
  comm.broadcast(Buffer(&size, 1), root).wait();
  std::string out = text;
  out.resize(size);
  comm.broadcast(Buffer(out.data(), out.size(), DType::u8), root).wait();
  return out;
}

}  // namespace rz
