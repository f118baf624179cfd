// libnvidia-ml.so.1: what train/records/stage_meter.py asks of it. As the real one, it knows all GPUs of the node whatever
// CUDA_VISIBLE_DEVICES says, and finds one by its whole UUID only.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

#define API extern "C" __attribute__((visibility("default")))
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6 };
struct Memory { unsigned long long total, free, used; };
struct Rates { unsigned gpu, memory; };

template <class Function> static Function find(const char* name) { return (Function)dlsym(RTLD_DEFAULT, name); }
static unsigned count() { const char* n = getenv("CUDASIM_DEVICES"); return n ? atoi(n) : 1; }
static void write_uuid(unsigned index, char* out, unsigned room) { find<void (*)(int, char*, int)>("cudasim_uuid")(index, out, room); }
static unsigned index_of(void* device) { return (unsigned)(size_t)device - 1; }

API int nvmlInit_v2() { return SUCCESS; }
API int nvmlInitWithFlags(unsigned) { return SUCCESS; }
API int nvmlShutdown() { return SUCCESS; }
API const char* nvmlErrorString(int error) { return error == NOT_FOUND ? "Not Found" : "simulated NVML error"; }
API int nvmlDeviceGetCount_v2(unsigned* number) { *number = count(); return SUCCESS; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (index >= count()) return INVALID_ARGUMENT;
  *device = (void*)(size_t)(index + 1);
  return SUCCESS;
}
API int nvmlDeviceGetUUID(void* device, char* out, unsigned room) { write_uuid(index_of(device), out, room); return SUCCESS; }
API int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  for (unsigned i = 0; i < count(); i++) {
    char own[64];
    write_uuid(i, own, sizeof own);
    if (!strcmp(own, uuid)) return nvmlDeviceGetHandleByIndex_v2(i, device);
  }
  return NOT_FOUND;
}
API int nvmlDeviceGetMemoryInfo(void* device, Memory* out) {
  // What this process uses, of the device that it sees under the same number.
  *out = {80ull << 30, 0, find<size_t (*)(int)>("cudasim_used")(index_of(device))};
  out->free = out->total - out->used;
  return SUCCESS;
}
API int nvmlDeviceGetUtilizationRates(void*, Rates* out) { *out = {50, 25}; return SUCCESS; }

// What torch looks up when memory runs out, to name who has it: it fails without them, and manages if they say no.
enum { NOT_SUPPORTED = 3 };
API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void**) { return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned*, void*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return NOT_SUPPORTED; }
API int nvmlSystemGetCudaDriverVersion_v2(int*) { return NOT_SUPPORTED; }
