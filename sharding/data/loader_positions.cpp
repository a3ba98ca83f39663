#include "sharding/data/loader_positions.h"

#include <algorithm>

#include "comm/core/error.h"
#include "sharding/io/text.h"

namespace rz {

void LoaderPositions::attach(const std::string& name, StatefulLoader& loader) {
  require(!loaders_.contains(name), Errc::invalid_argument, "there are two loaders of the name '", name,
          "'; give one another name, by which its position is saved");
  if (const auto found = pending_.find(name); found != pending_.end()) {
    move(name, loader, found->second);
    pending_.erase(found);
  }
  loaders_[name] = {&loader, loader.position()};
}

void LoaderPositions::detach(const StatefulLoader& loader) {
  const auto found =
      std::ranges::find_if(loaders_, [&](const auto& named) { return named.second.loader == &loader; });
  if (found == loaders_.end()) return;
  waited_seconds_ += loader.waited_seconds();
  loaders_.erase(found);
}

double LoaderPositions::waited_seconds() const {
  double seconds = waited_seconds_;
  for (const auto& [name, entry] : loaders_) seconds += entry.loader->waited_seconds();
  return seconds;
}

std::string LoaderPositions::new_name() { return concat("loader ", named_++); }

void LoaderPositions::end_update() {
  for (auto& [name, entry] : loaders_) entry.of_update = entry.loader->position();
}

void LoaderPositions::skip_failed() {
  for (auto& [name, entry] : loaders_) entry.loader->skip_failed();
}

LoaderPositions::ByName LoaderPositions::now() const {
  ByName all = pending_;
  for (const auto& [name, entry] : loaders_) {
    all[name] = entry.loader->position();
    all[name].data = entry.loader->data();
  }
  return all;
}

LoaderPositions::ByName LoaderPositions::of_update() const {
  ByName all = pending_;
  for (const auto& [name, entry] : loaders_) {
    all[name] = entry.of_update;
    all[name].data = entry.loader->data();
  }
  return all;
}

void LoaderPositions::move(const std::string& name, StatefulLoader& loader, const LoaderPosition& to) {
  const std::string now = loader.data();
  if (now.empty() || to.data.empty() || now == to.data) return loader.set_position(to);
  loader.set_position({});
  differences_.push_back(concat("the data of '", name, "' are not those of the checkpoint: ",
                                escaped(to.data), "; now ", now, "; ", loader.when_others()));
  if (on_difference_) on_difference_(differences_.back());
}

void LoaderPositions::restore(const ByName& positions) {
  pending_.clear();
  for (const auto& [name, position] : positions) {
    const auto found = loaders_.find(name);
    if (found == loaders_.end()) {
      pending_[name] = position;
    } else {
      move(name, *found->second.loader, position);
    }
  }
  end_update();
}

}  // namespace rz
