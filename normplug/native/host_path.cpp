// The host path of normplug's kernels: what a call of a norm does between Python and the GPU.
//
// A plan of Python (`normplug._ops.plans`) describes its work as programs: what to allocate, which
// compiled kernels to launch with which tensors, what to save. This file carries programs out
// without Python, and makes the autograd node. It knows no norm by name. Whatever it has not seen
// before it asks Python for, once: a plan's programs, a kernel's first launch, second derivatives.
//
// No header of CUDA is needed. The driver's functions are looked up when the file is loaded.

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
#define NORMPLUG_NODE_CREATION_HOOKS
#endif

#include <ATen/TracerMode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>

#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// As in `normplug._ops.program.SLOTS`; checked when the module is loaded.
constexpr size_t kTensors = 8, kInputs = 5, kSlots = 24, kNothing = kSlots - 1;
constexpr size_t kTracked = 7, kDy = 14, kDtotal = 15, kPartial = 21, kCounters = 22;
using Slots = std::array<Tensor, kSlots>;

[[noreturn]] void throw_python() {
  python_error error;
  error.persist();
  throw std::move(error);
}

// A new reference, or the Python error as an exception.
py::object checked(PyObject* object) {
  if (object == nullptr) throw_python();
  return py::reinterpret_steal<py::object>(object);
}

// --- The driver ---

namespace driver {

using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       void*, void**, void**);
using LaunchCooperative = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                  unsigned, void*, void**);
using ParamInfo = int (*)(void*, size_t, size_t*, size_t*);
using GetDevice = int (*)(int*, int);
using RetainContext = int (*)(void**, int);
using SetContext = int (*)(void*);
using CurrentStream = int (*)(int32_t, void**);

Launch launch = nullptr;
LaunchCooperative launch_cooperative = nullptr;
ParamInfo param_info = nullptr;
GetDevice get_device = nullptr;
RetainContext retain_context = nullptr;
SetContext set_context = nullptr;
CurrentStream current_stream = nullptr;  // of torch

template <typename F>
void find(void* library, const char* name, F& function) {
  function = library == nullptr ? nullptr : reinterpret_cast<F>(dlsym(library, name));
}

void load() {
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

bool complete() {
  return launch && launch_cooperative && param_info && get_device && retain_context &&
         set_context && current_stream;
}

// A thread that has called the driver's functions only through this file has no context yet.
bool make_context(int index) {
  int device = 0;
  void* context = nullptr;
  return get_device(&device, index) == 0 && retain_context(&context, device) == 0 &&
         set_context(context) == 0;
}

}  // namespace driver

// --- Programs ---

// A compiled kernel, with the values of its parameters.
struct Compiled {
  struct Parameter {
    int tensor;      // the place among the launch's tensors, or -1
    uint64_t value;  // the bits of a number
  };
  static constexpr int kInvalidContext = 201;

  void* function;
  unsigned grid, threads, shared;
  bool cooperative;
  std::vector<Parameter> parameters;

  void operator()(int device, void* stream, const void* const* pointers) const {
    constexpr size_t most = 64;
    uint64_t values[most];
    void* arguments[most];
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

struct Step {
  py::object launch;  // Python's
  std::vector<uint8_t> places;
  std::shared_ptr<const Compiled> compiled;  // once Python has launched it
};

struct Layout {
  size_t place;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

struct Result {
  size_t place;
  std::optional<at::ScalarType> dtype;
};

struct Program {
  struct Copy {
    size_t place;
    std::vector<int64_t> strides;
  };
  std::vector<Copy> copies;
  bool counts;
  std::vector<Layout> empties;
  std::vector<Step> steps;
  std::vector<Result> results;
  std::vector<uint8_t> saved, moves;
  py::object scratch;
  int64_t counters, room;
  Tensor kept_partial, kept_counters;  // the default stream's
};

struct Plan {
  py::object python;
  at::Device device = at::kCPU;
  at::ScalarType accumulator;
  bool has_total, is_recomputable;
  std::vector<uint8_t> saved_places;
  std::mutex mutex;  // of the programs
  std::unordered_map<std::string, std::shared_ptr<Program>> programs;

  ~Plan() {
    py::gil_scoped_acquire gil;
    programs.clear();
    python = py::object();
  }
};

template <typename T>
T attribute(py::handle object, const char* name) {
  return object.attr(name).cast<T>();
}

at::ScalarType dtype_of(py::handle dtype) {
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

std::optional<at::ScalarType> maybe_dtype(py::handle dtype) {
  if (dtype.is_none()) return std::nullopt;
  return dtype_of(dtype);
}

// Under the GIL.
std::shared_ptr<Program> program_of(py::handle python) {
  auto program = std::make_shared<Program>();
  for (py::handle copy : python.attr("copies")) {
    auto pair = copy.cast<std::pair<size_t, std::vector<int64_t>>>();
    program->copies.push_back({pair.first, std::move(pair.second)});
  }
  program->counts = attribute<bool>(python, "counts");
  for (py::handle empty : python.attr("empties")) {
    program->empties.push_back({attribute<size_t>(empty, "place"),
                                attribute<std::vector<int64_t>>(empty, "shape"),
                                attribute<std::vector<int64_t>>(empty, "stride"),
                                dtype_of(empty.attr("dtype"))});
  }
  for (py::handle step : python.attr("steps")) {
    program->steps.push_back({py::reinterpret_borrow<py::object>(step.attr("launch")),
                              attribute<std::vector<uint8_t>>(step, "places")});
  }
  for (py::handle result : python.attr("results")) {
    program->results.push_back({attribute<size_t>(result, "place"),
                                maybe_dtype(result.attr("dtype"))});
  }
  program->saved = attribute<std::vector<uint8_t>>(python, "saved");
  program->moves = attribute<std::vector<uint8_t>>(python, "moves");
  program->scratch = python.attr("scratch");
  std::tie(program->counters, program->room) =
      program->scratch.cast<std::pair<int64_t, int64_t>>();
  return program;
}

std::shared_ptr<Plan> plan_of(py::handle python) {
  auto plan = std::make_shared<Plan>();
  plan->python = py::reinterpret_borrow<py::object>(python);
  plan->device = reinterpret_cast<THPDevice*>(python.attr("device").ptr())->device;
  plan->accumulator = dtype_of(python.attr("acc"));
  plan->has_total = attribute<bool>(python, "has_total");
  plan->is_recomputable = attribute<bool>(python, "is_recomputable");
  plan->saved_places = attribute<std::vector<uint8_t>>(python, "saved_places");
  return plan;
}

py::object wrapped(const Tensor& t) {
  if (!t.defined()) return py::none();
  return checked(THPVariable_Wrap(t));
}

Tensor unwrapped(py::handle object) {
  return object.is_none() ? Tensor() : THPVariable_Unpack(object.ptr());
}

// --- Carrying out a program ---

void* stream_of(const Plan& plan) {
  void* stream = nullptr;
  if (plan.device.is_cuda()) {
    TORCH_CHECK(driver::current_stream(plan.device.index(), &stream) == 0,
                "normplug: torch has no current stream");
  }
  return stream;
}

// Counters and partial results: kept for the default stream, fresh for every other.
void find_workspace(Plan& plan, Program& program, void* stream, Slots& slots) {
  if (stream != nullptr) {
    auto options = at::TensorOptions().device(plan.device);
    slots[kCounters] = at::zeros({program.counters}, options.dtype(at::kLong));
    slots[kPartial] = at::empty({program.room}, options.dtype(plan.accumulator));
    return;
  }
  if (!program.kept_counters.defined()) {
    py::gil_scoped_acquire gil;
    py::tuple found = plan.python.attr("workspace")(program.scratch);
    Tensor partial = unwrapped(found[1].attr("partial"));
    Tensor counters = unwrapped(found[1].attr("counters"));
    if (!plan.device.is_cuda()) {
      slots[kPartial] = partial;
      slots[kCounters] = counters;
      return;
    }
    std::lock_guard<std::mutex> lock(plan.mutex);
    program.kept_partial = partial;
    program.kept_counters = counters;
  }
  slots[kPartial] = program.kept_partial;
  slots[kCounters] = program.kept_counters;
}

// What Python knows of a launch's compiled kernel; null where this file cannot launch it.
std::shared_ptr<const Compiled> compiled_of(py::handle launch) {
  if (!driver::complete()) return nullptr;
  py::object found = launch.attr("compiled")();
  if (found.is_none()) return nullptr;
  auto compiled = std::make_shared<Compiled>();
  compiled->function = reinterpret_cast<void*>(attribute<uintptr_t>(found, "function"));
  compiled->grid = attribute<unsigned>(found, "grid");
  compiled->threads = attribute<unsigned>(found, "threads");
  compiled->shared = attribute<unsigned>(found, "shared");
  compiled->cooperative = attribute<bool>(found, "cooperative");
  // The kernel itself says how many parameters it has, and how large: Triton's versions differ.
  size_t offset = 0, size = 0, count = 0;
  for (py::handle each : found.attr("parameters")) {
    auto [tensor, value, bytes] = each.cast<std::tuple<int, uint64_t, size_t>>();
    compiled->parameters.push_back({tensor, value});
    if (driver::param_info(compiled->function, count++, &offset, &size) != 0 || size != bytes) {
      return nullptr;
    }
  }
  // What follows are pointers to scratch memory, of which these kernels use none.
  while (driver::param_info(compiled->function, count, &offset, &size) == 0) {
    if (size != sizeof(void*) || count > 60) return nullptr;
    compiled->parameters.push_back({-1, 0});
    ++count;
  }
  return compiled;
}

void launch_by_python(const Plan& plan, Step& step, void* stream, const Slots& slots) {
  py::gil_scoped_acquire gil;
  py::tuple arguments(step.places.size() + 1);
  arguments[0] = py::int_(reinterpret_cast<uintptr_t>(stream));
  for (size_t i = 0; i < step.places.size(); ++i) arguments[i + 1] = wrapped(slots[step.places[i]]);
  checked(PyObject_CallObject(step.launch.ptr(), arguments.ptr()));
  if (plan.device.is_cuda() && std::atomic_load(&step.compiled) == nullptr) {
    std::atomic_store(&step.compiled, compiled_of(step.launch));
  }
}

void launch(const Plan& plan, Step& step, void* stream, const Slots& slots) {
  auto compiled = std::atomic_load(&step.compiled);
  if (compiled != nullptr) {
    const void* pointers[32];
    uintptr_t bits = 0;
    for (size_t i = 0; i < step.places.size(); ++i) {
      pointers[i] = slots[step.places[i]].const_data_ptr();
      bits |= reinterpret_cast<uintptr_t>(pointers[i]);
    }
    if ((bits & 15) == 0) {  // as the kernel was compiled for
      (*compiled)(plan.device.index(), stream, pointers);
      return;
    }
  }
  launch_by_python(plan, step, stream, slots);
}

void run(Plan& plan, Program& program, Slots& slots) {
  for (const auto& [place, strides] : program.copies) {
    Tensor& t = slots[place];
    Tensor copy = at::empty_strided(t.sizes(), strides, t.options());
    copy.copy_(t);
    t = std::move(copy);
  }
  if (program.counts && slots[kTracked].defined()) slots[kTracked].add_(1);
  for (const auto& empty : program.empties) {
    slots[empty.place] = at::empty_strided(
        empty.sizes, empty.strides, at::TensorOptions().device(plan.device).dtype(empty.dtype));
  }
  if (program.steps.empty()) return;
  void* stream = stream_of(plan);
  find_workspace(plan, program, stream, slots);
  for (auto& step : program.steps) launch(plan, step, stream, slots);
}

Tensor result_of(const Result& result, const Slots& slots) {
  const Tensor& t = slots[result.place];
  return t.defined() && result.dtype ? t.to(*result.dtype) : t;
}

// The program of a key; made by `ask`, under the GIL, when the key is first seen.
template <typename Ask>
std::shared_ptr<Program> find_program(Plan& plan, const std::string& key, Ask ask) {
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

// --- Autograd ---

using NodePtr = decltype(torch::autograd::Edge::function);

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

  // What the forward saved, in the order of `Plan`.
  variable_list unpacked() {
    std::lock_guard<std::mutex> lock(mutex);
    variable_list found;
    found.reserve(saved.size());
    for (auto& each : saved) found.push_back(each.unpack(getptr()));
    return found;
  }

  variable_list apply(variable_list&& grads) override;
  Tensor recomputed();
};

py::list wrapped_list(const variable_list& tensors) {
  py::list list;
  for (const auto& each : tensors) list.append(wrapped(each));
  return list;
}

Slots slots_of(const Plan& plan, const variable_list& saved) {
  Slots slots;
  for (size_t i = 0; i < saved.size(); ++i) slots[plan.saved_places[i]] = saved[i];
  return slots;
}

void append(std::string& key, const Tensor& t) {
  int64_t rank = t.defined() ? t.dim() : -1;
  key.append(reinterpret_cast<const char*>(&rank), sizeof(rank));
  if (t.defined()) {
    auto strides = t.strides();
    key.append(reinterpret_cast<const char*>(strides.data()), strides.size() * sizeof(int64_t));
  }
}

variable_list NormBackward::apply(variable_list&& grads) {
  at::DeviceGuard device(plan->device);
  variable_list found = unpacked();
  Tensor dy = grads[0], dtotal = total_has_gradient && grads.size() > 1 ? grads[1] : Tensor();
  if (!plan->has_total && !dy.defined()) dy = input_metadata(0).zeros_like();
  std::array<bool, kInputs> needs;
  for (size_t i = 0; i < kInputs; ++i) needs[i] = next_edge(i).is_valid();
  auto needs_tuple = [&] {
    py::tuple tuple(kInputs);
    for (size_t i = 0; i < kInputs; ++i) tuple[i] = py::bool_(needs[i]);
    return tuple;
  };
  if (at::GradMode::is_enabled()) {
    py::gil_scoped_acquire gil;
    py::object gradients = plan->python.attr("composed_backward")(
        wrapped_list(found), wrapped(dy), wrapped(dtotal), needs_tuple());
    variable_list list;
    for (py::handle each : gradients) list.push_back(unwrapped(each));
    return list;
  }
  std::string key = "backward";
  for (bool need : needs) key.push_back(need ? '1' : '0');
  append(key, dy);
  append(key, dtotal);
  auto program = find_program(*plan, key, [&] {
    return plan->python.attr("backward_of")(wrapped_list(found), wrapped(dy), wrapped(dtotal),
                                            needs_tuple());
  });
  Slots slots = slots_of(*plan, found);
  slots[kDy] = dy;
  slots[kDtotal] = dtotal;
  run(*plan, *program, slots);
  variable_list gradients;
  gradients.reserve(kInputs);
  for (const auto& result : program->results) gradients.push_back(result_of(result, slots));
  return gradients;
}

Tensor NormBackward::recomputed() {
  at::DeviceGuard device(plan->device);
  at::AutoGradMode no_grad(false);
  variable_list found = unpacked();
  auto program = find_program(*plan, "recompute", [&] {
    return plan->python.attr("recompute_of")(wrapped_list(found));
  });
  Slots slots = slots_of(*plan, found);
  run(*plan, *program, slots);
  return result_of(program->results[0], slots);
}

template <typename T>
auto make_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<T>();
  } else {
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  }
}

// The kernels write these without autograd's knowledge.
void raise_versions(const Program& program, const Slots& slots) {
  for (uint8_t place : program.moves) {
    const Tensor& t = slots[place];
    if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  }
}

void make_history(const std::shared_ptr<Plan>& plan, const Program& program, const Slots& slots,
                  const std::array<Tensor, kInputs>& inputs) {
  auto node = make_node<NormBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(inputs[0], inputs[1], inputs[2],
                                                           inputs[3], inputs[4]));
  node->plan = plan;
  const Tensor& y = slots[program.results[0].place];
  torch::autograd::set_history(y, node);
  if (plan->has_total) {
    node->total_has_gradient = node->next_edge(0).is_valid() || node->next_edge(1).is_valid();
    if (node->total_has_gradient) {
      torch::autograd::set_history(slots[program.results[1].place], node);
    }
  }
  node->saved.reserve(program.saved.size());
  for (uint8_t place : program.saved) {
    const Tensor& t = slots[place];
    if (!t.defined()) {
      node->saved.emplace_back();
      continue;
    }
    bool is_output = node->total_has_gradient && place == program.results[1].place;
    node->saved.emplace_back(t, is_output);
  }
#ifdef NORMPLUG_NODE_CREATION_HOOKS
  torch::autograd::fire_node_creation_hooks(node);
#endif
}

// Without the GIL.
std::shared_ptr<Program> carry_out(const std::shared_ptr<Plan>& plan, Slots& slots) {
  at::DeviceGuard device(plan->device);
  std::array<Tensor, kInputs> inputs;
  for (size_t i = 0; i < kInputs; ++i) inputs[i] = slots[i];
  bool keep = torch::autograd::compute_requires_grad(inputs[0], inputs[1], inputs[2], inputs[3],
                                                     inputs[4]);
  auto program = find_program(*plan, keep ? "1" : "0", [&] {
    py::tuple t(kTensors);
    for (size_t i = 0; i < kTensors; ++i) t[i] = wrapped(slots[i]);
    return plan->python.attr("forward_of")(t, keep);
  });
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    run(*plan, *program, slots);
  }
  raise_versions(*program, slots);
  if (keep) make_history(plan, *program, slots, inputs);
  return program;
}

PyObject* call_plan(const std::shared_ptr<Plan>& plan, Slots& slots) {
  std::shared_ptr<Program> program;
  {
    py::gil_scoped_release no_gil;
    program = carry_out(plan, slots);
  }
  const auto& results = program->results;
  if (!plan->has_total) return THPVariable_Wrap(slots[results[0].place]);
  py::object y = wrapped(slots[results[0].place]), total = wrapped(slots[results[1].place]);
  return py::make_tuple(y, total).release().ptr();
}

// --- The cache of calls ---

using Signature = c10::SmallVector<int64_t, 64>;

struct Entry {
  Signature signature;
  py::object spec, backend;
  std::shared_ptr<Plan> plan;
};

constexpr size_t kMost = 8192;
std::unordered_map<size_t, std::vector<Entry>>& entries() {
  static auto* kept = new std::unordered_map<size_t, std::vector<Entry>>();
  return *kept;
}

// Whether something sees torch's operations, and would miss a kernel: see `_torch.interposed`.
bool interposed() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         c10::impl::tls_is_dispatch_key_included(at::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr ||
         at::tracer::impl::is_dispatch_enabled();
}

bool is_plain(const Tensor& t) {
  constexpr auto strange = at::DispatchKeySet(
      {at::DispatchKey::Python, at::DispatchKey::FuncTorchBatched,
       at::DispatchKey::FuncTorchGradWrapper, at::DispatchKey::Functionalize,
       at::DispatchKey::Negative, at::DispatchKey::Conjugate, at::DispatchKey::ZeroTensor});
  return t.layout() == at::kStrided && !t.is_nested() && !t.key_set().has_any(strange);
}

// The tensors of a call, and what the plan of a call depends on of them; false where one is not
// plainly a tensor.
bool read(PyObject* t, Slots& slots, Signature& signature) {
  if (!PyTuple_Check(t) || PyTuple_GET_SIZE(t) != kTensors) return false;
  for (size_t i = 0; i < kTensors; ++i) {
    PyObject* object = PyTuple_GET_ITEM(t, i);
    if (object == Py_None) {
      signature.push_back(-1);
      continue;
    }
    if (!THPVariable_CheckExact(object)) return false;
    const Tensor& tensor = THPVariable_Unpack(object);
    if (!is_plain(tensor)) return false;
    auto device = tensor.device();
    signature.push_back(static_cast<int64_t>(tensor.scalar_type()) |
                        (static_cast<int64_t>(device.type()) << 8) |
                        ((static_cast<int64_t>(device.index()) & 0xff) << 16) |
                        (tensor.dim() << 24));
    auto sizes = tensor.sizes(), strides = tensor.strides();
    signature.append(sizes.begin(), sizes.end());
    signature.append(strides.begin(), strides.end());
    slots[i] = tensor;
  }
  return true;
}

// -1 with a Python error where the spec cannot be hashed.
Py_hash_t hash_of(PyObject* spec, const Signature& signature) {
  Py_hash_t start = PyObject_Hash(spec);
  if (start == -1) return -1;
  auto hash = static_cast<uint64_t>(start);
  for (int64_t each : signature) {
    hash = (hash ^ static_cast<uint64_t>(each)) * 0x9E3779B97F4A7C15ull;
    hash ^= hash >> 29;
  }
  return static_cast<Py_hash_t>(hash >> 1);
}

bool same(PyObject* a, PyObject* b) {
  if (a == b) return true;
  int equal = PyObject_RichCompareBool(a, b, Py_EQ);
  if (equal < 0) throw_python();
  return equal == 1;
}

// --- What Python calls ---

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

// call(spec, backend, t): the result, or None where the call is not known.
PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 3, "normplug: call takes a spec, a backend and tensors");
  Slots slots;
  Signature signature;
  if (interposed() || !read(args[2], slots, signature)) Py_RETURN_NONE;
  Py_hash_t hash = hash_of(args[0], signature);
  if (hash == -1) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  auto found = entries().find(static_cast<size_t>(hash));
  if (found == entries().end()) Py_RETURN_NONE;
  for (const Entry& entry : found->second) {
    if (entry.signature == signature && same(entry.backend.ptr(), args[1]) &&
        same(entry.spec.ptr(), args[0])) {
      auto plan = entry.plan;  // another thread may clear the cache
      return call_plan(plan, slots);
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// keep(spec, backend, t, plan): what `call` finds from now on.
PyObject* keep(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 4, "normplug: keep takes a spec, a backend, tensors and a plan");
  Slots slots;
  Signature signature;
  if (interposed() || !read(args[2], slots, signature)) Py_RETURN_NONE;
  Py_hash_t hash = hash_of(args[0], signature);
  if (hash == -1) throw_python();
  if (entries().size() >= kMost) entries().clear();
  entries()[static_cast<size_t>(hash)].push_back(
      {std::move(signature), py::reinterpret_borrow<py::object>(args[0]),
       py::reinterpret_borrow<py::object>(args[1]), plan_in(args[3])});
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
  entries().clear();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// A node, for as long as Python may ask it to recompute.
constexpr const char* kNodeName = "normplug.Node";

// node(y): the node of a norm that can recompute y, its first result; else None.
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

// recompute(node): y again.
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

// plan_of(y): the Python plan of y's node; None where it is no node of this file.
PyObject* plan_of_node(PyObject*, PyObject* y) {
  HANDLE_TH_ERRORS
  NodePtr node = torch::autograd::impl::gradient_edge(THPVariable_Unpack(y)).function;
  auto* norm = dynamic_cast<NormBackward*>(node.get());
  if (norm == nullptr) Py_RETURN_NONE;
  return py::object(norm->plan->python).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"plan", make_plan, METH_O, "Make the plan of a Python plan."},
    {"call", reinterpret_cast<PyCFunction>(call), METH_FASTCALL, "Carry out a known call."},
    {"keep", reinterpret_cast<PyCFunction>(keep), METH_FASTCALL, "Make a call known."},
    {"run", reinterpret_cast<PyCFunction>(run_plan), METH_FASTCALL, "Carry out a plan."},
    {"forget", forget, METH_NOARGS, "Forget every call."},
    {"node", recomputable_node, METH_O, "The node that can recompute a tensor, or None."},
    {"recompute", recompute, METH_O, "Recompute the result of a node."},
    {"plan_of", plan_of_node, METH_O, "The plan of a tensor's node, or None."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "normplug_host_path", nullptr, -1, methods};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_normplug_host_path() {
  HANDLE_TH_ERRORS
  // The names that Python's programs count by.
  py::tuple slots = py::module_::import("normplug._ops.program").attr("SLOTS");
  const std::pair<size_t, const char*> known[] = {
      {kTracked, "tracked"}, {kDy, "dy"},           {kDtotal, "dtotal"},
      {kPartial, "partial"}, {kCounters, "counters"}, {kNothing, "nothing"}};
  TORCH_CHECK_VALUE(slots.size() == kSlots, "normplug: Python has ", slots.size(), " slots");
  for (const auto& [place, name] : known) {
    TORCH_CHECK_VALUE(slots[place].cast<std::string>() == name, "normplug: slot ", place, " is ",
                      slots[place].cast<std::string>());
  }
  driver::load();
  return PyModule_Create(&module);
  END_HANDLE_TH_ERRORS
}
