// Functions of the CUDA driver, and torch's current stream; looked up when the module is loaded.
#pragma once

#include <c10/util/Exception.h>

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace normplug {

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

}  // namespace normplug
