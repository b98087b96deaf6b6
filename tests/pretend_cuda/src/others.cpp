// The functions of the remaining libraries that must return more than success.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

#ifdef CUDNN
API size_t cudnnGetVersion() { return 92000; }
API size_t cudnnGetCudartVersion() { return 13000; }
API int cudnnGetProperty(int which, int* value) { return *value = which == 0 ? 9 : which == 1 ? 20 : 0, 0; }
API void cudnnGetLastErrorString(char* out, size_t length) { strncpy(out, "not supported on a pretend card", length); }
API int cudnnBackendCreateDescriptor(int, void** out) { return *out = calloc(1, 64), 0; }
API int cudnnBackendFinalize(void*) { return 3000; }  // CUDNN_STATUS_NOT_SUPPORTED
API int cudnnDropoutGetStatesSize(void*, size_t* bytes) { return *bytes = 1 << 20, 0; }
#endif

#ifdef NVRTC
API int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
API int nvrtcGetPTXSize(void*, size_t* bytes) { return *bytes = 8, 0; }
API int nvrtcGetPTX(void*, char* out) { return memset(out, 0, 8), 0; }
API int nvrtcGetCUBINSize(void*, size_t* bytes) { return *bytes = 8, 0; }
API int nvrtcGetCUBIN(void*, char* out) { return memset(out, 0, 8), 0; }
API int nvrtcGetProgramLogSize(void*, size_t* bytes) { return *bytes = 1, 0; }
API int nvrtcGetProgramLog(void*, char* out) { return *out = 0, 0; }
API int nvrtcGetLoweredName(void*, const char* name, const char** out) { return *out = name, 0; }
#endif

#ifdef CUFFT
API int cufftCreate(int* out) { return *out = 1, 0; }
API int cufftXtMakePlanMany(int, int, void*, void*, long long, long long, int, void*, long long, long long, int, long long, size_t* bytes, int) {
    return *bytes = 0, 0;
}
#endif

#ifdef CUPTI
API int cuptiGetVersion(uint32_t* version) { return *version = 130000, 0; }
API int cuptiGetResultString(int, const char** text) { return *text = "pretend cupti", 0; }
API int cuptiActivityGetNextRecord(uint8_t*, size_t, void**) { return 12; }  // CUPTI_ERROR_MAX_LIMIT_REACHED
API int cuptiActivityGetNumDroppedRecords(void*, uint32_t, size_t* count) { return *count = 0, 0; }
API int cuptiGetCallbackName(int, uint32_t, const char** name) { return *name = "", 0; }
API int cuptiSubscribe(void** out, void*, void*) { return *out = calloc(1, 8), 0; }
#endif

#ifdef CUSPARSE
API int cusparseGetVersion(void*, int* version) { return *version = 12600, 0; }
#endif

#ifdef CUSPARSELT
API int cusparseLtInit(void*) { return 3; }  // not available
#endif
