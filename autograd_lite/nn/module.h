#pragma once
/// Models as trees of modules, which register their parameters, buffers and parts.
///
///     struct Net : rz::Module {
///       rz::nn::Linear fc1{*this, "fc1", 32, 64}, fc2{*this, "fc2", 64, 4};  // fc1.weight, fc1.bias, …
///       rz::Var operator()(rz::Tape& t, rz::Var x) { return fc2(t, rz::nn::gelu(t, fc1(t, x))); }
///     };
///
/// A part is a member, constructed with its module and its name. Names, parameters and scopes follow from
/// that. Parts keep addresses of each other: a module is neither copied nor moved, and outlives its parts. A
/// part that ends, as one whose constructor throws, is no longer in the tree.
///
/// Scopes, the units that ZeRO-3 gathers: a module with parameters forms a scope of them, unless it or a
/// module above it declares itself one scope (one_scope(), as a transformer block does), or several modules
/// form one together (register_scope()). Layers enter their scope unless it is open, so a layer works
/// wherever it is called. Code that uses a module's own parameters does so in in_scope().

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../tape.h"

namespace rz {

/// A tensor that is saved with a model and not trained, e.g. a running mean.
struct ModuleBuffer {
  std::string name;  ///< as Parameter::name
  Shape shape;
  DType dtype = DType::f32;
  float initial = 0;       ///< other values than 0 for f32 only
  bool persistent = true;  ///< false: not saved
  Tensor value;            ///< undefined until allocate_buffers()
};

/// Not thread-safe.
class Module {
 public:
  /// The root of a tree, with an empty path.
  Module() = default;
  /// A part of `parent` named `name`. Errc::invalid_argument for an empty name.
  Module(Module& parent, const std::string& name);
  virtual ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // ---- registration, in constructors
  /// Names the parameter `name` after the path of this module. The parameter lives as long as the module, or
  /// until unregister_parameter().
  void register_parameter(Parameter&, const std::string& name, const Shape&, const Initial& = {});
  /// Takes a parameter of this module out of the tree and its scopes; nothing if it is none. Not while a
  /// strategy has the module.
  void unregister_parameter(const Parameter&);
  /// Names the buffer `name` after the path of this module. The buffer lives as long as the module.
  void register_buffer(ModuleBuffer&, const std::string& name, const Shape&, DType = DType::f32,
                       float initial = 0);
  /// Declares all parameters of this tree one scope, except those of declared scopes in it.
  void one_scope();
  /// Declares one scope for modules that are used together, none of which is in a declared scope. A parameter
  /// that another scope contains too, e.g. a tied weight, may be appended to the result. Its place in
  /// scopes() is that of the first module.
  Scope& register_scope(const std::string& name, std::span<Module* const>);
  /// Declares one scope for parameters that are used together.
  Scope& register_scope(const std::string& name, std::vector<Parameter*>);

  // ---- contents, in order of registration
  /// Names from the root, joined by dots; empty for the root.
  const std::string& path() const { return path_; }
  /// This module and all below it; a module precedes its parts.
  std::vector<Module*> modules();
  /// Every parameter once.
  std::vector<Parameter*> parameters();
  /// Parameters with their names from this module.
  std::vector<std::pair<std::string, Parameter*>> named_parameters();
  std::vector<ModuleBuffer*> buffers();
  /// Scopes with at least one parameter. Every parameter is in at least one; a shared one may be in several.
  std::vector<const Scope*> scopes();
  /// The parameter with this name from this module; null if there is none.
  Parameter* find(std::string_view name);
  /// The module with this name from this module; null if there is none.
  Module* find_module(std::string_view name);

  // ---- modes
  /// Sets whether this module and all below it train. Initially true. Dropout acts in training only.
  void train(bool training = true);
  void eval() { train(false); }
  bool training() const { return training_; }
  /// Sets Parameter::requires_grad of all parameters: false freezes them. Call before a strategy is created.
  void requires_grad_(bool);

  // ---- activation checkpointing
  /// Sets whether in_block() of this module and all below it keeps activations. Initially it does.
  void checkpoint_activations(bool checkpoint = true);
  /// Whether one_scope() was called: the module is a block, e.g. of a transformer.
  bool is_block() const { return is_block_; }
  /// Returns body(x) with the module's parameters available, in its scope. With activation checkpointing only
  /// `x` is kept, and body runs again in backward (Tape::checkpoint): it must capture by value what does not
  /// live until then.
  template <class F>
  Var in_block(Tape& tape, Var x, const F& body) {
    if (checkpoints_ && !tape.is_open(scope())) return tape.checkpoint(scope(), x, body);
    return in_scope(tape, [&] { return body(x); });
  }

  // ---- scopes
  /// The scope that contains the module's parameters.
  const Scope& scope() { return unit(); }
  /// Returns body() with the module's parameters available, in its scope.
  template <class F>
  auto in_scope(Tape& tape, const F& body) {
    const Scope& unit = scope();
    return tape.is_open(unit) ? body() : tape.scope(unit, body);
  }

 private:
  struct Entry {
    Module* part;  // null: a scope
    Scope* scope;
  };
  Scope& unit();
  std::string named(const std::string& name) const;
  std::string_view name_from_here(std::string_view full) const;
  void move_parameters_to(Scope&);
  void forget(const Module& part);
  void remove_from_scopes(std::span<Parameter* const>);
  Scope& add_scope(const std::string& name, std::span<Module* const> members);
  void append_scopes(std::vector<const Scope*>&);

  std::string path_;
  Module* parent_ = nullptr;
  std::vector<Parameter*> parameters_;
  std::vector<ModuleBuffer*> buffers_;
  std::vector<Entry> entries_;  // parts and declared scopes
  std::vector<std::unique_ptr<Scope>> declared_;
  Scope own_{"model", {}};     // parameters of this module, or of its tree, in no other scope
  Scope* assigned_ = nullptr;  // the declared scope of this tree
  bool training_ = true, is_block_ = false, checkpoints_ = false;
};

/// The persistent buffers of a module with their names from it, as in PyTorch's state_dict().
std::vector<std::pair<std::string, ModuleBuffer*>> persistent_buffers(Module&);

/// Whether a dotted name is the pattern, or ends with it behind a dot: "attn.c_attn" and "c_attn" are
/// patterns of "h.0.attn.c_attn". In a pattern `*` stands for any characters of one part of a name:
/// "h.*.attn.c_attn"; `{a,b}` stands for either: "attn.{q,k}_proj". Errc::invalid_argument without the }.
bool matches_name(std::string_view name, std::string_view pattern);
/// Whether a pattern matches the name, or that of a module above it: "h.0" is a pattern of "h.0.attn.c_attn".
bool matches_part(std::string_view name, std::string_view pattern);

/// Sets a module to evaluation during its lifetime; afterwards each part has its own mode again.
class EvalMode {
 public:
  explicit EvalMode(Module&);
  ~EvalMode();
  EvalMode(const EvalMode&) = delete;

 private:
  std::vector<std::pair<Module*, bool>> before_;
};

/// Errc::invalid_argument if two parameters have the same name: their initial values would be equal, and a
/// checkpoint could not distinguish them. Called by allocate_parameters(), init_parameters() and the
/// strategies.
void require_distinct_names(std::span<Parameter* const>);

}  // namespace rz
