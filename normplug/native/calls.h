// The cache of calls: the key of a call, and the plan that runs it.
//
// The key of a function call is its spec, its backend and its tensors' layouts. The key of a module
// call is the module's class, the attributes that the class declares (normplug's settings are one
// tuple among them), and the layouts of the tensors in the module's own dicts. Everything here needs
// the GIL.
#pragma once

#include <torch/csrc/autograd/forward_grad.h>

#include <ATen/TracerMode.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>

#include "autograd.h"

namespace normplug {

using Signature = c10::SmallVector<int64_t, 64>;

// Whether something observes torch's operations, and would miss a kernel: see `_torch.interposed`.
inline bool interposed() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         c10::impl::tls_is_dispatch_key_included(at::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr ||
         at::tracer::impl::is_dispatch_enabled();
}

// Whether the values of t are in its memory, where its strides say.
inline bool is_plain(const Tensor& t) {
  constexpr auto strange = at::DispatchKeySet(
      {at::DispatchKey::Python, at::DispatchKey::FuncTorchBatched,
       at::DispatchKey::FuncTorchGradWrapper, at::DispatchKey::Functionalize,
       at::DispatchKey::Negative, at::DispatchKey::Conjugate, at::DispatchKey::ZeroTensor});
  return t.layout() == at::kStrided && !t.is_nested() && !t.key_set().has_any(strange);
}

// Append the layout of a tensor, on which plans depend; false unless it is plain or undefined.
inline bool describe(const Tensor& t, Signature& signature) {
  if (!t.defined()) {
    signature.push_back(-1);
    return true;
  }
  if (!is_plain(t)) return false;
  auto device = t.device();
  signature.push_back(static_cast<int64_t>(t.scalar_type()) |
                      (static_cast<int64_t>(device.type()) << 8) |
                      ((static_cast<int64_t>(device.index()) & 0xff) << 16) | (t.dim() << 24));
  auto sizes = t.sizes(), strides = t.strides();
  signature.append(sizes.begin(), sizes.end());
  signature.append(strides.begin(), strides.end());
  return true;
}

inline bool describe(PyObject* object, Signature& signature) {
  if (object == Py_None) return describe(Tensor(), signature);
  return THPVariable_CheckExact(object) && describe(THPVariable_Unpack(object), signature);
}

inline size_t hash_of(size_t start, const Signature& signature) {
  uint64_t hash = start;
  for (int64_t each : signature) {
    hash = (hash ^ static_cast<uint64_t>(each)) * 0x9E3779B97F4A7C15ull;
    hash ^= hash >> 29;
  }
  return hash;
}

inline bool same(PyObject* a, PyObject* b) {
  if (a == b) return true;
  int equal = PyObject_RichCompareBool(a, b, Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal == 1;
}

constexpr size_t kMost = 8192;  // calls; when full, all are dropped

// All that a call depends on. The references are borrowed.
struct Reading {
  std::array<PyObject*, kTensors> tensors;
  PyObject* type;                          // of the spec or of the module
  c10::SmallVector<PyObject*, 16> values;  // the spec and the backend; or attributes and arguments
  Signature signature;
  size_t hash;
};

struct Call {
  Signature signature;
  py::object type;
  std::vector<py::object> values;
  Route route;
};

struct Calls {
  std::unordered_multimap<size_t, Call> by_hash;
  std::unordered_map<PyObject*, std::shared_ptr<Plan>> plans;  // by the Python plan

  const Route* find(const Reading& reading) const {
    auto [found, end] = by_hash.equal_range(reading.hash);
    for (; found != end; ++found) {
      const Call& each = found->second;
      if (each.type.ptr() != reading.type || each.signature != reading.signature ||
          each.values.size() != reading.values.size()) {
        continue;
      }
      size_t i = 0;
      while (i < each.values.size() && same(each.values[i].ptr(), reading.values[i])) ++i;
      if (i == each.values.size()) return &each.route;
    }
    return nullptr;
  }

  void store(const Reading& reading, Route route) {
    Call call{reading.signature, py::reinterpret_borrow<py::object>(reading.type), {},
              std::move(route)};
    for (PyObject* value : reading.values) {
      call.values.push_back(py::reinterpret_borrow<py::object>(value));
    }
    if (by_hash.size() >= kMost) clear();
    by_hash.emplace(reading.hash, std::move(call));
  }

  std::shared_ptr<Plan> plan(py::handle python) {
    auto found = plans.find(python.ptr());
    if (found != plans.end()) return found->second;
    return plans.emplace(python.ptr(), plan_of(python)).first->second;
  }

  void clear() {
    Calls gone = std::move(*this);  // destroyed last, since that may run Python code
    *this = Calls();
  }
};

inline Calls& calls() {
  static auto* stored = new Calls();
  return *stored;
}

// Read the call of a function; false if it must not be stored.
inline bool read_call(PyObject* spec, PyObject* backend, PyObject* tensors, Reading& reading) {
  if (interposed() || !PyTuple_Check(tensors) || PyTuple_GET_SIZE(tensors) != kTensors) {
    return false;
  }
  for (size_t i = 0; i < kTensors; ++i) {
    reading.tensors[i] = PyTuple_GET_ITEM(tensors, i);
    if (!describe(reading.tensors[i], reading.signature)) return false;
  }
  Py_hash_t start = PyObject_Hash(spec);
  if (start == -1) {  // an unhashable setting, which the checks will refuse
    PyErr_Clear();
    return false;
  }
  reading.type = reinterpret_cast<PyObject*>(Py_TYPE(spec));
  reading.values = {spec, backend};
  reading.hash = hash_of(static_cast<size_t>(start), reading.signature);
  return true;
}

// A tensor in one of a module's two tables. None if the module has no such tensor; nullptr if it is
// a plain attribute, such as a weight that a hook computes.
inline PyObject* find_tensor(PyObject* table, PyObject* other, PyObject* own, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(table, name);
  if (found == nullptr) found = PyDict_GetItemWithError(other, name);
  if (found != nullptr) return found;
  found = PyDict_GetItemWithError(own, name);
  return found == nullptr || found == Py_None ? Py_None : nullptr;
}

// Read the call of a module; false if it must not be stored. The class's `_affine_names` are those
// of weight and bias; its `_call_reads` names three statistics and then attributes. args: module,
// input, residual, input bias, others.
inline bool read_module(PyObject* const* args, Py_ssize_t count, Reading& reading) {
  static PyObject* reads_name = PyUnicode_InternFromString("_call_reads");
  static PyObject* parameters_name = PyUnicode_InternFromString("_parameters");
  static PyObject* buffers_name = PyUnicode_InternFromString("_buffers");
  static PyObject* affine_name = PyUnicode_InternFromString("_affine_names");
  PyObject *module = args[0], *input = args[1];
  if (count < 4 || !THPVariable_CheckExact(input) || interposed()) return false;
  reading.type = reinterpret_cast<PyObject*>(Py_TYPE(module));
  auto names = py::reinterpret_steal<py::object>(PyObject_GetAttr(reading.type, reads_name));
  py::object affine;
  if (names) {
    affine = py::reinterpret_steal<py::object>(PyObject_GetAttr(reading.type, affine_name));
  }
  if (!affine) {  // another thread has unswapped the layer
    PyErr_Clear();
    return false;
  }
  auto own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  if (!own) throw py::error_already_set();
  PyObject* parameters = PyDict_GetItemWithError(own.ptr(), parameters_name);
  PyObject* buffers = PyDict_GetItemWithError(own.ptr(), buffers_name);
  if (parameters == nullptr || buffers == nullptr) return false;
  auto& tensors = reading.tensors;
  tensors = {input,
             args[2],
             find_tensor(parameters, buffers, own.ptr(), PyTuple_GET_ITEM(affine.ptr(), 0)),
             find_tensor(parameters, buffers, own.ptr(), PyTuple_GET_ITEM(affine.ptr(), 1)),
             args[3],
             find_tensor(buffers, parameters, own.ptr(), PyTuple_GET_ITEM(names.ptr(), 0)),
             find_tensor(buffers, parameters, own.ptr(), PyTuple_GET_ITEM(names.ptr(), 1)),
             find_tensor(buffers, parameters, own.ptr(), PyTuple_GET_ITEM(names.ptr(), 2))};
  for (PyObject* each : tensors) {
    if (each == nullptr || !describe(each, reading.signature)) return false;
  }
  // A norm in evaluation saves less if neither weight nor bias needs a gradient.
  for (size_t i : {2, 3}) {
    bool trains = tensors[i] != Py_None && THPVariable_Unpack(tensors[i]).requires_grad();
    reading.signature.push_back(trains);
  }
  auto device = THPVariable_Unpack(input).device().type();
  bool casts =
      (device == at::kCUDA || device == at::kCPU) && at::autocast::is_autocast_enabled(device);
  reading.signature.push_back(
      casts ? static_cast<int64_t>(at::autocast::get_autocast_dtype(device)) : -1);
  for (Py_ssize_t i = 3; i < PyTuple_GET_SIZE(names.ptr()); ++i) {
    PyObject* value = PyDict_GetItemWithError(own.ptr(), PyTuple_GET_ITEM(names.ptr(), i));
    reading.values.push_back(value == nullptr ? Py_None : value);
  }
  for (Py_ssize_t i = 4; i < count; ++i) reading.values.push_back(args[i]);
  reading.hash = hash_of(reinterpret_cast<size_t>(reading.type), reading.signature);
  return true;
}

}  // namespace normplug
