#pragma once
/// The loss of a model on data that it is not trained on.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autograd_lite/models/language_model.h"
#include "sharding/data/dataset.h"
#include "sharding/data/loader.h"
#include "sharding/data/loader_positions.h"
#include "sharding/data/tokens.h"
#include "sharding/engine/engine.h"

namespace rz::lm {

/// Samples `first` … `first` + `samples` - 1 of a TokenDataset.
struct ValidationData {
  Tokens tokens;
  std::uint64_t first = 0, samples = 0;
  std::optional<std::int32_t> document_end{};  ///< attention stays within documents
};

/// These samples with the fields of a TokenDataset, and after them samples without targets up to a multiple
/// of `multiple`: all ranks have equally many batches, and each sample counts once.
class ValidationDataset : public Dataset {
 public:
  ValidationDataset(ValidationData, std::size_t seq_len, std::uint64_t multiple);

  std::uint64_t size() const override { return size_; }
  std::vector<Field> fields() const override { return all_.fields(); }
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override;

 private:
  TokenDataset all_;
  std::uint64_t first_, samples_, size_;
};

/// What a checkpoint has of data that are evaluated: other ones are a line when a run is resumed. Attached to
/// the loaders of an engine as "evaluation".
class EvaluatedData final : public StatefulLoader {
 public:
  EvaluatedData(const Engine&, const ValidationData&, std::size_t seq_len);
  ~EvaluatedData();
  EvaluatedData(const EvaluatedData&) = delete;

  LoaderPosition position() const override { return {}; }
  void set_position(const LoaderPosition&) override {}
  std::string data() const override { return data_; }
  const char* when_others() const override { return "losses and the best one before are of other data"; }

 private:
  std::shared_ptr<LoaderPositions> positions_;
  std::string data_;
};

class Validation {
 public:
  /// Batches have the micro-batch size of the engine.
  Validation(const Engine&, const ValidationData&, std::size_t seq_len);
  /// Mean over the targets of all ranks, with the same bits for any number of them; the model is in
  /// evaluation mode. None if a signal stops the run meanwhile. Collective.
  std::optional<double> loss(Engine&, LanguageModel&);

 private:
  Loader loader_;
  bool document_mask_;
};

}  // namespace rz::lm
