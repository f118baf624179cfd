// Memory: a device's is the host's, with the device's limit; copies from and to pinned memory are done later by a DMA
// thread, so that code that does not wait for them computes with the wrong numbers, as on a GPU.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

#include "sim.h"

enum Kind { DEVICE, PINNED };
struct Block {
  size_t bytes;
  int device;
  Kind kind;
};
static std::mutex mutex;
using Guard = std::lock_guard<std::mutex>;
static std::map<uintptr_t, Block> blocks;
static size_t used[MAX_DEVICES];
API size_t cudasim_used(int device) { Guard guard(mutex); return used[device]; }

static Block* find_block(const void* pointer) {
  auto it = blocks.upper_bound((uintptr_t)pointer);
  if (it == blocks.begin()) return nullptr;
  --it;
  return (uintptr_t)pointer < it->first + it->second.bytes ? &it->second : nullptr;
}
static bool is_kind(const Block* block, Kind kind) { return block && block->kind == kind; }

static cudaError_t allocate(void** pointer, size_t bytes, Kind kind) {
  size_t rounded = (bytes + 4095) & ~(size_t)4095;
  Guard guard(mutex);
  if (kind == DEVICE && used[current_device] + rounded > device_bytes()) return fail(cudaErrorMemoryAllocation);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | (kind == DEVICE ? MAP_NORESERVE : 0);
  void* memory = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  blocks[(uintptr_t)memory] = {rounded, current_device, kind};
  if (kind == DEVICE) used[current_device] += rounded;
  *pointer = memory;
  counters[kind == DEVICE ? MALLOC : HOST_ALLOC]++;
  return cudaSuccess;
}
API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  RETURN_IF_BROKEN;
  return allocate(pointer, bytes, DEVICE);
}
API cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  Guard guard(mutex);
  auto it = blocks.find((uintptr_t)pointer);
  if (it == blocks.end()) return fail(cudaErrorInvalidValue);
  if (it->second.kind == DEVICE) used[it->second.device] -= it->second.bytes;
  munmap(pointer, it->second.bytes);
  blocks.erase(it);
  return cudaSuccess;
}
API cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) { return allocate(pointer, bytes, PINNED); }
API cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return allocate(pointer, bytes, PINNED); }
API cudaError_t cudaFreeHost(void* pointer) { return cudaFree(pointer); }
API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  Guard guard(mutex);
  blocks[(uintptr_t)pointer] = {bytes, current_device, PINNED};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* pointer) { Guard guard(mutex); blocks.erase((uintptr_t)pointer); return cudaSuccess; }
API cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) { *device = host; return cudaSuccess; }
API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  RETURN_IF_BROKEN;
  *total = device_bytes();
  *free_bytes = *total - cudasim_used(current_device);
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* out, const void* pointer) {
  memset(out, 0, sizeof *out);
  Guard guard(mutex);
  Block* block = find_block(pointer);
  out->type = !block ? cudaMemoryTypeUnregistered : block->kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  out->device = block ? block->device : -1;
  out->devicePointer = block ? (void*)pointer : nullptr;
  out->hostPointer = (void*)pointer;
  return cudaSuccess;
}

// ---- copies ---------------------------------------------------------------------------------------------------------
struct Copy {
  Op* op;
  Ops after;
  void* to;
  const void* from;
  size_t bytes;
  bool to_device;
};
static std::deque<Copy> queue;
static std::mutex queue_mutex;
static std::condition_variable queue_filled;

static void run_dma() {
  long to_host_us = read_number("CUDASIM_DMA_US", 3000), to_device_us = read_number("CUDASIM_TO_DEVICE_US", to_host_us);
  for (;;) {
    std::unique_lock<std::mutex> lock(queue_mutex);
    queue_filled.wait(lock, [] { return !queue.empty(); });
    Copy copy = queue.front();
    queue.pop_front();
    lock.unlock();
    wait_for(copy.after);
    usleep(copy.to_device ? to_device_us : to_host_us);
    memcpy(copy.to, copy.from, copy.bytes);
    copy.op->done = true;
  }
}
static void copy_later(const Copy& copy) {
  static pid_t owner = 0;  // a fork has no threads
  Guard guard(queue_mutex);
  if (owner != getpid()) std::thread(run_dma).detach();
  owner = getpid();
  queue.push_back(copy);
  queue_filled.notify_one();
}
static bool is_on_device(const void* pointer) {
  Guard guard(mutex);
  return is_kind(find_block(pointer), DEVICE);
}
static bool is_later(const void* to, const void* from) {
  Guard guard(mutex);
  Block *a = find_block(to), *b = find_block(from);
  bool on_device = is_kind(a, DEVICE) && is_kind(b, DEVICE), pinned = is_kind(a, PINNED) || is_kind(b, PINNED);
  counters[on_device ? COPY_ON_DEVICE : pinned ? COPY_PINNED : COPY_PAGEABLE]++;
  return pinned && (is_kind(a, DEVICE) || is_kind(b, DEVICE));
}
static cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream, bool async) {
  if (!bytes) return cudaSuccess;
  Ops after = pending(stream);
  if (is_later(to, from) && async) {
    Op* op = new Op();
    cudasim_stream_add(stream, op);
    copy_later({op, after, to, from, bytes, is_on_device(to)});
  } else {
    wait_for(after);
    memcpy(to, from, bytes);
  }
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind) {
  RETURN_IF_BROKEN;
  counters[SYNC_COPY]++;
  return copy(to, from, bytes, 0, false);
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind, cudaStream_t stream) {
  RETURN_IF_BROKEN;
  return copy(to, from, bytes, stream, true);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  RETURN_IF_BROKEN;
  return copy(to, from, bytes, stream, true);
}
API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  RETURN_IF_BROKEN;
  cudasim_stream_block(stream);
  memset(pointer, value, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* pointer, int value, size_t bytes) { return cudaMemsetAsync(pointer, value, bytes, 0); }
