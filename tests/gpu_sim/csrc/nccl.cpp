// libnccl.so.2: ranks are processes of one machine and collectives go through shared memory, in a thread of the
// communicator, so that the host does not wait for them, as with the real one.
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <functional>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

#include <nccl.h>

#include "sim.h"

static const size_t SLOT_BYTES = 1 << 20;
static const int MAX_RANKS = 64;

struct Shared {  // zeroed by the kernel
  std::atomic<int> arrived, generation;
  std::atomic<bool> is_posted[MAX_RANKS];
  char gpus[MAX_RANKS][64];
};
using Collective = std::function<bool(ncclComm*)>;  // false: aborted
struct Work {
  Op* op;
  Ops after;
  Collective run;
};
struct ncclComm {
  int rank, num_ranks, device;
  Shared* shared;
  char* slots;
  std::deque<Work> queue;
  std::mutex mutex;
  std::condition_variable filled;
  std::atomic<bool> aborted{false};
};

// ---- errors ---------------------------------------------------------------------------------------------------------
static std::mutex error_mutex;
static std::string last_message;
static std::atomic<int> failure{ncclSuccess};  // of this rank's NCCL, asked for by a story

static ncclResult_t refuse(ncclResult_t result, const std::string& message) {
  std::lock_guard<std::mutex> guard(error_mutex);
  last_message = message;
  return result;
}
API void ncclsim_fail(int result, const char* message) {
  refuse((ncclResult_t)result, message);
  failure = result;
}
API const char* ncclGetLastError(ncclComm_t) { return last_message.c_str(); }
API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError: return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    default: return "unknown result code";
  }
}
API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = (ncclResult_t)failure.load();
  return ncclSuccess;
}

// ---- the communicator -----------------------------------------------------------------------------------------------
static bool meet(ncclComm* comm) {
  Shared* shared = comm->shared;
  int generation = shared->generation;
  if (shared->arrived.fetch_add(1) + 1 == comm->num_ranks) {
    shared->arrived = 0;
    shared->generation++;
    return true;
  }
  while (shared->generation == generation) {
    if (comm->aborted) return false;
    usleep(50);
  }
  return true;
}
static char* slot(ncclComm* comm, int rank) { return comm->slots + SLOT_BYTES * rank; }

static void run_collectives(ncclComm* comm) {
  for (;;) {
    std::unique_lock<std::mutex> lock(comm->mutex);
    comm->filled.wait(lock, [&] { return !comm->queue.empty() || comm->aborted; });
    if (comm->aborted) return;
    Work work = comm->queue.front();
    comm->queue.pop_front();
    lock.unlock();
    for (Op* op : work.after)
      while (!op->done) {
        if (comm->aborted) return;
        usleep(50);
      }
    usleep(read_number("NCCLSIM_US", 0));
    if (!work.run(comm)) return;
    work.op->done = true;
  }
}
static bool is_host(const void* pointer) {
  cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, pointer);
  return attributes.type != cudaMemoryTypeDevice;
}
static ncclResult_t submit(ncclComm* comm, cudaStream_t stream, const void* from, const void* to, Collective run) {
  if (failure != ncclSuccess) return (ncclResult_t)failure.load();
  if (is_host(from) || is_host(to)) return refuse(ncclInvalidArgument, "the buffer of a collective is a host pointer");
  Op *op = new Op(), *after[256];
  int count = cudasim_stream_pending(stream, after, 256);
  {
    std::lock_guard<std::mutex> guard(comm->mutex);
    comm->queue.push_back({op, Ops(after, after + count), run});
  }
  cudasim_stream_add(stream, op);
  comm->filled.notify_one();
  return ncclSuccess;
}
static ncclResult_t refuse_double_gpu(ncclComm* comm) {
  for (int a = 0; a < comm->num_ranks; a++)
    for (int b = a + 1; b < comm->num_ranks; b++)
      if (!strcmp(comm->shared->gpus[a], comm->shared->gpus[b])) {
        char message[200];
        snprintf(message, sizeof message, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %s", a, b,
                 comm->shared->gpus[a]);
        return refuse(ncclInvalidUsage, message);
      }
  return ncclSuccess;
}
API ncclResult_t ncclGetVersion(int* version) { *version = 23007; return ncclSuccess; }
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  static std::atomic<int> number{0};
  snprintf(id->internal, sizeof id->internal, "/ncclsim-%d-%ld-%d", getpid(), (long)time(nullptr), number++);
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int num_ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  if (failure != ncclSuccess) return (ncclResult_t)failure.load();
  size_t bytes = sizeof(Shared) + SLOT_BYTES * num_ranks;
  int fd = shm_open(id.internal, O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, bytes)) return refuse(ncclSystemError, "no shared memory");
  char* memory = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  auto comm = new ncclComm();
  comm->rank = rank;
  comm->num_ranks = num_ranks;
  comm->shared = (Shared*)memory;
  comm->slots = memory + sizeof(Shared);
  cudaGetDevice(&comm->device);
  char bus[32];
  cudaDeviceGetPCIBusId(bus, sizeof bus, comm->device);
  const char* node = getenv("CUDASIM_NODE");
  snprintf(comm->shared->gpus[rank], 64, "%s %s", node ? node : "node", bus);
  comm->shared->is_posted[rank] = true;
  for (int r = 0; r < num_ranks; r++) while (!comm->shared->is_posted[r]) usleep(100);
  ncclResult_t result = refuse_double_gpu(comm);
  if (result != ncclSuccess) return result;
  meet(comm);
  if (rank == 0) shm_unlink(id.internal);
  std::thread(run_collectives, comm).detach();
  *out = comm;
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRank(ncclComm_t* out, int num_ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(out, num_ranks, id, rank, nullptr);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int num_ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t* config) {
  return ncclCommInitRankConfig(out, num_ranks, ids[0], rank, config);
}
API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }  // its thread ends with the process
API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->aborted = true;
  comm->filled.notify_all();
  return ncclSuccess;
}
API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) { *count = comm->num_ranks; return ncclSuccess; }
API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { *rank = comm->rank; return ncclSuccess; }
API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) { *device = comm->device; return ncclSuccess; }
API ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) { *handle = nullptr; return ncclSuccess; }
API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
API ncclResult_t ncclGroupStart() { return ncclSuccess; }
API ncclResult_t ncclGroupEnd() { return ncclSuccess; }

// ---- collectives ----------------------------------------------------------------------------------------------------
static size_t width(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}
template <class T> static void combine(void* into, const void* values, size_t count, ncclRedOp_t op) {
  T* a = (T*)into;
  const T* b = (const T*)values;
  for (size_t i = 0; i < count; i++)
    a[i] = op == ncclMax ? std::max(a[i], b[i]) : op == ncclMin ? std::min(a[i], b[i]) : op == ncclProd ? a[i] * b[i] : a[i] + b[i];
}
static float widen(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
static uint16_t narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static void reduce(void* into, const void* values, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  switch (type) {
    case ncclFloat32: return combine<float>(into, values, count, op);
    case ncclFloat64: return combine<double>(into, values, count, op);
    case ncclInt64: return combine<int64_t>(into, values, count, op);
    case ncclInt32: return combine<int32_t>(into, values, count, op);
    case ncclUint8: return combine<uint8_t>(into, values, count, op);
    case ncclBfloat16:
      for (size_t i = 0; i < count; i++) ((uint16_t*)into)[i] = narrow(widen(((uint16_t*)into)[i]) + widen(((const uint16_t*)values)[i]));
      return;
    default: fprintf(stderr, "gpu_sim: NCCL type %d is not simulated\n", type); abort();
  }
}
// The mean divides the sum; NCCL's own order of additions is another, which no test may rely on.
static void divide(void* sums, size_t count, ncclDataType_t type, int by) {
  for (size_t i = 0; i < count; i++) {
    if (type == ncclFloat32) ((float*)sums)[i] /= by;
    else if (type == ncclFloat64) ((double*)sums)[i] /= by;
    else if (type == ncclBfloat16) ((uint16_t*)sums)[i] = narrow(widen(((uint16_t*)sums)[i]) / by);
  }
}
// Calls part(offset, bytes) for slices that fit a slot; the ranks meet before and after what each does with the slots.
static bool in_slices(ncclComm* comm, size_t bytes, const char* mine, std::function<void(size_t, size_t)> part) {
  for (size_t offset = 0; offset < bytes; offset += SLOT_BYTES) {
    size_t size = std::min(SLOT_BYTES, bytes - offset);
    if (mine) memcpy(slot(comm, comm->rank), mine + offset, size);
    if (!meet(comm)) return false;
    part(offset, size);
    if (!meet(comm)) return false;
  }
  return true;
}
API ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, from, to, [=](ncclComm* comm) {
    return in_slices(comm, count * width(type), (const char*)from, [=](size_t offset, size_t size) {
      std::vector<char> sums(slot(comm, 0), slot(comm, 0) + size);
      size_t items = size / width(type);
      for (int r = 1; r < comm->num_ranks; r++) reduce(sums.data(), slot(comm, r), items, type, op == ncclAvg ? ncclSum : op);
      if (op == ncclAvg) divide(sums.data(), items, type, comm->num_ranks);
      memcpy((char*)to + offset, sums.data(), size);
    });
  });
}
API ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, from, to, [=](ncclComm* comm) {
    const char* mine = comm->rank == root ? (const char*)from : nullptr;
    return in_slices(comm, count * width(type), mine, [=](size_t offset, size_t size) { memcpy((char*)to + offset, slot(comm, root), size); });
  });
}
API ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
API ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  size_t bytes = count * width(type);
  return submit(comm, stream, from, to, [=](ncclComm* comm) {
    return in_slices(comm, bytes, (const char*)from, [=](size_t offset, size_t size) {
      for (int r = 0; r < comm->num_ranks; r++) memcpy((char*)to + r * bytes + offset, slot(comm, r), size);
    });
  });
}
