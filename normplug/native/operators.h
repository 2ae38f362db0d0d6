// The operators that compilers call, below Python: see `normplug._ops.operators`.
//
// The dispatcher calls these kernels without the GIL. A call is known by its spec, which is a text,
// and by the layouts of its tensors. Python plans a new one.
#pragma once

#include <torch/library.h>

#include "calls.h"

namespace normplug {

// How a known call runs: its plan, and copies of tensors whose layout the kernels cannot read.
struct Operation {
  Copies copies;
  std::shared_ptr<Plan> plan;
};

struct Operators {
  std::mutex mutex;
  std::unordered_map<std::string, Operation> stored;
  std::atomic<bool> enabled{false};

  std::optional<Operation> find(const std::string& key) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = stored.find(key);
    return found == stored.end() ? std::nullopt : std::optional<Operation>(found->second);
  }

  void store(const std::string& key, Operation operation) {
    std::lock_guard<std::mutex> lock(mutex);
    stored.emplace(key, std::move(operation));
  }

  void clear() {
    std::unordered_map<std::string, Operation> gone;  // destroyed last: a plan needs the GIL
    std::lock_guard<std::mutex> lock(mutex);
    gone.swap(stored);
  }
};

inline Operators& operators() {
  static auto* all = new Operators();
  return *all;
}

// The key of a call; nullopt if a tensor is not plain.
inline std::optional<std::string> operator_key(const std::string& spec, const Slots& slots) {
  Signature signature;
  for (size_t i = 0; i < kTensors; ++i) {
    if (!describe(slots[i], signature)) return std::nullopt;
  }
  std::string key = spec;
  key.append(reinterpret_cast<const char*>(signature.data()), signature.size() * sizeof(int64_t));
  return key;
}

inline py::object to_python(const c10::IValue& value) {
  if (value.isTensor()) return py::cast(value.toTensor());
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isString()) return py::str(value.toStringRef());
  if (value.isBoolList()) return py::cast(value.toBoolList().vec());
  return py::none();
}

inline Tensor tensor_of(const c10::IValue& value) {
  return value.isNone() ? Tensor() : value.toTensor();
}

// What the kernels have in common. A subclass reads arguments and runs a known call.
template <typename Kernel>
class Boxed : public c10::OperatorKernel {
 public:
  // The function is never released: the dispatcher outlives Python.
  explicit Boxed(py::handle python) : python_(python) { python.inc_ref(); }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    size_t count = op.schema().arguments().size();
    auto args = torch::jit::last(*stack, count);
    variable_list results;
    Slots slots = Kernel::slots(args);
    std::optional<Operation> known;
    if (operators().enabled) {
      if (auto key = operator_key(Kernel::spec(args), slots)) known = operators().find(*key);
    }
    if (known) {
      at::DeviceGuard device(known->plan->device);
      copy_tensors(known->copies, slots);
      results = Kernel::run(*known->plan, slots, args);
    } else {
      py::gil_scoped_acquire gil;
      py::tuple given(count);
      for (size_t i = 0; i < count; ++i) given[i] = to_python(args[i]);
      for (py::handle each : python_(*given)) results.push_back(each.cast<Tensor>());
    }
    torch::jit::drop(*stack, count);
    Kernel::push(*stack, std::move(results));
  }

 private:
  py::handle python_;
};

// forward(*tensors, spec) -> (results, state)
struct Forward {
  static const std::string& spec(c10::ArrayRef<c10::IValue> args) {
    return args.back().toStringRef();
  }

  static Slots slots(c10::ArrayRef<c10::IValue> args) {
    Slots slots;
    for (size_t i = 0; i < kTensors; ++i) slots[i] = tensor_of(args[i]);
    return slots;
  }

  static variable_list run(Plan& plan, Slots& slots, c10::ArrayRef<c10::IValue>) {
    variable_list results;
    auto program = run_kernels(plan, slots, true);
    for (const auto& result : program->results) results.push_back(slots[result.first]);
    for (size_t i = kInputs; i < program->saved.size(); ++i) {
      const Tensor& state = slots[program->saved[i]];
      results.push_back(state.defined() ? state
                                        : at::empty({0}, slots[0].options().dtype(at::kByte)));
    }
    return results;
  }

  static void push(torch::jit::Stack& stack, variable_list results) {
    for (Tensor& each : results) stack.emplace_back(std::move(each));
  }
};

// backward(dy, dtotal, *inputs, *state, has_residual, spec, needs) -> gradients
struct Backward {
  static const std::string& spec(c10::ArrayRef<c10::IValue> args) {
    return args[args.size() - 2].toStringRef();
  }

  // A residual that was not saved: x is its placeholder in the key.
  static bool lacks_residual(c10::ArrayRef<c10::IValue> args) {
    return args[args.size() - 3].toBool() && args[3].isNone();
  }

  static Slots slots(c10::ArrayRef<c10::IValue> args) {
    Slots slots;
    for (size_t i = 0; i < kInputs; ++i) slots[i] = tensor_of(args[2 + i]);
    if (lacks_residual(args)) slots[1] = slots[0];
    return slots;
  }

  static variable_list run(Plan& plan, Slots& slots, c10::ArrayRef<c10::IValue> args) {
    variable_list saved(slots.begin(), slots.begin() + kInputs), results;
    if (lacks_residual(args)) saved[1] = Tensor();
    for (size_t i = 2 + kInputs; i < args.size() - 3; ++i) {
      const Tensor& state = args[i].toTensor();
      saved.push_back(state.numel() == 0 ? Tensor() : state);
    }
    std::array<bool, kInputs> needs;
    auto wanted = args.back().toBoolList();
    for (size_t i = 0; i < kInputs; ++i) needs[i] = wanted[i];
    Tensor dy = readable(tensor_of(args[0])), dtotal = readable(tensor_of(args[1]));
    for (Tensor& each : run_backward(plan, saved, dy, dtotal, needs)) {
      if (each.defined()) results.push_back(std::move(each));
    }
    return results;
  }

  static void push(torch::jit::Stack& stack, variable_list results) {
    stack.emplace_back(std::move(results));
  }
};

template <typename Kernel>
inline void register_operator(const std::string& name, py::handle python) {
  static auto* libraries = new std::vector<std::unique_ptr<torch::Library>>();  // never unloaded
  for (auto device : {c10::DispatchKey::CUDA, c10::DispatchKey::CPU}) {
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "normplug", device,
                                                    __FILE__, __LINE__);
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                    std::make_unique<Boxed<Kernel>>(python)));
    libraries->push_back(std::move(library));
  }
}

}  // namespace normplug
