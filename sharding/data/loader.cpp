#include "sharding/data/loader.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "comm/device/memory.h"
#include "sharding/data/collation.h"
#include "sharding/data/prefetcher.h"
#include "sharding/io/checksum.h"

namespace rz {
namespace {

/// [rows, shape…]
Shape batch_shape(std::size_t rows, const Shape& sample) {
  std::vector<std::size_t> extents{rows};
  for (int i = 0; i < sample.dims(); ++i) extents.push_back(sample[i]);
  return Shape(extents);
}

void check_fields(const std::vector<Field>& fields) {
  require(!fields.empty(), Errc::invalid_argument, "the samples have no fields; Dataset::fields() is empty");
  for (const Field& f : fields) {
    require(f.shape.dims() < 4, Errc::invalid_argument, "field ", f.name, ": samples of shape ",
            rz::name(f.shape), "; a batch adds a dimension, so give at most 3");
    require(std::ranges::count(fields, f.name, &Field::name) == 1, Errc::invalid_argument, "field ", f.name,
            " is there twice");
    require(!f.ragged || (f.shape.dims() > 0 && f.shape.count() > 0), Errc::invalid_argument, "field ",
            f.name, " is ragged and has the shape ", rz::name(f.shape),
            "; give the largest length as its first extent");
    check_padding_value(f);
  }
}

void check_options(const LoaderOptions& o) {
  const auto check_one = [](const char* what, long long value, long long min) {
    require(value >= min, Errc::invalid_argument, "LoaderOptions::", what, " is ", value, "; at least ", min);
  };
  check_one("num_workers", o.num_workers, 0);
  check_one("prefetch_factor", o.prefetch_factor, 1);
  check_one("slots", static_cast<long long>(o.slots), 1);
  check_one("collation.pad_to_multiple_of", static_cast<long long>(o.collation.pad_to_multiple_of), 1);
}

void check_targets(const std::vector<Field>& fields, const std::string& name) {
  if (name.empty()) return;
  const auto field = std::ranges::find(fields, name, &Field::name);
  require(field != fields.end() && field->dtype == DType::i32, Errc::invalid_argument,
          "LoaderOptions::targets: ",
          field == fields.end() ? concat("there is no field ", name)
                                : concat(name, " is ", rz::name(field->dtype)),
          "; name a field of i32");
}

std::vector<Tensor> batch_memory(const std::vector<Field>& fields, std::size_t rows, const Collation& padding,
                                 const Allocator& allocate) {
  std::vector<Tensor> all;
  for (const Field& f : fields)
    all.push_back(Tensor::empty(batch_shape(rows, padded_shape(f, padding)), f.dtype, allocate));
  return all;
}

/// Memory from which copies to the device do not block.
Allocator host_memory_for(Device device) {
  if (device.kind == Device::host) return allocate_host;
  return [device](std::size_t bytes) { return allocate_pinned(device, bytes); };
}

std::vector<HostBatch> ring_of(const std::vector<Field>& fields, std::size_t rows, std::size_t places,
                               const Collation& padding, Device device) {
  std::vector<HostBatch> ring(places);
  for (HostBatch& b : ring) b.tensors = batch_memory(fields, rows, padding, host_memory_for(device));
  return ring;
}

/// The fields of a dataset or a stream, checked.
template <class Source>
std::shared_ptr<const std::vector<Field>> checked_fields(const Source* source) {
  require(source != nullptr, Errc::invalid_argument, "a loader without a dataset");
  auto fields = std::make_shared<const std::vector<Field>>(fields_of_batches(source->fields()));
  check_fields(*fields);
  return fields;
}

std::string checksum_of(const std::optional<std::uint64_t>& checksum) {
  return checksum ? concat(", checksum ", checksum_text(*checksum)) : "";
}

std::string identity_of(const Dataset& dataset, const BatchSampler& sampler) {
  const std::string order = sampler.order();
  return concat(order.empty() ? concat(dataset.size(), " samples") : order, checksum_of(dataset.checksum()));
}

std::string identity_of(const IterableDataset& source, const LoaderOptions& o) {
  const std::uint64_t samples = source.samples_per_shard();
  return concat(
      source.shards(), " shards",
      samples == IterableDataset::endless ? "" : concat(" of ", samples, " samples"),
      o.buffer_size > 1 ? concat(", shuffled among ", o.buffer_size, " with seed ", o.seed) : ", in order",
      checksum_of(source.checksum()));
}

}  // namespace

Loader::Loader(std::shared_ptr<const Dataset> dataset, std::shared_ptr<const BatchSampler> sampler,
               const Stream& stream, LoaderOptions options)
    : Loader(std::move(dataset), nullptr, std::move(sampler), stream, std::move(options)) {}

Loader::Loader(std::shared_ptr<const IterableDataset> source, std::shared_ptr<const BatchSampler> sampler,
               const Stream& stream, LoaderOptions options)
    : Loader(nullptr, std::move(source), std::move(sampler), stream, std::move(options)) {}

Loader::Loader(std::shared_ptr<const Dataset> dataset, std::shared_ptr<const IterableDataset> source,
               std::shared_ptr<const BatchSampler> sampler, const Stream& stream, LoaderOptions options)
    : fields_(source ? checked_fields(source.get()) : checked_fields(dataset.get())),
      sampler_(std::move(sampler)),
      stream_(stream),
      options_(std::move(options)) {
  require(sampler_ && sampler_->batches() > 0, Errc::invalid_argument, "a loader without batches");
  check_options(options_);
  check_targets(*fields_, options_.targets);
  // Copies of `slots` batches may be in flight while the next ones are copied.
  max_held_ = on_device() ? 2 * options_.slots : options_.slots;
  slots_.resize(options_.slots);
  const std::size_t rows = sampler_->batch_size();
  if (on_device())
    for (Slot& slot : slots_)
      slot.memory = batch_memory(*fields_, rows, options_.collation, allocator_on(stream_.device()));
  if (options_.positions) data_ = source ? identity_of(*source, options_) : identity_of(*dataset, *sampler_);
  const int ahead = std::max(1, options_.num_workers * options_.prefetch_factor);
  const std::size_t places = max_held_ + static_cast<std::size_t>(ahead);
  BatchSource read{.dataset = std::move(dataset),
                   .stream = nullptr,
                   .fields = *fields_,
                   .collation = options_.collation,
                   .seed = options_.seed};
  if (source)
    read.stream =
        std::make_unique<ShardReaders>(std::move(source), *fields_, options_.seed, options_.buffer_size);
  prefetcher_ = std::make_unique<Prefetcher>(
      std::move(read), sampler_, ring_of(*fields_, rows, places, options_.collation, stream_.device()),
      options_.num_workers);
  if (options_.positions) options_.positions->attach(options_.name, *this);
}

Loader::~Loader() {
  if (options_.positions) options_.positions->detach(*this);
  try {
    for (const Event& copy : copies_) copy.synchronize();
  } catch (const Error&) {  // the device has failed, which its user learns elsewhere
  }
}

std::uint64_t Loader::size() const { return sampler_->batches(); }

void Loader::release_oldest() {
  copies_.front().synchronize();
  copies_.pop_front();
  prefetcher_->release();
}

Tensor Loader::place(const Slot& slot, std::size_t field, const HostBatch& host) const {
  const Shape shape = batch_shape(host.samples.indices.size(), host.shapes[field]);
  const Tensor from = host.tensors[field].view(0, shape);
  if (!on_device()) return from;
  const Tensor to = slot.memory[field].view(0, shape);
  memcpy_async(to.raw(), from.raw(), to.bytes(), stream_);
  return to;
}

void Loader::ignore_padding(const HostBatch& host) const {
  const std::size_t padding = host.samples.padding;
  if (options_.targets.empty() || padding == 0) return;
  const auto field = static_cast<std::size_t>(std::ranges::find(*fields_, options_.targets, &Field::name) -
                                              fields_->begin());
  const std::size_t size = host.shapes[field].count();
  std::fill_n(host.tensors[field].data<std::int32_t>() + (host.samples.indices.size() - padding) * size,
              padding * size, options_.ignore_index);
}

Batch& Loader::next() {
  require(!stream_.capturing(), Errc::invalid_argument,
          "a batch was read while the stream is captured; read it before, into memory that stays");
  if (copies_.size() == max_held_) release_oldest();
  failed_ = true;
  const HostBatch& host = prefetcher_->next(Deadline::after(options_.timeout));
  failed_ = false;
  Slot& slot = slots_[returned_ % slots_.size()];
  ignore_padding(host);
  std::vector<Tensor> tensors;
  for (std::size_t f = 0; f < fields_->size(); ++f) tensors.push_back(place(slot, f, host));
  copies_.push_back(stream_.record());
  slot.batch = Batch(fields_, std::move(tensors), host.samples.indices, host.samples.padding);
  ++returned_;
  return slot.batch;
}

double Loader::waited_seconds() const { return std::chrono::duration<double>(prefetcher_->waited()).count(); }

Loader::State Loader::state() const {
  return {prefetcher_->position() / size(), prefetcher_->position() % size()};
}

LoaderPosition Loader::position() const { return sampler_->position(state().epoch, state().batch); }

void Loader::set_position(const LoaderPosition& to) {
  const BatchSampler::Resumed resumed = sampler_->starting_at(to);
  if (resumed.sampler) sampler_ = resumed.sampler;
  set_state({resumed.epoch, resumed.batch});
}

void Loader::skip_failed() {
  const std::uint64_t next = prefetcher_->position() + 1;
  if (failed_) set_state({next / size(), next % size()});
}

void Loader::set_state(State to) {
  require(to.batch < size(), Errc::invalid_argument, "batch ", to.batch, " of an epoch of ", size());
  while (!copies_.empty()) release_oldest();
  prefetcher_->restart(to.epoch * size() + to.batch, sampler_);
  returned_ = 0;
  failed_ = in_loop_ = false;
}

}  // namespace rz
