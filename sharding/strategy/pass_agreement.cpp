#include "sharding/strategy/pass_agreement.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include "comm/core/error.h"

namespace rz {

PassAgreement::PassAgreement(Communicator& communicator, std::size_t members)
    : communicator_(communicator), used_(members), exchanged_(members), words_(fixed_words + members) {}

PassAgreement::~PassAgreement() {
  try {
    wait();
  } catch (const std::exception&) {  // the result is not needed any more
  }
}

void PassAgreement::reset() { std::ranges::fill(used_, 0); }

void PassAgreement::begin(bool cancelled) {
  exchanged_ = used_;
  words_[0] = cancelled ? communicator_.size() - communicator_.rank() : 0;
  words_[1] = values_written_;
  words_[2] = scopes_;
  words_[3] = -scopes_;
  words_[4] = broken_ && !cancelled;
  words_[5] = counted_;
  words_[6] = optimizer_;
  words_[7] = -optimizer_;
  std::ranges::copy(used_, words_.begin() + fixed_words);
  if (communicator_.size() > 1)
    exchange_ = communicator_.all_reduce(Buffer(words_.data(), words_.size()), ReduceOp::max);
}

namespace {
std::int32_t short_hash(std::uint64_t hash) {
  return static_cast<std::int32_t>((hash ^ (hash >> 32)) & 0x7fffffff);
}
}  // namespace

void PassAgreement::set_scopes(std::uint64_t hash) { scopes_ = short_hash(hash); }
void PassAgreement::set_optimizer(std::uint64_t hash) { optimizer_ = short_hash(hash); }

void PassAgreement::exchange_before_replay(bool cancelled) {
  constexpr std::int32_t none = std::numeric_limits<std::int32_t>::min();
  std::array<std::int32_t, 3> words{0, optimizer_, -optimizer_};
  if (cancelled) words = {communicator_.size() - communicator_.rank(), none, none};
  if (communicator_.size() > 1)
    communicator_.all_reduce(Buffer(words.data(), words.size()), ReduceOp::max).wait();
  words_[0] = words[0];
  words_[6] = words[1], words_[7] = words[2];
}

void PassAgreement::wait() { std::exchange(exchange_, {}).wait(); }

void PassAgreement::reuse_last() {
  require(used_ == exchanged_, Errc::invalid_argument,
          "a pass that is captured in a graph reaches other parameters than the pass before; run an update "
          "that is not captured first");
}

std::vector<std::uint8_t> PassAgreement::used_anywhere() const {
  std::vector<std::uint8_t> out(used_.size());
  for (std::size_t m = 0; m < out.size(); ++m) out[m] = is_used(static_cast<int>(m));
  return out;
}

int PassAgreement::cancelled_by() const { return words_[0] == 0 ? -1 : communicator_.size() - words_[0]; }

void PassAgreement::mark_values_checked() {
  values_written_ = false;
  words_[1] = 0;
}

}  // namespace rz
