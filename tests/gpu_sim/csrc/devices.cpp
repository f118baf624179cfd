// The devices: how many are seen, what they are called, and the errors that they report.
#include <cstdio>
#include <cstring>
#include <string>

#include "sim.h"

std::atomic<long> counters[NUM_COUNTERS];
thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static std::atomic<int> broken_by{cudaSuccess};

API long cudasim_count(int counter) { return counters[counter]; }

// A story breaks the device: from now on each call returns this error, as after an ECC error.
API void cudasim_break(int error) { broken_by = error; }
cudaError_t broken() { return (cudaError_t)broken_by.load(); }

cudaError_t fail(cudaError_t error) { return last_error = error; }

// A UUID names one GPU in the world: simulated nodes have different ones.
static std::string uuid_of(int number) {
  const char* node = getenv("CUDASIM_NODE");
  unsigned hash = 5381;
  for (const char* c = node ? node : ""; *c; c++) hash = hash * 33 + (unsigned char)*c;
  char text[40];
  snprintf(text, sizeof text, "%08x-%04x-4242-8888-%012x", 0xa0b0c000u + number, hash >> 16, hash & 0xffff);
  return text;
}

API void cudasim_uuid(int number, char* out, int room) { snprintf(out, room, "GPU-%s", uuid_of(number).c_str()); }

static int number_of(const std::string& word, int num_devices) {
  if (!word.empty() && isdigit(word[0])) return atoi(word.c_str());
  for (int i = 0; i < num_devices && word.rfind("GPU-", 0) == 0; i++)
    if (("GPU-" + uuid_of(i)).rfind(word, 0) == 0) return i;
  return -1;
}

// As the real runtime: the list ends at the first entry that is no device.
static std::vector<int> see_devices() {
  std::vector<int> seen;
  int num_devices = (int)read_number("CUDASIM_DEVICES", 1);
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) {
    for (int i = 0; i < num_devices; i++) seen.push_back(i);
    return seen;
  }
  std::string rest(visible);
  while (!rest.empty()) {
    size_t comma = rest.find(',');
    int number = number_of(rest.substr(0, comma), num_devices);
    if (number < 0 || number >= num_devices) break;
    seen.push_back(number);
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
  }
  return seen;
}

static const std::vector<int>& seen() {
  static std::vector<int> devices = see_devices();  // once a process, as the real runtime does
  return devices;
}
int count_devices() { return (int)seen().size(); }
int physical_number(int device) { return device < count_devices() ? seen()[device] : -1; }
size_t device_bytes() { return (size_t)read_number("CUDASIM_MEMORY_MB", 81920) << 20; }
static int capability() { return (int)read_number("CUDASIM_CAPABILITY", 80); }

static const int RUNTIME_VERSION = 13020;
static int driver_version() { return (int)read_number("CUDASIM_DRIVER", RUNTIME_VERSION); }

API cudaError_t cudaGetDeviceCount(int* count) {
  RETURN_IF_BROKEN;
  *count = 0;
  if (driver_version() / 1000 < RUNTIME_VERSION / 1000) return fail(cudaErrorInsufficientDriver);
  *count = count_devices();
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* device) { *device = current_device; return cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= count_devices()) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) { *version = driver_version(); return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { *version = RUNTIME_VERSION; return cudaSuccess; }

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int device) {
  if (device < 0 || device >= count_devices()) return fail(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  const char* name = getenv("CUDASIM_NAME");
  snprintf(p->name, sizeof p->name, "%s", name ? name : "NVIDIA A100-SXM4-80GB (simulated)");
  std::string hex;
  for (char c : uuid_of(physical_number(device))) if (c != '-') hex += c;
  for (int i = 0; i < 16; i++) p->uuid.bytes[i] = (char)strtol(hex.substr(2 * i, 2).c_str(), nullptr, 16);
  p->major = capability() / 10;
  p->minor = capability() % 10;
  p->pciBusID = 0x10 + physical_number(device);
  p->totalGlobalMem = device_bytes();
  p->totalConstMem = 65536;
  p->l2CacheSize = 40 << 20;
  p->memoryBusWidth = 5120;
  p->multiProcessorCount = 108;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 166912;
  p->sharedMemPerMultiprocessor = 167936;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = 1;
  p->streamPrioritiesSupported = p->managedMemory = p->cooperativeLaunch = 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = 108; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int room, int device) {
  snprintf(text, room, "0000:%02x:00.0", 0x10 + physical_number(device));
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return cudaSuccess; }

API cudaError_t cudaGetLastError(void) {
  RETURN_IF_BROKEN;
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError(void) {
  RETURN_IF_BROKEN;
  return last_error;
}
// The words of the real runtime, for what the stories use.
API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorDevicesUnavailable: return "CUDA-capable device(s) is/are busy or unavailable";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    case cudaErrorNvlinkUncorrectable: return "uncorrectable NVLink error detected during the execution";
    case cudaErrorHardwareStackError: return "hardware stack error";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorUnknown: return "unknown error";
    default: return "simulated CUDA error";
  }
}
API const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaErrorSimulated"; }
