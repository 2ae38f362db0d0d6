// The host path of normplug's kernels: the work of a norm call between Python and the GPU.
//
// A Python plan (`normplug._ops.plans`) describes its work as programs: which tensors to allocate,
// which compiled kernels to launch on which tensors, which tensors to save. This module runs the
// programs without Python, and creates the autograd node. No code here is for one norm only. It
// calls Python to build a program, for a kernel's first launch, and for second derivatives.
//
// No CUDA headers are needed. The driver's functions are looked up when the module is loaded.

#include "operators.h"

namespace {

using namespace normplug;

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

// keep_operator(spec, t, ready, plan): store the plan of an operator's call. ready: see `keep`.
PyObject* keep_operator(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Slots slots;
  Copies copies;
  for (size_t i = 0; i < kTensors; ++i) {
    PyObject *given = PyTuple_GET_ITEM(args[1], i), *ready = PyTuple_GET_ITEM(args[2], i);
    if (given == Py_None) continue;
    slots[i] = THPVariable_Unpack(given);
    if (ready != given) copies.emplace_back(i, THPVariable_Unpack(ready).strides().vec());
  }
  if (auto key = operator_key(py::handle(args[0]).cast<std::string>(), slots)) {
    operators().store(*key, {std::move(copies), calls().plan(args[3])});
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// implement(name, forward, backward): run an operator here; the Python functions plan new calls.
PyObject* implement(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  auto name = py::handle(args[0]).cast<std::string>();
  register_operator<Forward>(name + "_forward", args[1]);
  register_operator<Backward>(name + "_backward", args[2]);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// enable(whether): let operators run here, or leave them to Python.
PyObject* enable(PyObject*, PyObject* whether) {
  operators().enabled = whether == Py_True;
  Py_RETURN_NONE;
}

PyObject* forget(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  operators().clear();
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
    {"keep_operator", reinterpret_cast<PyCFunction>(keep_operator), METH_FASTCALL, "Store a plan."},
    {"implement", reinterpret_cast<PyCFunction>(implement), METH_FASTCALL, "Register an operator."},
    {"enable", enable, METH_O, "Let operators run here, or leave them to Python."},
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
