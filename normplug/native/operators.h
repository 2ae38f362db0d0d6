// The operators that compilers call, below Python: see `normplug._ops.operators`.
//
// The dispatcher calls these kernels without the GIL. A call is known by its spec, which is a text,
// and by the layouts of its tensors. Python plans a new one.
#pragma once

#include <torch/library.h>

#include "calls.h"

namespace normplug {

struct Operators {
  std::mutex mutex;
  std::unordered_map<std::string, Route> stored;
  std::atomic<bool> enabled{false};

  std::optional<Route> find(const std::string& key) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = stored.find(key);
    return found == stored.end() ? std::nullopt : std::optional<Route>(found->second);
  }

  void store(const std::string& key, Route route) {
    std::lock_guard<std::mutex> lock(mutex);
    stored.emplace(key, std::move(route));
  }

  void clear() {
    std::unordered_map<std::string, Route> gone;  // destroyed last: a plan needs the GIL
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

inline Tensor tensor_of(const c10::IValue& value) {
  return value.isNone() ? Tensor() : value.toTensor();
}

// The kernel of NAME_forward(*tensors, spec) -> (results, state), or of NAME_backward(dy, dtotal,
// *inputs, *state, spec, flags) -> gradients. flags: see `flags_of` in `_ops/operators.py`.
class Operator : public c10::OperatorKernel {
 public:
  explicit Operator(bool is_backward) : is_backward_(is_backward) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    size_t count = op.schema().arguments().size();
    auto args = torch::jit::last(*stack, count);
    Slots slots;
    for (size_t i = 0; i < (is_backward_ ? kInputs : kTensors); ++i) {
      slots[i] = tensor_of(args[is_backward_ ? 2 + i : i]);
    }
    // A residual that was not saved: x is its placeholder in the key.
    bool lacks_residual = is_backward_ && (args.back().toInt() & 1) && !slots[1].defined();
    if (lacks_residual) slots[1] = slots[0];
    std::optional<Route> known;
    if (operators().enabled) {
      const std::string& spec = args[count - (is_backward_ ? 2 : 1)].toStringRef();
      if (auto key = operator_key(spec, slots)) known = operators().find(*key);
    }
    if (!known) {  // the Python kernel plans it
      op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
      return;
    }
    at::DeviceGuard device(known->plan->device);
    copy_tensors(known->copies, slots);
    if (lacks_residual) slots[1] = Tensor();
    auto results = is_backward_ ? backward(*known->plan, slots, args) : forward(*known->plan, slots);
    torch::jit::drop(*stack, count);
    if (is_backward_) {
      stack->emplace_back(std::move(results));
    } else {
      for (Tensor& each : results) stack->emplace_back(std::move(each));
    }
  }

 private:
  static variable_list forward(Plan& plan, Slots& slots) {
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

  static variable_list backward(Plan& plan, const Slots& slots, c10::ArrayRef<c10::IValue> args) {
    variable_list saved(slots.begin(), slots.begin() + kInputs), results;
    for (size_t i = 2 + kInputs; i < args.size() - 2; ++i) {
      const Tensor& state = args[i].toTensor();
      saved.push_back(state.numel() == 0 ? Tensor() : state);
    }
    std::array<bool, kInputs> needs;
    for (size_t i = 0; i < kInputs; ++i) needs[i] = args.back().toInt() >> (1 + i) & 1;
    Tensor dy = readable(tensor_of(args[0])), dtotal = readable(tensor_of(args[1]));
    for (Tensor& each : run_backward(plan, saved, dy, dtotal, needs)) {
      if (each.defined()) results.push_back(std::move(each));
    }
    return results;
  }

  bool is_backward_;
};

inline void register_operator(const std::string& name, bool is_backward) {
  static auto* libraries = new std::vector<std::unique_ptr<torch::Library>>();  // never unloaded
  for (auto device : {c10::DispatchKey::CUDA, c10::DispatchKey::CPU}) {
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "normplug", device,
                                                    __FILE__, __LINE__);
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                    std::make_unique<Operator>(is_backward)));
    libraries->push_back(std::move(library));
  }
}

}  // namespace normplug
