// Shared by all pretend libraries: cards, memory, streams, kernels and counters. Implemented in core.cpp (libpretend.so).
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

#pragma GCC visibility push(default)
namespace pretend {

constexpr size_t MIB = size_t(1) << 20;

struct Card {
    std::string name;
    int major, minor;
    size_t total;       // bytes
    size_t context;     // bytes of the driver's context
    int physical;       // index among all cards, visible or not
    int processors, threads_per_processor, shared_optin, shared_per_processor, l2_bytes, clock_khz, bus_bits, memory_khz;
    unsigned char uuid[16];
    std::atomic<size_t> used{0}, peak{0};
    std::atomic<bool> has_context{false};
};

int card_count();                 // visible cards (CUDA_VISIBLE_DEVICES)
int physical_count();
Card& card(int index);            // visible index
Card& physical_card(int index);
int& current_card();              // the current device of this thread
std::string uuid_text(const Card&);
std::string bus_id(const Card&);
size_t free_bytes(Card&);
void touch_context(int index);
bool forked();                    // whether the context was created before a fork

// Device memory. The host cannot access a device address (PROT_NONE). Its bytes are in host memory, at a fixed distance from it.
void* allocate(int index, size_t bytes);                 // nullptr: out of memory
void* reserve(int index, size_t bytes, size_t alignment);  // an address range without memory
bool release(void* address);                             // of allocate or reserve
bool take(int index, size_t bytes);                      // memory without an address; false: out of memory
void give(int index, size_t bytes);
bool find(const void* address, void** base, size_t* bytes);
int card_of(const void* address);                        // -1: not a device address
char* bytes_at(const void* address);                     // the host memory of a device address; host addresses stay
void drop(void* address, size_t bytes);                  // zeroes device memory and returns its pages to the system
void fill(void* address, const void* value, size_t value_bytes, size_t count);

enum class Place { unknown, pinned, managed, device };
void* allocate_host(size_t bytes, Place place, int index);
bool release_host(void* address);
void register_host(void* address, size_t bytes);
bool unregister_host(void* address);
Place place_of(const void* address, int* index);

enum class Way { guess, to_device, to_host, in_device, in_host };
void copy(void* to, const void* from, size_t bytes, Way way, bool waits);

std::atomic<uint64_t>& counter(const std::string& name);
void waited(const char* kind);    // counts a wait of the host: "stream", "device", "event", "copy_to_host", ...

struct Kernel {
    const char* symbol;           // mangled C++ name
    std::atomic<uint64_t> launches{0};
    int (*compute)(const Kernel&, void** arguments) = nullptr;
    int max_dynamic_shared = 48 << 10;
};
Kernel* kernel_of(const void* host_function);            // nullptr: unknown
Kernel* named_kernel(const std::string& name);           // for library calls and kernels of loaded modules
void register_kernel(const void* host_function, const char* symbol);
void launched(Kernel*, void** arguments = nullptr);

struct Stream {
    int card = 0, priority = 0;
    unsigned flags = 0;
    uint64_t capture = 0;         // number of the graph capture that this stream is in; 0: none
    unsigned long long id = 0;
};
struct Event {
    unsigned flags = 0;
    uint64_t capture = 0;
    double when_ms = -1;
};
Stream* stream_of(const void* handle);                   // also for the default streams' handles
double now_ms();
double device_ms();                                      // when the device will have done everything launched so far
double setting(const char* variable, double otherwise);  // a number in an environment variable, which a test may change
extern std::atomic<int> captures;                        // graph captures in progress
extern bool verbose;

// What a graph does when it is launched: host functions in the order of their capture
void record(uint64_t capture, std::function<void()> call);
void replay(uint64_t capture);
void forget(uint64_t capture);

}  // namespace pretend
#pragma GCC visibility pop
