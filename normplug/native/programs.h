// Programs: a Python plan's work as data, and the code that runs it.
#pragma once

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <dlfcn.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace normplug {

using at::Tensor;

// Functions of the CUDA driver, and torch's current stream; looked up when the module is loaded.
namespace driver {

inline int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                     void*, void**, void**) = nullptr;
inline int (*launch_cooperative)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 unsigned, void*, void**) = nullptr;
inline int (*param_info)(void*, size_t, size_t*, size_t*) = nullptr;
inline int (*get_device)(int*, int) = nullptr;
inline int (*retain_context)(void**, int) = nullptr;
inline int (*set_context)(void*) = nullptr;
inline int (*current_stream)(int32_t, void**) = nullptr;  // torch's

template <typename F>
void find(void* library, const char* name, F& function) {
  function = library == nullptr ? nullptr : reinterpret_cast<F>(dlsym(library, name));
}

inline void load() {
  void* cuda = dlopen("libcuda.so.1", RTLD_LAZY);
  find(cuda, "cuLaunchKernel", launch);
  find(cuda, "cuLaunchCooperativeKernel", launch_cooperative);
  find(cuda, "cuFuncGetParamInfo", param_info);
  find(cuda, "cuDeviceGet", get_device);
  find(cuda, "cuDevicePrimaryCtxRetain", retain_context);
  find(cuda, "cuCtxSetCurrent", set_context);
  void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  find(torch, "aoti_torch_get_current_cuda_stream", current_stream);
}

inline bool complete() {
  return launch && launch_cooperative && param_info && get_device && retain_context &&
         set_context && current_stream;
}

// Make the device's context current. A thread on which only this file has called the driver has
// none yet.
inline bool make_context(int index) {
  int device = 0;
  void* context = nullptr;
  return get_device(&device, index) == 0 && retain_context(&context, device) == 0 &&
         set_context(context) == 0;
}

}  // namespace driver

// A compiled kernel, with the values of its parameters.
struct Compiled {
  struct Parameter {
    int tensor;      // the index among the launch's tensors, or -1
    uint64_t value;  // the bits of a number
  };
  static constexpr int kInvalidContext = 201;  // CUDA_ERROR_INVALID_CONTEXT
  // The sizes of arrays on the stack. Python launches a kernel that takes more.
  static constexpr size_t kMostParameters = 64, kMostTensors = 32;

  void* function;
  unsigned grid, threads, shared;
  bool cooperative;
  std::vector<Parameter> parameters;

  void operator()(int device, void* stream, const void* const* pointers) const {
    uint64_t values[kMostParameters];
    void* arguments[kMostParameters];
    size_t n = 0;
    for (const auto& parameter : parameters) {
      values[n] = parameter.tensor < 0 ? parameter.value
                                       : reinterpret_cast<uint64_t>(pointers[parameter.tensor]);
      arguments[n] = &values[n];
      ++n;
    }
    int error = start(stream, arguments);
    if (error == kInvalidContext && driver::make_context(device)) error = start(stream, arguments);
    TORCH_CHECK(error == 0, "normplug: the driver refused to launch a kernel, with error ", error);
  }

  int start(void* stream, void** arguments) const {
    if (cooperative) {
      return driver::launch_cooperative(function, grid, 1, 1, threads, 1, 1, shared, stream,
                                        arguments);
    }
    return driver::launch(function, grid, 1, 1, threads, 1, 1, shared, stream, arguments, nullptr);
  }
};

// Indices into `normplug._ops.plans.SLOTS`; checked when the module is loaded.
constexpr size_t kTensors = 8, kInputs = 5, kSlots = 25, kNothing = kSlots - 1;
constexpr size_t kTracked = 7, kDy = 14, kDtotal = 15, kPartial = 22, kCounters = 23;
using Slots = std::array<Tensor, kSlots>;

[[noreturn]] inline void throw_python() {
  python_error error;
  error.persist();
  throw std::move(error);
}

// Own a new reference; throw the Python error if it is null.
inline py::object checked(PyObject* object) {
  if (object == nullptr) throw_python();
  return py::reinterpret_steal<py::object>(object);
}

struct Step {
  py::object launch;  // the Python `Launch`
  std::vector<uint8_t> slots;
  std::shared_ptr<const Compiled> compiled;  // null until Python has launched it once
};

struct Layout {
  size_t slot;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

struct Result {
  size_t slot;
  std::optional<at::ScalarType> dtype;
};

struct Program {
  struct Copy {
    size_t slot;
    std::vector<int64_t> strides;
  };
  std::vector<Copy> copies;
  bool counts;  // whether to increment `tracked` first
  std::vector<Layout> empties;
  std::vector<Step> steps;
  std::vector<Result> results;
  std::vector<uint8_t> saved, updates;  // updates: the slots updated in place
  py::object scratch;
  int64_t counters, room;  // `scratch`: how many counters and partial results
  Tensor kept_partial, kept_counters;  // of the default stream
};

struct Plan {
  py::object python;
  at::Device device = at::kCPU;
  at::ScalarType accumulator;
  bool has_total, is_recomputable;
  // Kernels set it if they stop waiting for another process; null if none waits.
  const volatile int64_t* mark;
  const volatile int64_t* turn = nullptr;  // the stream of the device's latest such kernel
  std::vector<uint8_t> saved_slots;
  std::mutex mutex;  // of the programs, and of the workspaces that they keep
  std::unordered_map<std::string, std::shared_ptr<Program>> programs;

  ~Plan() {
    if (!Py_IsInitialized()) {  // torch's dispatcher outlives Python: leak Python objects
      new auto(std::move(programs));
      python.release();
      return;
    }
    py::gil_scoped_acquire gil;
    programs.clear();
    python = py::object();
  }
};

template <typename T>
inline T attribute(py::handle object, const char* name) {
  return object.attr(name).cast<T>();
}

inline at::ScalarType dtype_of(py::handle dtype) {
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

inline std::optional<at::ScalarType> maybe_dtype(py::handle dtype) {
  if (dtype.is_none()) return std::nullopt;
  return dtype_of(dtype);
}

// Needs the GIL.
inline std::shared_ptr<Program> program_of(py::handle python) {
  auto program = std::make_shared<Program>();
  for (py::handle copy : python.attr("copies")) {
    auto pair = copy.cast<std::pair<size_t, std::vector<int64_t>>>();
    program->copies.push_back({pair.first, std::move(pair.second)});
  }
  program->counts = attribute<bool>(python, "counts");
  for (py::handle empty : python.attr("empties")) {
    program->empties.push_back({attribute<size_t>(empty, "slot"),
                                attribute<std::vector<int64_t>>(empty, "shape"),
                                attribute<std::vector<int64_t>>(empty, "stride"),
                                dtype_of(empty.attr("dtype"))});
  }
  for (py::handle step : python.attr("steps")) {
    program->steps.push_back({py::reinterpret_borrow<py::object>(step.attr("launch")),
                              attribute<std::vector<uint8_t>>(step, "slots")});
  }
  for (py::handle result : python.attr("results")) {
    program->results.push_back({attribute<size_t>(result, "slot"),
                                maybe_dtype(result.attr("dtype"))});
  }
  program->saved = attribute<std::vector<uint8_t>>(python, "saved");
  program->updates = attribute<std::vector<uint8_t>>(python, "updates");
  program->scratch = python.attr("scratch");
  std::tie(program->counters, program->room) =
      program->scratch.cast<std::pair<int64_t, int64_t>>();
  return program;
}

inline std::shared_ptr<Plan> plan_of(py::handle python) {
  auto plan = std::make_shared<Plan>();
  plan->python = py::reinterpret_borrow<py::object>(python);
  plan->device = reinterpret_cast<THPDevice*>(python.attr("device").ptr())->device;
  plan->accumulator = dtype_of(python.attr("acc"));
  plan->has_total = attribute<bool>(python, "has_total");
  plan->is_recomputable = attribute<bool>(python, "is_recomputable");
  plan->mark = reinterpret_cast<const int64_t*>(attribute<uintptr_t>(python, "mark"));
  if (plan->mark != nullptr) {
    py::object peers = python.attr("spec").attr("peers");
    plan->turn = reinterpret_cast<const int64_t*>(attribute<uintptr_t>(peers, "turn"));
  }
  plan->saved_slots = attribute<std::vector<uint8_t>>(python, "saved_slots");
  return plan;
}

inline py::object wrapped(const Tensor& t) {
  if (!t.defined()) return py::none();
  return checked(THPVariable_Wrap(t));
}

inline Tensor unwrapped(py::handle object) {
  return object.is_none() ? Tensor() : THPVariable_Unpack(object.ptr());
}

inline void* stream_of(const Plan& plan) {
  void* stream = nullptr;
  if (plan.device.is_cuda()) {
    TORCH_CHECK(driver::current_stream(plan.device.index(), &stream) == 0,
                "normplug: torch has no current stream");
  }
  return stream;
}

// Fill the slots of counters and partial results: cached for the default stream, else allocated.
inline void find_workspace(Plan& plan, Program& program, void* stream, Slots& slots) {
  if (stream != nullptr) {
    auto options = at::TensorOptions().device(plan.device);
    slots[kCounters] = at::zeros({program.counters}, options.dtype(at::kLong));
    slots[kPartial] = at::empty({program.room}, options.dtype(plan.accumulator));
    return;
  }
  {
    std::lock_guard<std::mutex> lock(plan.mutex);
    slots[kPartial] = program.kept_partial;
    slots[kCounters] = program.kept_counters;
  }
  if (slots[kCounters].defined()) return;
  py::gil_scoped_acquire gil;
  py::tuple found = plan.python.attr("workspace")(program.scratch);
  slots[kPartial] = unwrapped(found[1].attr("partial"));
  slots[kCounters] = unwrapped(found[1].attr("counters"));
  if (!plan.device.is_cuda()) return;
  std::lock_guard<std::mutex> lock(plan.mutex);
  program.kept_partial = slots[kPartial];
  program.kept_counters = slots[kCounters];
}

// The compiled kernel of a step; null if it cannot be launched without Python.
inline std::shared_ptr<const Compiled> compiled_of(const Step& step) {
  if (!driver::complete() || step.slots.size() > Compiled::kMostTensors) return nullptr;
  py::object found = step.launch.attr("compiled")();
  if (found.is_none()) return nullptr;
  auto compiled = std::make_shared<Compiled>();
  compiled->function = reinterpret_cast<void*>(attribute<uintptr_t>(found, "function"));
  compiled->grid = attribute<unsigned>(found, "grid");
  compiled->threads = attribute<unsigned>(found, "threads");
  compiled->shared = attribute<unsigned>(found, "shared");
  compiled->cooperative = attribute<bool>(found, "cooperative");
  // Check the parameters against what the driver reports, since versions of Triton differ.
  size_t offset = 0, size = 0, count = 0;
  for (py::handle each : found.attr("parameters")) {
    auto [tensor, value, bytes] = each.cast<std::tuple<int, uint64_t, size_t>>();
    if (count == Compiled::kMostParameters) return nullptr;
    compiled->parameters.push_back({tensor, value});
    if (driver::param_info(compiled->function, count++, &offset, &size) != 0 || size != bytes) {
      return nullptr;
    }
  }
  // Any further parameters are pointers to scratch memory, which these kernels do not use.
  while (driver::param_info(compiled->function, count, &offset, &size) == 0) {
    if (size != sizeof(void*) || count == Compiled::kMostParameters) return nullptr;
    compiled->parameters.push_back({-1, 0});
    ++count;
  }
  return compiled;
}

inline void launch_by_python(const Plan& plan, Step& step, void* stream, const Slots& slots) {
  py::gil_scoped_acquire gil;
  py::tuple arguments(step.slots.size() + 1);
  arguments[0] = py::int_(reinterpret_cast<uintptr_t>(stream));
  for (size_t i = 0; i < step.slots.size(); ++i) arguments[i + 1] = wrapped(slots[step.slots[i]]);
  checked(PyObject_CallObject(step.launch.ptr(), arguments.ptr()));
  if (plan.device.is_cuda() && std::atomic_load(&step.compiled) == nullptr) {
    std::atomic_store(&step.compiled, compiled_of(step));
  }
}

inline void launch(const Plan& plan, Step& step, void* stream, const Slots& slots) {
  auto compiled = std::atomic_load(&step.compiled);
  if (compiled != nullptr) {
    const void* pointers[Compiled::kMostTensors];
    uintptr_t bits = 0;
    for (size_t i = 0; i < step.slots.size(); ++i) {
      pointers[i] = slots[step.slots[i]].const_data_ptr();
      bits |= reinterpret_cast<uintptr_t>(pointers[i]);
    }
    if ((bits & 15) == 0) {  // the kernel assumes 16-byte alignment
      (*compiled)(plan.device.index(), stream, pointers);
      return;
    }
  }
  launch_by_python(plan, step, stream, slots);
}

// Have kernels that wait for other processes run one after another; an error if a wait has ended.
inline void take_turn(const Plan& plan) {
  auto stream = reinterpret_cast<int64_t>(stream_of(plan));
  if (*plan.mark == 0 && *plan.turn == stream) return;
  py::gil_scoped_acquire gil;
  plan.python.attr("spec").attr("peers").attr("take_turn")(stream);
}

inline void run(Plan& plan, Program& program, Slots& slots) {
  if (plan.mark != nullptr) take_turn(plan);
  for (const auto& [slot, strides] : program.copies) {
    Tensor& t = slots[slot];
    Tensor copy = at::empty_strided(t.sizes(), strides, t.options());
    copy.copy_(t);
    t = std::move(copy);
  }
  if (program.counts && slots[kTracked].defined()) slots[kTracked].add_(1);
  for (const auto& empty : program.empties) {
    slots[empty.slot] = at::empty_strided(
        empty.sizes, empty.strides, at::TensorOptions().device(plan.device).dtype(empty.dtype));
  }
  if (program.steps.empty()) return;
  void* stream = stream_of(plan);
  find_workspace(plan, program, stream, slots);
  for (auto& step : program.steps) launch(plan, step, stream, slots);
}

inline Tensor result_of(const Result& result, const Slots& slots) {
  const Tensor& t = slots[result.slot];
  return t.defined() && result.dtype ? t.to(*result.dtype) : t;
}

// The program of a key; built by Python (`ask`), under the GIL, when the key is first seen.
template <typename Ask>
inline std::shared_ptr<Program> find_program(Plan& plan, const std::string& key, Ask ask) {
  {
    std::lock_guard<std::mutex> lock(plan.mutex);
    auto found = plan.programs.find(key);
    if (found != plan.programs.end()) return found->second;
  }
  py::gil_scoped_acquire gil;
  auto program = program_of(ask());
  std::lock_guard<std::mutex> lock(plan.mutex);
  return plan.programs.emplace(key, std::move(program)).first->second;
}

}  // namespace normplug
