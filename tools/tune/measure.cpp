#include "tools/tune/measure.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "comm/core/error.h"
#include "comm/tuning/intranode.h"

namespace rz::tune {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Collective tunable_collectives[] = {
    Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather, Collective::broadcast,
    Collective::reduce,     Collective::gather,         Collective::scatter,    Collective::all_to_all};

std::vector<std::string> split_list(const std::string& list) {
  std::vector<std::string> all;
  for (std::size_t at = 0; at < list.size();) {
    const std::size_t end = std::min(list.find(", ", at), list.size());
    all.push_back(list.substr(at, end - at));
    at = end + 2;
  }
  return all;
}

/// Starts one call; `bytes` is the size of the whole buffer.
Work start_call(Communicator& comm, Collective c, float* in, float* out, std::size_t bytes) {
  const auto ranks = static_cast<std::size_t>(comm.size());
  const std::size_t whole = bytes / sizeof(float), part = whole / ranks;
  const ConstBuffer in_whole(in, whole), in_part(in, part);
  const Buffer out_whole(out, whole), out_part(out, part);
  switch (c) {
    case Collective::all_reduce:
      return comm.all_reduce(in_whole, out_whole, ReduceOp::sum);
    case Collective::reduce_scatter:
      return comm.reduce_scatter(in_whole, out_part);
    case Collective::all_gather:
      return comm.all_gather(in_part, out_whole);
    case Collective::broadcast:
      return comm.broadcast(in_whole, out_whole, 0);
    case Collective::reduce:
      return comm.reduce(in_whole, out_whole, 0);
    case Collective::gather:
      return comm.gather(in_part, out_whole, 0);
    case Collective::scatter:
      return comm.scatter(in_whole, out_part, 0);
    case Collective::all_to_all:
      return comm.all_to_all(in_whole, out_whole);
    default:
      fail(Errc::config, name(c), " has no choice of algorithms to measure");
  }
}

/// A communicator in which one candidate of every collective is forced, and its memory.
struct CandidateComm {
  std::string forced;
  std::optional<Communicator> comm;
  std::shared_ptr<float> in, out;
};

class Measure {
 public:
  Measure(int rank, int size, std::shared_ptr<Store> store, const Options& options, const Progress& progress)
      : rank_(rank), size_(size), store_(std::move(store)), options_(options), progress_(progress) {
    control_.emplace(connect("control", ""));
    measured_.ranks = size;
    measured_.intra_node = control_->explain(Collective::barrier, 0).algorithm == "staged";
    measured_.backend = control_->describe();
    make_candidate_comms();
    in_.assign(options.max_bytes / sizeof(float) + static_cast<std::size_t>(size), 1);
    out_.assign(in_.size(), 0);
  }

  Measured run() {
    const auto sizes = options_.sizes();
    std::size_t done = 0;
    const std::size_t cells = comm_of_candidate_.size() * sizes.size();
    budget_us_ = options_.seconds * 1e6 / static_cast<double>(cells) / options_.rounds;
    for (auto first = comm_of_candidate_.begin(); first != comm_of_candidate_.end();) {
      const Collective c = first->first.collective;
      auto last = first;
      while (last != comm_of_candidate_.end() && last->first.collective == c) ++last;
      for (const std::size_t bytes : sizes) {
        progress_(static_cast<double>(done) / static_cast<double>(cells),
                  concat(name(c), ", ", human_bytes(bytes)));
        measure_size({first, last}, bytes);
        done += static_cast<std::size_t>(last - first);
      }
      first = last;
    }
    progress_(1, "done");
    return std::move(measured_);
  }

 private:
  using CandidateIndex = std::vector<std::pair<Candidate, std::size_t>>;

  Communicator connect(const std::string& group, const std::string& forced) {
    CommOptions o;
    o.backend = "native";
    o.algorithm = forced;
    o.tuning.clear();
    o.deterministic = false;
    return Communicator::connect(rank_, size_, prefix_store(store_, "tune/" + group + "/"), o);
  }

  /// Candidate k of every collective uses communicator k.
  void make_candidate_comms() {
    std::map<Collective, std::size_t> used;
    for (const Candidate& c : candidates(measured_.intra_node, options_)) {
      const std::size_t k = used[c.collective]++;
      if (k == candidate_comms_.size()) candidate_comms_.emplace_back();
      candidate_comms_[k].forced +=
          concat(candidate_comms_[k].forced.empty() ? "" : ",", name(c.collective), "=", c.name);
      comm_of_candidate_.emplace_back(c, k);
    }
    require(!candidate_comms_.empty(), Errc::config,
            "none of the collectives has a choice of algorithms to measure");
    for (std::size_t k = 0; k < candidate_comms_.size(); ++k)
      candidate_comms_[k].comm.emplace(connect(concat(k), candidate_comms_[k].forced));
    const std::size_t count = options_.max_bytes / sizeof(float) + static_cast<std::size_t>(size_);
    for (const auto& [candidate, k] : comm_of_candidate_) {
      if (!candidate.is_zero_copy() || candidate_comms_[k].in) continue;
      candidate_comms_[k].in = candidate_comms_[k].comm->allocate_array<float>(count);
      candidate_comms_[k].out = candidate_comms_[k].comm->allocate_array<float>(count);
    }
  }

  /// Measures the candidates that compete.
  void measure_size(std::span<const CandidateIndex::value_type> all, std::size_t wanted) {
    const std::size_t grain = sizeof(float) * static_cast<std::size_t>(size_);
    const std::size_t bytes = std::max(wanted / grain, std::size_t{1}) * grain;
    std::vector<int> iterations;
    std::vector<std::vector<double>> us(all.size());
    for (const auto& candidate : all) {
      time(candidate, bytes, 1);  // warm-up: connections, plans, page faults
      const double once = time(candidate, bytes, 2);
      iterations.push_back(static_cast<int>(std::clamp(budget_us_ / std::max(once, 0.05), 1.0, 20000.0)));
    }
    for (int round = 0; round < options_.rounds; ++round)
      for (std::size_t i = 0; i < us.size(); ++i) us[i].push_back(time(all[i], bytes, iterations[i]));
    for (std::size_t i = 0; i < us.size(); ++i) {
      std::sort(us[i].begin(), us[i].end());
      measured_.times.push_back({all[i].first, bytes, us[i][us[i].size() / 2]});
    }
  }

  /// Microseconds per call, on the slowest rank.
  double time(const std::pair<Candidate, std::size_t>& which, std::size_t bytes, int iterations) {
    const auto& [candidate, k] = which;
    CandidateComm& lane = candidate_comms_[k];
    float* const in = candidate.is_zero_copy() ? lane.in.get() : in_.data();
    float* const out = candidate.is_zero_copy() ? lane.out.get() : out_.data();
    control_->barrier().wait();
    const auto begin = Clock::now();
    for (int i = 0; i < iterations; ++i) start_call(*lane.comm, candidate.collective, in, out, bytes).wait();
    double us = std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / iterations;
    control_->all_reduce({&us, 1}, ReduceOp::max).wait();
    return us;
  }

  const int rank_, size_;
  const std::shared_ptr<Store> store_;
  const Options& options_;
  const Progress& progress_;
  std::optional<Communicator> control_;
  std::vector<CandidateComm> candidate_comms_;
  CandidateIndex comm_of_candidate_;
  std::vector<float> in_, out_;
  double budget_us_ = 0;
  Measured measured_;
};

}  // namespace

std::vector<Candidate> candidates(bool intra_node, const Options& options) {
  std::vector<Candidate> all;
  for (const Collective c : tunable_collectives) {
    const auto& wanted = options.collectives;
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), c) == wanted.end()) continue;
    const tuning::Scope scope = intra_node ? tuning::Scope::intra_node : tuning::Scope::inter_node;
    std::vector<Candidate> of_one;
    for (const std::string& word : split_list(tuning::algorithm_choices(c, scope))) {
      tuning::Rule rule{c, scope, ""};
      tuning::set_algorithm(rule, word);
      if (!rule.is_schedule || options.schedules) of_one.push_back({c, scope, word});
    }
    if (intra_node) of_one.push_back({c, tuning::Scope::intra_node_registered, "zero_copy"});
    if (of_one.size() > 1) all.insert(all.end(), of_one.begin(), of_one.end());
  }
  return all;
}

Measured measure(int rank, int size, const std::shared_ptr<Store>& store, const Options& options,
                 const Progress& progress) {
  return Measure(rank, size, store, options, progress).run();
}

}  // namespace rz::tune
