#pragma once
/// Modules that contain modules, with PyTorch's names: "0", "1", … after the container's own.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../ops.h"
#include "module.h"

namespace rz::nn {

/// Modules of one type M, constructible from (Module& parent, const std::string& name, arguments…).
template <class M>
class ModuleList : public Module {
 public:
  using Module::Module;
  /// Makes `count` modules with these arguments each.
  template <class... Arguments>
  ModuleList(Module& parent, const std::string& name, std::size_t count, const Arguments&... arguments)
      : Module(parent, name) {
    for (std::size_t i = 0; i < count; ++i) append(arguments...);
  }
  /// Constructs one more module and returns it.
  template <class... Arguments>
  M& append(Arguments&&... arguments) {
    return *list_.emplace_back(
        std::make_unique<M>(*this, std::to_string(list_.size()), std::forward<Arguments>(arguments)...));
  }

  std::size_t size() const { return list_.size(); }
  M& operator[](std::size_t i) const { return *list_[i]; }

  class Iterator {
   public:
    explicit Iterator(const std::unique_ptr<M>* at) : at_(at) {}
    M& operator*() const { return **at_; }
    Iterator& operator++() { return ++at_, *this; }
    bool operator==(const Iterator&) const = default;

   private:
    const std::unique_ptr<M>* at_;
  };
  Iterator begin() const { return Iterator(list_.data()); }
  Iterator end() const { return Iterator(list_.data() + list_.size()); }

 private:
  std::vector<std::unique_ptr<M>> list_;
};

/// Modules of any types that are called one after the other as m(Tape&, Var) -> Var. Blocks among them
/// support activation checkpointing (Module::checkpoint_activations).
class Sequential : public Module {
 public:
  using Module::Module;
  /// Constructs one more module, the last one to be called. Returns *this.
  template <class M, class... Arguments>
  Sequential& append(Arguments&&... arguments) {
    auto module =
        std::make_unique<M>(*this, std::to_string(list_.size()), std::forward<Arguments>(arguments)...);
    list_.push_back(
        {std::move(module), [](Module& m, Tape& tape, Var x) { return static_cast<M&>(m)(tape, x); }});
    return *this;
  }

  std::size_t size() const { return list_.size(); }
  Module& operator[](std::size_t i) const { return *list_[i].module; }
  Var operator()(Tape& tape, Var x) {
    for (const Called& called : list_) {
      const auto body = [&tape, called = &called](Var in) { return called->call(*called->module, tape, in); };
      x = called.module->is_block() ? called.module->in_block(tape, x, body) : body(x);
    }
    return x;
  }

 private:
  struct Called {
    std::unique_ptr<Module> module;
    Var (*call)(Module&, Tape&, Var);
  };
  std::vector<Called> list_;
};

/// An operator without parameters as a module.
template <Var (*function)(Tape&, Var)>
struct Function : Module {
  using Module::Module;
  Var operator()(Tape& tape, Var x) const { return function(tape, x); }
};
using Gelu = Function<gelu>;
using Relu = Function<relu>;
using Tanh = Function<tanh>;

/// All dimensions except the first as one.
struct Flatten : Module {
  using Module::Module;
  Var operator()(Tape& tape, Var x) const { return flatten(tape, x, 1); }
};

}  // namespace rz::nn
