// libnvidia-ml: the functions that pynvml and torch's out-of-memory message call.
#include "core.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>

using namespace pretend;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
using Handle = void*;  // the card's index plus one

static Card& of(Handle handle) { return physical_card(int(intptr_t(handle)) - 1); }
static int text_to(char* out, unsigned length, const std::string& text) {
    if (text.size() + 1 > length) return INSUFFICIENT_SIZE;
    return strcpy(out, text.c_str()), SUCCESS;
}
static size_t used(Card& one) { return one.total - free_bytes(one); }

API int nvmlInit_v2() { return SUCCESS; }
API int nvmlInit() { return SUCCESS; }
API int nvmlInitWithFlags(unsigned) { return SUCCESS; }
API int nvmlShutdown() { return SUCCESS; }
API const char* nvmlErrorString(int code) { return code == SUCCESS ? "Success" : code == NOT_SUPPORTED ? "Not Supported" : code == NOT_FOUND ? "Not Found" : "Unknown Error"; }
API int nvmlSystemGetDriverVersion(char* out, unsigned length) { return text_to(out, length, "580.65.06"); }
API int nvmlSystemGetNVMLVersion(char* out, unsigned length) { return text_to(out, length, "13.580.65.06"); }
API int nvmlSystemGetCudaDriverVersion(int* version) { return *version = 13000, SUCCESS; }
API int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, SUCCESS; }
API int nvmlDeviceGetCount_v2(unsigned* count) { return *count = unsigned(physical_count()), SUCCESS; }
API int nvmlDeviceGetCount(unsigned* count) { return nvmlDeviceGetCount_v2(count); }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle* out) {
    if (int(index) >= physical_count()) return INVALID_ARGUMENT;
    return *out = (Handle)(intptr_t)(index + 1), SUCCESS;
}
API int nvmlDeviceGetHandleByIndex(unsigned index, Handle* out) { return nvmlDeviceGetHandleByIndex_v2(index, out); }
API int nvmlDeviceGetHandleByUUID(const char* uuid, Handle* out) {
    for (int i = 0; i < physical_count(); i++)
        if (uuid_text(physical_card(i)) == uuid) return nvmlDeviceGetHandleByIndex_v2(i, out);
    return NOT_FOUND;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, Handle* out) {
    unsigned domain = 0, number = 0;
    sscanf(bus, "%x:%x", &domain, &number);
    for (int i = 0; i < physical_count(); i++)
        if (int(number) == physical_card(i).physical + 1) return nvmlDeviceGetHandleByIndex_v2(i, out);
    return NOT_FOUND;
}
API int nvmlDeviceGetIndex(Handle handle, unsigned* index) { return *index = unsigned(of(handle).physical), SUCCESS; }
API int nvmlDeviceGetName(Handle handle, char* out, unsigned length) { return text_to(out, length, of(handle).name); }
API int nvmlDeviceGetUUID(Handle handle, char* out, unsigned length) { return text_to(out, length, uuid_text(of(handle))); }
API int nvmlDeviceGetCudaComputeCapability(Handle handle, int* major, int* minor) {
    return *major = of(handle).major, *minor = of(handle).minor, SUCCESS;
}
struct Memory { unsigned long long total, free, used; };
API int nvmlDeviceGetMemoryInfo(Handle handle, Memory* out) {
    Card& one = of(handle);
    return *out = {one.total, one.total - used(one), used(one)}, SUCCESS;
}
struct Memory2 { unsigned version; unsigned long long total, reserved, free, used; };
API int nvmlDeviceGetMemoryInfo_v2(Handle handle, Memory2* out) {
    Card& one = of(handle);
    out->total = one.total, out->reserved = 0, out->free = one.total - used(one), out->used = used(one);
    return SUCCESS;
}
struct Utilization { unsigned gpu, memory; };
API int nvmlDeviceGetUtilizationRates(Handle, Utilization* out) {
    return *out = {unsigned(setting("PRETEND_GPU_PERCENT", 50)), unsigned(setting("PRETEND_MEMORY_PERCENT", 25))}, SUCCESS;
}
API int nvmlDeviceGetCurrentClocksEventReasons(Handle, unsigned long long* reasons) {
    return *reasons = (unsigned long long)setting("PRETEND_CLOCK_REASONS", 0), SUCCESS;
}
API int nvmlDeviceGetTemperature(Handle, int, unsigned* celsius) { return *celsius = 60, SUCCESS; }
API int nvmlDeviceGetPowerUsage(Handle, unsigned* milliwatts) { return *milliwatts = 150000, SUCCESS; }
API int nvmlDeviceGetEnforcedPowerLimit(Handle, unsigned* milliwatts) { return *milliwatts = 220000, SUCCESS; }
API int nvmlDeviceGetClockInfo(Handle handle, int kind, unsigned* mhz) {
    return *mhz = unsigned((kind == 2 ? of(handle).memory_khz : of(handle).clock_khz) / 1000), SUCCESS;
}
API int nvmlDeviceGetMaxClockInfo(Handle handle, int kind, unsigned* mhz) { return nvmlDeviceGetClockInfo(handle, kind, mhz); }
struct Process { unsigned pid; unsigned long long used; unsigned instance, compute_instance; };
API int nvmlDeviceGetComputeRunningProcesses(Handle handle, unsigned* count, Process* out) {
    if (*count < 1) return *count = 1, INSUFFICIENT_SIZE;
    out[0] = {unsigned(getpid()), used(of(handle)), ~0u, ~0u};
    return *count = 1, SUCCESS;
}
API int nvmlDeviceGetComputeRunningProcesses_v3(Handle handle, unsigned* count, Process* out) { return nvmlDeviceGetComputeRunningProcesses(handle, count, out); }
API int nvmlDeviceGetNvLinkRemoteDeviceType(Handle, unsigned, int*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle, unsigned, void*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetGpuFabricInfoV(Handle, char* out) { return memset(out + 4, 0, 28), SUCCESS; }  // state: not supported
API int nvmlDeviceGetP2PStatus(Handle, Handle, int, int* status) { return *status = 5, SUCCESS; }
