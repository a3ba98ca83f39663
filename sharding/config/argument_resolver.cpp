// What "auto" stands for, which arguments were used, and batch sizes.

#include <algorithm>
#include <cmath>

#include "comm/core/error.h"
#include "sharding/config/settings.h"

namespace rz::ds {
namespace {

using nlohmann::json;

/// Names the argument; one that was typed under another name, as it was typed.
std::string described(const ArgumentSpec& spec, const TrainingArguments& a) {
  const auto typed = a.flags.find(std::string(spec.name));
  const bool alias = typed != a.flags.end() && argument_name(typed->second) != spec.name;
  return concat(alias ? std::string_view(typed->second) : spec.shown(), " (", a.origin, ")");
}

bool is_batch_size(std::string_view argument) {
  return argument == "train_batch_size" || argument == "per_device_train_batch_size" ||
         argument == "gradient_accumulation_steps";
}

bool has_key(std::string_view argument) {
  return std::ranges::any_of(objects(), [&](const ObjectSpec& o) {
    return std::ranges::any_of(o.keys,
                               [&](const KeySpec& k) { return k.argument && k.argument == argument; });
  });
}

/// Sizes with their names.
std::string ranks_text(const MeshSizes& mesh) {
  const std::string all = concat(mesh.data(), mesh.data() == 1 ? " rank" : " ranks");
  return mesh.tp == 1 ? all
                      : concat(all, " with data of their own (", mesh.ranks(), " ranks / tp ", mesh.tp, ")");
}

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

std::optional<ArgumentValue> ArgumentResolver::given(std::string_view argument) {
  if (argument == "warmup_steps" && arguments_.warmup_ratio) return warmup_by_ratio();
  const ArgumentSpec& spec = argument_spec(argument);
  json value = given_value(arguments_, spec);
  if (value.is_null()) return std::nullopt;
  used_.insert(spec.name);
  return ArgumentValue{std::move(value), described(spec, arguments_)};
}

std::optional<ArgumentValue> ArgumentResolver::automatic(std::string_view argument) {
  if (auto found = given(argument)) {
    // Hugging Face writes 1 for no warm-up; DeepSpeed takes both for 2.
    if (argument == "warmup_steps" && found->value == 0) found->value = 1;
    return found;
  }
  if (argument == "schedule_steps") return automatic("total_steps");
  if (argument == "total_steps") return total_steps();
  if (argument == "warmup_max_lr") return max_rate();
  if (is_batch_size(argument)) return ArgumentValue{json(), "from the other batch sizes"};
  if (argument.starts_with("mesh_")) return ArgumentValue{0, "what the others leave"};
  const ArgumentSpec& spec = argument_spec(argument);
  json value = json::parse(spec.otherwise);
  if (value.is_null()) return std::nullopt;
  return ArgumentValue{std::move(value), "Hugging Face's default"};
}

/// The rate of the optimizer, which was read before the scheduler.
std::optional<ArgumentValue> ArgumentResolver::max_rate() {
  if (const Settings::Entry* rate = settings_.find("optimizer.params.lr"))
    return ArgumentValue{rate->value, "optimizer.params.lr"};
  return automatic("learning_rate");
}

/// Schedules read their total before the warm-up; one without a total counts with the updates of the run.
std::optional<ArgumentValue> ArgumentResolver::warmup_by_ratio() {
  require(!arguments_.warmup_steps, Errc::config, "warmup_steps and warmup_ratio (", arguments_.origin,
          ") exclude each other");
  const Settings::Entry* entry = settings_.find("scheduler.params.total_num_steps");
  const auto total = entry ? std::optional(ArgumentValue{entry->value, ""}) : automatic("total_steps");
  require(total.has_value(), Errc::config, file_, ": scheduler.params.warmup_num_steps: warmup_ratio (",
          arguments_.origin, ") needs the updates of the run; give total_steps or max_steps");
  ratio_used_ = true;
  const auto steps = std::ceil(*arguments_.warmup_ratio * total->value.get<double>());
  return ArgumentValue{static_cast<std::int64_t>(steps), concat("warmup_ratio (", arguments_.origin, ")")};
}

std::optional<ArgumentValue> ArgumentResolver::total_steps() const {
  if (!facts_.updates) return std::nullopt;
  if (errors_.has_wrong(
          {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}))
    return ArgumentValue{1, "unknown"};  // the configuration is refused
  const BatchSizes sizes = resolve_batch(batch_of(settings_), mesh_of(settings_, facts_, file_).sizes, file_);
  return ArgumentValue{facts_.updates(sizes), "the updates of the run"};
}

void ArgumentResolver::require_all_used(ConfigErrors& errors) const {
  const auto require_used = [&](bool used, const std::string& argument) {
    errors.collect(ConfigErrors::Kind::combination, "", [&] {
      require(used, Errc::config, file_, ": the configuration has no key for ", argument,
              "; add its section, or leave it out");
    });
  };
  require_used(arguments_.warmup_ratio.value_or(0) == 0 || ratio_used_,
               described(argument_spec("warmup_ratio"), arguments_));
  for (const ArgumentSpec& spec : argument_specs()) {
    const json value = given_value(arguments_, spec);
    const bool no_warmup = spec.name == "warmup_steps" && value == 0;
    if (!value.is_null() && !no_warmup && has_key(spec.name))
      require_used(used_.contains(spec.name), described(spec, arguments_));
  }
}

BatchConfig batch_of(const Settings& s) {
  BatchConfig batch{s.optional_integer("train_batch_size"),
                    s.optional_integer("train_micro_batch_size_per_gpu"),
                    s.optional_integer("gradient_accumulation_steps")};
  constexpr std::int64_t hugging_face_micro = 8;
  const auto is_auto = [&](const char* key) { return s.find(key)->origin.starts_with("auto"); };
  if (!batch.train && !batch.micro &&
      (is_auto("train_batch_size") || is_auto("train_micro_batch_size_per_gpu")))
    batch.micro = hugging_face_micro;
  return batch;
}

BatchSizes resolve_batch(const BatchConfig& b, const MeshSizes& mesh, const std::string& file) {
  const int ranks = mesh.data();
  if (b.train && b.micro) {
    const std::int64_t parts = *b.micro * ranks;
    const std::string text = concat(ranks_text(mesh), " × train_micro_batch_size_per_gpu ", *b.micro);
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
        steps == 1 ? ranks_text(mesh) : concat(ranks_text(mesh), " × gradient_accumulation_steps ", steps);
    return {*b.train, divide(*b.train, text, steps * ranks, file), steps};
  }
  require(b.micro.has_value(), Errc::config, file,
          ": train_batch_size: missing; give train_batch_size or train_micro_batch_size_per_gpu");
  return {*b.micro * steps * ranks, *b.micro, steps};
}

}  // namespace rz::ds
