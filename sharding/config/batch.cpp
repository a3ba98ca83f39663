#include "sharding/config/batch.h"

#include "comm/core/error.h"

namespace rz {
namespace {

/// Sizes with their names.
std::string ranks_text(std::int64_t ranks) { return concat(ranks, ranks == 1 ? " rank" : " ranks"); }

std::string nearest_text(std::int64_t whole, std::int64_t parts) {
  const std::int64_t below = whole / parts * parts;
  return below > 0 ? concat(below, " or ", below + parts) : concat(below + parts);
}

/// whole / parts; throws unless the division is exact.
std::int64_t divide(std::int64_t whole, const std::string& parts_text, std::int64_t parts,
                    const std::string& file) {
  require(whole % parts == 0, Errc::config, file, ": train_batch_size: ", whole,
          " cannot be shared out evenly over ", parts_text, "; use ", nearest_text(whole, parts),
          ", or another number of ranks");
  return whole / parts;
}

}  // namespace

BatchSizes resolve_batch(const BatchConfig& b, int ranks, const std::string& file) {
  if (b.train && b.micro) {
    const std::int64_t parts = *b.micro * ranks;
    const std::string text = concat(ranks_text(ranks), " × train_micro_batch_size_per_gpu ", *b.micro);
    if (!b.accumulation) return {*b.train, *b.micro, divide(*b.train, text, parts, file)};
    const std::int64_t product = parts * *b.accumulation;
    require(*b.train == product, Errc::config, file, ": train_batch_size: ", *b.train, " is not ", text,
            " × gradient_accumulation_steps ", *b.accumulation, " = ", product,
            "; remove one of the three, or make them agree");
    return {*b.train, *b.micro, *b.accumulation};
  }
  const std::int64_t steps = b.accumulation.value_or(1);
  if (b.train) {
    const std::string text =
        steps == 1 ? ranks_text(ranks) : concat(ranks_text(ranks), " × gradient_accumulation_steps ", steps);
    return {*b.train, divide(*b.train, text, steps * ranks, file), steps};
  }
  require(b.micro.has_value(), Errc::config, file,
          ": train_batch_size: missing; give train_batch_size or train_micro_batch_size_per_gpu");
  return {*b.micro * steps * ranks, *b.micro, steps};
}

}  // namespace rz
