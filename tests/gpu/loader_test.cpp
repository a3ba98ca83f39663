/// Batches on a device: stable memory, copies in the order of the stream.
#include "sharding/data/loader.h"

#include <memory>
#include <utility>

#include "comm/device/graph.h"
#include "sharding/data/batch_sampler.h"
#include "sharding/data/dataset.h"
#include "tests/gpu/on_device.h"

namespace rz::test {
namespace {

using DeviceLoader = OnDevice;

constexpr std::size_t width = 64;

/// Row i of x holds i in every element.
std::shared_ptr<const Dataset> rows(std::size_t n) {
  const Tensor x = Tensor::empty({n, width});
  for (std::size_t i = 0; i < x.count(); ++i) x.data<float>()[i] = static_cast<float>(i / width);
  return tensor_dataset({{"x", x}});
}

std::vector<double> expected(const BatchSampler& order, std::uint64_t batch) {
  std::vector<double> out;
  for (const std::uint64_t i : order.at(batch / order.batches(), batch % order.batches()).indices)
    out.insert(out.end(), width, static_cast<double>(i));
  return out;
}

TEST_F(DeviceLoader, SlotsAreStableMemoryAndKernelsSeeTheirBatch) {
  for (int seed = 0; seed < schedules(20); ++seed) {
    reschedule(static_cast<std::uint64_t>(seed));
    constexpr std::size_t slots = 3, batches = 23;
    const auto order = std::make_shared<DistributedBatchSampler>(
        BatchSamplerOptions{.samples = 26, .batch_size = 4, .seed = static_cast<std::uint64_t>(seed)});
    Loader loader(rows(26), order, stream, {.num_workers = 2, .slots = slots});
    std::vector<const void*> places;
    std::vector<Tensor> copies;
    for (std::size_t i = 0; i < batches; ++i) {
      const Tensor& x = loader.next()["x"];
      EXPECT_EQ(x.device(), device);
      places.push_back(x.raw());
      if (i >= slots) {
        EXPECT_EQ(places[i], places[i - slots]) << i;
      }
      copies.push_back(empty_on(stream, x.shape()));
      memcpy_async(copies[i].raw(), x.raw(), x.bytes(), stream);
    }
    EXPECT_NE(places[0], places[1]);
    for (std::size_t i = 0; i < batches; ++i)
      EXPECT_EQ(from_device(copies[i], stream), expected(*order, i)) << i;
  }
}

TEST_F(DeviceLoader, AGraphReadsTheNextBatchAtEveryLaunch) {
  const auto order =
      std::make_shared<DistributedBatchSampler>(BatchSamplerOptions{.samples = 24, .batch_size = 4});
  Loader loader(rows(24), order, stream, {.slots = 2});
  const Tensor seen = empty_on(stream, {2, 4, width});
  const Tensor first = loader.next()["x"], second = loader.next()["x"];
  const Graph graph = capture(stream, [&] {
    memcpy_async(seen.raw(), first.raw(), first.bytes(), stream);
    memcpy_async(seen.raw() + first.bytes(), second.raw(), second.bytes(), stream);
    EXPECT_THROW(loader.next(), Error);
  });
  for (std::uint64_t update = 0; update < 6; ++update) {
    if (update > 0) loader.next(), loader.next();
    graph.launch(stream);
    std::vector<double> both = expected(*order, 2 * update);
    const std::vector<double> other = expected(*order, 2 * update + 1);
    both.insert(both.end(), other.begin(), other.end());
    EXPECT_EQ(from_device(seen, stream), both) << update;
  }
  loader.set_state({0, 3});
  EXPECT_EQ(loader.next()["x"].raw(), first.raw()) << "slots are counted from set_state()";
  EXPECT_EQ(from_device(first, stream), expected(*order, 3));
}

/// Sample i has i mod 4 + 1 tokens of the value i.
struct Sentences : Dataset {
  std::uint64_t size() const override { return 16; }
  std::vector<Field> fields() const override { return {{"ids", DType::i32, {6}, true, -1}}; }
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override {
    for (std::int32_t& id : to.row<std::int32_t>("ids", row, index % 4 + 1))
      id = static_cast<std::int32_t>(index);
  }
};

TEST_F(DeviceLoader, RaggedFieldsAreInTheSameMemoryWithTheirLengths) {
  const auto order = std::make_shared<DistributedBatchSampler>(
      BatchSamplerOptions{.samples = 16, .batch_size = 3, .shuffle = false, .drop_last = true});
  const auto values_of = [&](const Tensor& t) {
    const Tensor host = t.on_host(stream);
    const auto* values = host.data<std::int32_t>();
    return std::vector<double>(values, values + host.count());
  };
  for (const auto padding : {Collation::Padding::max_length, Collation::Padding::longest}) {
    const bool whole = padding == Collation::Padding::max_length;
    Loader loader(std::make_shared<Sentences>(), order, stream, {.collation = {.padding = padding}});
    const void* place = nullptr;
    for (std::uint64_t batch = 0; batch < 4; ++batch) {
      const Batch& b = loader.next();
      const std::size_t padded = whole ? 6 : batch == 0 ? 3 : 4;
      std::vector<double> ids, lengths;
      for (std::uint64_t i = 3 * batch; i < 3 * batch + 3; ++i) {
        lengths.push_back(static_cast<double>(i % 4 + 1));
        for (std::size_t at = 0; at < padded; ++at)
          ids.push_back(at < i % 4 + 1 ? static_cast<double>(i) : -1);
      }
      EXPECT_EQ(b["ids"].shape(), (Shape{3, padded}));
      EXPECT_EQ(values_of(b["ids"]), ids);
      EXPECT_EQ(values_of(b["ids.lengths"]), lengths);
      EXPECT_EQ(b["ids.lengths"].device(), device);
      EXPECT_EQ(std::exchange(place, b["ids"].raw()), batch == 0 ? nullptr : b["ids"].raw());
    }
  }
}

}  // namespace
}  // namespace rz::test
