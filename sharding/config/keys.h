#pragma once
/// The keys of a DeepSpeed configuration as data. These tables drive the reader, the typed configuration, the
/// resolved one and docs/configuration.md. Names are those of DeepSpeed 0.19; the default of a key that is
/// applied is that of its field.

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "sharding/config/ds_config.h"
#include "sharding/io/foreign_keys.h"
#include "sharding/optim/optimizers.h"

namespace rz::ds {

using Kind = ValueKind;

enum class Determinism { rank_order, world_size_invariant };

/// A configuration while it is read: what its keys set by themselves, and values from which others follow,
/// which complete() derives.
struct Draft : DsConfig {
  std::string optimizer_type, schedule_type;
  OptimizerConfig optimizer_params;
  bool adam_w_mode = true, torch_adam = false;
  std::optional<double> muon_base_lr, muon_lr, adam_lr;  ///< null: not given
  bool half = false, brain = false;                      ///< fp16.enabled, bf16.enabled
  bool check_grad_overflow = true;
  std::optional<DType> grad_accum_dtype, param_dtype, autocast_dtype;
  bool autocasts = false;
  bool partition_activations = false, cpu_checkpointing = false;
  std::optional<std::int64_t> number_checkpoints;
  bool ignore_unused_parameters = true;
  std::optional<bool> find_unused_parameters, greater_is_better;
  Determinism deterministic = Determinism::rank_order;
  std::optional<std::int64_t> max_skipped;
  nlohmann::json resume = false;  ///< true, false or a folder
  LoraOptions lora_params;
  // What others call sizes of the mesh.
  std::int64_t autotp_size = 0, tp_size = 1, mics_shard_size = -1;
  std::optional<std::int64_t> data_parallel_size;
  nlohmann::json prof_ops = nlohmann::json::array();  ///< of comms_logger: a list of texts
  nlohmann::json target_modules, modules_to_save;     ///< of ringzero.lora: lists of texts, or a text
  /// torch's OneCycleLR: the first, or the product of the others.
  std::optional<std::int64_t> total_steps, epochs, steps_per_epoch;
};

struct KeySpec;

/// What a key sets. Only a key with a field is applied, and a test finds a reader of each field.
struct Field {
  const char* name = nullptr;  ///< ends with its name, "&rz::DsConfig::stage]"; null: the key sets nothing
  nlohmann::json (*initial)(const KeySpec&) = nullptr;
  /// `value` has the form of the key. Null sets nothing, unless the field may be absent.
  void (*set)(Draft&, const KeySpec&, const nlohmann::json& value) = nullptr;
};

struct KeySpec : ValueForm {
  const char* key = "";
  /// The default, in JSON. "": there is none, the key is required. Null: that of the field.
  const char* fallback = nullptr;
  Treatment treatment = Treatment::applied;
  const char* note = "";           ///< what is done, or the reason
  const char* argument = nullptr;  ///< in arguments.h: stands behind "auto", and fills a key that is left out
  /// "auto" stands for this function of the model's hidden size.
  std::int64_t (*by_hidden_size)(std::int64_t) = nullptr;
  Field field = {};

  constexpr KeySpec within(double low, double high) const {
    KeySpec k = *this;
    k.min = low, k.max = high;
    return k;
  }
  constexpr KeySpec from(const char* name) const {
    KeySpec k = *this;
    k.argument = name;
    return k;
  }
  constexpr KeySpec from_hidden_size(std::int64_t (*function)(std::int64_t)) const {
    KeySpec k = *this;
    k.by_hidden_size = function;
    return k;
  }
  constexpr KeySpec one_of(const char* words) const {
    KeySpec k = *this;
    k.values = words;
    return k;
  }
  constexpr KeySpec or_infinity() const {
    KeySpec k = *this;
    k.infinite = true;
    return k;
  }
  /// Null stands for the default of the field, and is the default of the key.
  constexpr KeySpec or_null() const {
    KeySpec k = *this;
    k.fallback = "null";
    return k;
  }
  constexpr KeySpec required() const {
    KeySpec k = *this;
    k.fallback = "";
    return k;
  }

  constexpr bool is_required() const { return fallback != nullptr && *fallback == '\0'; }
  /// What "auto" stands for, in words; "": for no argument.
  std::string_view meaning_of_auto() const;
  /// The default. The key must not be required.
  nlohmann::json initial() const;
};

// ---- fields

template <class T>
constexpr Kind kind_of(std::type_identity<T>) {
  if constexpr (std::is_same_v<T, bool>) return Kind::boolean;
  if constexpr (std::is_same_v<T, DType>) return Kind::dtype;
  if constexpr (std::is_integral_v<T>) return Kind::integer;
  if constexpr (std::is_floating_point_v<T>) return Kind::number;
  if constexpr (std::is_same_v<T, std::string>) return Kind::text;
  if constexpr (std::is_enum_v<T>) return Kind::choice;
  if constexpr (std::is_same_v<T, PerGroup>) return Kind::per_group;
  if constexpr (std::is_same_v<T, std::vector<std::int64_t>>) return Kind::integers;
  return Kind::any;
}
template <class T>
constexpr Kind kind_of(std::type_identity<std::optional<T>>) {
  return kind_of(std::type_identity<T>());
}

/// The place of a word in KeySpec::values, which are in the order of the enumerators.
int word_index(const KeySpec&, const nlohmann::json& word);
nlohmann::json word_at(const KeySpec&, int index);
DType dtype_of(const nlohmann::json& word);
const char* word_of(DType);

template <class T>
nlohmann::json json_of(const KeySpec& k, const T& value) {
  if constexpr (std::is_same_v<T, PerGroup>)
    return value.values().size() == 1 ? nlohmann::json(value[0]) : nlohmann::json(value.values());
  else if constexpr (std::is_same_v<T, DType>)
    return word_of(value);
  else if constexpr (std::is_enum_v<T>)
    return word_at(k, static_cast<int>(value));
  else
    return value;
}
template <class T>
nlohmann::json json_of(const KeySpec& k, const std::optional<T>& value) {
  return value ? json_of(k, *value) : nlohmann::json();
}

template <class T>
void assign(const KeySpec& k, const nlohmann::json& value, T& to) {
  if constexpr (std::is_same_v<T, nlohmann::json>) {
    to = value;
  } else if (!value.is_null()) {
    if constexpr (std::is_same_v<T, PerGroup>)
      to = value.is_array() ? PerGroup(value.get<std::vector<double>>()) : PerGroup(value.get<double>());
    else if constexpr (std::is_same_v<T, DType>)
      to = dtype_of(value);
    else if constexpr (std::is_enum_v<T>)
      to = static_cast<T>(word_index(k, value));
    else
      to = value.get<T>();
  }
}
template <class T>
void assign(const KeySpec& k, const nlohmann::json& value, std::optional<T>& to) {
  to.reset();
  if (value.is_null()) return;
  if constexpr (std::is_default_constructible_v<T>)
    to.emplace();
  else
    to.emplace(0.0);
  assign(k, value, *to);
}

template <class Class, class T>
Class class_of(T Class::*);

// The part of a draft that has the members of a class.
inline BatchConfig& part(Draft& d, std::type_identity<BatchConfig>) { return d.batch; }
inline OptimizerConfig& part(Draft& d, std::type_identity<OptimizerConfig>) { return d.optimizer_params; }
inline PrecisionConfig& part(Draft& d, std::type_identity<PrecisionConfig>) { return d.precision; }
inline LossScaleOptions& part(Draft& d, std::type_identity<LossScaleOptions>) {
  return d.precision.loss_scale;
}
inline MeshSizes& part(Draft& d, std::type_identity<MeshSizes>) { return d.mesh; }
inline StrategyOptions& part(Draft& d, std::type_identity<StrategyOptions>) { return d.strategy; }
inline WireFormat& part(Draft& d, std::type_identity<WireFormat>) { return d.strategy.wire; }
inline GatherLimits& part(Draft& d, std::type_identity<GatherLimits>) { return d.strategy.gathers; }
inline DdpConfig& part(Draft& d, std::type_identity<DdpConfig>) { return d.ddp; }
inline PowerSgdOptions& part(Draft& d, std::type_identity<PowerSgdOptions>) {
  return d.ddp.comm_state_option;
}
inline JoinConfig& part(Draft& d, std::type_identity<JoinConfig>) { return d.ddp.join; }
inline CheckpointConfig& part(Draft& d, std::type_identity<CheckpointConfig>) { return d.checkpoint; }
inline LoraOptions& part(Draft& d, std::type_identity<LoraOptions>) { return d.lora_params; }
inline FlopsProfilerConfig& part(Draft& d, std::type_identity<FlopsProfilerConfig>) {
  return d.flops_profiler;
}
inline TraceConfig& part(Draft& d, std::type_identity<TraceConfig>) { return d.trace; }
inline MonitorConfig& part(Draft& d, std::type_identity<MonitorConfig>) { return d.monitor; }
template <class Class>
requires std::is_base_of_v<Class, Draft> Class& part(Draft& d, std::type_identity<Class>) { return d; }
/// The schedule, which becomes one of this type.
template <class Schedule>
requires std::is_constructible_v<LrSchedule, Schedule> Schedule& part(Draft& d,
                                                                      std::type_identity<Schedule>) {
  auto* const own = std::get_if<Schedule>(&d.schedule);
  return own ? *own : d.schedule.emplace<Schedule>();
}

/// The member of a member, or a member of the draft or of its schedule.
template <auto First, auto... Rest>
auto& field_of(Draft& draft) {
  return ((part(draft, std::type_identity<decltype(class_of(First))>()).*First).*....*Rest);
}

template <auto Member>
constexpr const char* text_of() {
  return __PRETTY_FUNCTION__;
}
template <auto... Path>
constexpr const char* name_of_last() {
  const char* name = nullptr;
  ((name = text_of<Path>()), ...);
  return name;
}

template <auto... Path>
constexpr Field field() {
  return {name_of_last<Path...>(),
          [](const KeySpec& k) {
            Draft draft;
            return json_of(k, field_of<Path...>(draft));
          },
          [](Draft& draft, const KeySpec& k, const nlohmann::json& value) {
            assign(k, value, field_of<Path...>(draft));
          }};
}

// ---- rows

constexpr KeySpec row(const char* key, Kind kind, const char* fallback, Treatment treatment,
                      const char* note) {
  KeySpec k;
  k.kind = kind;
  k.key = key, k.fallback = fallback, k.treatment = treatment, k.note = note;
  return k;
}
/// A key that sets a member: applied<&DsConfig::stage>("stage", …), or a member of a member. Kind and
/// default are those of the member.
template <auto... Path>
constexpr KeySpec applied(const char* key, const char* note) {
  using T = std::remove_reference_t<decltype(field_of<Path...>(std::declval<Draft&>()))>;
  KeySpec k = row(key, kind_of(std::type_identity<T>()), nullptr, Treatment::applied, note);
  k.field = field<Path...>();
  return k;
}
constexpr KeySpec accepted(const char* key, const char* fallback, const char* note = "") {
  return row(key, Kind::any, fallback, Treatment::accepted, note);
}
/// For values that an engine may report.
constexpr KeySpec accepted(const char* key, Kind kind, const char* fallback, const char* note) {
  return row(key, kind, fallback, Treatment::accepted, note);
}
constexpr KeySpec always(const char* key, const char* fallback, const char* note) {
  return row(key, Kind::boolean, fallback, Treatment::always, note);
}
constexpr KeySpec unused(const char* key, Kind kind, const char* fallback, const char* note) {
  return row(key, kind, fallback, Treatment::unused, note);
}
/// `harmless`: a JSON list. An object is harmless too if nothing in it is enabled.
constexpr KeySpec refused(const char* key, const char* fallback, const char* harmless, const char* reason) {
  return row(key, Kind::any, fallback, Treatment::refused, reason).one_of(harmless);
}
/// A section with a table of its own. `fallback`: "{}" if its defaults hold where it is absent, else "null".
constexpr KeySpec section(const char* key, const char* fallback, const char* note) {
  return row(key, Kind::object, fallback, Treatment::accepted, note);
}

/// An object of the configuration.
struct ObjectSpec {
  const char* path;     ///< "zero_optimization"; "" is the whole
  const char* variant;  ///< the type that has these keys: "AdamW"; "" where the keys are always the same
  std::span<const KeySpec> keys;
  /// "auto" of a key without an argument is the default here, as in DeepSpeed.
  bool auto_is_default = false;
};

/// All objects, in the order of the documentation.
std::span<const ObjectSpec> objects();
/// Null if there is none.
const ObjectSpec* find_object(std::string_view path, std::string_view variant = "");

// The parts of the table.
std::span<const ObjectSpec> general_objects();
std::span<const ObjectSpec> ringzero_objects();
std::span<const ObjectSpec> optimizer_objects();
std::span<const ObjectSpec> scheduler_objects();
std::span<const ObjectSpec> precision_objects();
std::span<const ObjectSpec> zero_objects();
std::span<const ObjectSpec> reporting_objects();

}  // namespace rz::ds
