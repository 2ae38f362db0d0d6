// The operators that compilers call. They run without Python once a plan is stored for the call.
#pragma once

#include <torch/library.h>

#include "calls.h"

namespace normplug {

using torch::jit::Stack;

// The plan of the operator that Python is running on this thread, if later calls can reuse it.
inline thread_local std::shared_ptr<Plan> noted;
inline std::atomic<bool> operators_paused{false};
// Incremented when all plans must be dropped.
inline std::atomic<uint64_t> operators_epoch{0};

// The key of a plan: all that it depends on, as bytes.
struct Key {
  std::string bytes;

  template <typename T>
  void add(const T& value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  // False if a call with this value must run in Python.
  bool add_value(const c10::IValue& value) {
    if (value.isTensor()) return add_tensor(value.toTensor());
    if (value.isNone()) {
      add('n');
    } else if (value.isBool()) {
      add(value.toBool() ? 't' : 'f');
    } else if (value.isInt()) {
      add('i');
      add(value.toInt());
    } else if (value.isDouble()) {
      add('d');
      add(value.toDouble());
    } else if (value.isString()) {
      add('s');
      bytes += value.toStringRef();
      add('\0');
    } else if (value.isIntList()) {
      add('l');
      for (int64_t each : value.toIntList()) add(each);
      add('\0');
    } else if (value.isBoolList()) {
      add('b');
      for (bool each : value.toBoolList()) add(each ? 't' : 'f');
    } else {
      return false;
    }
    return true;
  }

  bool add_tensor(const Tensor& t) {
    if (!t.defined() || !is_plain(t)) return false;
    add('x');
    add(t.scalar_type());
    add(t.device().type());
    add(t.device().index());
    add(t.dim());
    for (int64_t size : t.sizes()) add(size);
    for (int64_t stride : t.strides()) add(stride);
    return true;
  }
};

inline Tensor tensor_in(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : Tensor();
}

// NAME_forward or NAME_backward of `normplug._ops.library.NormOperators`.
class Operator : public c10::OperatorKernel {
 public:
  Operator(std::string python_name, bool is_forward, size_t states)
      : python_name_(std::move(python_name)), is_forward_(is_forward), states_(states) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    size_t count = op.schema().arguments().size();
    auto arguments = torch::jit::last(*stack, count);
    Key key;
    bool is_kept = !operators_paused.load(std::memory_order_relaxed) && !interposed();
    for (size_t i = 0; is_kept && i < count; ++i) is_kept = key.add_value(arguments[i]);
    auto plan = is_kept ? find(key.bytes) : nullptr;
    at::AutoDispatchBelowADInplaceOrView guard;
    if (plan == nullptr) {
      by_python(stack);
      if (is_kept && noted != nullptr) keep(std::move(key.bytes), noted);
      noted = nullptr;
      return;
    }
    at::DeviceGuard device(plan->device);
    auto results = is_forward_ ? forward(*plan, arguments) : backward(*plan, arguments);
    torch::jit::drop(*stack, count);
    for (auto& result : results) stack->emplace_back(std::move(result));
  }

 private:
  using Plans = std::unordered_map<std::string, std::shared_ptr<Plan>>;

  void by_python(Stack* stack) {
    noted = nullptr;
    c10::Dispatcher::singleton().findSchemaOrThrow(python_name_.c_str(), "").callBoxed(stack);
  }

  std::shared_ptr<Plan> find(const std::string& key) {
    Plans gone;  // destroyed after the lock is released: that may wait for the GIL
    std::lock_guard<std::mutex> lock(mutex_);
    if (epoch_ != operators_epoch) {
      gone.swap(plans_);
      epoch_ = operators_epoch;
    }
    auto found = plans_.find(key);
    return found == plans_.end() ? nullptr : found->second;
  }

  void keep(std::string key, std::shared_ptr<Plan> plan) {
    Plans gone;
    std::lock_guard<std::mutex> lock(mutex_);
    if (plans_.size() >= kMost) gone.swap(plans_);
    plans_.emplace(std::move(key), std::move(plan));
  }

  // Return (y, [total,] *state), with an empty tensor where a state is None.
  variable_list forward(Plan& plan, c10::ArrayRef<c10::IValue> arguments) {
    Slots slots;
    for (size_t i = 0; i < kTensors; ++i) slots[i] = tensor_in(arguments[i]);
    auto program = find_program(plan, "1", [&] {  // "1": with the state, as in `carry_out`
      py::tuple t(kTensors);
      for (size_t i = 0; i < kTensors; ++i) t[i] = wrapped(slots[i]);
      return plan.python.attr("forward_of")(t, true);
    });
    run(plan, *program, slots);
    increment_versions(*program, slots);
    variable_list results;
    for (const auto& result : program->results) results.push_back(slots[result.slot]);
    for (size_t i = kInputs; i < program->saved.size(); ++i) {
      const Tensor& state = slots[program->saved[i]];
      results.push_back(state.defined() ? state : empty_like(slots[0], at::kByte));
    }
    return results;
  }

  // Return the gradients of x, residual, weight, bias and input_bias, empty where not needed.
  variable_list backward(Plan& plan, c10::ArrayRef<c10::IValue> arguments) {
    Tensor dy = tensor_in(arguments[0]), dtotal = tensor_in(arguments[1]);
    variable_list saved;
    for (size_t i = 0; i < kInputs + states_; ++i) {
      Tensor t = tensor_in(arguments[2 + i]);
      saved.push_back(i >= kInputs && t.defined() && t.numel() == 0 ? Tensor() : t);
    }
    Needs needs;
    auto list = arguments.back().toBoolList();
    for (size_t i = 0; i < kInputs; ++i) needs[i] = list[i];
    auto gradients = gradients_of(plan, saved, dy, dtotal, needs);
    for (auto& each : gradients) {
      if (!each.defined()) each = empty_like(saved[0], saved[0].scalar_type());
    }
    return gradients;
  }

  static Tensor empty_like(const Tensor& x, at::ScalarType dtype) {
    return at::empty({0}, x.options().dtype(dtype));
  }

  const std::string python_name_;
  const bool is_forward_;
  const size_t states_;
  std::mutex mutex_;
  uint64_t epoch_ = 0;
  Plans plans_;
};

// Implement an operator of the library "normplug". The registration is never destroyed.
inline void implement(const std::string& name, const std::string& python_name, bool is_forward,
                      size_t states) {
  for (auto key : {c10::DispatchKey::CUDA, c10::DispatchKey::CPU}) {
    auto* library = new torch::Library(torch::Library::IMPL, "normplug", key, __FILE__, __LINE__);
    library->impl(name.c_str(),
                  torch::CppFunction::makeFromBoxedKernel(c10::BoxedKernel::makeFromFunctor(
                      std::make_unique<Operator>(python_name, is_forward, states))));
  }
}

}  // namespace normplug
