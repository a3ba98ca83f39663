#include "sharding/parallel/parallelize.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "autograd_lite/nn/layers.h"
#include "comm/core/error.h"
#include "comm/core/text.h"
#include "sharding/parallel/collectives.h"
#include "sharding/parallel/traffic.h"

namespace rz {

namespace {

using Function = Exchange::Function;

/// What layers call; all empty without tp.
struct ParallelFunctions {
  Function input, output;  ///< of column, and of row and vocabulary
  Function of_whole;       ///< Exchange::parameter of a parameter that is used on a part of the columns
  Function of_tokens;      ///< the same on a part of the tokens
  std::function<Tensor(Tape&, const Tensor&)> gather;
  RankOf part;
  bool sequence = false;
};

/// The tokens are the dimension before the last.
ParallelFunctions functions_of(const CountedGroup& c, RankOf part, bool sequence) {
  ParallelFunctions f;
  f.part = part, f.sequence = sequence;
  f.of_whole = [c](Tape& tape, Var x) { return functional::replicate(tape, x, c); };
  f.gather = [c](Tape& tape, const Tensor& x) { return functional::gather(tape, x, c); };
  if (!sequence) {
    f.input = f.of_whole;
    f.output = [c](Tape& tape, Var x) { return functional::combine(tape, x, c); };
    return f;
  }
  f.input = [c](Tape& tape, Var x) {
    return tape.is_grad_enabled() ? functional::all_gather(tape, x, c, -2) : x;
  };
  f.output = [c](Tape& tape, Var x) {
    return tape.is_grad_enabled() ? functional::reduce_scatter(tape, x, c, -2)
                                  : functional::combine(tape, x, c);
  };
  f.of_tokens = f.of_whole;
  return f;
}

/// A layer that a rule matches, with its name from the module.
struct MatchedLayer {
  const ParallelRule* rule;
  Module* module;
  std::string name;
};

[[noreturn]] void refuse_layer(const MatchedLayer& of, const std::string& why) {
  fail(Errc::config, "parallelize: ", of.name, " (", rz::name(of.rule->style), " by \"", of.rule->pattern,
       "\"): ", why);
}

template <class T>
T& layer_as(const MatchedLayer& of, const char* expected) {
  auto* const layer = dynamic_cast<T*>(of.module);
  if (!layer) refuse_layer(of, concat("expected ", expected));
  return *layer;
}

/// What becomes of a layer: parts of its parameters, then its exchanges.
class Division {
 public:
  explicit Division(const ParallelFunctions& f) : f_(f) {}

  void add(const MatchedLayer& of) {
    switch (of.rule->style) {
      case ParallelStyle::column:
        return column(of);
      case ParallelStyle::row:
        return row(of);
      case ParallelStyle::vocabulary:
        return vocabulary(of);
      case ParallelStyle::sequence:
        return whole(of, f_.of_tokens, f_.sequence ? f_.part : RankOf{}, true);
      case ParallelStyle::shared:
        return whole(of, f_.of_whole, f_.part, false);
      case ParallelStyle::replicated:
        return;
    }
  }

  void apply() const {
    for (const MatchedLayer& of : shared_dropouts_)
      if (!uneven_.empty() && of.rule->columns == 0)
        refuse_layer(of, concat("tp ", f_.part.ranks, " does not divide ", uneven_,
                                ", so that ranks drop different numbers of columns; give the rule the number "
                                "of all: columns = …"));
    for (const Part& p : parts_) p.parameter->set_part(p.box, p.shape);
    for (const auto& set : settings_) set();
  }

  std::size_t divided() const { return parts_.size(); }

 private:
  struct Part {
    Parameter* parameter;
    Box box;
    Shape shape;
  };

  /// Divides dimension `d` of a parameter; `blocks` equal ranges of it each.
  void cut(const MatchedLayer& of, Parameter& p, int d, std::size_t blocks, std::size_t head_size) {
    const auto ranks = static_cast<std::size_t>(f_.part.ranks);
    const std::size_t size = p.shape[d], together = std::max<std::size_t>(1, head_size);
    if (blocks == 0 || size % (blocks * together) != 0)
      refuse_layer(of, concat(p.name, " has ", size, " of them, which ", blocks, " blocks",
                              head_size ? concat(" of heads of ", head_size) : "", " do not divide"));
    const std::size_t columns = size / blocks, heads = columns / together;
    if (head_size && heads % ranks != 0)
      refuse_layer(of,
                   concat("tp ", ranks, " does not divide ", heads, heads == 1 ? " head of " : " heads of ",
                          head_size, " of ", p.name, "; use a divisor of ", heads));
    if (columns == 1 && ranks > 1)
      refuse_layer(of, concat("tp ", ranks, " has one column of ", p.name,
                              " to share; leave its layers whole (replicated)"));
    if (columns % ranks != 0 && uneven_.empty()) uneven_ = concat("the ", columns, " columns of ", p.name);
    std::vector<std::uint64_t> shape = extents(p.shape);
    shape[static_cast<std::size_t>(d)] = columns;
    const std::size_t cut_at = static_cast<std::size_t>(d) + (blocks > 1 ? 1 : 0);
    if (blocks > 1) shape.insert(shape.begin() + d, blocks);
    const Range own = chunk_of(columns, f_.part);
    add_part(p, shape, cut_at, own, p.shape.with(d, blocks * own.count()));
  }

  void add_part(Parameter& p, const std::vector<std::uint64_t>& shape, std::size_t d, Range own,
                const Shape& local) {
    require(!p.value.defined() && !p.grad.defined(), Errc::invalid_argument, "parallelize: parameter ",
            p.name,
            " has memory already; call it before initialize(), make_strategy() and allocate_parameters()");
    require(!p.part, Errc::invalid_argument, "parallelize: parameter ", p.name, " is a part already");
    Box box = Box::whole(shape);
    box.offset[d] = own.begin, box.extent[d] = own.count();
    parts_.push_back({&p, std::move(box), local});
  }

  void column(const MatchedLayer& of) {
    const std::size_t blocks = of.rule->blocks, head = of.rule->head_size;
    if (auto* const attention = dynamic_cast<nn::MultiheadAttention*>(of.module)) {
      const std::size_t channels = attention->in_proj_weight.shape[0] / 3 / attention->heads;
      cut(of, attention->in_proj_weight, 0, 3, channels);
      cut(of, attention->in_proj_bias, 0, 3, channels);
      settings_.push_back([this, attention] {
        attention->heads /= static_cast<std::size_t>(f_.part.ranks);
        attention->exchange.input = f_.input, attention->exchange.part = f_.part;
      });
      return;
    }
    auto& layer = layer_as<nn::Linear>(of, "an nn::Linear or nn::MultiheadAttention");
    cut(of, layer.weight, layer.layout == ops::WeightLayout::in_out ? 1 : 0, blocks, head);
    if (layer.with_bias) cut(of, layer.bias, 0, blocks, head);
    if (layer.lora) cut(of, layer.lora->b, 0, blocks, head);
    settings_.push_back([this, &layer] {
      layer.exchange.input = f_.input, layer.exchange.part = f_.part;
      if (layer.lora) layer.lora->exchange_a = f_.of_whole;
    });
  }

  void row(const MatchedLayer& of) {
    const std::size_t blocks = of.rule->blocks, head = of.rule->head_size;
    auto& layer = layer_as<nn::Linear>(of, "an nn::Linear");
    cut(of, layer.weight, layer.layout == ops::WeightLayout::in_out ? 0 : 1, blocks, head);
    if (layer.lora) cut(of, layer.lora->a, 1, blocks, head);
    settings_.push_back([this, &layer] {
      layer.exchange.output = f_.output, layer.exchange.parameter = f_.of_tokens;
      layer.exchange.part = f_.part;
      if (!layer.lora) return;
      layer.lora->exchange_b = f_.of_whole;
      layer.lora->input_part = columns_of(layer.lora->a.global_shape()[1]);
    });
  }

  void vocabulary(const MatchedLayer& of) {
    auto& layer = layer_as<nn::Embedding>(of, "an nn::Embedding");
    Parameter& p = layer.weight;
    const std::size_t rows = p.shape[0];
    if (const int last = f_.part.ranks - 1; chunk_of(rows, {last, last + 1}).count() == 0)
      refuse_layer(of,
                   concat("tp ", last + 1, " leaves ranks without any of the ", rows, " rows of ", p.name));
    const Range own = chunk_of(rows, f_.part);
    add_part(p, extents(p.shape), 0, own, p.shape.with(0, own.count()));
    settings_.push_back([this, &layer] { layer.exchange = {f_.input, f_.output, {}, f_.gather, f_.part}; });
  }

  void whole(const MatchedLayer& of, const Function& parameter, RankOf part, bool by_tokens) {
    const Exchange exchange{
        {}, {}, parameter, {}, part, by_tokens, columns_of(by_tokens ? 0 : of.rule->columns)};
    const auto set = [&](auto& layer) {
      settings_.push_back([&layer, exchange] { layer.exchange = exchange; });
    };
    if (auto* const norm = dynamic_cast<nn::LayerNorm*>(of.module)) return set(*norm);
    if (auto* const rms = dynamic_cast<nn::RmsNorm*>(of.module)) return set(*rms);
    if (auto* const dropout = dynamic_cast<nn::Dropout*>(of.module)) {
      if (of.rule->style == ParallelStyle::shared) shared_dropouts_.push_back(of);
      return set(*dropout);
    }
    if (auto* const table = dynamic_cast<nn::Embedding*>(of.module)) return set(*table);
    refuse_layer(of, "expected an nn::LayerNorm, nn::RmsNorm, nn::Dropout or nn::Embedding");
  }

  nn::PartOf columns_of(std::size_t count) const { return {chunk_of(count, f_.part), count}; }

  const ParallelFunctions f_;
  std::vector<Part> parts_;
  std::vector<MatchedLayer> shared_dropouts_;
  std::string uneven_;  ///< the first that ranks have in different numbers
  std::vector<std::function<void()>> settings_;
};

/// Each module with the first rule that matches it. Each rule must match one.
std::vector<MatchedLayer> layers_of(Module& module, const ParallelPlan& plan) {
  std::vector<MatchedLayer> layers;
  std::vector<bool> used(plan.size(), false);
  std::string known;
  const std::size_t prefix = module.path().empty() ? 0 : module.path().size() + 1;
  for (Module* m : module.modules()) {
    if (m == &module) continue;
    const std::string name = m->path().substr(prefix);
    bool found = false;
    for (std::size_t r = 0; r < plan.size(); ++r) {
      if (!matches_name(name, plan[r].pattern)) continue;
      if (!found) layers.push_back({&plan[r], m, name});
      used[r] = found = true;
    }
    if (known.size() < 200) known += concat(known.empty() ? "" : ", ", name);
  }
  for (std::size_t r = 0; r < plan.size(); ++r)
    require(used[r], Errc::config, "parallelize: the pattern \"", plan[r].pattern, "\" (",
            rz::name(plan[r].style), ") matches no module; there are ", known.empty() ? "none" : known,
            known.size() < 200 ? "" : ", …");
  return layers;
}

/// With sequence parallelism a parameter without a rule would get the gradient of a part of the tokens.
void require_rules(Module& module, const std::vector<MatchedLayer>& layers) {
  for (Parameter* p : module.parameters()) {
    bool known = false;
    for (const MatchedLayer& layer : layers) {
      const auto below = layer.module->parameters();
      known = known || std::ranges::find(below, p) != below.end();
    }
    require(known, Errc::config, "parallelize: sequence_parallel needs a rule for each parameter, and ",
            p->name, " has none; add one, such as {\"", p->name.substr(0, p->name.rfind('.')),
            "\", sequence}");
  }
}

/// "tp 2: transformer.wte (vocabulary), … x 12 (column), …; 62 of 124 elements on this rank"
std::string report_of(Module& module, const ParallelPlan& plan, const std::vector<MatchedLayer>& layers,
                      int ranks) {
  std::string text = concat("tp ", ranks, ": ");
  for (const ParallelRule& rule : plan) {
    const auto count = std::ranges::count_if(layers, [&](const MatchedLayer& l) { return l.rule == &rule; });
    if (rule.style == ParallelStyle::column || rule.style == ParallelStyle::row ||
        rule.style == ParallelStyle::vocabulary)
      text += concat(rule.pattern, " (", rz::name(rule.style),
                     count > 1 ? concat(", ", count, " layers") : "", "), ");
  }
  std::size_t here = 0, all = 0;
  for (const Parameter* p : module.parameters()) here += p->count(), all += p->global_shape().count();
  return concat(text, "together ", here, " of ", all, " elements on this rank");
}

}  // namespace

std::string parallelize(Module& module, const ParallelPlan& plan, const Mesh& mesh,
                        const ParallelOptions& options) {
  const std::vector<MatchedLayer> layers = layers_of(module, plan);
  if (options.sequence_parallel) require_rules(module, layers);
  ParallelFunctions functions;
  if (mesh.tp()) functions = functions_of(mesh.layers(), mesh.part(), options.sequence_parallel);
  Division division(functions);
  for (const MatchedLayer& layer : layers) division.add(layer);
  if (!mesh.tp()) return "";
  division.apply();
  return report_of(module, plan, layers, mesh.sizes().tp);
}

}  // namespace rz
