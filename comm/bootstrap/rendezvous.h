#pragma once
/// Rendezvous of a group's ranks over a store in which no other group has keys (Store::of_next_group()):
/// values that every rank publishes, the error of a rank that cannot connect, and the moment when all have.

#include <functional>
#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/store.h"

namespace rz {

/// All-gather of one string per rank through the store, under the keys "`what`/<rank>". Returns the values in
/// rank order. `check` is called for each value before the next one is read. Errc::timeout names the ranks
/// that did not publish; the error's culprit is the first of them. The error of a rank that has published one
/// is thrown on this rank, too.
std::vector<std::string> store_all_gather(
    int rank, int size, Store&, const std::string& what, const std::string& value, Deadline,
    const std::function<void(int rank, const std::string& value)>& check = nullptr);

/// This rank cannot connect: publishes the error, so that the others do not wait for it until their
/// deadlines.
void publish_failure(int rank, Store&, const Error&) noexcept;
/// Throws on `rank` the error that another one has published; returns if there is none.
void throw_published_failure(int rank, Store&);
/// Errc::rendezvous if another process has connected as this rank in this store.
void require_not_connected(int rank, Store&);
/// This rank has connected. Returns once all ranks have, so that none uses the group before, or throws the
/// error that one of them has published. Meanwhile it calls `check` twice a second, which may throw. Rank 0,
/// with which the store may end, returns after the others.
void await_connected(int rank, int size, Store&, Deadline, const std::function<void()>& check);

}  // namespace rz
