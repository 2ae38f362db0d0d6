// Programs: a Python plan's work as data, and the code that runs it.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

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
  void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  find(torch, "aoti_torch_get_current_cuda_stream", current_stream);
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

  void operator()(at::Device device, void* stream, const void* const* pointers) const {
    uint64_t values[kMostParameters];
    void* arguments[kMostParameters];
    for (size_t i = 0; i < parameters.size(); ++i) {
      auto [tensor, value] = parameters[i];
      values[i] = tensor < 0 ? value : reinterpret_cast<uint64_t>(pointers[tensor]);
      arguments[i] = &values[i];
    }
    int error = start(stream, arguments);
    if (error == kInvalidContext) {
      // A thread on which only this file has called the driver. torch makes the context current.
      at::zeros({1}, at::TensorOptions().device(device));
      error = start(stream, arguments);
    }
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

// Indices into `normplug._ops.plans.SLOTS`; a test compares them.
constexpr size_t kTensors = 8, kInputs = 5, kSlots = 26;
constexpr size_t kTracked = 7, kDy = 14, kDtotal = 15, kPartial = 23, kCounters = 24;
using Slots = std::array<Tensor, kSlots>;

struct Step {
  py::object launch;  // the Python `Launch`
  std::vector<uint8_t> slots;
  std::shared_ptr<const Compiled> compiled;  // null until Python has launched it once
};

// Slots whose tensors are copied, and the strides of the copies.
using Copies = std::vector<std::pair<size_t, std::vector<int64_t>>>;

inline void copy_tensors(const Copies& copies, Slots& slots) {
  for (const auto& [slot, strides] : copies) {
    Tensor& t = slots[slot];
    t = at::empty_strided(t.sizes(), strides, t.options()).copy_(t);
  }
}

// A tensor to allocate: its slot, sizes, strides and dtype.
using Layout = std::tuple<size_t, std::vector<int64_t>, std::vector<int64_t>, at::ScalarType>;
// A slot to return, and the dtype to cast to, if any.
using Result = std::pair<size_t, std::optional<at::ScalarType>>;

struct Program {
  Copies copies;
  bool counts;  // whether to increment `tracked` first
  std::vector<Layout> empties;
  std::vector<Step> steps;
  std::vector<Result> results;
  std::vector<uint8_t> saved, updates;  // updates: the slots updated in place
  std::pair<int64_t, int64_t> scratch;  // how many counters and partial results
  Tensor kept_partial, kept_counters;  // of the default stream
};

struct Plan {
  py::object python;
  at::Device device = at::kCPU;
  at::ScalarType accumulator;
  bool has_total, is_recomputable;
  // Kernels set it if they stop waiting for another process; null if none waits.
  const volatile int64_t* mark = nullptr;
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

// How a stored call runs: its plan, and the tensors that the plan reads.
struct Route {
  std::shared_ptr<Plan> plan;
  // The tensors whose layout the kernels cannot read, and the strides of their copies.
  Copies copies;
  uint8_t used = 0xff;  // bit i: whether the plan reads tensor i
};

template <typename T>
inline T attribute(py::handle object, const char* name) {
  return object.attr(name).cast<T>();
}

// Needs the GIL.
inline std::shared_ptr<Program> program_of(py::handle python) {
  auto program = std::make_shared<Program>();
  program->copies = attribute<Copies>(python, "copies");
  program->counts = attribute<bool>(python, "counts");
  program->empties = attribute<std::vector<Layout>>(python, "empties");
  for (py::handle step : python.attr("steps")) {
    program->steps.push_back({step.attr("launch"),
                              attribute<std::vector<uint8_t>>(step, "slots")});
  }
  program->results = attribute<std::vector<Result>>(python, "results");
  program->saved = attribute<std::vector<uint8_t>>(python, "saved");
  program->updates = attribute<std::vector<uint8_t>>(python, "updates");
  program->scratch = attribute<std::pair<int64_t, int64_t>>(python, "scratch");
  return program;
}

inline std::shared_ptr<Plan> plan_of(py::handle python) {
  auto plan = std::make_shared<Plan>();
  plan->python = py::reinterpret_borrow<py::object>(python);
  plan->device = attribute<at::Device>(python, "device");
  plan->accumulator = attribute<at::ScalarType>(python, "acc");
  plan->has_total = attribute<bool>(python, "has_total");
  plan->is_recomputable = attribute<bool>(python, "is_recomputable");
  py::object peers = python.attr("peers");
  if (!peers.is_none()) {
    plan->mark = reinterpret_cast<const int64_t*>(attribute<uintptr_t>(peers, "mark"));
    plan->turn = reinterpret_cast<const int64_t*>(attribute<uintptr_t>(peers, "turn"));
  }
  plan->saved_slots = attribute<std::vector<uint8_t>>(python, "saved_slots");
  return plan;
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
    slots[kCounters] = at::zeros({program.scratch.first}, options.dtype(at::kLong));
    slots[kPartial] = at::empty({program.scratch.second}, options.dtype(plan.accumulator));
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
  slots[kPartial] = attribute<Tensor>(found[1], "partial");
  slots[kCounters] = attribute<Tensor>(found[1], "counters");
  if (!plan.device.is_cuda()) return;
  std::lock_guard<std::mutex> lock(plan.mutex);
  program.kept_partial = slots[kPartial];
  program.kept_counters = slots[kCounters];
}

// The compiled kernel of a step; null if it cannot be launched without Python.
inline std::shared_ptr<const Compiled> compiled_of(const Step& step) {
  bool has_driver = driver::launch && driver::launch_cooperative && driver::param_info &&
                    driver::current_stream;
  if (!has_driver || step.slots.size() > Compiled::kMostTensors) return nullptr;
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
    compiled->parameters.push_back({tensor, value});
    if (driver::param_info(compiled->function, count++, &offset, &size) != 0 || size != bytes) {
      return nullptr;
    }
  }
  // Any further parameters are pointers to scratch memory, which these kernels do not use.
  while (driver::param_info(compiled->function, count++, &offset, &size) == 0) {
    if (size != sizeof(void*)) return nullptr;
    compiled->parameters.push_back({-1, 0});
  }
  return compiled->parameters.size() > Compiled::kMostParameters ? nullptr : compiled;
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
      (*compiled)(plan.device, stream, pointers);
      return;
    }
  }
  py::gil_scoped_acquire gil;
  py::list tensors;
  for (uint8_t slot : step.slots) tensors.append(slots[slot]);
  step.launch(reinterpret_cast<uintptr_t>(stream), *tensors);
  if (plan.device.is_cuda() && compiled == nullptr) {
    std::atomic_store(&step.compiled, compiled_of(step));
  }
}

// Have kernels that wait for other processes run one after another; an error if a wait has ended.
inline void take_turn(const Plan& plan) {
  auto stream = reinterpret_cast<int64_t>(stream_of(plan));
  if (*plan.mark == 0 && *plan.turn == stream) return;
  py::gil_scoped_acquire gil;
  plan.python.attr("peers").attr("take_turn")(stream);
}

inline void run(Plan& plan, Program& program, Slots& slots) {
  if (plan.mark != nullptr) take_turn(plan);
  copy_tensors(program.copies, slots);
  if (program.counts && slots[kTracked].defined()) slots[kTracked].add_(1);
  // Redispatched: choosing the device's kernel by its key takes half as long as by the options.
  c10::DispatchKeySet key(plan.device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  for (const auto& [slot, sizes, strides, dtype] : program.empties) {
    slots[slot] = at::_ops::empty_strided::redispatch(
        key, c10::fromIntArrayRefKnownNonNegative(sizes),
        c10::fromIntArrayRefKnownNonNegative(strides), dtype, {}, plan.device, {});
  }
  if (program.steps.empty()) return;
  void* stream = stream_of(plan);
  find_workspace(plan, program, stream, slots);
  for (auto& step : program.steps) launch(plan, step, stream, slots);
}

inline Tensor result_of(const Result& result, const Slots& slots) {
  const auto& [slot, dtype] = result;
  const Tensor& t = slots[slot];
  return t.defined() && dtype ? t.to(*dtype) : t;
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
