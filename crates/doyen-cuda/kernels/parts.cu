// What cuts, joins, folds, picks and turns values of a step: Split, Concat, reductions over neighbouring axes, TopK,
// GatherElements, ScatterElements, rotations outside of attention. Element by element in float32, or word by word.

#include "doyen.cuh"

// Runs of `run` words, the same of each of many rows of both sides. Mirrors `CopyParams`.
struct CopyParams {
    const u32* x;
    u32* y;
    u64 n;         // words in all
    u64 run;
    u64 x_first;   // word of the first run
    u64 y_first;
    u64 x_stride;  // words from one run to the next
    u64 y_stride;
};

extern "C" __global__ void __launch_bounds__(256) copy_runs(const __grid_constant__ CopyParams p) {
    in_order();
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < p.n; i += gridDim.x * 256ull) {
        const u64 row = i / p.run, c = i % p.run;
        p.y[p.y_first + row * p.y_stride + c] = p.x[p.x_first + row * p.x_stride + c];
    }
}

enum ReduceKind : u32 { R_MAX, R_MEAN, R_MIN, R_PROD, R_SUM, R_SUM_SQUARE, R_L1, R_L2 };

// y[o, i] of x[o, 0.., i]. Mirrors `ReduceParams`.
struct ReduceParams {
    const float* x;
    float* y;
    u64 n;      // numbers of y
    u64 inner;  // of them, those behind the axes
    u32 count;  // numbers that fall together
    u32 kind;
};

// A NaN stays one.
__device__ __forceinline__ float reduced(u32 kind, float a, float b) {
    switch (kind) {
        case R_MAX: return a != a || a > b ? a : b;
        case R_MIN: return a != a || a < b ? a : b;
        case R_PROD: return a * b;
        default: return a + b;
    }
}

// A warp a number.
extern "C" __global__ void __launch_bounds__(128) reduce(const __grid_constant__ ReduceParams p) {
    in_order();
    const u64 at = blockIdx.x * 4ull + threadIdx.x / 32;
    if (at >= p.n) return;
    const float* x = p.x + at / p.inner * p.count * p.inner + at % p.inner;
    float v = p.kind == R_MAX ? -INF : p.kind == R_MIN ? INF : p.kind == R_PROD ? 1.f : 0.f;
    for (u32 k = threadIdx.x % 32; k < p.count; k += 32) {
        float e = x[k * p.inner];
        if (p.kind == R_SUM_SQUARE || p.kind == R_L2) e *= e;
        if (p.kind == R_L1) e = fabsf(e);
        v = reduced(p.kind, v, e);
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) v = reduced(p.kind, v, __shfl_xor_sync(0xffffffffu, v, o));
    if (p.kind == R_MEAN) v /= p.count;
    if (p.kind == R_L2) v = sqrtf(v);
    if (threadIdx.x % 32 == 0) p.y[at] = v;
}

// The `k` first of each row of `width` numbers in descending or ascending order, equal ones by index; a NaN is above all. Mirrors
// `TopKParams`.
struct TopKParams {
    const float* x;
    float* values;  // [rows, k] or null
    i64* indices;   // [rows, k] or null
    u64 rows;
    u32 width;
    u32 k;
    u32 largest;
};

#define NOBODY 0xffffffffu

__device__ __forceinline__ bool comes_before(float a, u32 at, float b, u32 other, bool largest) {
    if (at == NOBODY || other == NOBODY) return other == NOBODY && at != NOBODY;
    const bool above = a > b || (a != a && b == b), below = a < b || (a == a && b != b);
    return above || below ? (largest ? above : below) : at < other;
}

// A warp a row: every round finds the first behind the last one found.
extern "C" __global__ void __launch_bounds__(128) top_k(const __grid_constant__ TopKParams p) {
    in_order();
    const u64 row = blockIdx.x * 4ull + threadIdx.x / 32;
    if (row >= p.rows) return;
    const float* x = p.x + row * p.width;
    float last = 0.f;
    u32 last_at = NOBODY;
    for (u32 r = 0; r < p.k; r++) {
        float best = 0.f;
        u32 at = NOBODY;
        for (u32 i = threadIdx.x % 32; i < p.width; i += 32) {
            if (last_at != NOBODY && !comes_before(last, last_at, x[i], i, p.largest)) continue;
            if (comes_before(x[i], i, best, at, p.largest)) best = x[i], at = i;
        }
#pragma unroll
        for (int o = 16; o; o >>= 1) {
            const float v = __shfl_xor_sync(0xffffffffu, best, o);
            const u32 other = __shfl_xor_sync(0xffffffffu, at, o);
            if (comes_before(v, other, best, at, p.largest)) best = v, at = other;
        }
        if (threadIdx.x % 32 == 0) {
            if (p.values) p.values[row * p.k + r] = best;
            if (p.indices) p.indices[row * p.k + r] = at;
        }
        last = best, last_at = at;
    }
}

// Index `i` of a row of `width` numbers; outside of it, it raises the fault and is 0.
__device__ __forceinline__ u32 index_at(const void* indices, u64 i, u32 wide, u32 width, int* fault, u32 node) {
    i64 at = wide ? ((const i64*)indices)[i] : (i64)((const int*)indices)[i];
    if (at < 0) at += width;
    if (at >= 0 && at < width) return (u32)at;
    atomicMax(fault, (int)node);
    return 0;
}

// y[r, j] = x[r, indices[r, j]] of words. Mirrors `PickParams`.
struct PickParams {
    const u32* x;
    const void* indices;
    u32* y;
    int* fault;
    u64 n;      // words of y
    u32 width;  // of a row of x
    u32 count;  // of a row of y
    u32 wide;   // int64 indices instead of int32
    u32 node;
};

extern "C" __global__ void __launch_bounds__(256) pick(const __grid_constant__ PickParams p) {
    in_order();
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < p.n; i += gridDim.x * 256ull) {
        const u32 at = index_at(p.indices, i, p.wide, p.width, p.fault, p.node);
        p.y[i] = p.x[i / p.count * p.width + at];
    }
}

// y[r] = x[r], then y[r, indices[r, j]] = updates[r, j] for one j after the other. Mirrors `ScatterParams`.
struct ScatterParams {
    const u32* x;
    const void* indices;
    const u32* updates;
    u32* y;
    int* fault;
    u64 rows;
    u32 width;
    u32 count;  // updates of a row
    u32 wide;
    u32 node;
};

// A warp a row.
extern "C" __global__ void __launch_bounds__(128) scatter(const __grid_constant__ ScatterParams p) {
    in_order();
    const u64 row = blockIdx.x * 4ull + threadIdx.x / 32;
    if (row >= p.rows) return;
    for (u32 i = threadIdx.x % 32; i < p.width; i += 32) p.y[row * p.width + i] = p.x[row * p.width + i];
    __syncwarp();
    if (threadIdx.x % 32) return;
    for (u32 j = 0; j < p.count; j++) {
        const u64 from = row * p.count + j;
        p.y[row * p.width + index_at(p.indices, from, p.wide, p.width, p.fault, p.node)] = p.updates[from];
    }
}

// Heads of `size` channels whose first 2 * half rotate. Mirrors `RotateParams`.
struct RotateParams {
    const float* x;
    float* y;
    const void* cos;       // [rows, half]; [tokens, half] without positions
    const void* sin;
    const i64* positions;  // [streams, tokens], or null
    int* fault;
    u64 n;                 // numbers of x
    u32 tokens;
    u32 heads;
    u32 size;
    u32 half;
    u32 rows;
    u32 streams;
    u32 by_head;           // x is [heads, tokens, size], instead of [tokens, heads, size]
    u32 interleaved;
    u32 cos_float;
    u32 sin_float;
    u32 node;
};

extern "C" __global__ void __launch_bounds__(256) rotate(const __grid_constant__ RotateParams p) {
    in_order();
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < p.n; i += gridDim.x * 256ull) {
        const u32 c = i % p.size;
        if (c >= 2 * p.half) {
            p.y[i] = p.x[i];
            continue;
        }
        const u64 head = i / p.size;
        const u32 token = p.by_head ? head % p.tokens : head / p.heads;
        i64 at = token;
        if (p.positions) {
            at = p.positions[token];
            bool bad = at < 0 || at >= p.rows;
            for (u32 s = 1; s < p.streams; s++) bad |= p.positions[(u64)s * p.tokens + token] != at;
            if (bad) {
                atomicMax(p.fault, (int)p.node);
                at = 0;
            }
        }
        const u32 pair = p.interleaved ? c / 2 : c % p.half;
        const bool second = p.interleaved ? c % 2 : c >= p.half;
        const u32 apart = p.interleaved ? 1 : p.half;
        const float cs = load_float(p.cos, at * p.half + pair, p.cos_float);
        const float sn = load_float(p.sin, at * p.half + pair, p.sin_float);
        const float own = p.x[i], other = p.x[second ? i - apart : i + apart];
        p.y[i] = second ? other * sn + own * cs : own * cs - other * sn;
    }
}
