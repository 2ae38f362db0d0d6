// The autograd node of a norm, and the code that runs a call by its plan.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
#define NORMPLUG_NODE_CREATION_HOOKS
#endif

#include "programs.h"

namespace normplug {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

using NodePtr = decltype(torch::autograd::Edge::function);

// A gradient with its values in memory: no lazy negation, no ZeroTensor.
inline Tensor readable(const Tensor& t) {
  if (!t.defined()) return t;
  return t._is_zerotensor() ? at::zeros(t.sizes(), t.options()) : t.resolve_neg();
}

inline Slots slots_of(const Plan& plan, const variable_list& saved) {
  Slots slots;
  for (size_t i = 0; i < saved.size(); ++i) slots[plan.saved_slots[i]] = saved[i];
  return slots;
}

// The needed gradients of a call, from the tensors that its forward saved. `needs`: of each input.
// Undefined where not needed. Call this without the GIL.
inline variable_list run_backward(Plan& plan, const variable_list& saved, const Tensor& dy,
                                  const Tensor& dtotal, const std::array<bool, kInputs>& needs) {
  std::string key(needs.begin(), needs.end());
  for (const Tensor* t : {&dy, &dtotal}) {
    key.push_back(t->defined() ? static_cast<char>(t->dim()) : -1);
    if (!t->defined()) continue;
    auto strides = t->strides();
    key.append(reinterpret_cast<const char*>(strides.data()), strides.size() * sizeof(int64_t));
  }
  auto program = find_program(plan, key, [&] {
    return plan.python.attr("backward_of")(saved, dy, dtotal, py::tuple(py::cast(needs)));
  });
  Slots slots = slots_of(plan, saved);
  slots[kDy] = dy;
  slots[kDtotal] = dtotal;
  run(plan, *program, slots);
  variable_list gradients;
  gradients.reserve(kInputs);
  for (const auto& result : program->results) gradients.push_back(result_of(result, slots));
  return gradients;
}

struct NormBackward : public Node {
  std::shared_ptr<Plan> plan;
  std::vector<SavedVariable> saved;
  std::mutex mutex;
  bool total_has_gradient = false;

  std::string name() const override { return "NormBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& each : saved) each.reset_data();
  }

  // The tensors that the forward saved, in the order that the Python `Plan` documents.
  variable_list unpacked() {
    std::lock_guard<std::mutex> lock(mutex);
    variable_list found;
    found.reserve(saved.size());
    for (auto& each : saved) found.push_back(each.unpack(getptr()));
    return found;
  }

  variable_list apply(variable_list&& grads) override {
    at::DeviceGuard device(plan->device);
    variable_list found = unpacked(), gradients;
    Tensor dy = grads[0], dtotal = total_has_gradient && grads.size() > 1 ? grads[1] : Tensor();
    if (!plan->has_total && !dy.defined()) dy = input_metadata(0).zeros_like();
    dy = readable(dy);
    dtotal = readable(dtotal);
    std::array<bool, kInputs> needs;
    for (size_t i = 0; i < kInputs; ++i) needs[i] = next_edge(i).is_valid();
    if (!at::GradMode::is_enabled()) return run_backward(*plan, found, dy, dtotal, needs);
    py::gil_scoped_acquire gil;  // create_graph=True
    for (py::handle each : plan->python.attr("composed_backward")(found, dy, dtotal,
                                                                 py::tuple(py::cast(needs)))) {
      gradients.push_back(each.is_none() ? Tensor() : each.cast<Tensor>());
    }
    return gradients;
  }

  Tensor recomputed() {
    at::DeviceGuard device(plan->device);
    at::AutoGradMode no_grad(false);
    variable_list found = unpacked();
    auto program = find_program(*plan, "recompute", [&] {
      return plan->python.attr("recompute_of")(found);
    });
    Slots slots = slots_of(*plan, found);
    run(*plan, *program, slots);
    return result_of(program->results[0], slots);
  }
};

template <typename T>
inline auto make_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<T>();
  } else {
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  }
}

// Tell the hooks that observe new nodes, in the versions of torch that have them.
inline void created([[maybe_unused]] const NodePtr& node) {
#ifdef NORMPLUG_NODE_CREATION_HOOKS
  torch::autograd::fire_node_creation_hooks(node);
#endif
}

inline void make_history(const std::shared_ptr<Plan>& plan, const Program& program,
                         const Slots& slots) {
  auto node = make_node<NormBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(slots[0], slots[1], slots[2], slots[3],
                                                           slots[4]));
  node->plan = plan;
  const Tensor& y = slots[program.results[0].first];
  torch::autograd::set_history(y, node);
  if (plan->has_total) {
    node->total_has_gradient = node->next_edge(0).is_valid() || node->next_edge(1).is_valid();
    if (node->total_has_gradient) {
      torch::autograd::set_history(slots[program.results[1].first], node);
    }
  }
  node->saved.reserve(program.saved.size());
  for (uint8_t slot : program.saved) {
    bool is_output = node->total_has_gradient && slot == program.results[1].first;
    node->saved.emplace_back(slots[slot], is_output);
  }
  created(node);
}

// Run the forward of a plan; `keep` what its backward needs. Call this without the GIL.
inline std::shared_ptr<Program> run_kernels(Plan& plan, Slots& slots, bool keep) {
  auto program = find_program(plan, keep ? "1" : "0", [&] {
    return plan.python.attr("forward_of")(variable_list(slots.begin(), slots.begin() + kTensors),
                                          keep);
  });
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    run(plan, *program, slots);
  }
  for (uint8_t slot : program->updates) {  // in place, by the kernels
    if (!slots[slot].is_inference()) slots[slot].unsafeGetTensorImpl()->bump_version();
  }
  return program;
}

// Run a call, and return the result.
inline PyObject* run_route(const Route& route, Slots& slots) {
  std::shared_ptr<Program> program;
  {
    py::gil_scoped_release no_gil;
    copy_tensors(route.copies, slots);  // which autograd records
    at::DeviceGuard device(route.plan->device);
    bool keep = torch::autograd::compute_requires_grad(slots[0], slots[1], slots[2], slots[3],
                                                       slots[4]);
    program = run_kernels(*route.plan, slots, keep);
    if (keep) make_history(route.plan, *program, slots);
  }
  const auto& results = program->results;
  if (!route.plan->has_total) return THPVariable_Wrap(slots[results[0].first]);
  return py::make_tuple(slots[results[0].first], slots[results[1].first]).release().ptr();
}

}  // namespace normplug
