// The host path of normplug's kernels: the work of a norm call between Python and the GPU.
//
// A Python plan (`normplug._ops.plans`) describes its work as programs: which tensors to allocate,
// which compiled kernels to launch on which tensors, which tensors to save. This module runs the
// programs without Python, and creates the autograd node. No code here is for one norm only. It
// calls Python to build a program, for a kernel's first launch, and for second derivatives.
//
// No CUDA headers are needed. The driver's functions are looked up when the module is loaded.

#include "calls.h"

namespace {

using namespace normplug;

constexpr const char* kPlanName = "normplug.Plan";

const std::shared_ptr<Plan>& plan_in(PyObject* capsule) {
  void* found = PyCapsule_GetPointer(capsule, kPlanName);
  if (found == nullptr) throw_python();
  return *static_cast<std::shared_ptr<Plan>*>(found);
}

PyObject* make_plan(PyObject*, PyObject* python) {
  HANDLE_TH_ERRORS
  auto* plan = new std::shared_ptr<Plan>(plan_of(python));
  return PyCapsule_New(plan, kPlanName, [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<Plan>*>(PyCapsule_GetPointer(capsule, kPlanName));
  });
  END_HANDLE_TH_ERRORS
}

// Run a stored call; None if there is none. By value: another thread may clear the stored calls.
PyObject* run_call(const Way* stored, const Reading& reading) {
  if (stored == nullptr) Py_RETURN_NONE;
  Way way = *stored;
  Slots slots;
  for (size_t i = 0; i < kTensors; ++i) {
    if (way.used >> i & 1) slots[i] = THPVariable_Unpack(reading.tensors[i]);
  }
  return call_plan(way.plan, slots, way.copies);
}

// call(spec, backend, t): the result, or None if the call is not stored.
PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 3, "normplug: call takes a spec, a backend and tensors");
  Reading reading;
  bool is_read = read_call(args[0], args[1], args[2], reading);
  return run_call(is_read ? calls().find(reading) : nullptr, reading);
  END_HANDLE_TH_ERRORS
}

// keep(spec, backend, t, ready, plan): store a call, for `call` to run. ready: t, with copies of the
// tensors whose layout the kernels cannot read.
PyObject* keep(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 5, "normplug: keep takes a spec, a backend, tensors twice, and a plan");
  Reading reading;
  if (read_call(args[0], args[1], args[2], reading)) {
    Way way{0, {}, plan_in(args[4])};
    for (size_t i = 0; i < kTensors; ++i) {
      PyObject* ready = PyTuple_GetItem(args[3], static_cast<Py_ssize_t>(i));
      if (ready == nullptr) throw_python();
      way.used |= (ready != Py_None) << i;
      if (ready != reading.tensors[i]) {
        way.copies.emplace_back(i, THPVariable_Unpack(ready).strides().vec());
      }
    }
    calls().store(reading, std::move(way));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// forward(module, names, input, residual, input_bias, *others): the result, or None if the call is
// not stored.
PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count >= 5, "normplug: forward takes a module, names and three tensors");
  Reading reading;
  return run_call(read_module(args, count, reading) ? calls().find(reading) : nullptr, reading);
  END_HANDLE_TH_ERRORS
}

// learn(spec, backend, t, module, names, input, residual, input_bias, *others): store the call of a
// module, for `forward` to run, with the plan of the function call that it makes, if that is stored.
PyObject* learn(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count >= 8, "normplug: learn takes a call, a module, names and three tensors");
  Reading function, module;
  bool is_read = read_call(args[0], args[1], args[2], function);
  const Way* found = is_read ? calls().find(function) : nullptr;
  if (found != nullptr && read_module(args + 3, count - 3, module) &&
      calls().find(module) == nullptr) {
    Way way = *found;  // a copy: `store` may clear the stored calls
    if (auto used = used_of(module, args[2])) {
      way.used = *used;
      calls().store(module, std::move(way));
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// run(plan, t): the result of a call whose plan is known.
PyObject* run_plan(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 2, "normplug: run takes a plan and tensors");
  Slots slots;
  for (size_t i = 0; i < kTensors; ++i) {
    PyObject* object = PyTuple_GetItem(args[1], static_cast<Py_ssize_t>(i));
    if (object == nullptr) throw_python();
    if (object != Py_None) slots[i] = THPVariable_Unpack(object);
  }
  auto plan = plan_in(args[0]);
  return call_plan(plan, slots);
  END_HANDLE_TH_ERRORS
}

PyObject* forget(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  calls().clear();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The name of capsules that keep a node alive while Python may ask it to recompute.
constexpr const char* kNodeName = "normplug.Node";

// node(y): the node of the norm whose first result is y, if it can recompute y; else None.
PyObject* recomputable_node(PyObject*, PyObject* y) {
  HANDLE_TH_ERRORS
  if (!THPVariable_Check(y)) Py_RETURN_NONE;
  const Tensor& tensor = THPVariable_Unpack(y);
  if (tensor.output_nr() != 0) Py_RETURN_NONE;
  NodePtr node = torch::autograd::impl::gradient_edge(tensor).function;
  auto* norm = dynamic_cast<NormBackward*>(node.get());
  if (norm == nullptr || !norm->plan->is_recomputable) Py_RETURN_NONE;
  return PyCapsule_New(new NodePtr(std::move(node)), kNodeName, [](PyObject* capsule) {
    delete static_cast<NodePtr*>(PyCapsule_GetPointer(capsule, kNodeName));
  });
  END_HANDLE_TH_ERRORS
}

// recompute(node): recompute y.
PyObject* recompute(PyObject*, PyObject* capsule) {
  HANDLE_TH_ERRORS
  void* found = PyCapsule_GetPointer(capsule, kNodeName);
  if (found == nullptr) throw_python();
  NodePtr node = *static_cast<NodePtr*>(found);
  Tensor y;
  {
    py::gil_scoped_release no_gil;
    y = dynamic_cast<NormBackward&>(*node).recomputed();
  }
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"plan", make_plan, METH_O, "Make the plan of a Python plan."},
    {"call", reinterpret_cast<PyCFunction>(call), METH_FASTCALL, "Run a stored call."},
    {"keep", reinterpret_cast<PyCFunction>(keep), METH_FASTCALL, "Store a call."},
    {"forward", reinterpret_cast<PyCFunction>(forward), METH_FASTCALL, "Run a stored call of a module."},
    {"learn", reinterpret_cast<PyCFunction>(learn), METH_FASTCALL, "Store a call of a module."},
    {"run", reinterpret_cast<PyCFunction>(run_plan), METH_FASTCALL, "Run a call by its plan."},
    {"forget", forget, METH_NOARGS, "Drop all stored calls."},
    {"node", recomputable_node, METH_O, "The node that can recompute a tensor, or None."},
    {"recompute", recompute, METH_O, "Recompute the result of a node."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "normplug_host_path", nullptr, -1, methods};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_normplug_host_path() {
  HANDLE_TH_ERRORS
  // programs.h and Python's programs must number the slots alike.
  py::tuple slots = py::module_::import("normplug._ops.plans").attr("SLOTS");
  const std::pair<size_t, const char*> known[] = {
      {kTracked, "tracked"}, {kDy, "dy"},           {kDtotal, "dtotal"},
      {kPartial, "partial"}, {kCounters, "counters"}, {kNothing, "nothing"}};
  TORCH_CHECK_VALUE(slots.size() == kSlots, "normplug: Python has ", slots.size(), " slots");
  for (const auto& [slot, name] : known) {
    TORCH_CHECK_VALUE(slots[slot].cast<std::string>() == name, "normplug: slot ", slot, " is ",
                      slots[slot].cast<std::string>());
  }
  driver::load();
  return PyModule_Create(&module);
  END_HANDLE_TH_ERRORS
}
