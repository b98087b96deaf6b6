// libcuda: the driver functions that torch (expandable segments, jiterator) and triton call.
#include "core.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

using namespace pretend;

API CUresult cuInit(unsigned) { return card_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
API CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult error, const char** text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : error == CUDA_ERROR_INVALID_VALUE ? "invalid argument"
          : error == CUDA_ERROR_NOT_SUPPORTED ? "operation not supported" : error == CUDA_SUCCESS ? "no error" : "unknown error";
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult error, const char** text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* count) { return *count = card_count(), CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* out, int index) {
    if (index < 0 || index >= card_count()) return CUDA_ERROR_INVALID_DEVICE;
    return *out = index, CUDA_SUCCESS;
}
API CUresult cuDeviceGetName(char* text, int length, CUdevice device) { return strncpy(text, card(device).name.c_str(), length), CUDA_SUCCESS; }
API CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) { return *bytes = card(device).total, CUDA_SUCCESS; }
API CUresult cuDeviceGetUuid(CUuuid* out, CUdevice device) { return memcpy(out, card(device).uuid, 16), CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) return *value = 1, CUDA_SUCCESS;
    return CUresult(cudaDeviceGetAttribute(value, cudaDeviceAttr(attribute), device));  // both enumerations have the same values
}

// The handle of a context is the card's index plus one.
static CUcontext context_of(int index) { return (CUcontext)(intptr_t)(index + 1); }
static thread_local bool bound = false;
API CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) { return touch_context(device), *out = context_of(device), CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    *flags = 0;
    return *active = card(device).has_context, CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* out) {
    bool made = bound || (card_count() && card(current_card()).has_context);
    return *out = made ? context_of(current_card()) : nullptr, CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext context) {
    if (context) current_card() = int(intptr_t(context)) - 1, bound = true;
    return CUDA_SUCCESS;
}
API CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxSetCurrent(context); }
API CUresult cuCtxPopCurrent(CUcontext* out) { return *out = context_of(current_card()), CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice* out) { return *out = current_card(), CUDA_SUCCESS; }
API CUresult cuCtxSynchronize() { return waited("device"), CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t* value, CUlimit) { return *value = 1024, CUDA_SUCCESS; }

// ---- virtual memory management, for expandable segments

struct Pages { int card; size_t bytes; int uses; bool released; };
static void drop_pages(Pages* pages) {
    if (--pages->uses > 0) return;
    give(pages->card, pages->bytes);
    delete pages;
}
static std::map<CUdeviceptr, std::pair<Pages*, size_t>> mapped;
static std::mutex lock;

API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) { return *bytes = 2 * MIB, CUDA_SUCCESS; }
API CUresult cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    void* address = reserve(current_card(), bytes, 2 * MIB);
    return *out = (CUdeviceptr)address, address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemAddressFree(CUdeviceptr address, size_t) { return release((void*)address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
API CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t bytes, const CUmemAllocationProp* how, unsigned long long) {
    ++counter("malloc");
    if (!take(how->location.id, bytes)) return ++counter("malloc.refused"), CUDA_ERROR_OUT_OF_MEMORY;
    *out = (CUmemGenericAllocationHandle) new Pages{how->location.id, bytes, 1, false};
    return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return drop_pages((Pages*)handle), CUDA_SUCCESS; }
API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
    std::lock_guard<std::mutex> guard(lock);
    ((Pages*)handle)->uses++;
    mapped[address] = {(Pages*)handle, bytes};
    return CUDA_SUCCESS;
}
API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    for (auto at = mapped.lower_bound(address); at != mapped.end() && at->first < address + bytes; at = mapped.erase(at)) {
        drop((void*)at->first, at->second.second);
        drop_pages(at->second.first);
        ++counter("free");
    }
    return CUDA_SUCCESS;
}
API CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
    void* start;
    if (!find((void*)address, &start, bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (base) *base = (CUdeviceptr)start;
    return CUDA_SUCCESS;
}
API CUresult cuMemExportToShareableHandle(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long) { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream) { return fill((void*)address, &value, 4, count), CUDA_SUCCESS; }
API CUresult cuMemAlloc(CUdeviceptr* out, size_t bytes) { return CUresult(cudaMalloc((void**)out, bytes)); }
API CUresult cuMemFree(CUdeviceptr address) { return CUresult(cudaFree((void*)address)); }
API CUresult cuMemGetInfo(size_t* free_, size_t* total) { return CUresult(cudaMemGetInfo(free_, total)); }
API CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) { return copy((void*)to, from, bytes, Way::to_device, true), CUDA_SUCCESS; }
API CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) { return copy(to, (void*)from, bytes, Way::to_host, true), CUDA_SUCCESS; }
API CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr address) {
    int index = 0;
    Place place = place_of((void*)address, &index);
    if (place == Place::unknown) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext*)out = context_of(index); break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)out = index; break;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(CUdeviceptr*)out = address; break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(CUmemorytype*)out = place == Place::device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}
API CUresult cuStreamWriteValue32(CUstream, CUdeviceptr address, cuuint32_t value, unsigned) { return memcpy(bytes_at((void*)address), &value, 4), CUDA_SUCCESS; }
API CUresult cuStreamSynchronize(CUstream stream) { return CUresult(cudaStreamSynchronize(stream)); }

// ---- modules: a kernel is identified by its name

API CUresult cuModuleLoadData(CUmodule* out, const void*) { return *out = (CUmodule)malloc(8), CUDA_SUCCESS; }
API CUresult cuModuleLoadDataEx(CUmodule* out, const void*, unsigned, CUjit_option*, void**) { return *out = (CUmodule)malloc(8), CUDA_SUCCESS; }
API CUresult cuModuleLoad(CUmodule* out, const char*) { return *out = (CUmodule)malloc(8), CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction* out, CUmodule, const char* name) { return *out = (CUfunction)named_kernel(name), CUDA_SUCCESS; }
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    Card& one = card(current_card());
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
        case CU_FUNC_ATTRIBUTE_PTX_VERSION: case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = one.major * 10 + one.minor; break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}
API CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**) {
    return launched((Kernel*)function), CUDA_SUCCESS;
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction function, void**, void**) { return launched((Kernel*)function), CUDA_SUCCESS; }
API CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**) {
    return launched((Kernel*)function), CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int threads, size_t) {
    return CUresult(cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, nullptr, threads, 0));
}
API CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) { return *clusters = 16, CUDA_SUCCESS; }
API CUresult cuGetProcAddress(const char* symbol, void** out, int version, cuuint64_t flags, CUdriverProcAddressQueryResult* status) {
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion(symbol, out, version, flags, &found);
    if (status) *status = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
