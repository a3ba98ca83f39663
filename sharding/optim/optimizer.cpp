#include "sharding/optim/optimizer.h"

#include <atomic>
#include <cmath>
#include <limits>
#include <utility>

#include "comm/core/error.h"

namespace rz {

namespace {

std::uint64_t next_serial() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace

void require_finite(const char* optimizer, const char* option, double value) {
  require(std::abs(value) <= std::numeric_limits<float>::max(), Errc::invalid_argument, optimizer, ": ",
          option, " = ", value, " is not finite in f32, in which updates are computed");
}

Optimizer::Optimizer(std::vector<Group> groups) : serial_(next_serial()), groups_(std::move(groups)) {
  require(!groups_.empty(), Errc::invalid_argument, "an optimizer needs a parameter group");
  for (std::size_t i = 0; i < groups_.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      require(groups_[i].name != groups_[j].name, Errc::invalid_argument, "two parameter groups are named ",
              groups_[i].name);
}

void Optimizer::measure(std::span<const UpdateSpan>, const UpdateScale&, const NormSums&,
                        const Stream&) const {
  fail(Errc::unsupported, name(), " has no group of grain parameter");
}

void Optimizer::direct(std::span<const UpdateSpan>, const UpdateScale&, const Stream&) const {
  fail(Errc::unsupported, name(), " has no group of grain matrix");
}

void Optimizer::orthogonalize(const Tensor&, int, const Workspace&, const Stream&) const {
  fail(Errc::unsupported, name(), " has no group of grain matrix");
}

std::string Optimizer::describe() const {
  std::string text = name();
  for (int g = 0; g < groups(); ++g)
    text +=
        concat(g ? "; " : ", ", groups() > 1 ? concat("group ", group_name(g), ": ") : "", describe_group(g));
  return text;
}

int Optimizer::group_of(const Parameter& p) const {
  for (int g = 0; g < groups(); ++g)
    if (const ParameterFilter& contains = at(g).contains; !contains || contains(p)) return g;
  fail(Errc::invalid_argument, "parameter ", p.name, " belongs to no group of the optimizer (", name(),
       "); add a last group that contains every parameter");
}

void Optimizer::set_learning_rate(double rate) {
  require_finite(name(), "learning_rate", rate);
  for (Group& g : groups_) g.learning_rate = rate;
}

void Optimizer::set_learning_rate(int group, double rate) {
  require(group >= 0 && group < groups(), Errc::invalid_argument, "set_learning_rate(): there is no group ",
          group, "; ", name(), " has ", groups());
  require_finite(name(), "learning_rate", rate);
  groups_[static_cast<std::size_t>(group)].learning_rate = rate;
}

void Optimizer::set_betas(int group, std::array<double, 2>) {
  fail(Errc::unsupported, name(), ": the group \"", group_name(group), "\" has no betas");
}

void Optimizer::set_momentum(int group, double) {
  fail(Errc::unsupported, name(), ": the group \"", group_name(group), "\" has no momentum");
}

}  // namespace rz
