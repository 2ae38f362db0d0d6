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

// The tensors of a stored call that its plan takes.
Slots slots_of_call(const Way& way, const Reading& reading) {
  Slots slots;
  for (size_t i = 0; i < kTensors; ++i) {
    if (way.used >> i & 1) slots[i] = THPVariable_Unpack(reading.tensors[i]);
  }
  return slots;
}

// Run a stored call; None if there is none. By value: another thread may clear the stored calls.
PyObject* run_call(const Way* stored, const Reading& reading) {
  if (stored == nullptr) Py_RETURN_NONE;
  Way way = *stored;
  Slots slots = slots_of_call(way, reading);
  return call_plan(way.plan, slots, way.copies);
}

// call(spec, backend, t): the result, or None if the call is not stored.
PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Reading reading;
  bool is_read = read_call(args[0], args[1], args[2], reading);
  return run_call(is_read ? calls().find(reading) : nullptr, reading);
  END_HANDLE_TH_ERRORS
}

// keep(spec, backend, t, ready, run): store a call, for `call` to run, if `run` is the method of a
// plan. ready: t, with copies of the tensors whose layout the kernels cannot read.
PyObject* keep(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  py::handle run = args[4];
  Reading reading;
  if (py::getattr(run, "__name__", py::none()).equal(py::str("run")) &&
      read_call(args[0], args[1], args[2], reading)) {
    Way way{0, {}, calls().plan(run.attr("__self__"))};
    for (size_t i = 0; i < kTensors; ++i) {
      PyObject* ready = PyTuple_GET_ITEM(args[3], i);
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

// forward(module, input, residual, input_bias, *others): the result, or None if the call is not
// stored.
PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Reading reading;
  return run_call(read_module(args, count, reading) ? calls().find(reading) : nullptr, reading);
  END_HANDLE_TH_ERRORS
}

// learn(spec, backend, t, module, input, residual, input_bias, *others): store the call of a module,
// for `forward` to run, with the plan of the function call that it makes, if that is stored. Not if
// a tensor of that call is not in the module (such as a cast copy), or a setting is a tensor, whose
// value may change.
PyObject* learn(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Reading function, module;
  bool is_read = read_call(args[0], args[1], args[2], function);
  const Way* found = is_read ? calls().find(function) : nullptr;
  if (found == nullptr || !read_module(args + 3, count - 3, module) ||
      calls().find(module) != nullptr) {
    Py_RETURN_NONE;
  }
  Way way = *found;  // a copy: `store` may clear the stored calls
  way.used = 0;
  bool may_store = true;
  for (size_t i = 0; i < kTensors; ++i) {
    bool is_taken = function.tensors[i] != Py_None;
    may_store &= !is_taken || function.tensors[i] == module.tensors[i];
    way.used |= is_taken << i;
  }
  for (PyObject* value : module.values) may_store &= !THPVariable_Check(value);
  if (may_store) calls().store(module, std::move(way));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// run(plan, t): the result of a call whose plan is known.
PyObject* run_plan(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Slots slots;
  for (size_t i = 0; i < kTensors; ++i) {
    PyObject* object = PyTuple_GET_ITEM(args[1], i);
    if (object != Py_None) slots[i] = THPVariable_Unpack(object);
  }
  return call_plan(calls().plan(args[0]), slots);
  END_HANDLE_TH_ERRORS
}

// The stored call of an operator, whose spec is a text. nullopt if it is not stored.
std::optional<Way> find_operator(PyObject* spec, PyObject* tensors, Reading& reading) {
  if (!read_call(spec, Py_None, tensors, reading)) return std::nullopt;
  const Way* stored = calls().find(reading);
  return stored == nullptr ? std::nullopt : std::optional<Way>(*stored);
}

// operate(spec, t): the results of a stored call, and then its state; None if it is not stored.
PyObject* operate(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Reading reading;
  auto way = find_operator(args[0], args[1], reading);
  if (!way) Py_RETURN_NONE;
  Slots slots = slots_of_call(*way, reading);
  variable_list found;
  {
    py::gil_scoped_release no_gil;
    at::DeviceGuard device(way->plan->device);
    copy_tensors(way->copies, slots);
    auto program = run_kernels(*way->plan, slots, true);
    for (const auto& result : program->results) found.push_back(slots[result.first]);
    for (size_t i = kInputs; i < program->saved.size(); ++i) {
      const Tensor& state = slots[program->saved[i]];
      found.push_back(state.defined() ? state
                                      : at::empty({0}, slots[0].options().dtype(at::kByte)));
    }
  }
  return py::cast(found).cast<py::tuple>().release().ptr();
  END_HANDLE_TH_ERRORS
}

// differentiate(spec, t, state, dy, dtotal, is_placeholder, needs): the gradients that are needed,
// as a list; None if the call is not stored. is_placeholder: whether t's residual was not saved.
PyObject* differentiate(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Reading reading;
  auto way = find_operator(args[0], args[1], reading);
  if (!way) Py_RETURN_NONE;
  Slots slots = slots_of_call(*way, reading);
  auto state = py::handle(args[2]).cast<variable_list>();
  auto gradient = [&](PyObject* t) { return t == Py_None ? Tensor() : THPVariable_Unpack(t); };
  Tensor dy = gradient(args[3]), dtotal = gradient(args[4]);
  bool is_placeholder = args[5] == Py_True;
  auto needs = py::handle(args[6]).cast<std::array<bool, kInputs>>();
  variable_list found;
  {
    py::gil_scoped_release no_gil;
    at::DeviceGuard device(way->plan->device);
    copy_tensors(way->copies, slots);
    variable_list saved(slots.begin(), slots.begin() + kInputs);
    if (is_placeholder) saved[1] = Tensor();
    for (const Tensor& each : state) saved.push_back(each.numel() == 0 ? Tensor() : each);
    for (Tensor& each : run_backward(*way->plan, saved, readable(dy), readable(dtotal), needs)) {
      if (each.defined()) found.push_back(std::move(each));
    }
  }
  return py::cast(found).release().ptr();
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
  if (found == nullptr) throw py::error_already_set();
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
    {"call", reinterpret_cast<PyCFunction>(call), METH_FASTCALL, "Run a stored call."},
    {"keep", reinterpret_cast<PyCFunction>(keep), METH_FASTCALL, "Store a call."},
    {"forward", reinterpret_cast<PyCFunction>(forward), METH_FASTCALL, "Run a stored call of a module."},
    {"learn", reinterpret_cast<PyCFunction>(learn), METH_FASTCALL, "Store a call of a module."},
    {"run", reinterpret_cast<PyCFunction>(run_plan), METH_FASTCALL, "Run a call by its plan."},
    {"operate", reinterpret_cast<PyCFunction>(operate), METH_FASTCALL, "Run an operator."},
    {"differentiate", reinterpret_cast<PyCFunction>(differentiate), METH_FASTCALL, "The gradients."},
    {"forget", forget, METH_NOARGS, "Drop all stored calls."},
    {"recomputable_node", recomputable_node, METH_O, "The node that can recompute a tensor."},
    {"recompute", recompute, METH_O, "Recompute the result of a node."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "normplug_host_path", nullptr, -1, methods};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_normplug_host_path() {
  HANDLE_TH_ERRORS
  driver::load();
  return PyModule_Create(&module);
  END_HANDLE_TH_ERRORS
}
