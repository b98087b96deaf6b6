// libcudart: the runtime functions that must do more than return success. build.py generates the others.
#include "core.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo
using namespace pretend;

static thread_local cudaError_t last_error = cudaSuccess;
static cudaError_t fail(cudaError_t error) { return last_error = error; }
static cudaError_t ready() {  // called by functions that need a context
    if (forked()) return fail(cudaErrorInitializationError);
    if (current_card() >= card_count()) return fail(cudaErrorNoDevice);
    touch_context(current_card());
    return cudaSuccess;
}
#define READY() if (cudaError_t no = ready()) return no

// ---- errors and versions

#define ERRORS(_)                                                                                         \
    _(cudaSuccess, "no error") _(cudaErrorInvalidValue, "invalid argument")                               \
    _(cudaErrorMemoryAllocation, "out of memory") _(cudaErrorInitializationError, "initialization error") \
    _(cudaErrorInvalidConfiguration, "invalid configuration argument")                                    \
    _(cudaErrorInvalidDeviceFunction, "invalid device function")                                          \
    _(cudaErrorNoDevice, "no CUDA-capable device is detected")                                            \
    _(cudaErrorInvalidDevice, "invalid device ordinal") _(cudaErrorNotReady, "device not ready")          \
    _(cudaErrorNotSupported, "operation not supported")                                                   \
    _(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled")                                \
    _(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")              \
    _(cudaErrorSymbolNotFound, "named symbol not found")

API const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
#define TEXT(code, text) case code: return text;
        ERRORS(TEXT)
        default: return "unknown error";
    }
}
API const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define NAME(code, text) case code: return #code;
        ERRORS(NAME)
        default: return "cudaErrorUnknown";
    }
}
API cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }
API cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }

// ---- devices

static void attach_to_torch(const char* what, std::once_flag& once) {  // see torch_hook.cpp
    std::call_once(once, [what] {
        if (!dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD)) return;
        void* library = dlopen("libpretend_torch.so", RTLD_NOW);
        if (!library) fprintf(stderr, "pretend-cuda: %s\n", dlerror());
        else if (void (*attach)() = (void (*)())dlsym(library, what)) attach();
    });
}

API cudaError_t cudaGetDeviceCount(int* count) {
    static std::once_flag once;
    attach_to_torch("pretend_attach_operators", once);
    *count = card_count();
    if (forked()) return fail(cudaErrorInitializationError);
    return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* device) { return *device = current_card(), cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= card_count()) return fail(cudaErrorInvalidDevice);
    if (forked()) return fail(cudaErrorInitializationError);
    current_card() = device;
    touch_context(device);
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
    if (device < 0 || device >= card_count()) return fail(cudaErrorInvalidDevice);
    Card& one = card(device);
    memset(out, 0, sizeof *out);
    strncpy(out->name, one.name.c_str(), sizeof out->name - 1);
    memcpy(&out->uuid, one.uuid, 16);
    out->totalGlobalMem = one.total;
    out->major = one.major, out->minor = one.minor;
    out->multiProcessorCount = one.processors;
    out->maxThreadsPerMultiProcessor = one.threads_per_processor;
    out->sharedMemPerBlock = 48 << 10, out->sharedMemPerBlockOptin = one.shared_optin;
    out->sharedMemPerMultiprocessor = one.shared_per_processor, out->reservedSharedMemPerBlock = 1024;
    out->regsPerBlock = out->regsPerMultiprocessor = 65536;
    out->warpSize = 32, out->maxThreadsPerBlock = 1024, out->maxBlocksPerMultiProcessor = one.major >= 8 ? 24 : 16;
    out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024, out->maxThreadsDim[2] = 64;
    out->maxGridSize[0] = 0x7fffffff, out->maxGridSize[1] = out->maxGridSize[2] = 65535;
    out->memPitch = 0x7fffffff, out->totalConstMem = 65536, out->textureAlignment = 512, out->texturePitchAlignment = 32;
    out->maxTexture1D = 131072, out->surfaceAlignment = 512;
    out->pciBusID = one.physical + 1, out->memoryBusWidth = one.bus_bits, out->l2CacheSize = one.l2_bytes;
    out->concurrentKernels = out->canMapHostMemory = out->unifiedAddressing = out->managedMemory = 1;
    out->streamPrioritiesSupported = out->globalL1CacheSupported = out->localL1CacheSupported = 1;
    out->computePreemptionSupported = out->cooperativeLaunch = out->hostRegisterSupported = out->memoryPoolsSupported = 1;
    out->canUseHostPointerForRegisteredMem = out->ipcEventSupported = out->concurrentManagedAccess = 1;
    out->asyncEngineCount = 2, out->clusterLaunch = one.major >= 9;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    if (device < 0 || device >= card_count()) return fail(cudaErrorInvalidDevice);
    cudaDeviceProp p;
    cudaGetDeviceProperties(&p, device);
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
        case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
        case cudaDevAttrMaxBlockDimZ: *value = 64; break;
        case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(p.sharedMemPerBlock); break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(p.sharedMemPerBlockOptin); break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = int(p.sharedMemPerMultiprocessor); break;
        case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
        case cudaDevAttrTotalConstantMemory: *value = 65536; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
        case cudaDevAttrClockRate: *value = card(device).clock_khz; break;
        case cudaDevAttrMemoryClockRate: *value = card(device).memory_khz; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
        case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
        case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
        case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
        case cudaDevAttrPciBusId: *value = p.pciBusID; break;
        case cudaDevAttrAsyncEngineCount: *value = 2; break;
        case cudaDevAttrTextureAlignment: *value = 512; break;
        case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing: case cudaDevAttrManagedMemory:
        case cudaDevAttrStreamPrioritiesSupported: case cudaDevAttrCooperativeLaunch: case cudaDevAttrCanMapHostMemory:
        case cudaDevAttrComputePreemptionSupported: case cudaDevAttrHostRegisterSupported: case cudaDevAttrMemoryPoolsSupported:
        case cudaDevAttrConcurrentManagedAccess: case cudaDevAttrCanUseHostPointerForRegisteredMem:
        case cudaDevAttrGlobalL1CacheSupported: case cudaDevAttrLocalL1CacheSupported:
            *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
    strncpy(text, bus_id(card(device)).c_str(), length);
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* answer, int, int) { return *answer = 0, cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() {
    READY();
    if (captures) return fail(cudaErrorStreamCaptureUnsupported);
    waited("device");
    return cudaSuccess;
}

// ---- memory

API cudaError_t cudaMalloc(void** out, size_t bytes) {
    READY();
    if (!bytes) return *out = nullptr, cudaSuccess;
    ++counter("malloc");
    *out = allocate(current_card(), bytes);
    if (!*out) return ++counter("malloc.refused"), fail(cudaErrorMemoryAllocation);
    static std::once_flag once;
    attach_to_torch("pretend_attach_allocator", once);
    return cudaSuccess;
}
API cudaError_t cudaFree(void* address) {
    if (!address) return ready();  // libraries call cudaFree(0) to create a context
    ++counter("free");
    if (release(address) || release_host(address)) return waited("free"), cudaSuccess;
    return fail(cudaErrorInvalidValue);
}
API cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) { return cudaMalloc(out, bytes); }
API cudaError_t cudaFreeAsync(void* address, cudaStream_t) {
    ++counter("free");
    return !address || release(address) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
API cudaError_t cudaMallocManaged(void** out, size_t bytes, unsigned) {
    READY();
    *out = allocate_host(bytes, Place::managed, current_card());
    return *out ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
API cudaError_t cudaMemGetInfo(size_t* free_, size_t* total) {
    READY();
    *free_ = free_bytes(card(current_card())), *total = card(current_card()).total;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) { return *pool = (cudaMemPool_t)(intptr_t)(device + 1), cudaSuccess; }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
    Card& one = card(int(intptr_t(pool)) - 1);
    bool used = attribute == cudaMemPoolAttrUsedMemCurrent || attribute == cudaMemPoolAttrReservedMemCurrent;
    bool peak = attribute == cudaMemPoolAttrUsedMemHigh || attribute == cudaMemPoolAttrReservedMemHigh;
    *(uint64_t*)value = used ? one.used.load() : peak ? one.peak.load() : 0;
    return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
    READY();
    ++counter("host_alloc");
    counter("host_alloc.bytes") += bytes;
    *out = allocate_host(bytes, Place::pinned, current_card());
    return *out ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
API cudaError_t cudaMallocHost(void** out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
API cudaError_t cudaFreeHost(void* address) { return !address || release_host(address) ? cudaSuccess : fail(cudaErrorInvalidValue); }
API cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) { return register_host(address, bytes), cudaSuccess; }
API cudaError_t cudaHostUnregister(void* address) { return unregister_host(address) ? cudaSuccess : fail(cudaErrorInvalidValue); }
API cudaError_t cudaHostGetDevicePointer(void** out, void* host, unsigned) { return *out = host, cudaSuccess; }
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* address) {
    memset(out, 0, sizeof *out);
    int index = cudaInvalidDeviceId;
    Place place = place_of(address, &index);
    out->device = place == Place::unknown ? cudaInvalidDeviceId : index;
    out->type = place == Place::device ? cudaMemoryTypeDevice : place == Place::pinned ? cudaMemoryTypeHost
              : place == Place::managed ? cudaMemoryTypeManaged : cudaMemoryTypeUnregistered;
    if (place != Place::unknown) out->devicePointer = (void*)address;
    if (place == Place::pinned || place == Place::managed) out->hostPointer = (void*)address;
    return cudaSuccess;
}

static Way way_of(cudaMemcpyKind kind) {
    return kind == cudaMemcpyHostToDevice ? Way::to_device : kind == cudaMemcpyDeviceToHost ? Way::to_host
         : kind == cudaMemcpyDeviceToDevice ? Way::in_device : kind == cudaMemcpyHostToHost ? Way::in_host : Way::guess;
}
static bool capturing(cudaStream_t stream) { return captures && stream_of(stream)->capture; }

API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    READY();
    if (bytes) copy(to, from, bytes, way_of(kind), true);
    return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    READY();
    if (!bytes) return cudaSuccess;
    if (capturing(stream) && (place_of(to, nullptr) == Place::unknown || place_of(from, nullptr) == Place::unknown))
        return fail(cudaErrorStreamCaptureUnsupported);
    if (capturing(stream)) record(stream_of(stream)->capture, [=] { copy(to, from, bytes, way_of(kind), false); });
    else copy(to, from, bytes, way_of(kind), false);
    return cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
    if (bytes) copy(to, from, bytes, Way::in_device, false);
    return cudaSuccess;
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                                  cudaMemcpyKind kind, cudaStream_t) {
    for (size_t row = 0; row < height; row++)
        copy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width, way_of(kind), false);
    return cudaSuccess;
}
API cudaError_t cudaMemset(void* address, int value, size_t bytes) {
    READY();
    ++counter("memset");
    char byte = char(value);
    if (bytes) fill(address, &byte, 1, bytes);
    return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t stream) {
    if (!capturing(stream)) return cudaMemset(address, value, bytes);
    ++counter("memset");
    record(stream_of(stream)->capture, [=] { char byte = char(value); if (bytes) fill(address, &byte, 1, bytes); });
    return cudaSuccess;
}

// ---- streams and events

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
    READY();
    static std::atomic<unsigned long long> number{10};
    Stream* made = new Stream;
    made->card = current_card(), made->flags = flags, made->priority = priority, made->id = number++;
    *out = (cudaStream_t)made;
    return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (uintptr_t(stream) > 2) delete (Stream*)stream;
    return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) { return *priority = stream_of(stream)->priority, cudaSuccess; }
API cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) { return *id = stream_of(stream)->id, cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ++counter("query.stream");
    if (capturing(stream)) return fail(cudaErrorStreamCaptureUnsupported);
    return now_ms() < device_ms() ? fail(cudaErrorNotReady) : cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    READY();
    if (capturing(stream)) return fail(cudaErrorStreamCaptureUnsupported);
    waited("stream");
    return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) { return function(data), cudaSuccess; }

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
    READY();
    Event* made = new Event;
    made->flags = flags;
    *out = (cudaEvent_t)made;
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete (Event*)event, cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ((Event*)event)->when_ms = device_ms();
    ((Event*)event)->capture = stream_of(stream)->capture;
    return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
API cudaError_t cudaEventQuery(cudaEvent_t event) {
    ++counter("query.event");
    if (((Event*)event)->capture && captures) return fail(cudaErrorStreamCaptureUnsupported);
    return now_ms() < ((Event*)event)->when_ms ? fail(cudaErrorNotReady) : cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (((Event*)event)->capture && captures) return fail(cudaErrorStreamCaptureUnsupported);
    waited("event");
    return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    Event *a = (Event*)start, *b = (Event*)end;
    if (a->when_ms < 0 || b->when_ms < 0) return fail(cudaErrorInvalidResourceHandle);
    *ms = float(b->when_ms - a->when_ms);
    return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (captures && ((Event*)event)->capture) stream_of(stream)->capture = ((Event*)event)->capture;
    return cudaSuccess;
}

// ---- graphs: captured kernels are counted once, during the capture; a graph launch counts as one launch. Copies, memsets and the
// values of small operators (torch_hook.cpp) are recorded, and done when the graph is launched

struct Graph { uint64_t capture; bool executable; };
static std::atomic<uint64_t> capture_number{1};
static std::mutex capture_lock;
static std::map<uint64_t, bool> open_captures;

static uint64_t capture_of(cudaStream_t stream) {
    Stream* one = stream_of(stream);
    if (one->capture && captures) {
        std::lock_guard<std::mutex> guard(capture_lock);
        if (open_captures.count(one->capture)) return one->capture;
    }
    return one->capture = 0;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    READY();
    std::lock_guard<std::mutex> guard(capture_lock);
    stream_of(stream)->capture = capture_number++;
    open_captures[stream_of(stream)->capture] = true;
    ++captures;
    return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    uint64_t number = capture_of(stream);
    if (!number) return fail(cudaErrorIllegalState);
    std::lock_guard<std::mutex> guard(capture_lock);
    open_captures.erase(number);
    --captures;
    stream_of(stream)->capture = 0;
    *graph = (cudaGraph_t) new Graph{number, false};
    return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    *status = capture_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                                         const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges, size_t* count) {
    uint64_t number = capture_of(stream);
    if (status) *status = number ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = number;
    if (graph) *graph = nullptr;
    if (dependencies) *dependencies = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { return *mode = cudaStreamCaptureModeRelaxed, cudaSuccess; }
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
    return *out = (cudaGraphExec_t) new Graph{((Graph*)graph)->capture, true}, cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
    launched(named_kernel("graph"));
    replay(((Graph*)graph)->capture);
    return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) { return *count = 1, cudaSuccess; }  // torch asks whether it is empty
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete (Graph*)graph, cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return forget(((Graph*)graph)->capture), delete (Graph*)graph, cudaSuccess; }

// ---- kernels

API void** __cudaRegisterFatBinary(void*) { static void* handle[4]; return handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) { register_kernel(host, name); }

static std::map<const void*, std::pair<size_t, void*>> variables;
static std::mutex variable_lock;
API void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t bytes, int, int) { variables[host] = {bytes, nullptr}; }
API cudaError_t cudaGetSymbolAddress(void** out, const void* symbol) {
    READY();
    std::lock_guard<std::mutex> guard(variable_lock);
    auto& [bytes, address] = variables[symbol];
    if (!address) address = allocate(current_card(), bytes + 512);
    *out = address;
    return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset, cudaMemcpyKind) {
    void* address;
    cudaGetSymbolAddress(&address, symbol);
    copy((char*)address + offset, from, bytes, Way::to_device, true);
    return cudaSuccess;
}

struct Configuration { dim3 grid, block; size_t shared; cudaStream_t stream; };
static thread_local std::vector<Configuration> pushed;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    pushed.push_back({grid, block, shared, stream});
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    if (pushed.empty()) return fail(cudaErrorMissingConfiguration);
    *grid = pushed.back().grid, *block = pushed.back().block, *shared = pushed.back().shared;
    *(cudaStream_t*)stream = pushed.back().stream;
    pushed.pop_back();
    return cudaSuccess;
}

static cudaError_t launch(Kernel* kernel, dim3 grid, dim3 block, void** arguments, size_t shared) {
    READY();
    if (!kernel) return fail(cudaErrorInvalidDeviceFunction);
    size_t threads = size_t(block.x) * block.y * block.z, blocks = size_t(grid.x) * grid.y * grid.z;
    if (!threads || threads > 1024 || !blocks || grid.y > 65535 || grid.z > 65535) return fail(cudaErrorInvalidConfiguration);
    if (shared > size_t(kernel->max_dynamic_shared)) return fail(cudaErrorInvalidValue);
    launched(kernel, arguments);
    return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* host) {
    *out = (cudaKernel_t)kernel_of(host);
    return *out ? cudaSuccess : fail(cudaErrorInvalidDeviceFunction);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
    return launch((Kernel*)kernel, grid, block, arguments, shared);
}
API cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
    return launch(kernel_of(host), grid, block, arguments, shared);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
    return launch(kernel_of(host), grid, block, arguments, shared);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* host, void** arguments) {
    return launch(kernel_of(host), how->gridDim, how->blockDim, arguments, how->dynamicSmemBytes);
}
// The newest architecture of torch's CUDA 13 build that a card can run: 86 for a card of compute capability 8.9. CUB chooses its
// kernels by this number and fails if none was built for it.
static int architecture_of(const Card& one) {
    int found = 0;
    for (int built : {75, 80, 86, 90, 100, 120})
        if (built <= one.major * 10 + one.minor) found = built;
    return found;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
    READY();
    memset(out, 0, sizeof *out);
    Card& one = card(current_card());
    out->maxThreadsPerBlock = 1024, out->numRegs = 32, out->maxDynamicSharedSizeBytes = 48 << 10;
    out->ptxVersion = out->binaryVersion = architecture_of(one);
    return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
    Kernel* kernel = kernel_of(host);
    if (!kernel) return fail(cudaErrorInvalidDeviceFunction);
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value > card(current_card()).shared_optin) return fail(cudaErrorInvalidValue);
        kernel->max_dynamic_shared = value;
    }
    return cudaSuccess;
}
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, cudaFuncAttribute attribute, int value, int device) {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value > card(device).shared_optin) return fail(cudaErrorInvalidValue);
        ((Kernel*)kernel)->max_dynamic_shared = value;
    }
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t) {
    int most = threads > 0 ? card(current_card()).threads_per_processor / threads : 0;
    return *blocks = most < 1 ? 1 : most > 16 ? 16 : most, cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* host, int threads, size_t shared, unsigned) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, host, threads, shared);
}
API cudaError_t cudaLibraryLoadData(cudaLibrary_t* out, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*, void**, unsigned) {
    return *out = (cudaLibrary_t)malloc(8), cudaSuccess;
}
API cudaError_t cudaLibraryGetKernel(cudaKernel_t* out, cudaLibrary_t, const char* name) { return *out = (cudaKernel_t)named_kernel(name), cudaSuccess; }

// ---- functions of the driver by name

API cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** out, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
    static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    *out = driver ? dlsym(driver, (std::string(symbol) + "_v2").c_str()) : nullptr;
    if (!*out && driver) *out = dlsym(driver, symbol);
    if (status) *status = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
API cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** out, unsigned long long flags, cudaDriverEntryPointQueryResult* status) {
    return cudaGetDriverEntryPointByVersion(symbol, out, 13000, flags, status);
}
