#include "comm/backends/mpi/engine.h"

#include <algorithm>

#include "comm/backends/execution.h"
#include "comm/backends/layout.h"
#include "comm/core/cuda/runtime.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/core/helper_thread.h"
#include "comm/core/pause.h"

namespace rz::mpi {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::size_t wakes_the_thread = 1 << 20;  // bytes: below, the caller mostly waits at once
constexpr auto in_use = 1s;                        // after the last call, the thread looks once a millisecond
constexpr auto light_sleep = 1ms;
constexpr auto note_interval = 1ms;    // between looks for notes while operations are in flight
constexpr auto idle_interval = 100ms;  // and while there are none
constexpr auto inquiry_time = 1s;      // an idle rank answers within idle_interval
constexpr auto catching_up = 200ms;    // for calls that others have ended
constexpr std::size_t ahead = 8;       // agreements under way
constexpr std::size_t remembered = 8;  // ended calls, for ranks that ask
constexpr int first_tag_of_splits = Control::tag + 1, tags_of_splits = 32000;  // of 32,767 that MPI promises

bool wants_thread(std::span<const Operation> group) {
  std::size_t bytes = 0;
  for (const Operation& op : group) bytes += std::max(op.in.bytes(), op.out.bytes());
  return bytes >= wakes_the_thread;
}

// Two different calls get the same number once in 2^64 times.
std::uint64_t number_of(const Signature& s) {
  std::uint64_t h = 0x9e3779b97f4a7c15u;
  for (const std::uint64_t field :
       {std::uint64_t{s.sequence}, static_cast<std::uint64_t>(s.root), s.count,
        static_cast<std::uint64_t>(s.kind), static_cast<std::uint64_t>(s.dtype),
        static_cast<std::uint64_t>(s.op), static_cast<std::uint64_t>(s.algorithm)}) {
    h = (h ^ field) * 0xff51afd7ed558ccdu;
    h ^= h >> 32;
  }
  return h;
}

double seconds(std::chrono::milliseconds t) { return std::chrono::duration<double>(t).count(); }

std::string list_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += str(i ? ", " : " ", ranks[i]);
  return text;
}

MpiOptions with_bounded_timeout(MpiOptions options) {
  options.timeout = bounded(options.timeout);
  return options;
}

MPI_Comm idup(MPI_Comm comm, std::chrono::milliseconds timeout) {
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Comm_idup(comm, &copy, &request), "MPI_Comm_idup");
  int done = 0;
  for (const Deadline end = Deadline::after(timeout);;) {
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done) break;
    require(!end.expired(), Errc::timeout, "the MPI communicator could not be duplicated within ",
            seconds(timeout), " s; does every rank of it connect?");
    std::this_thread::sleep_for(50us);
  }
  check(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

}  // namespace

Comms duplicate(MPI_Comm comm, std::chrono::milliseconds timeout) {
  return complete(idup(comm, timeout), timeout);
}

Comms complete(MPI_Comm comm, std::chrono::milliseconds timeout) {
  check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return {comm, idup(comm, timeout)};
}

bool Job::done() const noexcept {
  if (!ended() && !engine_->threaded()) engine_->pump();
  return ended();
}

void Job::wait() {
  engine_->wait(*this);
  if (error_) std::rethrow_exception(error_);
}

Engine::Engine(Session& session, Comms comms, int rank, int size, const MpiOptions& options)
    : session_(session),
      comms_(comms),
      rank_(rank),
      size_(size),
      options_(with_bounded_timeout(options)),
      wire_{comms.data, rank, size, options.deterministic, options.most_bytes},
      control_(comms.order, rank, size),
      messages_(comms.data, rank, size, options.most_bytes),
      left_(static_cast<std::size_t>(size)) {}

// ---- who drives

void Engine::start() {
  if (threaded()) helper_thread([self = shared_from_this()] { self->progress_thread(); }).detach();
}

std::shared_ptr<Job> Engine::submit(std::span<const Operation> group) {
  const auto now = Clock::now();
  auto job = std::make_shared<Job>(shared_from_this(), group, now + options_.timeout);
  {
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    if (group.empty()) {
      job->end(nullptr);
      return job;
    }
    incoming_.push_back(job);
    ++unfinished_;
    last_use_ = now;
    attention_.store(true, std::memory_order_release);
    if (!driven_ && wants_thread(group)) work_arrived_.notify_one();
  }
  if (!threaded()) pump();
  return job;
}

void Engine::wait(const Job& job) {
  std::unique_lock lock(mutex_);
  while (!job.ended()) {
    if (driven_) {
      changed_.wait(lock);
      continue;
    }
    driven_ = true;
    lock.unlock();
    drive(&job);
    lock.lock();
    hand_back(lock);
  }
}

void Engine::hand_back(std::unique_lock<std::mutex>&) {
  driven_ = false;
  changed_.notify_all();
  if (unfinished_ > 0) work_arrived_.notify_one();
}

bool Engine::take_over(std::unique_lock<std::mutex>& lock) {
  changed_.wait_for(lock, 5s, [&] { return !driven_; });
  if (driven_) return false;
  return driven_ = true;
}

void Engine::pump() noexcept {
  std::unique_lock lock(mutex_);
  if (driven_) return;
  driven_ = true;
  lock.unlock();
  try {
    const cuda::DeviceGuard device(options_.device);  // as MPI wants it
    step();
  } catch (...) {
    poison(std::current_exception());
  }
  lock.lock();
  hand_back(lock);
}

void Engine::progress_thread() {
  std::unique_lock lock(mutex_);
  while (!stopping_ && !poisoned_) {
    if (!driven_ && (unfinished_ > 0 || attention_.load() || Clock::now() >= next_look_)) {
      driven_ = true;
      lock.unlock();
      drive(nullptr);
      lock.lock();
      driven_ = false;
      changed_.notify_all();
    } else if (Clock::now() - last_use_ < in_use) {
      work_arrived_.wait_for(lock, light_sleep);
    } else {
      work_arrived_.wait_for(lock, idle_interval);
    }
  }
  if (poisoned_) {
    if (leaving_) session_.end_leaving();
    return;
  }
  // A thread that waits may still drive: its step sees stopping_.
  const bool mine = take_over(lock);
  lock.unlock();
  if (mine) leave();
}

void Engine::drive(const Job* until) {
  try {
    const cuda::DeviceGuard device(options_.device);
    do step();
    while (until ? !until->ended() : !nothing_left());
  } catch (...) {
    poison(std::current_exception());
  }
}

void Engine::abort(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = std::make_exception_ptr(Error(Errc::aborted, reason, rank_));
    attention_.store(true, std::memory_order_release);
    work_arrived_.notify_one();
  }
  if (!threaded()) pump();
}

void Engine::stop() noexcept {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  attention_.store(true, std::memory_order_release);
  if (poisoned_) return;
  leaving_ = true;
  session_.begin_leaving();
  work_arrived_.notify_all();
  if (threaded()) {
    changed_.wait_for(lock, 2s, [&] { return unfinished_ == 0; });
    return;
  }
  const bool mine = take_over(lock);
  lock.unlock();
  if (mine) leave();
}

// ---- collectives and messages

void Engine::step() {
  require(session_.open(), Errc::aborted, "MPI was finalised while the communicator of rank ", rank_,
          " was in use");
  if (attention_.load(std::memory_order_acquire)) accept();
  bool moved = advance_front();
  moved |= messages_.advance([this](Job& job) { operation_ended(job); });
  check_heard();
  const auto now = Clock::now();
  if (now >= next_look_) {
    next_look_ = now + (queue_.empty() && messages_.idle() ? idle_interval : note_interval);
    read_notes();
    check_left();
    check_deadlines();
  }
  if (!moved) return idle();
  idle_rounds_ = 0;
}

void Engine::accept() {
  const std::lock_guard lock(mutex_);
  attention_.store(false, std::memory_order_relaxed);
  if (failure_) std::rethrow_exception(failure_);
  require(!stopping_ || unfinished_ == 0, Errc::aborted, "the communicator of rank ", rank_,
          " was destroyed");
  for (const auto& job : incoming_)
    for (std::size_t i = 0; i < job->operations.size(); ++i) {
      const Operation& op = job->operations[i];
      if (traits(op.kind).point_to_point) {
        messages_.add(op, job);
        continue;
      }
      Call& call = queue_.emplace_back();
      call.job = job;
      call.operation = i;
      call.signature = {.sequence = next_sequence_++,
                        .root = op.root,
                        .count = common_count(op, size_),
                        .kind = op.kind,
                        .dtype = op.out.data ? op.out.dtype : op.in.dtype,
                        .op = op.op.kind,
                        .algorithm = in_messages(op)};
    }
  incoming_.clear();
}

// The order is the same on every rank, as the calls' is.
void Engine::propose() {
  for (std::size_t i = 0; i < std::min(queue_.size(), ahead); ++i) {
    Call& call = queue_[i];
    if (call.proposed) continue;
    call.mine[0] = number_of(call.signature);
    call.mine[1] = ~call.mine[0];
    check(MPI_Iallreduce(call.mine, call.agreed, 2, MPI_UINT64_T, MPI_MAX, comms_.order, &call.agreement),
          "MPI_Iallreduce");
    call.proposed = true;
  }
}

bool Engine::advance_front() {
  if (queue_.empty()) return false;
  propose();
  Call& call = queue_.front();
  if (!call.begun) {
    if (!agreed(call)) return false;
    call.stages = stages_of(call.job->operations[call.operation], wire_, operators_);
    call.begun = true;
    if (!call.stages.empty()) call.stages[0].post(call.requests);
  }
  if (!advance_stages(call)) return false;
  const auto job = std::move(call.job);
  ended_.push_back(call.signature);
  if (ended_.size() > remembered) ended_.pop_front();
  queue_.pop_front();
  inquiry_.reset();
  operation_ended(*job);
  return true;
}

bool Engine::agreed(Call& call) {
  int done = 0;
  check(MPI_Test(&call.agreement, &done, MPI_STATUS_IGNORE), "MPI_Test");
  if (!done) return false;
  if (call.agreed[0] == ~call.agreed[1]) return true;
  // All have come, but not to the same call: now it is asked who.
  if (!inquiry_) inquire(call);
  return false;
}

bool Engine::advance_stages(Call& call) {
  for (; call.stage < call.stages.size(); ++call.stage) {
    int done = 0;
    check(
        MPI_Testall(static_cast<int>(call.requests.size()), call.requests.data(), &done, MPI_STATUSES_IGNORE),
        "MPI_Testall");
    if (!done) return false;
    if (const auto& finish = call.stages[call.stage].finish) finish();
    call.requests.clear();
    if (call.stage + 1 < call.stages.size()) call.stages[call.stage + 1].post(call.requests);
  }
  return true;
}

void Engine::operation_ended(Job& job) {
  if (--job.left > 0) return;
  const std::lock_guard lock(mutex_);
  job.end(nullptr);
  --unfinished_;
  changed_.notify_all();
}

// ---- notes

void Engine::read_notes() {
  control_.poll([this](int peer, const Note& note) { read(peer, note); });
}

void Engine::read(int peer, const Note& note) {
  switch (note.kind) {
    case Note::query:
      return control_.tell(peer, answer_to(note));
    case Note::answer:
      if (inquiry_ && inquiry_->sequence == note.sequence &&
          !inquiry_->answers[static_cast<std::size_t>(peer)]) {
        inquiry_->answers[static_cast<std::size_t>(peer)] = note;
        --inquiry_->open;
      }
      return;
    case Note::leaving:
      left_[static_cast<std::size_t>(peer)] = note;
      return;
    case Note::failure:
      learnt_ = true;
      if (!heard_)
        heard_ = Heard{.error = Error(static_cast<Errc>(note.code), note.get_text(), note.culprit),
                       .calls = note.calls,
                       .until = Clock::now() + catching_up};
      return check_heard();
  }
}

void Engine::check_heard() const {
  if (!heard_) return;
  const bool behind = !queue_.empty() && queue_.front().signature.sequence < heard_->calls;
  if (!behind || Clock::now() >= heard_->until) throw heard_->error;
}

Note Engine::answer_to(const Note& query) const {
  Note answer{.kind = Note::answer, .calls = next_sequence_, .sequence = query.sequence};
  const auto look = [&](const Signature& s) {
    if (s.sequence != query.sequence) return;
    answer.known = 1;
    answer.signature = s;
  };
  std::for_each(ended_.begin(), ended_.end(), look);
  for (const Call& call : queue_) look(call.signature);
  return answer;
}

// Whoever left had ended all its calls, and no other ones will come: those are ended here, too.
void Engine::check_left() const {
  for (int peer = 0; peer < size_; ++peer) {
    const auto& note = left_[static_cast<std::size_t>(peer)];
    if (!note) continue;
    const bool missed = !queue_.empty() && queue_.front().signature.sequence >= note->calls;
    if (missed || messages_.in_vain(peer, note->sent, note->received))
      throw Error(Errc::peer_lost,
                  str("rank ", peer, " destroyed its communicator, but rank ", rank_, " called ",
                      missed ? describe(queue_.front().signature) : "a message that it should share",
                      "; every rank must make the same calls"),
                  peer);
  }
}

// ---- waiting, and deadlines

void Engine::idle() {
  check_deadlines();
  if (queue_.empty() && messages_.idle()) return;
  if (++idle_rounds_ < 64) return cpu_pause();
  if (idle_rounds_ < 256) return std::this_thread::yield();
  std::this_thread::sleep_for(std::min<Clock::duration>(500us, 10us * (1 + (idle_rounds_ - 256) / 16)));
}

void Engine::check_deadlines() {
  const auto now = Clock::now();
  if (inquiry_) {
    if (inquiry_->open == 0 || now >= inquiry_->until) conclude();
  } else if (!queue_.empty() && now >= queue_.front().job->deadline) {
    inquire(queue_.front());
  }
  if (messages_.idle()) return;
  const auto late = messages_.oldest();
  if (now < late.job->deadline) return;
  fail_late(str("rank ", late.peer), late.peer,
            str(late.sending ? "send to" : "recv from", " rank ", late.peer));
}

void Engine::inquire(const Call& call) {
  inquiry_ = Inquiry{.sequence = call.signature.sequence,
                     .until = Clock::now() + inquiry_time,
                     .answers = std::vector<std::optional<Note>>(static_cast<std::size_t>(size_)),
                     .open = size_ - 1};
  control_.tell_all({.kind = Note::query, .sequence = call.signature.sequence});
}

void Engine::conclude() {
  const Signature& mine = queue_.front().signature;
  std::vector<int> silent, late;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const auto& answer = inquiry_->answers[static_cast<std::size_t>(peer)];
    if (!answer) {
      silent.push_back(peer);
    } else if (!answer->known && answer->calls <= mine.sequence) {
      late.push_back(peer);
    } else if (answer->known && !(answer->signature == mine)) {
      fail(Errc::mismatch, "mismatched collectives: rank ", peer, " called ", describe(answer->signature),
           " while rank ", rank_, " called ", describe(mine),
           "; every rank must make the same calls in the same order");
    }
  }
  std::string who;
  if (!late.empty()) who = list_of(late) + " did not call it";
  if (!silent.empty()) who += str(who.empty() ? "" : ", and ", list_of(silent), " did not answer");
  if (who.empty()) who = "every rank called it, but MPI did not end it";
  fail_late(who, !late.empty() ? late[0] : !silent.empty() ? silent[0] : -1, describe(mine));
}

void Engine::fail_late(const std::string& who, int culprit, const std::string& what) const {
  throw Error(Errc::timeout,
              str(what, " did not end within ", seconds(options_.timeout), " s on rank ", rank_, ": ", who,
                  "; a rank may be stuck, or slower than the timeout allows"),
              culprit);
}

// ---- the end

// What MPI still holds stays in memory for ever: it has no way to withdraw a collective.
void Engine::poison(std::exception_ptr error) noexcept {
  Note note{.kind = Note::failure,
            .code = static_cast<int>(Errc::aborted),
            .culprit = rank_,
            .calls = queue_.empty() ? next_sequence_ : queue_.front().signature.sequence};
  bool destroyed = false;
  {
    const std::lock_guard lock(mutex_);
    destroyed = stopping_ && !failure_ && !learnt_;
  }
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    const bool shared = e.code() == Errc::timeout || e.code() == Errc::mismatch ||
                        e.code() == Errc::peer_lost || e.code() == Errc::aborted;
    if (shared) note.code = static_cast<int>(e.code()), note.culprit = e.culprit();
    note.set_text(shared ? e.what() : str("rank ", rank_, ": ", e.what()));
  } catch (const std::exception& e) {
    note.set_text(str("rank ", rank_, ": ", e.what()));
  }
  if (destroyed) {
    note.code = static_cast<int>(Errc::peer_lost);
    note.culprit = rank_;
  }
  session_.failed();
  try {
    if (!learnt_ && session_.open()) control_.tell_all(note);
    control_.flush(500ms);
  } catch (const Error&) {  // MPI is broken here; the others have their deadlines
  }
  control_.give_up();
  operators_.forget();
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = error;
  const auto end = [&](Job& job) {
    if (!job.ended()) job.end(failure_);
  };
  for (const Call& call : queue_) end(*call.job);
  for (const auto& job : incoming_) end(*job);
  incoming_.clear();
  messages_.give_up(end);
  if (!queue_.empty()) new std::deque<Call>(std::move(queue_));
  queue_.clear();
  inquiry_.reset();
  unfinished_ = 0;
  poisoned_ = true;
  changed_.notify_all();
  work_arrived_.notify_all();
}

// The last note of each rank says that no other will follow: once all have come, no message can meet a later
// communicator of the same number.
void Engine::leave() noexcept {
  try {
    accept();
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_)
        control_.tell(peer, {.kind = Note::leaving,
                             .calls = next_sequence_,
                             .sent = messages_.sent(peer),
                             .received = messages_.received(peer)});
    const auto patience =
        threaded() ? options_.timeout : std::min<std::chrono::milliseconds>(options_.timeout, 1s);
    const Deadline end = Deadline::after(patience);
    const auto all_left = [&] {
      return std::count_if(left_.begin(), left_.end(), [](const auto& note) { return note.has_value(); }) ==
             size_ - 1;
    };
    for (auto nap = 10us; !all_left() && !end.expired();
         nap = std::min<std::chrono::microseconds>(nap * 2, 10ms)) {
      read_notes();
      if (!all_left()) std::this_thread::sleep_for(nap);
    }
    if (all_left() && control_.flush(1s)) free_comms();
    control_.give_up();
    const std::lock_guard lock(mutex_);
    failure_ = std::make_exception_ptr(
        Error(Errc::aborted, str("the communicator of rank ", rank_, " was destroyed"), rank_));
  } catch (...) {
    poison(std::current_exception());
  }
  session_.end_leaving();
}

void Engine::free_comms() {
  Comms comms = comms_;
  check(MPI_Comm_free(&comms.data), "MPI_Comm_free");
  check(MPI_Comm_free(&comms.order), "MPI_Comm_free");
}

Comms Engine::split(std::span<const int> members) {
  std::unique_lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  require(take_over(lock), Errc::timeout, "rank ", rank_, ": another thread kept the communicator busy");
  lock.unlock();
  Comms comms;
  std::exception_ptr error;
  try {
    MPI_Group all, some;
    check(MPI_Comm_group(comms_.order, &all), "MPI_Comm_group");
    const int chosen = MPI_Group_incl(all, static_cast<int>(members.size()), members.data(), &some);
    MPI_Group_free(&all);
    check(chosen, "MPI_Group_incl");
    MPI_Comm comm = MPI_COMM_NULL;
    const int made =
        MPI_Comm_create_group(comms_.order, some, first_tag_of_splits + splits_++ % tags_of_splits, &comm);
    MPI_Group_free(&some);
    check(made, "MPI_Comm_create_group");
    comms = complete(comm, options_.rendezvous_timeout);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  hand_back(lock);
  if (error) std::rethrow_exception(error);
  return comms;
}

}  // namespace rz::mpi
