// Experts whose codes are small floats with scales of blocks: MXFP4, NVFP4 and FP8 (operator contract, section 1.12). Compiled
// for BITS 4 (E2M1) and 8 (E4M3FN); sums are float32.
//
// Products of a route at a time read the codes as they lie; `mini_expand` writes whole matrices for the dense products.

#include "doyen.cuh"

enum ScaleKind : u32 { SCALE_NONE = 0, SCALE_E8M0 = 1, SCALE_E4M3 = 2, SCALE_TILES = 3 };

// A bank of matrices [rows, cols]. Mirrors `Mini`.
struct Mini {
    const u8* codes;
    const void* scales;
    const float* globals;  // a factor of every matrix, or null
    u64 codes_stride;      // bytes from one matrix to the next
    u64 scales_stride;     // scales from one matrix to the next
    u32 rows;
    u32 cols;
    u32 row_bytes;
    u32 blocks;       // scales of a row
    u32 block;        // columns that share a scale, a multiple of RUN unless a row has one
    u32 tile;         // rows that share a scale
    u32 scale_kind;
    u32 scale_float;  // FloatKind of the scales of tiles
    u32 aligned;      // whether every run starts at a multiple of its own bytes
};

// Exponent and mantissa lie where a float has its lowest exponent bits; a power of two moves them to their place, exactly,
// numbers without exponent included.
__device__ __forceinline__ float e2m1(u32 code) {
    return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 8.507059173023462e37f;  // 2^126
}
__device__ __forceinline__ float e4m3(u32 code) {
    const float v = __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20) * 1.329227995784916e36f;  // 2^120
    return (code & 0x7f) == 0x7f ? QUIET_NAN : v;
}
__device__ __forceinline__ float e8m0(u32 code) {
    return code == 255 ? QUIET_NAN : __uint_as_float(code ? code << 23 : 1u << 22);
}

__device__ __forceinline__ float mini_scale(const Mini& w, u64 matrix, u32 row, u32 column) {
    const float global = w.globals ? w.globals[matrix] : 1.f;
    const u64 at = matrix * w.scales_stride + (u64)(row / w.tile) * w.blocks + column / w.block;
    switch (w.scale_kind) {
        case SCALE_E8M0: return e8m0(((const u8*)w.scales)[at]) * global;
        case SCALE_E4M3: return e4m3(((const u8*)w.scales)[at]) * global;
        case SCALE_TILES: return load_float(w.scales, at, w.scale_float) * global;
        default: return global;
    }
}

// The values of a run without their scale; columns past the row are zeros.
__device__ __forceinline__ void load_run(float (&out)[RUN], const Mini& w, u64 matrix, u32 row, u32 column) {
    const u8* p = w.codes + matrix * w.codes_stride + (u64)row * w.row_bytes + (u64)column * BITS / 8;
    const u32 guard = w.cols - column;
    u32 word[BITS / 2];
    if (w.aligned && guard >= RUN) {
        if constexpr (BITS == 4) {
            const uint2 v = *(const uint2*)p;
            word[0] = v.x, word[1] = v.y;
        } else {
            const uint4 v = *(const uint4*)p;
            word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
        }
    } else {
        const u32 bytes = guard >= RUN ? 2 * BITS : (guard * BITS + 7) / 8;
#pragma unroll
        for (int i = 0; i < BITS / 2; i++) {
            word[i] = 0;
            for (u32 j = 0; j < 4; j++)
                if (4 * i + j < bytes) word[i] |= (u32)p[4 * i + j] << (8 * j);
        }
    }
    constexpr int PER_WORD = 32 / BITS;
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        const u32 code = (word[i / PER_WORD] >> (BITS * (i % PER_WORD))) & ((1u << BITS) - 1);
        out[i] = i >= guard ? 0.f : BITS == 4 ? e2m1(code) : e4m3(code);
    }
}

// Dot products of rows of a matrix with a row of activations, the sums in every lane.
template <int ROWS>
__device__ __forceinline__ void mini_dots(float (&sum)[ROWS], const Mini& w, u64 matrix, const u32 (&row)[ROWS], const float* x) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r] = 0.f;
    for (u32 column = threadIdx.x % 32 * RUN; column < w.cols; column += 32 * RUN) {
        float v[RUN];
#pragma unroll
        for (int i = 0; i < RUN; i++) v[i] = column + i < w.cols ? x[column + i] : 0.f;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float codes[RUN], part = 0.f;
            load_run(codes, w, matrix, row[r], column);
#pragma unroll
            for (int i = 0; i < RUN; i++) part = fmaf(codes[i], v[i], part);
            sum[r] = fmaf(mini_scale(w, matrix, row[r], column), part, sum[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r] = warp_sum(sum[r]);
}

// Mirrors `MiniRoutedParams`.
struct MiniRoutedParams {
    Mini w;
    const float* x;
    float* y;
    const void* bias;    // [experts, rows]
    const int* experts;  // [routes]
    const float* mix;    // [routes], of mini_sum alone
    u32 bias_float;
    u32 x_div;           // routes that share a row of x
    u32 k;               // routes of a token
    Activation act;
};

#define WARPS 4

// y[route, rows] = W[expert] x[route / x_div] + bias[expert]; a warp a row.
extern "C" __global__ void __launch_bounds__(32 * WARPS) mini_routed(const __grid_constant__ MiniRoutedParams p) {
    in_order();
    const u32 row[1] = {blockIdx.x * WARPS + threadIdx.x / 32}, route = blockIdx.y;
    if (row[0] >= p.w.rows) return;
    const u64 expert = p.experts[route];
    float sum[1];
    mini_dots(sum, p.w, expert, row, p.x + (u64)(route / p.x_div) * p.w.cols);
    const float b = p.bias ? load_float(p.bias, expert * p.w.rows + row[0], p.bias_float) : 0.f;
    if (threadIdx.x % 32 == 0) p.y[(u64)route * p.w.rows + row[0]] = sum[0] + b;
}

// FC1 and the activation in one: y[route, inter]; a warp a value.
extern "C" __global__ void __launch_bounds__(32 * WARPS) mini_activated(const __grid_constant__ MiniRoutedParams p) {
    in_order();
    const u32 inter = p.act.gate == GATE_NONE ? p.w.rows : p.w.rows / 2;
    const u32 i = blockIdx.x * WARPS + threadIdx.x / 32, route = blockIdx.y;
    if (i >= inter) return;
    const u64 expert = p.experts[route];
    u32 row[2] = {i, i};
    if (p.act.gate == GATE_INTERLEAVED) row[0] = 2 * i, row[1] = 2 * i + 1;
    if (p.act.gate == GATE_CONCATENATED) row[1] = inter + i;
    float h[2];
    mini_dots(h, p.w, expert, row, p.x + (u64)(route / p.x_div) * p.w.cols);
    if (threadIdx.x % 32) return;
    if (p.bias)
        for (int j = 0; j < 2; j++) h[j] += load_float(p.bias, expert * p.w.rows + row[j], p.bias_float);
    p.y[(u64)route * inter + i] = activate(p.act, h[0], h[1]);
}

// FC2 and the weighted sum in one: y[token, rows] = sum_j mix[token, j] (W[e_j] x[token, j] + bias[e_j]), j in order; a block a
// row of a token, whose warps share the routes. Shared memory: k floats.
extern "C" __global__ void __launch_bounds__(32 * WARPS) mini_sum(const __grid_constant__ MiniRoutedParams p) {
    in_order();
    extern __shared__ float part[];
    const u32 row[1] = {blockIdx.x}, token = blockIdx.y;
    for (u32 j = threadIdx.x / 32; j < p.k; j += WARPS) {
        const u32 route = token * p.k + j;
        const u64 expert = p.experts[route];
        float sum[1];
        mini_dots(sum, p.w, expert, row, p.x + (u64)route * p.w.cols);
        const float b = p.bias ? load_float(p.bias, expert * p.w.rows + row[0], p.bias_float) : 0.f;
        if (threadIdx.x % 32 == 0) part[j] = p.mix[route] * (sum[0] + b);
    }
    __syncthreads();
    if (threadIdx.x) return;
    float total = 0.f;
    for (u32 j = 0; j < p.k; j++) total += part[j];
    p.y[(u64)token * p.w.rows + row[0]] = total;
}

// Mirrors `MiniExpandParams`.
struct MiniExpandParams {
    Mini w;
    void* y;    // [matrices, rows, cols] of `kind`
    u64 first;  // matrix
    u64 runs;   // of all matrices
    u32 kind;   // FloatKind
};

extern "C" __global__ void __launch_bounds__(256) mini_expand(const __grid_constant__ MiniExpandParams p) {
    in_order();
    const u32 line = (p.w.cols + RUN - 1) / RUN;
    for (u64 at = blockIdx.x * 256ull + threadIdx.x; at < p.runs; at += gridDim.x * 256ull) {
        const u64 row = at / line, matrix = p.first + row / p.w.rows;
        const u32 column = at % line * RUN, own = row % p.w.rows;
        float codes[RUN];
        load_run(codes, p.w, matrix, own, column);
        const float scale = mini_scale(p.w, matrix, own, column);
        for (u32 i = 0; i < RUN && column + i < p.w.cols; i++)
            store_float(p.y, row * p.w.cols + column + i, p.kind, codes[i] * scale);
    }
}

// Lines that hold the rows of a column, [cols, rows / 2], to lines that hold the columns of a row: 4-bit codes, two by two.
// Mirrors `MiniTurnParams`.
struct MiniTurnParams {
    const u8* x;
    u8* y;
    u64 pairs;  // of all matrices: of columns, of rows
    u32 rows;
    u32 cols;
};

extern "C" __global__ void __launch_bounds__(256) mini_turn(const __grid_constant__ MiniTurnParams p) {
    in_order();
    const u32 rows = p.rows / 2, cols = p.cols / 2;
    for (u64 at = blockIdx.x * 256ull + threadIdx.x; at < p.pairs; at += gridDim.x * 256ull) {
        const u64 matrix = at / rows / cols * rows * p.cols;
        const u32 n = at % rows, k = at / rows % cols;
        const u32 a = p.x[matrix + (u64)2 * k * rows + n], b = p.x[matrix + (u64)(2 * k + 1) * rows + n];
        p.y[matrix + (u64)2 * n * cols + k] = (a & 15) | (b & 15) << 4;
        p.y[matrix + (u64)(2 * n + 1) * cols + k] = a >> 4 | (b & 0xf0);
    }
}
