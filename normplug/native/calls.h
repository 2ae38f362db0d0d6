// Caches of calls seen before: the key of a call, and the plan that runs it.
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

// Whether something observes torch's operations, and would miss a kernel: `_torch.interposed`.
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

// Append the layout of a tensor, on which plans depend; false unless it is a plain tensor or None.
inline bool describe(PyObject* object, Signature& signature) {
  if (object == Py_None) {
    signature.push_back(-1);
    return true;
  }
  if (!THPVariable_CheckExact(object)) return false;
  const Tensor& t = THPVariable_Unpack(object);
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
  if (equal < 0) throw_python();
  return equal == 1;
}

inline Tensor tensor_in(PyObject* object) {
  return object == Py_None ? Tensor() : THPVariable_Unpack(object);
}

constexpr size_t kMost = 8192;  // entries of a cache, which is cleared when full

template <typename Entry>
struct Kept {
  std::unordered_map<size_t, std::vector<Entry>> entries;
  size_t count = 0;

  void add(size_t hash, Entry entry) {
    if (count >= kMost) clear();
    entries[hash].push_back(std::move(entry));
    ++count;
  }

  void clear() {
    count = 0;
    auto gone = std::move(entries);  // destroyed last, since that may run Python code
    entries.clear();
  }
};

// --- Calls of functions ---

struct FunctionCall {
  Signature signature;
  py::object spec, backend;
  std::shared_ptr<Plan> plan;
};

inline Kept<FunctionCall>& function_calls() {
  static auto* kept = new Kept<FunctionCall>();
  return *kept;
}

// Compute the signature and the hash of a call; false if it must not be cached.
inline bool read_call(PyObject* spec, PyObject* tensors, Signature& signature, size_t& hash) {
  if (interposed() || !PyTuple_Check(tensors) || PyTuple_GET_SIZE(tensors) != kTensors) {
    return false;
  }
  for (size_t i = 0; i < kTensors; ++i) {
    if (!describe(PyTuple_GET_ITEM(tensors, i), signature)) return false;
  }
  Py_hash_t start = PyObject_Hash(spec);
  if (start == -1) {  // an unhashable setting, which the checks will refuse
    PyErr_Clear();
    return false;
  }
  hash = hash_of(static_cast<size_t>(start), signature);
  return true;
}

inline std::shared_ptr<Plan> find_call(PyObject* spec, PyObject* backend, PyObject* tensors) {
  Signature signature;
  size_t hash = 0;
  if (!read_call(spec, tensors, signature, hash)) return nullptr;
  auto found = function_calls().entries.find(hash);
  if (found == function_calls().entries.end()) return nullptr;
  for (const auto& each : found->second) {
    if (each.signature == signature && same(each.backend.ptr(), backend) &&
        same(each.spec.ptr(), spec)) {
      return each.plan;
    }
  }
  return nullptr;
}

inline void keep_call(PyObject* spec, PyObject* backend, PyObject* tensors,
                      const std::shared_ptr<Plan>& plan) {
  Signature signature;
  size_t hash = 0;
  if (!read_call(spec, tensors, signature, hash)) return;
  function_calls().add(hash, {std::move(signature), py::reinterpret_borrow<py::object>(spec),
                              py::reinterpret_borrow<py::object>(backend), plan});
}

// --- Calls of modules ---

struct ModuleCall {
  Signature signature;
  py::object type;
  std::vector<py::object> values;  // of the attributes, and of the call's other arguments
  uint8_t used;                    // bit i: whether the plan takes tensor i
  std::shared_ptr<Plan> plan;
};

inline Kept<ModuleCall>& module_calls() {
  static auto* kept = new Kept<ModuleCall>();
  return *kept;
}

// All that a module call depends on. The references are borrowed.
struct ModuleReading {
  std::array<PyObject*, kTensors> tensors;
  c10::SmallVector<PyObject*, 16> values;
  Signature signature;
  size_t hash;
};

// Append the autocast dtype of the tensor's device, or -1 where autocast is off.
inline void describe_autocast(const Tensor& t, Signature& signature) {
  auto device = t.device().type();
  bool is_on =
      (device == at::kCUDA || device == at::kCPU) && at::autocast::is_autocast_enabled(device);
  signature.push_back(is_on ? static_cast<int64_t>(at::autocast::get_autocast_dtype(device)) : -1);
}

// A tensor in one of a module's tables. None if the module has no such tensor; nullptr if it is a
// plain attribute, such as a weight that a hook computes.
inline PyObject* find_tensor(PyObject* table, PyObject* own, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(table, name);
  if (found != nullptr) return found;
  found = PyDict_GetItemWithError(own, name);
  return found == nullptr || found == Py_None ? Py_None : nullptr;
}

constexpr Py_ssize_t kStatistics = 3;

// Read a module call; false if it must not be cached.
// args: module, names of its statistics and then of its attributes, input, residual, input bias,
// others.
inline bool read_module(PyObject* const* args, Py_ssize_t count, ModuleReading& reading) {
  static PyObject* parameters_name = PyUnicode_InternFromString("_parameters");
  static PyObject* buffers_name = PyUnicode_InternFromString("_buffers");
  static PyObject* weight_name = PyUnicode_InternFromString("weight");
  static PyObject* bias_name = PyUnicode_InternFromString("bias");
  PyObject *names = args[1], *input = args[2];
  if (!THPVariable_CheckExact(input) || interposed()) return false;
  py::object own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(args[0], nullptr));
  if (!own) throw_python();
  PyObject* parameters = PyDict_GetItemWithError(own.ptr(), parameters_name);
  PyObject* buffers = PyDict_GetItemWithError(own.ptr(), buffers_name);
  if (parameters == nullptr || buffers == nullptr) return false;
  auto& tensors = reading.tensors;
  tensors = {input,
             args[3],
             find_tensor(parameters, own.ptr(), weight_name),
             find_tensor(parameters, own.ptr(), bias_name),
             args[4],
             find_tensor(buffers, own.ptr(), PyTuple_GET_ITEM(names, 0)),
             find_tensor(buffers, own.ptr(), PyTuple_GET_ITEM(names, 1)),
             find_tensor(buffers, own.ptr(), PyTuple_GET_ITEM(names, 2))};
  for (PyObject* each : tensors) {
    if (each == nullptr || !describe(each, reading.signature)) return false;
  }
  describe_autocast(THPVariable_Unpack(input), reading.signature);
  for (Py_ssize_t i = kStatistics; i < PyTuple_GET_SIZE(names); ++i) {
    PyObject* value = PyDict_GetItemWithError(own.ptr(), PyTuple_GET_ITEM(names, i));
    reading.values.push_back(value == nullptr ? Py_None : value);
  }
  for (Py_ssize_t i = 5; i < count; ++i) reading.values.push_back(args[i]);
  reading.hash = hash_of(reinterpret_cast<size_t>(Py_TYPE(args[0])), reading.signature);
  return true;
}

inline const ModuleCall* find_module_call(PyObject* module, const ModuleReading& reading) {
  auto found = module_calls().entries.find(reading.hash);
  if (found == module_calls().entries.end()) return nullptr;
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(module));
  for (const auto& each : found->second) {
    if (each.type.ptr() != type || each.signature != reading.signature ||
        each.values.size() != reading.values.size()) {
      continue;
    }
    size_t i = 0;
    while (i < each.values.size() && same(each.values[i].ptr(), reading.values[i])) ++i;
    if (i == each.values.size()) return &each;
  }
  return nullptr;
}

// Whether a value is a tensor or has one, whose elements may change.
inline bool has_tensor(PyObject* value) {
  if (THPVariable_Check(value)) return true;
  if (!PyTuple_Check(value)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
    if (has_tensor(PyTuple_GET_ITEM(value, i))) return true;
  }
  return false;
}

// Store a module call under the plan of the function call that it makes with `tensors`.
inline void keep_module_call(PyObject* module, const ModuleReading& reading, PyObject* tensors,
                             const std::shared_ptr<Plan>& plan) {
  ModuleCall kept{reading.signature,
                  py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(Py_TYPE(module))),
                  {},
                  0,
                  plan};
  for (size_t i = 0; i < kTensors; ++i) {
    PyObject* taken = PyTuple_GET_ITEM(tensors, i);
    if (taken == Py_None) continue;
    if (taken != reading.tensors[i]) return;  // such as a cast copy, which is not in the module
    kept.used |= static_cast<uint8_t>(1u << i);
  }
  for (PyObject* value : reading.values) {
    if (has_tensor(value)) return;
    kept.values.push_back(py::reinterpret_borrow<py::object>(value));
  }
  module_calls().add(reading.hash, std::move(kept));
}

}  // namespace normplug
