#include "comm/backends/mpi/world_exchange.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/os/helper_thread.h"
#include "comm/os/wait_policy.h"

namespace rz::mpi {

namespace {

/// How much longer the others wait than rank 0, which names the missing ranks; and for MPI_Finalize.
constexpr std::chrono::seconds margin(5);

/// All messages have one size, below MPI's limits of eager ones: a send does not wait for its receive.
struct Message {
  int code = -1;  ///< an Errc, if it is a failure
  int culprit = -1;
  char text[2040] = {};

  void set(const std::string& from) {
    require(from.size() < sizeof text, Errc::system, "a text of ", from.size(), " bytes is too long for MPI");
    std::memcpy(text, from.c_str(), from.size() + 1);
  }
};

/// Whether the request has ended by then.
bool ends(MPI_Request& request, Deadline deadline) {
  for (int done = 0;;) {
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done || deadline.expired()) return done != 0;
    std::this_thread::sleep_for(poll_period::mpi_finalize);
  }
}

/// A receive into memory that MPI no longer accesses when this ends.
class Receive {
 public:
  explicit Receive(int from) {
    check(MPI_Irecv(&message_, sizeof message_, MPI_BYTE, from, world_tag, MPI_COMM_WORLD, &request_),
          "MPI_Irecv");
  }
  ~Receive() {
    if (request_ == MPI_REQUEST_NULL) return;
    MPI_Cancel(&request_);
    MPI_Wait(&request_, MPI_STATUS_IGNORE);
  }
  Receive(const Receive&) = delete;

  bool arrives(Deadline deadline) { return ends(request_, deadline); }
  const Message& message() const { return message_; }

 private:
  Message message_;
  MPI_Request request_ = MPI_REQUEST_NULL;
};

/// Leaks the message if MPI does not send it by then.
void send(const Message& message, int to, Deadline deadline) {
  auto kept = std::make_unique<Message>(message);
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Isend(kept.get(), sizeof message, MPI_BYTE, to, world_tag, MPI_COMM_WORLD, &request),
        "MPI_Isend");
  if (ends(request, deadline)) return;
  kept.release();
  MPI_Request_free(&request);
}

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (const int r : ranks) text += concat(text.empty() ? "" : ", ", r);
  return text;
}

/// On rank 0: the answer to the texts of all ranks, which it sends to all that have come.
std::string serve(const MpiExchange& e) {
  std::vector<std::unique_ptr<Receive>> others;
  for (int r = 1; r < e.size; ++r) others.push_back(std::make_unique<Receive>(r));
  std::vector<std::string> texts{e.own};
  std::vector<int> come, missing;
  const Deadline deadline = Deadline::after(e.timeout);
  for (int r = 1; r < e.size; ++r) {
    Receive& other = *others[static_cast<std::size_t>(r - 1)];
    (other.arrives(deadline) ? come : missing).push_back(r);
    texts.emplace_back(other.message().text);
  }
  Message answer;
  std::exception_ptr failure;
  try {
    if (!missing.empty())
      throw Error(Errc::timeout,
                  concat("rank ", list(missing), " of ", e.size, " did not arrive within ",
                         seconds(e.timeout), ", for MPI to hand on where rank 0 is"),
                  missing.front());
    answer.set(e.answer(texts));
  } catch (const Error& error) {
    failure = std::current_exception();
    answer.code = static_cast<int>(error.code());
    answer.culprit = error.culprit();
    answer.set(std::string(error.what()).substr(0, sizeof answer.text - 1));
  }
  for (const int r : come) send(answer, r, Deadline::after(margin));
  if (failure) std::rethrow_exception(failure);
  return answer.text;
}

std::string fetch(const MpiExchange& e) {
  Receive first(0);
  Message own;
  own.set(e.own);
  const Deadline deadline = Deadline::after(e.timeout + margin);
  send(own, 0, deadline);
  if (!first.arrives(deadline))
    throw Error(Errc::timeout,
                concat("rank ", e.rank, ": rank 0 did not hand on by MPI where it is, within ",
                       seconds(e.timeout + margin)),
                0);
  const Message& answer = first.message();
  if (answer.code >= 0) throw Error(static_cast<Errc>(answer.code), answer.text, answer.culprit);
  return answer.text;
}

/// MPI is finalised if this process has initialised it here and no backend needs it.
std::string exchange_in_world(const MpiExchange& e) {
  MpiRuntime& runtime = MpiRuntime::instance();
  std::string answer;
  try {
    const MpiRuntime::Use use(runtime);
    require_world(e.rank, e.size, e.launcher, runtime);
    int rank = 0;
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
    require(rank == e.rank, Errc::unsupported, "rank ", e.rank, " of ", e.launcher, " is rank ", rank,
            " of MPI_COMM_WORLD");
    answer = rank == 0 ? serve(e) : fetch(e);
  } catch (...) {
    runtime.mark_failed();
    throw;
  }
  if (!e.keep) runtime.finalise_if_own(margin);
  return answer;
}

/// MPI_Init waits for all ranks, without a limit.
std::string exchange_from_the_start(const MpiExchange& e) {
  struct Outcome {
    std::string answer;
    std::exception_ptr error;
  };
  const auto outcome = std::make_shared<Outcome>();
  const auto limit = e.timeout + 2 * margin;
  const bool has_ended = run_with_timeout(limit, [e, outcome] {
    try {
      outcome->answer = exchange_in_world(e);
    } catch (...) {
      outcome->error = std::current_exception();
    }
  });
  require(
      has_ended, Errc::timeout, "rank ", e.rank, ": MPI_Init did not end within ", seconds(limit),
      ": another of the ", e.size,
      " ranks has not come, or has MASTER_ADDR, which this one has not; mpirun hands it to all hosts with -x "
      "MASTER_ADDR");
  if (outcome->error) std::rethrow_exception(outcome->error);
  return std::move(outcome->answer);
}

}  // namespace

void require_world(int rank, int launched, const std::string& launcher, const MpiRuntime& runtime) {
  int world = 0;
  check(MPI_Comm_size(MPI_COMM_WORLD, &world), "MPI_Comm_size");
  require(launched == 0 || launched == world, Errc::unsupported, "rank ", rank, ": ", runtime.library(),
          " sees ", world, " process", world == 1 ? "" : "es", ", but the launcher, ", launcher, ", started ",
          launched, "; start with the mpirun of ", runtime.library(),
          ", or use RZ_BACKEND=native (--backend native)");
}

std::string exchange(const MpiExchange& e) {
  int initialised = 0, finalised = 0;
  check(MPI_Initialized(&initialised), "MPI_Initialized");
  check(MPI_Finalized(&finalised), "MPI_Finalized");
  require(!finalised, Errc::unsupported, "MPI was finalised before");
  require(initialised || e.may_start, Errc::unsupported,
          "this program is linked with MPI, but has not called MPI_Init; call it before");
  return initialised ? exchange_in_world(e) : exchange_from_the_start(e);
}

}  // namespace rz::mpi
