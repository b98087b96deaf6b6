// libcublas and libcublasLt: handles, one algorithm for all shapes, and counters of matrix products and their operations.
#include "core.h"

#include <cstdlib>
#include <cstring>

using namespace pretend;
using ll = long long;

static int product(const char* name, double m, double n, double k, double batch = 1) {
    static std::atomic<uint64_t>& flops = counter("gemm.flops");
    static std::atomic<uint64_t>& times = counter("gemm");
    ++times;
    flops += uint64_t(2 * m * n * k * batch);
    launched(named_kernel(name));
    return 0;
}

#ifdef CUBLAS
struct Blas { void* stream; int math, pointer; };
API int cublasCreate_v2(void** out) { return *out = calloc(1, sizeof(Blas)), 0; }
API int cublasDestroy_v2(void* handle) { return free(handle), 0; }
API int cublasSetStream_v2(Blas* handle, void* stream) { return handle->stream = stream, 0; }
API int cublasGetStream_v2(Blas* handle, void** stream) { return *stream = handle->stream, 0; }
API int cublasSetMathMode(Blas* handle, int mode) { return handle->math = mode, 0; }
API int cublasGetMathMode(Blas* handle, int* mode) { return *mode = handle->math, 0; }
API int cublasSetPointerMode_v2(Blas* handle, int mode) { return handle->pointer = mode, 0; }
API int cublasGetPointerMode_v2(Blas* handle, int* mode) { return *mode = handle->pointer, 0; }
API int cublasGetVersion_v2(void*, int* version) { return *version = 130100, 0; }

#define GEMM(name) API int name(void*, int, int, int m, int n, int k) { return product(#name, m, n, k); }
GEMM(cublasSgemm_v2) GEMM(cublasDgemm_v2) GEMM(cublasCgemm_v2) GEMM(cublasZgemm_v2) GEMM(cublasSgemmEx) GEMM(cublasGemmEx)
#define BATCHED(name)                                                                                                         \
    API int name(void*, int, int, int m, int n, int k, const void*, const void*, int, ll, const void*, int, ll, const void*, \
                 void*, int, ll, int batch) { return product(#name, m, n, k, batch); }
BATCHED(cublasSgemmStridedBatched) BATCHED(cublasDgemmStridedBatched) BATCHED(cublasCgemmStridedBatched) BATCHED(cublasZgemmStridedBatched)
API int cublasGemmStridedBatchedEx(void*, int, int, int m, int n, int k, const void*, const void*, int, int, ll, const void*, int, int, ll,
                                   const void*, void*, int, int, ll, int batch) {
    return product("cublasGemmStridedBatchedEx", m, n, k, batch);
}
#endif

#ifdef CUBLASLT
struct Layout { int type; uint64_t rows, columns; ll ld; int batch; };
struct Product { int turned; };
API int cublasLtMatrixLayoutCreate(Layout** out, int type, uint64_t rows, uint64_t columns, ll ld) {
    *out = new Layout{type, rows, columns, ld, 1};
    return 0;
}
API int cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value, size_t) {
    if (attribute == 5) memcpy(&layout->batch, value, 4);  // CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT
    return 0;
}
API int cublasLtMatrixLayoutDestroy(Layout* layout) { return delete layout, 0; }
API int cublasLtMatmulDescCreate(Product** out, int, int) { return *out = new Product{0}, 0; }
API int cublasLtMatmulDescSetAttribute(Product* what, int attribute, const void* value, size_t) {
    if (attribute == 3) memcpy(&what->turned, value, 4);  // CUBLASLT_MATMUL_DESC_TRANSA
    return 0;
}
API int cublasLtMatmulDescDestroy(Product* what) { return delete what, 0; }
API int cublasLtCreate(void** out) { return *out = calloc(1, 64), 0; }
API size_t cublasLtGetVersion() { return 130100; }
struct Heuristic { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Heuristic* results, int* found) {
    memset(results, 0, sizeof *results);
    results->waves = 1;
    return *found = 1, 0;
}
API int cublasLtMatmul(void*, const Product* what, const void*, const void*, const Layout* a, const void*, const Layout*, const void*,
                       const void*, const Layout*, void*, const Layout* d) {
    return product("cublasLtMatmul", d->rows, d->columns, what->turned ? a->rows : a->columns, d->batch);
}
#endif
