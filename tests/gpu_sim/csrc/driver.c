// libcuda.so.1: the few calls of the driver that torch makes; the rest answers "not supported".
#include <stdlib.h>

int cuDriverGetVersion(int* version) {
  const char* value = getenv("CUDASIM_DRIVER");
  *version = value ? atoi(value) : 13020;
  return 0;
}
int cuInit(unsigned flags) { return 0; }
int cuCtxGetCurrent(void** context) { *context = (void*)8; return 0; }
int cuCtxSetCurrent(void* context) { return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { *value = 0; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) { *flags = 0; *active = 1; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)8; return 0; }
int cuGetErrorString(int error, const char** text) { *text = "simulated driver error"; return 0; }

#define NOT_SUPPORTED(name) int name() { return 801; }
NOT_SUPPORTED(cuFuncGetAttribute)
NOT_SUPPORTED(cuFuncSetAttribute)
NOT_SUPPORTED(cuFuncSetCacheConfig)
NOT_SUPPORTED(cuGetExportTable)
NOT_SUPPORTED(cuGetProcAddress_v2)
NOT_SUPPORTED(cuLaunchCooperativeKernel)
NOT_SUPPORTED(cuLaunchKernel)
NOT_SUPPORTED(cuLinkAddData_v2)
NOT_SUPPORTED(cuLinkComplete)
NOT_SUPPORTED(cuLinkCreate_v2)
NOT_SUPPORTED(cuModuleGetFunction)
NOT_SUPPORTED(cuModuleLoad)
NOT_SUPPORTED(cuModuleLoadData)
NOT_SUPPORTED(cuModuleLoadDataEx)
NOT_SUPPORTED(cuModuleUnload)
NOT_SUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOT_SUPPORTED(cuPointerGetAttribute)
NOT_SUPPORTED(cuTensorMapEncodeTiled)
