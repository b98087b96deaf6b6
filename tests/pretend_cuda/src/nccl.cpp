// libnccl: collectives between the processes of one machine, through shared memory. The host waits for the other ranks; with the
// real library the device waits. All ranks must call the collectives of a communicator in the same order, as with the real one.
#include "core.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

using namespace pretend;

constexpr size_t SLOT = MIB;  // bytes per rank and exchange
struct Shared { std::atomic<uint32_t> arrived, generation; };
struct Comm {
    int ranks, rank, device;
    std::string name;
    Shared* shared;
    int children = 0;
    char* slot(int of) const { return (char*)shared + 4096 + of * SLOT; }
};
struct Id { char bytes[128]; };
static std::vector<double> factors;  // of the reductions of ncclRedOpCreatePreMulSum, which are numbered from 5

static int meet(Comm* comm) {  // a barrier; returns 6 (ncclRemoteError) after 10 minutes
    uint32_t now = comm->shared->generation;
    if (comm->shared->arrived.fetch_add(1) + 1 == uint32_t(comm->ranks)) {
        comm->shared->arrived = 0;
        ++comm->shared->generation;
        return 0;
    }
    for (double began = now_ms(); comm->shared->generation == now; usleep(20))
        if (now_ms() - began > 600e3) return 6;
    return 0;
}
static int open_comm(Comm** out, int ranks, int rank, const std::string& name) {
    size_t bytes = 4096 + ranks * SLOT;
    int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, off_t(bytes))) return 2;
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) return 2;
    *out = new Comm{ranks, rank, current_card(), name, (Shared*)at};
    int failed = meet(*out);
    shm_unlink(name.c_str());  // all ranks have opened it
    return failed;
}

// ---- numbers

static size_t bytes_of(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < 12 ? sizes[type] : 1;
}
struct Brain { uint16_t bits; };
static float as_number(Brain x) { uint32_t b = uint32_t(x.bits) << 16; float f; memcpy(&f, &b, 4); return f; }
static double as_number(double x) { return x; }
template <class T> void store(T& to, double x) { to = T(x); }
static void store(Brain& to, double x) {
    float f = float(x);
    uint32_t b;
    memcpy(&b, &f, 4);
    to.bits = uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
template <class T> void reduce(Comm* comm, char* out, size_t from, size_t bytes, int op) {
    for (size_t i = 0; i < bytes / sizeof(T); i++) {
        double found = as_number(((T*)(comm->slot(0) + from))[i]);
        for (int r = 1; r < comm->ranks; r++) {
            double x = as_number(((T*)(comm->slot(r) + from))[i]);
            found = op == 1 ? found * x : op == 2 ? std::max(found, x) : op == 3 ? std::min(found, x) : found + x;
        }
        if (op == 4) found /= comm->ranks;
        else if (op >= 5) found *= factors[op - 5];
        store(((T*)out)[i], found);
    }
}
static void reduce_as(int type, Comm* comm, char* out, size_t from, size_t bytes, int op) {
    switch (type) {
        case 0: return reduce<int8_t>(comm, out, from, bytes, op);
        case 1: return reduce<uint8_t>(comm, out, from, bytes, op);
        case 2: return reduce<int32_t>(comm, out, from, bytes, op);
        case 3: return reduce<uint32_t>(comm, out, from, bytes, op);
        case 4: return reduce<int64_t>(comm, out, from, bytes, op);
        case 5: return reduce<uint64_t>(comm, out, from, bytes, op);
        case 6: return reduce<_Float16>(comm, out, from, bytes, op);
        case 7: return reduce<float>(comm, out, from, bytes, op);
        case 8: return reduce<double>(comm, out, from, bytes, op);
        case 9: return reduce<Brain>(comm, out, from, bytes, op);
    }
}

// Exchanges `bytes` of every rank through the slots, in pieces. `take` reads the piece that starts at `done` from all slots.
template <class Take>
int passed(const char* name, Comm* comm, const void* from, size_t bytes, Take take) {
    launched(named_kernel(name));
    counter("collective.bytes") += bytes;
    for (size_t done = 0; done < bytes; done += SLOT) {
        size_t part = std::min(SLOT, bytes - done);
        memcpy(comm->slot(comm->rank), bytes_at(from) + done, part);
        if (int failed = meet(comm)) return failed;
        take(done, part);
        if (int failed = meet(comm)) return failed;
    }
    return 0;
}

// ---- the calls

API int ncclGetVersion(int* version) { return *version = 22907, 0; }
API int ncclGetUniqueId(Id* out) {
    memset(out, 0, sizeof *out);
    std::random_device random;
    snprintf(out->bytes, sizeof out->bytes, "/pretend-nccl-%08x%08x%08x", random(), random(), unsigned(getpid()));
    return 0;
}
API const char* ncclGetErrorString(int code) { return code == 0 ? "no error" : code == 6 ? "a rank did not arrive" : "system error"; }
API const char* ncclGetLastError(void*) { return ""; }
API int ncclCommInitRankConfig(Comm** out, int ranks, Id id, int rank, void*) { return open_comm(out, ranks, rank, id.bytes); }
API int ncclCommInitRank(Comm** out, int ranks, Id id, int rank) { return open_comm(out, ranks, rank, id.bytes); }
API int ncclCommInitRankScalable(Comm** out, int ranks, int rank, int, Id* ids, void*) { return open_comm(out, ranks, rank, ids[0].bytes); }
API int ncclCommSplit(Comm* comm, int color, int, Comm** out, void*) {
    memcpy(comm->slot(comm->rank), &color, sizeof color);
    if (int failed = meet(comm)) return failed;
    int ranks = 0, rank = 0, number = comm->children++;
    for (int r = 0; r < comm->ranks; r++) {
        int other;
        memcpy(&other, comm->slot(r), sizeof other);
        if (other != color) continue;
        if (r < comm->rank) rank++;
        ranks++;
    }
    if (int failed = meet(comm)) return failed;
    if (color < 0) return *out = nullptr, 0;
    return open_comm(out, ranks, rank, comm->name + "-" + std::to_string(number) + "-" + std::to_string(color));
}
API int ncclCommDestroy(Comm* comm) {
    munmap(comm->shared, 4096 + comm->ranks * SLOT);
    delete comm;
    return 0;
}
API int ncclCommAbort(Comm* comm) { return ncclCommDestroy(comm); }
API int ncclCommInitAll(Comm**, int, const int*) { return 5; }  // one process with several cards is not supported
API int ncclCommCount(Comm* comm, int* count) { return *count = comm->ranks, 0; }
API int ncclCommUserRank(Comm* comm, int* rank) { return *rank = comm->rank, 0; }
API int ncclCommCuDevice(Comm* comm, int* device) { return *device = comm->device, 0; }
API int ncclCommGetAsyncError(Comm*, int* error) { return *error = 0, 0; }
API int ncclRedOpCreatePreMulSum(int* out, void* factor, int type, int, Comm*) {
    char* at = bytes_at(factor);
    factors.push_back(type == 8 ? *(double*)at : type == 7 ? *(float*)at : type == 6 ? double(*(_Float16*)at) : as_number(*(Brain*)at));
    return *out = int(factors.size()) + 4, 0;
}
API int ncclMemAlloc(void** out, size_t bytes) { return *out = allocate(current_card(), bytes), *out ? 0 : 1; }
API int ncclMemFree(void* address) { return release(address), 0; }

API int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, Comm* comm, void*) {
    return passed("ncclAllReduce", comm, from, count * bytes_of(type), [&](size_t done, size_t part) { reduce_as(type, comm, bytes_at(to) + done, 0, part, op); });
}
API int ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, Comm* comm, void*) {
    return passed("ncclReduce", comm, from, count * bytes_of(type), [&](size_t done, size_t part) {
        if (comm->rank == root) reduce_as(type, comm, bytes_at(to) + done, 0, part, op);
    });
}
API int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Comm* comm, void*) {
    return passed("ncclBroadcast", comm, comm->rank == root ? from : to, count * bytes_of(type),
                  [&](size_t done, size_t part) { memcpy(bytes_at(to) + done, comm->slot(root), part); });
}
API int ncclBcast(void* at, size_t count, int type, int root, Comm* comm, void* stream) { return ncclBroadcast(at, at, count, type, root, comm, stream); }
API int ncclAllGather(const void* from, void* to, size_t count, int type, Comm* comm, void*) {
    size_t bytes = count * bytes_of(type);
    return passed("ncclAllGather", comm, from, bytes, [&](size_t done, size_t part) {
        for (int r = 0; r < comm->ranks; r++) memcpy(bytes_at(to) + r * bytes + done, comm->slot(r), part);
    });
}
API int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, Comm* comm, void*) {
    size_t bytes = count * bytes_of(type), mine = comm->rank * bytes;
    return passed("ncclReduceScatter", comm, from, bytes * comm->ranks, [&](size_t done, size_t part) {
        size_t begin = std::max(done, mine), end = std::min(done + part, mine + bytes);
        if (begin < end) reduce_as(type, comm, bytes_at(to) + begin - mine, begin - done, end - begin, op);
    });
}
API int ncclAlltoAll(const void* from, void* to, size_t count, int type, Comm* comm, void*) {
    size_t bytes = count * bytes_of(type), mine = comm->rank * bytes;
    return passed("ncclAlltoAll", comm, from, bytes * comm->ranks, [&](size_t done, size_t part) {
        size_t begin = std::max(done, mine), end = std::min(done + part, mine + bytes);
        for (int r = 0; begin < end && r < comm->ranks; r++) memcpy(bytes_at(to) + r * bytes + begin - mine, comm->slot(r) + begin - done, end - begin);
    });
}
// Point-to-point transfers are counted but move no data.
API int ncclSend(const void*, size_t, int, int, Comm*, void*) { return launched(named_kernel("ncclSend")), 0; }
API int ncclRecv(void*, size_t, int, int, Comm*, void*) { return launched(named_kernel("ncclRecv")), 0; }
