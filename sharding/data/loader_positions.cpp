#include "sharding/data/loader_positions.h"

#include "comm/core/error.h"

namespace rz {

void LoaderPositions::attach(const std::string& name, StatefulLoader& loader) {
  require(!loaders_.contains(name), Errc::invalid_argument, "there are two loaders of the name '", name,
          "'; give one another name, by which its position is saved");
  if (const auto found = pending_.find(name); found != pending_.end()) {
    loader.set_position(found->second);
    pending_.erase(found);
  }
  loaders_[name] = {&loader, loader.position()};
}

void LoaderPositions::detach(const StatefulLoader& loader) {
  std::erase_if(loaders_, [&](const auto& named) { return named.second.loader == &loader; });
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
  for (const auto& [name, entry] : loaders_) all[name] = entry.loader->position();
  return all;
}

LoaderPositions::ByName LoaderPositions::of_update() const {
  ByName all = pending_;
  for (const auto& [name, entry] : loaders_) all[name] = entry.of_update;
  return all;
}

void LoaderPositions::restore(const ByName& positions) {
  pending_.clear();
  for (const auto& [name, position] : positions) {
    const auto found = loaders_.find(name);
    if (found == loaders_.end()) {
      pending_[name] = position;
    } else {
      found->second.loader->set_position(position);
    }
  }
  end_update();
}

}  // namespace rz
