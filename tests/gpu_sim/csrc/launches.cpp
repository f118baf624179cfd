// Kernels: operators.py computes them on the host, so none should be launched here; one that is would do nothing, and
// is refused, because numbers would be wrong without a word.
#include <cstdio>
#include <cstring>
#include <dlfcn.h>

#include "sim.h"

static cudaError_t refuse_launch(const char* call) {
  RETURN_IF_BROKEN;
  counters[STRAY_LAUNCH]++;
  fprintf(stderr, "gpu_sim: %s outside the simulated operators (another thread?)\n", call);
  return fail(cudaErrorNotSupported);
}
API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return refuse_launch("cudaLaunchKernel"); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return refuse_launch("cudaLaunchKernelExC"); }
API cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse_launch("cudaLaunchCooperativeKernel");
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return refuse_launch("__cudaLaunchKernel"); }
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) { *kernel = (cudaKernel_t)function; return cudaSuccess; }

API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->binaryVersion = out->ptxVersion = 80;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, enum cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) { *count = 2; return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  *count = 2;
  return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) { *pointer = (void*)symbol; return cudaSuccess; }
API cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
API cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

static int not_supported() { return cudaErrorNotSupported; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 enum cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  void* found = driver ? dlsym(driver, name) : nullptr;
  *function = found ? found : (void*)not_supported;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// What a library with kernels calls when it is loaded.
API void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
static thread_local struct { dim3 grid, block; size_t shared; void* stream; } call;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  call = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = call.grid;
  *block = call.block;
  *shared = call.shared;
  *(void**)stream = call.stream;
  return cudaSuccess;
}
