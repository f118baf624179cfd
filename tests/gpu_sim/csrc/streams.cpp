// Streams and events: a stream knows the work that has not ended yet, an event remembers it.
#include <mutex>
#include <time.h>
#include <unistd.h>

#include "sim.h"

static std::mutex mutex;
using Guard = std::lock_guard<std::mutex>;
struct Stream {
  Ops ops;
  int priority = 0;
};
struct Event {
  Ops ops;
  timespec at{};
};
static Stream default_streams[MAX_DEVICES];

static Stream* stream_of(cudaStream_t stream) {
  return (uintptr_t)stream <= 2 ? &default_streams[current_device] : (Stream*)stream;  // 0, 1, 2: the default ones
}
static Ops unfinished(const Ops& ops) {
  Ops out;
  for (Op* op : ops) if (!op->done) out.push_back(op);
  return out;
}
Ops pending(cudaStream_t stream) {
  Guard guard(mutex);
  return stream_of(stream)->ops = unfinished(stream_of(stream)->ops);
}
void wait_for(const Ops& ops) {
  for (Op* op : ops) while (!op->done) usleep(50);
}
API void cudasim_stream_add(cudaStream_t stream, Op* op) {
  Guard guard(mutex);
  stream_of(stream)->ops.push_back(op);
}
API int cudasim_stream_pending(cudaStream_t stream, Op** out, int room) {
  int count = 0;
  for (Op* op : pending(stream)) if (count < room) out[count++] = op;
  return count;
}
API void cudasim_stream_block(cudaStream_t stream) { wait_for(pending(stream)); }

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  auto made = new Stream();
  made->priority = priority;
  *stream = (cudaStream_t)made;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) { *priority = stream_of(stream)->priority; return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  RETURN_IF_BROKEN;
  counters[SYNC_STREAM]++;
  cudasim_stream_block(stream);
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) { return pending(stream).empty() ? cudaSuccess : cudaErrorNotReady; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  RETURN_IF_BROKEN;
  Guard guard(mutex);
  for (Op* op : unfinished(((Event*)event)->ops)) stream_of(stream)->ops.push_back(op);
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, enum cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize(void) {
  RETURN_IF_BROKEN;
  counters[SYNC_DEVICE]++;
  cudasim_stream_block(0);
  return cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { *event = (cudaEvent_t) new Event(); return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { delete (Event*)event; return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  RETURN_IF_BROKEN;
  Ops ops = pending(stream);
  Guard guard(mutex);
  ((Event*)event)->ops = ops;
  clock_gettime(CLOCK_MONOTONIC, &((Event*)event)->at);
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
static Ops pending_of(cudaEvent_t event) {
  Guard guard(mutex);
  return unfinished(((Event*)event)->ops);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  RETURN_IF_BROKEN;
  return pending_of(event).empty() ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  RETURN_IF_BROKEN;
  counters[SYNC_EVENT]++;
  wait_for(pending_of(event));
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  const timespec &a = ((Event*)from)->at, &b = ((Event*)to)->at;
  *ms = (b.tv_sec - a.tv_sec) * 1e3f + (b.tv_nsec - a.tv_nsec) * 1e-6f;
  return cudaSuccess;
}
