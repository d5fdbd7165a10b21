// What a translated CUDA file runs on: lanes as fibers of one host thread, warps and blocks that meet, shared memory, and
// the tensor-core instructions by their definition. Included first by every translated file; knows no kernel.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct uint2 { unsigned x, y; };
struct int2 { int x, y; };
struct float2 { float x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
static inline int2 make_int2(int a, int b) { return {a, b}; }
static inline float2 make_float2(float a, float b) { return {a, b}; }
static inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
static inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }

struct uint3 { unsigned x, y, z; };
static uint3 threadIdx, blockIdx, blockDim, gridDim;

// ---- fibers ----------------------------------------------------------------------------------------------------------

// Saves the registers that a call keeps, and goes on where `to` left off.
extern "C" void lanes_switch(void** from, void* to) __attribute__((visibility("hidden")));
asm(R"(
.text
.globl lanes_switch
.hidden lanes_switch
lanes_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

namespace lanes {

constexpr unsigned STACK = 128 << 10;
constexpr unsigned SHARED = 232 << 10;

struct Lane {
    void* stack_pointer;
    char* stack;
    bool done;
    unsigned meetings;  // of the warp
};

struct Warp {
    unsigned lanes, arrived[2];
    uint64_t data[2][32][8];
};

static std::vector<Lane> all;
static std::vector<Warp> warps;
static unsigned current, alive, barrier, barriers_passed;
static void* scheduler;
static void (*body)(const void*);
static const void* parameters;
alignas(1024) static unsigned char shared[SHARED];

static void place(unsigned me) {
    current = me;
    threadIdx = {me % blockDim.x, me / blockDim.x, 0};
}

static void yield() {
    const unsigned me = current;
    lanes_switch(&all[me].stack_pointer, scheduler);
    place(me);
}

static void begin() {
    body(parameters);
    const unsigned me = current;
    all[me].done = true;
    // Lanes that are done count as met.
    alive--;
    if (alive && barrier == alive) barrier = 0, barriers_passed++;
    lanes_switch(&all[me].stack_pointer, scheduler);
    abort();
}

// Meets the other lanes of the warp, showing them `n` bytes; which of the two boards they lie on.
static unsigned meet(const void* data, size_t n) {
    const unsigned me = current;
    Warp& w = warps[me / 32];
    const unsigned board = all[me].meetings++ & 1;
    memcpy(w.data[board][me % 32], data, n);
    if (w.arrived[board] == w.lanes) w.arrived[board] = 0;
    w.arrived[board]++;
    while (w.arrived[board] != w.lanes) yield();
    return board;
}

template <class T>
static T shown(unsigned board, unsigned warp, unsigned lane, unsigned i = 0) {
    T v;
    memcpy(&v, (char*)warps[warp].data[board][lane] + i * sizeof(T), sizeof(T));
    return v;
}

// Runs a grid, one block after the other. Every second block goes through its lanes backwards, so that what relies on an
// order shows. Shared memory begins as NaNs.
static void run(void (*f)(const void*), const void* p, const unsigned grid[3], const unsigned block[3]) {
    const unsigned threads = block[0] * block[1] * block[2];
    body = f, parameters = p;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    while (all.size() < threads) all.push_back({nullptr, (char*)aligned_alloc(64, STACK), false, 0});
    warps.resize((threads + 31) / 32);
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = {x, y, z};
                memset(shared, 0xff, sizeof shared);
                alive = threads, barrier = 0;
                for (unsigned w = 0; w < warps.size(); w++) {
                    warps[w].lanes = std::min(32u, threads - 32 * w);
                    warps[w].arrived[0] = warps[w].arrived[1] = 0;
                }
                for (unsigned i = 0; i < threads; i++) {
                    void** top = (void**)(all[i].stack + STACK);
                    // The stack pointer is 8 past a multiple of 16 where a function begins.
                    top -= 1;
                    *--top = (void*)begin;
                    for (int r = 0; r < 6; r++) *--top = nullptr;
                    all[i].stack_pointer = top, all[i].done = false, all[i].meetings = 0;
                }
                const bool backwards = (x + y + z) % 2;
                unsigned long rounds = 0;
                while (alive) {
                    if (++rounds > 50'000'000) {
                        fprintf(stderr, "lanes wait for each other in block %u %u %u\n", x, y, z);
                        abort();
                    }
                    for (unsigned i = 0; i < threads; i++) {
                        const unsigned me = backwards ? threads - 1 - i : i;
                        if (all[me].done) continue;
                        place(me);
                        lanes_switch(&scheduler, all[me].stack_pointer);
                    }
                }
            }
}

}  // namespace lanes

static inline void __syncthreads() {
    const unsigned before = lanes::barriers_passed;
    if (++lanes::barrier == lanes::alive) {
        lanes::barrier = 0, lanes::barriers_passed++;
        return;
    }
    while (lanes::barriers_passed == before) lanes::yield();
}

// Whether any lane says so. Marks of two meetings that follow each other lie apart.
static inline bool __syncthreads_or(bool v) {
    static unsigned said[2];
    const unsigned mark = lanes::barriers_passed + 1;
    if (v) said[mark % 2] = mark;
    __syncthreads();
    return said[mark % 2] == mark;
}

static inline void __syncwarp(unsigned = ~0u) {
    const unsigned nothing = 0;
    lanes::meet(&nothing, 4);
}

// ---- warps -----------------------------------------------------------------------------------------------------------

template <class T, class F>
static T lanes_exchanged(T v, F from) {
    const unsigned me = lanes::current, board = lanes::meet(&v, sizeof v);
    return lanes::shown<T>(board, me / 32, from(me % 32));
}
template <class T>
static T __shfl_xor_sync(unsigned, T v, int mask) {
    return lanes_exchanged(v, [&](unsigned l) { return l ^ mask; });
}
template <class T>
static T __shfl_sync(unsigned, T v, int lane) {
    return lanes_exchanged(v, [&](unsigned) { return lane & 31; });
}
template <class T>
static T __shfl_up_sync(unsigned, T v, int by) {
    return lanes_exchanged(v, [&](unsigned l) { return (int)l < by ? l : l - by; });
}
template <class T>
static T __shfl_down_sync(unsigned, T v, int by) {
    return lanes_exchanged(v, [&](unsigned l) { return l + by > 31 ? l : l + by; });
}
template <class F>
static unsigned lanes_reduced(unsigned v, unsigned first, F f) {
    const unsigned me = lanes::current, board = lanes::meet(&v, 4);
    for (unsigned i = 0; i < lanes::warps[me / 32].lanes; i++) first = f(first, lanes::shown<unsigned>(board, me / 32, i), i);
    return first;
}
static inline unsigned __reduce_max_sync(unsigned, unsigned v) {
    return lanes_reduced(v, 0, [](unsigned a, unsigned b, unsigned) { return std::max(a, b); });
}
static inline unsigned __reduce_min_sync(unsigned, unsigned v) {
    return lanes_reduced(v, ~0u, [](unsigned a, unsigned b, unsigned) { return std::min(a, b); });
}
static inline unsigned __ballot_sync(unsigned, bool v) {
    return lanes_reduced(v, 0, [](unsigned a, unsigned b, unsigned i) { return a | b << i; });
}
static inline bool __any_sync(unsigned, bool v) { return __ballot_sync(~0u, v); }

static inline int atomicAdd(int* p, int v) { int old = *p; *p += v; return old; }
static inline int atomicMax(int* p, int v) { int old = *p; *p = std::max(old, v); return old; }
static inline unsigned atomicAdd(unsigned* p, unsigned v) { unsigned old = *p; *p += v; return old; }
static inline unsigned atomicMax(unsigned* p, unsigned v) { unsigned old = *p; *p = std::max(old, v); return old; }
static inline float atomicAdd(float* p, float v) { float old = *p; *p += v; return old; }
static inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) {
    unsigned long long old = *p;
    *p += v;
    return old;
}
static inline void __threadfence() {}

// ---- numbers ---------------------------------------------------------------------------------------------------------

template <class T> static T __ldcs(const T* p) { return *p; }
template <class T> static T __ldcg(const T* p) { return *p; }
template <class T> static T __ldg(const T* p) { return *p; }
template <class A, class B>
static auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }
template <class A, class B>
static auto max(A a, B b) -> decltype(a + b) { return a > b ? a : b; }

template <class To, class From>
static To bit_copy(From v) {
    To to;
    memcpy(&to, &v, sizeof to);
    return to;
}
static inline float __int_as_float(int v) { return bit_copy<float>(v); }
static inline float __uint_as_float(unsigned v) { return bit_copy<float>(v); }
static inline unsigned __float_as_uint(float v) { return bit_copy<unsigned>(v); }
static inline int __float_as_int(float v) { return bit_copy<int>(v); }
#define __expf expf
#define __logf logf
static inline float rsqrtf(float v) { return 1.f / sqrtf(v); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    const uint64_t v = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= (unsigned)(v >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
    return r;
}

static inline float half_value(uint16_t h) { return bit_copy<_Float16>(h); }
static inline uint16_t to_half(double v) { return bit_copy<uint16_t>((_Float16)v); }
static inline float brain_value(uint16_t h) { return bit_copy<float>((unsigned)h << 16); }
static inline uint16_t to_brain(double v) {
    if (v != v) return 0x7fff;
    if (v == 0 || std::isinf(v)) return bit_copy<unsigned>((float)v) >> 16;
    int e;
    const double m = frexp(v, &e), rounded = nearbyint(ldexp(m, 8));
    return bit_copy<unsigned>((float)ldexp(rounded, e - 8)) >> 16;
}

// ---- tensor cores ----------------------------------------------------------------------------------------------------

static inline uint32_t __cvta_generic_to_shared(const void* p) {
    return (uint32_t)((const unsigned char*)p - lanes::shared);
}
// Static arrays lie beside the dynamic ones, before or after.
static inline unsigned char* at_shared(uint32_t a) { return lanes::shared + (int32_t)a; }

// A barrier in shared memory: who is missing, how many meet, the phase, bytes that are to come.
struct EmulatedBarrier {
    uint8_t missing, count;
    uint16_t phase;
    int32_t bytes;
};

static inline void emulated_barrier_init(uint32_t at, unsigned count) {
    *(EmulatedBarrier*)at_shared(at) = {(uint8_t)count, (uint8_t)count, 0, 0};
}
static inline void emulated_barrier_end(EmulatedBarrier& b) {
    if (b.missing == 0 && b.bytes == 0) b.missing = b.count, b.phase++;
}
static inline void emulated_barrier_arrive(uint32_t at) {
    auto& b = *(EmulatedBarrier*)at_shared(at);
    b.missing--;
    emulated_barrier_end(b);
}
static inline void emulated_barrier_expect(uint32_t at, unsigned bytes) {
    ((EmulatedBarrier*)at_shared(at))->bytes += bytes;
    emulated_barrier_arrive(at);
}
static inline void emulated_barrier_complete(uint32_t at, unsigned bytes) {
    auto& b = *(EmulatedBarrier*)at_shared(at);
    b.bytes -= bytes;
    emulated_barrier_end(b);
}
static inline unsigned emulated_barrier_passed(uint32_t at, unsigned parity) {
    if ((((EmulatedBarrier*)at_shared(at))->phase & 1) != parity) return 1;
    lanes::yield();
    return 0;
}

template <bool BRAIN>
static float operand(unsigned word, bool high) {
    const uint16_t h = high ? word >> 16 : word & 0xffff;
    return BRAIN ? brain_value(h) : half_value(h);
}

template <bool BRAIN>
static void emulated_mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const unsigned me = lanes::current, board = lanes::meet(own, sizeof own), w = me / 32, g = me % 32 / 4, t = me % 4;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned row = g + i / 2 * 8, col = 2 * t + i % 2;
        double sum = 0;
        for (unsigned k = 0; k < 16; k++) {
            const unsigned from = k % 8 / 2, part = (row >= 8) + 2 * (k >= 8);
            const unsigned av = lanes::shown<unsigned>(board, w, row % 8 * 4 + from, part);
            const unsigned bv = lanes::shown<unsigned>(board, w, col * 4 + from, 4 + (k >= 8));
            sum += (double)operand<BRAIN>(av, k % 2) * operand<BRAIN>(bv, k % 2);
        }
        c[i] = (float)(c[i] + sum);
    }
}

static inline void emulated_ldmatrix4(unsigned (&r)[4], unsigned address) {
    const unsigned me = lanes::current, board = lanes::meet(&address, 4), l = me % 32;
    for (unsigned m = 0; m < 4; m++)
        memcpy(&r[m], at_shared(lanes::shown<unsigned>(board, me / 32, m * 8 + l / 4)) + l % 4 * 4, 4);
}

static inline void emulated_ldmatrix4_transposed(unsigned (&r)[4], unsigned address) {
    const unsigned me = lanes::current, board = lanes::meet(&address, 4), l = me % 32;
    for (unsigned m = 0; m < 4; m++) {
        uint16_t pair[2];
        for (unsigned i = 0; i < 2; i++)
            memcpy(&pair[i], at_shared(lanes::shown<unsigned>(board, me / 32, m * 8 + l % 4 * 2 + i)) + l / 4 * 2, 2);
        memcpy(&r[m], pair, 4);
    }
}

// The right operand in lines of 128 bytes whose 16-byte pieces are exchanged.
template <int N>
static void emulated_wgmma(float (&c)[N / 2], const unsigned (&a)[4], uint64_t descriptor, bool brain) {
    const unsigned me = lanes::current, board = lanes::meet(a, 16), w = me / 32, l = me % 32, g = l / 4, t = l % 4;
    if ((descriptor >> 62 & 3) != 1 || (descriptor >> 32 & 0x3fff) != 64) abort();
    const unsigned base = (descriptor & 0x3fff) << 4;
    const auto value = [&](uint16_t h) { return brain ? brain_value(h) : half_value(h); };
    float left[2][16];
    for (unsigned h = 0; h < 2; h++)
        for (unsigned k = 0; k < 16; k++) {
            const unsigned v = lanes::shown<unsigned>(board, w, g * 4 + k % 8 / 2, h + 2 * (k >= 8));
            left[h][k] = value(k % 2 ? v >> 16 : v & 0xffff);
        }
    for (unsigned j = 0; j < N / 8; j++)
        for (unsigned e = 0; e < 2; e++) {
            float right[16];
            for (unsigned k = 0; k < 16; k++) {
                unsigned at = base + (j * 8 + 2 * t + e) * 128 + 2 * k;
                at ^= (at >> 7 & 7) << 4;
                uint16_t h;
                memcpy(&h, at_shared(at), 2);
                right[k] = value(h);
            }
            for (unsigned h = 0; h < 2; h++) {
                double sum = 0;
                for (unsigned k = 0; k < 16; k++) sum += (double)left[h][k] * right[k];
                c[4 * j + 2 * h + e] = (float)(c[4 * j + 2 * h + e] + sum);
            }
        }
    __syncwarp();
}
