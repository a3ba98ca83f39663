#pragma once
/// Batches of a dataset on the device of the model, read ahead by threads.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../comm/device/stream.h"
#include "dataset.h"
#include "iterable_dataset.h"
#include "loader_positions.h"

namespace rz {

class BatchSampler;
class Prefetcher;
struct HostBatch;

/// Names as those of torch.utils.data.DataLoader.
struct LoaderOptions {
  int num_workers = 1;                         ///< threads that read ahead; 0: next() reads
  int prefetch_factor = 2;                     ///< batches that each of them reads ahead
  std::size_t slots = 1;                       ///< batches that are valid at a time
  std::chrono::milliseconds timeout{600'000};  ///< of reading one batch
  /// Where the loader is known by `name`, so that a run can be resumed; may be null.
  std::shared_ptr<LoaderPositions> positions{};
  std::string name{};
  std::uint64_t seed = 0;  ///< of BatchRows::draw()
  bool restart = false;    ///< a range-for after one that was left by break is over the whole epoch again
  /// A field of i32, such as the targets, that has `ignore_index` in rows that repeat samples
  /// (Batch::padding()): losses and nn::accuracy() do not count them. Empty: such rows are as the samples
  /// that they repeat.
  std::string targets{};
  std::int32_t ignore_index = -100;
  Collation collation{};  ///< of ragged fields
  /// The samples of a shard of an IterableDataset are shuffled within windows of so many, which depend on
  /// seed and epoch alone. Each shard holds two windows in memory. A loader that is moved to another position
  /// reads its window from where it begins. 0 or 1: samples come in order.
  std::size_t buffer_size = 0;
};

/// An endless run of epochs, or one epoch in a range-based for:
///
///     for (Batch& batch : loader) …      // the next such loop is the next epoch
///
/// A loop that was left by break is continued by the next one, with the batches that are left of the epoch,
/// so that no sample comes twice. With LoaderOptions::restart the next one begins the epoch again, as a loop
/// over a DataLoader of PyTorch does; a position that was set, as by load_checkpoint(), is continued in any
/// case.
///
/// A batch has the fields of the dataset, and "NAME.lengths" for each ragged one.
///
/// A batch is valid until `slots` later ones were returned. On a device, the k-th batch since the start, or
/// since set_state(), is always in slot k mod `slots` of the same memory, and is copied in the order of the
/// stream: a graph may read it, if ragged fields are padded to Field::shape (Collation::Padding::max_length).
/// One thread uses a loader; the number of workers changes no batch. Errors of Dataset::read carry the index
/// of the sample, those of a stream its shard and its number there; next() repeats them until set_state(),
/// set_epoch() or Engine::cancel_update().
class Loader final : public StatefulLoader {
 public:
  /// Batches are on the device of the stream. Errc::invalid_argument names an option or field that is out of
  /// range.
  Loader(std::shared_ptr<const Dataset>, std::shared_ptr<const BatchSampler>, const Stream&,
         LoaderOptions = {});
  /// Batches of a stream. The sampler is for size() samples in order (without shuffle). Batch::indices() are
  /// the numbers of samples in the order of the stream.
  Loader(std::shared_ptr<const IterableDataset>, std::shared_ptr<const BatchSampler>, const Stream&,
         LoaderOptions = {});
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// Batches of an epoch.
  std::uint64_t size() const;
  /// The next batch; not while the stream is captured. Errc::timeout.
  Batch& next();
  /// The time that next() has waited until a batch was read, since the loader was made: about 0 if threads
  /// read ahead fast enough.
  double waited_seconds() const override;

  /// Position of the next batch.
  struct State {
    std::uint64_t epoch = 0, batch = 0;
    bool operator==(const State&) const = default;
  };
  State state() const;
  /// Continues there, as a run that was never interrupted. Errc::invalid_argument if there is no such batch.
  void set_state(State);
  /// The same for any number of ranks and size of batches: the samples of the epoch that are left come once
  /// each (BatchSampler::starting_at). An update in progress begins anew.
  LoaderPosition position() const override;
  void set_position(const LoaderPosition&) override;
  /// The order of the sampler, and the checksum of the dataset if it has one.
  std::string data() const override { return data_; }
  void skip_failed() override;
  std::uint64_t epoch() const { return state().epoch; }
  void set_epoch(std::uint64_t epoch) { set_state({epoch, 0}); }

  /// Over the batches that are left of an epoch.
  class Iterator {
   public:
    explicit Iterator(Loader& loader) : loader_(loader), epoch_(loader.epoch()), batch_(&loader.next()) {}
    Batch& operator*() const { return *batch_; }
    Iterator& operator++() {
      batch_ = loader_.epoch() == epoch_ ? &loader_.next() : nullptr;
      loader_.in_loop_ = batch_ != nullptr;
      return *this;
    }
    bool operator==(std::default_sentinel_t) const { return batch_ == nullptr; }

   private:
    Loader& loader_;
    std::uint64_t epoch_;
    Batch* batch_;
  };
  Iterator begin() {
    if (std::exchange(in_loop_, true) && options_.restart) set_epoch(loop_epoch_);
    loop_epoch_ = epoch();
    in_loop_ = true;
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

 private:
  Loader(std::shared_ptr<const Dataset>, std::shared_ptr<const IterableDataset>,
         std::shared_ptr<const BatchSampler>, const Stream&, LoaderOptions);
  struct Slot {
    std::vector<Tensor> memory;  // on a device, else empty
    Batch batch;
  };
  bool on_device() const { return stream_.device().kind != Device::host; }
  void release_oldest();
  /// Rows that repeat samples get LoaderOptions::ignore_index.
  void ignore_padding(const HostBatch&) const;
  /// A field's rows where the model reads them.
  Tensor place(const Slot&, std::size_t field, const HostBatch&) const;

  std::shared_ptr<const std::vector<Field>> fields_;
  std::shared_ptr<const BatchSampler> sampler_;
  Stream stream_;
  LoaderOptions options_;
  std::size_t max_held_;      // batches of the prefetcher that are in use at a time
  std::deque<Event> copies_;  // one for each of them: after it, its host memory is free
  std::vector<Slot> slots_;
  std::string data_;
  std::uint64_t returned_ = 0;    // batches since set_state()
  bool failed_ = false;           // the next batch could not be read
  bool in_loop_ = false;          // an Iterator has not reached the end, and no position was set since
  std::uint64_t loop_epoch_ = 0;  // of the last begin()
  std::unique_ptr<Prefetcher> prefetcher_;
};

}  // namespace rz
