// What the libraries of the make-believe CUDA share.
#pragma once
#include <atomic>
#include <cstdlib>
#include <vector>

#include <cuda_runtime_api.h>

#define API extern "C" __attribute__((visibility("default")))

// Work that ends later: a copy of the DMA engine, a collective. It is never freed: runs are short.
struct Op {
  std::atomic<bool> done{false};
};
using Ops = std::vector<Op*>;

// The order is that of COUNTERS in operators.py.
enum Counter {
  MALLOC, HOST_ALLOC, COPY_ON_DEVICE, COPY_PINNED, COPY_PAGEABLE, SYNC_COPY, SYNC_STREAM, SYNC_EVENT, SYNC_DEVICE,
  STRAY_LAUNCH, NUM_COUNTERS
};
extern std::atomic<long> counters[NUM_COUNTERS];

constexpr int MAX_DEVICES = 64;

inline long read_number(const char* name, long standard) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : standard;
}

// devices.cpp
extern thread_local int current_device;
cudaError_t fail(cudaError_t error);  // remembered for cudaGetLastError
cudaError_t broken();                 // the error that the device is left in (an ECC error, say), or cudaSuccess
int count_devices();
int physical_number(int device);
size_t device_bytes();
#define RETURN_IF_BROKEN \
  if (broken() != cudaSuccess) return broken()

// streams.cpp
Ops pending(cudaStream_t stream);
void wait_for(const Ops& ops);
API void cudasim_stream_add(cudaStream_t stream, Op* op);
API int cudasim_stream_pending(cudaStream_t stream, Op** out, int room);
API void cudasim_stream_block(cudaStream_t stream);
