// The host path of normplug's kernels: the work of a norm call between Python and the GPU.
//
// A Python plan (`normplug._ops.plans`) describes its work as programs: which tensors to allocate,
// which compiled kernels to launch on which tensors, which tensors to save. This module runs the
// programs without Python, and creates the autograd node. No code here is for one norm only. It
// calls Python to build a program, for a kernel's first launch, and for second derivatives.
//
// No CUDA headers are needed. The driver's functions are looked up when the module is loaded.

#include "convolutions.h"
#include "operators.h"

namespace {

using namespace normplug;

// Run a stored call; None if there is none. By value: another thread may clear the stored calls.
PyObject* run_stored(const Route* stored, const Reading& reading) {
  if (stored == nullptr) Py_RETURN_NONE;
  Route route = *stored;
  Slots slots;
  for (size_t i = 0; i < kTensors; ++i) {
    if (route.used >> i & 1) slots[i] = THPVariable_Unpack(reading.tensors[i]);
  }
  return run_route(route, slots);
}

// run_call(spec, backend, t): run a stored call. None if it is not stored.
PyObject* run_call(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Reading reading;
  bool is_read = read_call(args[0], args[1], args[2], reading);
  return run_stored(is_read ? calls().find(reading) : nullptr, reading);
  END_HANDLE_TH_ERRORS
}

// store_call(spec, backend, t, ready, run): store the plan of a call, and run it. None unless `run` is
// the method of a plan. ready: t, with copies of the tensors whose layout the kernels cannot read.
PyObject* store_call(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  py::handle run = args[4];
  Reading reading;
  if (!py::getattr(run, "__name__", py::none()).equal(py::str("run")) ||
      !read_call(args[0], args[1], args[2], reading)) {
    Py_RETURN_NONE;
  }
  Route route{calls().plan(run.attr("__self__")), {}, 0};
  for (size_t i = 0; i < kTensors; ++i) {
    PyObject* ready = PyTuple_GET_ITEM(args[3], i);
    route.used |= (ready != Py_None) << i;
    if (ready != reading.tensors[i]) {
      route.copies.emplace_back(i, THPVariable_Unpack(ready).strides().vec());
    }
  }
  calls().store(reading, route);
  return run_stored(&route, reading);
  END_HANDLE_TH_ERRORS
}

// run_module(module, input, residual, input_bias, *others): run the stored call of a module. None if
// it is not stored.
PyObject* run_module(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Reading reading;
  return run_stored(read_module(args, count, reading) ? calls().find(reading) : nullptr, reading);
  END_HANDLE_TH_ERRORS
}

// store_module(spec, backend, t, module, input, residual, input_bias, *others): store the call of a
// module with the plan of the function call that it makes, if that is stored. Not if a tensor of that
// call is not in the module (such as a cast copy), or a setting is a tensor, whose value may change.
PyObject* store_module(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Reading function, module;
  bool is_read = read_call(args[0], args[1], args[2], function);
  const Route* found = is_read ? calls().find(function) : nullptr;
  if (found == nullptr || !read_module(args + 3, count - 3, module) ||
      calls().find(module) != nullptr) {
    Py_RETURN_NONE;
  }
  bool may_store = true;
  for (size_t i = 0; i < kTensors; ++i) {
    PyObject* taken = function.tensors[i];
    may_store &= taken == Py_None || taken == module.tensors[i];
  }
  for (PyObject* value : module.values) may_store &= !THPVariable_Check(value);
  if (may_store) calls().store(module, *found);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// store_operator(spec, t, ready, plan): store the plan of an operator's call. ready: see `store_call`.
PyObject* store_operator(PyObject*, PyObject* const* args, Py_ssize_t) {
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
    operators().store(*key, {calls().plan(args[3]), std::move(copies)});
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// implement(name): run a norm's operators here.
PyObject* implement(PyObject*, PyObject* name) {
  HANDLE_TH_ERRORS
  register_operator(py::handle(name).cast<std::string>() + "_forward", false);
  register_operator(py::handle(name).cast<std::string>() + "_backward", true);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// enable(whether): let operators run here, or leave them to Python.
PyObject* enable(PyObject*, PyObject* whether) {
  operators().enabled = whether == Py_True;
  Py_RETURN_NONE;
}

// clear(): drop all stored calls.
PyObject* clear(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  operators().clear();
  calls().clear();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// recomputable_node(y): a capsule with the node of the norm whose first result is y, if it can
// recompute y; else None.
PyObject* recomputable_node(PyObject*, PyObject* y) {
  HANDLE_TH_ERRORS
  if (!THPVariable_Check(y)) Py_RETURN_NONE;
  const Tensor& tensor = THPVariable_Unpack(y);
  if (tensor.output_nr() != 0) Py_RETURN_NONE;
  NodePtr node = torch::autograd::impl::gradient_edge(tensor).function;
  auto* norm = dynamic_cast<NormBackward*>(node.get());
  if (norm == nullptr || !norm->plan->is_recomputable) Py_RETURN_NONE;
  auto destroy = [](void* kept) { delete static_cast<NodePtr*>(kept); };
  return py::capsule(new NodePtr(std::move(node)), destroy).release().ptr();
  END_HANDLE_TH_ERRORS
}

// recompute(node): recompute y.
PyObject* recompute(PyObject*, PyObject* capsule) {
  HANDLE_TH_ERRORS
  NodePtr node = *py::reinterpret_borrow<py::capsule>(capsule).get_pointer<NodePtr>();
  Tensor y;
  {
    py::gil_scoped_release no_gil;
    y = dynamic_cast<NormBackward&>(*node).recomputed();
  }
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

// convolve(x, weight, forks): y, or (y, x) if `forks`, of a convolution with an autograd node of
// normplug. None if PyTorch must compute it, or if a gradient is not needed.
PyObject* convolve(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  if (!THPVariable_CheckExact(args[0]) || !THPVariable_CheckExact(args[1]) || interposed()) {
    Py_RETURN_NONE;
  }
  const Tensor &x = THPVariable_Unpack(args[0]), &weight = THPVariable_Unpack(args[1]);
  bool forks = args[2] == Py_True;
  if (!is_plain(x) || !is_plain(weight) || !at::GradMode::is_enabled() || !x.requires_grad() ||
      !weight.requires_grad()) {
    Py_RETURN_NONE;
  }
  std::tuple<Tensor, Tensor> results;
  {
    py::gil_scoped_release no_gil;
    results = convolve_with_history(x, weight, forks);
  }
  auto& [y, skip] = results;
  if (!forks) return THPVariable_Wrap(y);
  return py::make_tuple(y, skip).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"run_call", reinterpret_cast<PyCFunction>(run_call), METH_FASTCALL, "Run a stored call."},
    {"store_call", reinterpret_cast<PyCFunction>(store_call), METH_FASTCALL,
     "Store the plan of a call, and run it."},
    {"run_module", reinterpret_cast<PyCFunction>(run_module), METH_FASTCALL,
     "Run the stored call of a module."},
    {"store_module", reinterpret_cast<PyCFunction>(store_module), METH_FASTCALL,
     "Store the call of a module."},
    {"store_operator", reinterpret_cast<PyCFunction>(store_operator), METH_FASTCALL,
     "Store the plan of an operator's call."},
    {"implement", implement, METH_O, "Register the operators of a norm."},
    {"enable", enable, METH_O, "Let operators run here, or leave them to Python."},
    {"clear", clear, METH_NOARGS, "Drop all stored calls."},
    {"recomputable_node", recomputable_node, METH_O, "The node that can recompute a tensor."},
    {"recompute", recompute, METH_O, "Recompute the result of a node."},
    {"convolve", reinterpret_cast<PyCFunction>(convolve), METH_FASTCALL,
     "Run a convolution with its own gradients."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "normplug_host_path", nullptr, -1, methods};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_normplug_host_path() {
  HANDLE_TH_ERRORS
  driver::load();
  return PyModule_Create(&module);
  END_HANDLE_TH_ERRORS
}
