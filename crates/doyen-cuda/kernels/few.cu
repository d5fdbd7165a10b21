// Products of up to 8 rows of activations with packed codes on the tensor cores: as fast as the codes can be read, whatever
// the number of rows. Compiled once per BITS (2, 4, 8) and OPERAND.
//
// Weights are the left operand of mma.m16n8k16, straight from the packed bytes: the order of K inside a fragment is free,
// so lane 4g + t takes UNIT consecutive codes of rows g and g + 8, and the same columns of token g on the other side. Codes
// less their zero points are exact in both operand types; the 4 * UNIT columns of a unit share a block, whose scale goes
// to its float32 sums. Only activations are rounded. A warp owns 16 rows, or shares their columns with others where there are
// too few rows to fill the card.

#include "doyen.cuh"

#define WARPS 8
#define TOKENS 8
#define QUAD 64  // columns of a warp's step: 4 lanes of a run of 16 codes

// Mirrors `FewParams`.
struct FewParams {
    Weights w;
    const void* x;       // float32, or narrowed: in the operand type, the columns of a unit in the order of its pairs
    float* y;
    const void* bias;    // [experts, rows]
    const int* experts;  // expert of each route, where every route is a tile of its own
    const int* order;    // otherwise routes in the experts' order, and their tiles, as of gemm.cu; null: no experts
    const int2* tiles;
    const int* ends;
    const int* tile_count;
    u64 x_stride;
    u64 y_stride;
    u32 bias_float;
    u32 m;
    u32 x_div;
    u32 y_by_route;
    u32 narrowed;
    u32 split;           // warps that share the columns of 16 rows: 1, 2, 4 or 8
    Activation act;
};

// Sums of rows `row[0]` and `row[1]` (one of each lane's quarter warp) with the tokens, over every `split`th quad of columns
// from `part` on. Codes and scales of AHEAD quads are on their way at once.
#define AHEAD 3

template <int UNIT>
__device__ __forceinline__ void share(float (&sum)[4], const FewParams& p, u64 matrix, const u32 (&row)[2], const void* x,
                                      u32 part) {
    using Codes = Unit<BITS, UNIT, OPERAND>;
    constexpr int UNITS = RUN / UNIT;  // of a quad
    constexpr int CHUNK = UNITS > AHEAD ? 1 : AHEAD / UNITS;  // quads
    const Weights& w = p.w;
    const u32 t = threadIdx.x % 4, split = p.split;
    const u32 quads = (w.cols + QUAD - 1) / QUAD;
    const bool default_zero = w.zero_kind == ZERO_DEFAULT;
    const float middle = (float)(1u << (BITS - 1));
    const u8* codes[2];
    u64 scales[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        codes[r] = w.codes + matrix * w.codes_stride + (u64)row[r] * w.row_bytes;
        scales[r] = matrix * w.scales_stride + (u64)row[r] * w.blocks;
    }
    for (u32 quad0 = part; quad0 < quads; quad0 += CHUNK * split) {
        Codes unit[CHUNK][UNITS][2];
        float scale[CHUNK][UNITS][2], zero[CHUNK][UNITS][2];
#pragma unroll
        for (int q = 0; q < CHUNK; q++)
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                const u32 base = (quad0 + q * split) * QUAD + u * (4 * UNIT), column = base + t * UNIT;
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    unit[q][u][r].zero();
                    scale[q][u][r] = 0.f, zero[q][u][r] = middle;
                    if (base < w.cols) {
                        if (column < w.cols) unit[q][u][r].load(codes[r] + (u64)column * BITS / 8);
                        scale[q][u][r] = load_float(w.scales, scales[r] + (base >> w.block_shift), w.scale_float);
                        if (!default_zero) zero[q][u][r] = weight_zero<BITS>(w, matrix, row[r], base);
                    }
                }
            }
#pragma unroll
        for (int q = 0; q < CHUNK; q++)
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                const u32 column = (quad0 + q * split) * QUAD + u * (4 * UNIT) + t * UNIT;
                const bool live = x && column < w.cols;
                u32 b[UNIT / 2];
                if (p.narrowed) {
                    const u32* from = (const u32*)((const u16*)x + column);
                    if constexpr (UNIT >= 8) {
#pragma unroll
                        for (int i = 0; i < UNIT / 8; i++) {
                            uint4 c = live ? ((const uint4*)from)[i] : make_uint4(0, 0, 0, 0);
                            b[4 * i] = c.x, b[4 * i + 1] = c.y, b[4 * i + 2] = c.z, b[4 * i + 3] = c.w;
                        }
                    } else {
                        uint2 c = live ? *(const uint2*)from : make_uint2(0, 0);
                        b[0] = c.x, b[1] = c.y;
                    }
                } else {
                    float v[UNIT];
#pragma unroll
                    for (int i = 0; i < UNIT / 4; i++) {
                        float4 c = live ? ((const float4*)((const float*)x + column))[i] : make_float4(0.f, 0.f, 0.f, 0.f);
                        v[4 * i] = c.x, v[4 * i + 1] = c.y, v[4 * i + 2] = c.z, v[4 * i + 3] = c.w;
                    }
#pragma unroll
                    for (int i = 0; i < UNIT / 2; i++) b[i] = OPERAND::pack(v[Codes::first(i)], v[Codes::second(i)]);
                }
                u32 a[2][UNIT / 2];
#pragma unroll
                for (int r = 0; r < 2; r++) unit[q][u][r].pairs(a[r], (u32)zero[q][u][r]);
                float piece[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
                for (int i = 0; i < UNIT / 2; i += 2) {
                    u32 left[4] = {a[0][i], a[1][i], a[0][i + 1], a[1][i + 1]};
                    OPERAND::mma(piece, left, b[i], b[i + 1]);
                }
                sum[0] = fmaf(scale[q][u][0], piece[0], sum[0]);
                sum[1] = fmaf(scale[q][u][0], piece[1], sum[1]);
                sum[2] = fmaf(scale[q][u][1], piece[2], sum[2]);
                sum[3] = fmaf(scale[q][u][1], piece[3], sum[3]);
            }
    }
}

// The group of 16 rows that a warp works on, and which part of the columns.
struct Part {
    u32 group;
    u32 part;
};

__device__ __forceinline__ Part part_of(const FewParams& p) {
    u32 warp = threadIdx.x / 32;
    return {blockIdx.x * (WARPS / p.split) + warp / p.split, warp % p.split};
}

// The warp's 16 rows: sums of all its parts, in the warp that has the first. False in the others.
__device__ __forceinline__ bool rows16(float (&sum)[4], const FewParams& p, u32 part, u64 matrix, const u32 (&row)[2],
                                       const void* x) {
    __shared__ float4 parts[WARPS][32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = 0.f;
    if (p.w.block_shift >= 6)
        share<16>(sum, p, matrix, row, x, part);
    else if (p.w.block_shift == 5)
        share<8>(sum, p, matrix, row, x, part);
    else
        share<4>(sum, p, matrix, row, x, part);
    if (p.split == 1) return true;
    parts[warp][lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    if (part) return false;
    for (u32 i = 1; i < p.split; i++) {
        float4 v = parts[warp + i][lane];
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
    return true;
}

// Which rows of activations a block takes, and of which expert.
struct Place {
    u64 expert;
    u32 first;
    u32 end;
};

__device__ __forceinline__ bool place(const FewParams& p, Place& at) {
    const u32 b = blockIdx.y;
    if (p.experts) {
        at = {(u64)p.experts[b], b, b + 1};
        return true;
    }
    if (p.tiles) {
        if ((int)b >= *p.tile_count) return false;
        int2 tile = p.tiles[b];
        at = {(u64)tile.x, (u32)tile.y, min((u32)p.ends[tile.x], (u32)tile.y + TOKENS)};
        return true;
    }
    at = {0, b * TOKENS, min(p.m, b * TOKENS + TOKENS)};
    return true;
}

// The activations of this lane's token; null where there is none.
__device__ __forceinline__ const void* token(const FewParams& p, const Place& at) {
    u32 r = at.first + (threadIdx.x % 32) / 4;
    if (r >= at.end) return nullptr;
    u64 row = r;
    if (p.x_div) row = (p.order ? (u32)p.order[r] : r) / p.x_div;
    return (const u8*)p.x + row * p.x_stride * (p.narrowed ? sizeof(u16) : sizeof(float));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 3) few(const __grid_constant__ FewParams p) {
    in_order();
    Place at;
    if (!place(p, at)) return;
    const u32 g = (threadIdx.x % 32) / 4, t = threadIdx.x % 4;
    const Part own = part_of(p);
    const u32 n[2] = {own.group * 16 + g, own.group * 16 + 8 + g};
    const u32 row[2] = {n[0] < p.w.rows ? n[0] : 0, n[1] < p.w.rows ? n[1] : 0};
    float sum[4];
    if (!rows16(sum, p, own.part, at.expert, row, token(p, at))) return;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        u32 r = at.first + 2 * t + c;
        if (r >= at.end) continue;
        u64 to = p.order && p.y_by_route ? (u64)p.order[r] : (u64)r;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (n[h] >= p.w.rows) continue;
            float b = p.bias ? load_float(p.bias, at.expert * p.w.rows + n[h], p.bias_float) : 0.f;
            p.y[to * p.y_stride + n[h]] = sum[2 * h + c] + b;
        }
    }
}

// FC1 and the activation: rows g of the left operand are gates, rows g + 8 their linear rows. y is in the order of places.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 3) few_activated(const __grid_constant__ FewParams p) {
    in_order();
    Place at;
    if (!place(p, at)) return;
    const u32 g = (threadIdx.x % 32) / 4, t = threadIdx.x % 4;
    const bool gated = p.act.gate != GATE_NONE;
    const u32 inter = gated ? p.w.rows / 2 : p.w.rows;
    u32 value[2], n[2];
    const Part own = part_of(p);
    value[0] = own.group * (gated ? 8 : 16) + g;
    value[1] = gated ? value[0] : value[0] + 8;
    if (p.act.gate == GATE_INTERLEAVED)
        n[0] = 2 * value[0], n[1] = 2 * value[0] + 1;
    else if (p.act.gate == GATE_CONCATENATED)
        n[0] = value[0], n[1] = inter + value[0];
    else
        n[0] = value[0], n[1] = value[1];
    const u32 row[2] = {value[0] < inter ? n[0] : 0, value[1] < inter ? n[1] : 0};
    float sum[4];
    if (!rows16(sum, p, own.part, at.expert, row, token(p, at))) return;
    float b[2] = {0.f, 0.f};
    if (p.bias)
#pragma unroll
        for (int h = 0; h < 2; h++) b[h] = load_float(p.bias, at.expert * p.w.rows + row[h], p.bias_float);
#pragma unroll
    for (int c = 0; c < 2; c++) {
        u32 r = at.first + 2 * t + c;
        if (r >= at.end) continue;
        float* y = p.y + (u64)r * p.y_stride;
        float h0 = sum[c] + b[0], h1 = sum[2 + c] + b[1];
        if (value[0] < inter) y[value[0]] = activate(p.act, h0, h1);
        if (!gated && value[1] < inter) y[value[1]] = activate(p.act, h1, 0.f);
    }
}

// Mirrors `NarrowParams`: `runs` runs of 16 numbers.
struct NarrowParams {
    const float* x;
    u16* y;
    u64 runs;
    u32 block_shift;  // of the weights they will meet
};

template <int UNIT>
__device__ __forceinline__ void narrow_run(const NarrowParams& p, u64 run) {
    using Codes = Unit<BITS, UNIT, OPERAND>;
    float v[RUN];
#pragma unroll
    for (int i = 0; i < RUN / 4; i++) {
        float4 q = ((const float4*)p.x)[run * 4 + i];
        v[4 * i] = q.x, v[4 * i + 1] = q.y, v[4 * i + 2] = q.z, v[4 * i + 3] = q.w;
    }
    u32 out[RUN / 2];
#pragma unroll
    for (int i = 0; i < RUN / 2; i++) {
        constexpr int PAIRS = UNIT / 2;
        int from = i / PAIRS * UNIT;
        out[i] = OPERAND::pack(v[from + Codes::first(i % PAIRS)], v[from + Codes::second(i % PAIRS)]);
    }
    ((uint4*)p.y)[run * 2] = make_uint4(out[0], out[1], out[2], out[3]);
    ((uint4*)p.y)[run * 2 + 1] = make_uint4(out[4], out[5], out[6], out[7]);
}

// A thread a run: 16 numbers to the operand type, in the order in which the codes of their units come out of their bytes.
extern "C" __global__ void __launch_bounds__(256) narrow(const __grid_constant__ NarrowParams p) {
    in_order();
    for (u64 run = blockIdx.x * 256ull + threadIdx.x; run < p.runs; run += gridDim.x * 256ull) {
        if (p.block_shift >= 6)
            narrow_run<16>(p, run);
        else if (p.block_shift == 5)
            narrow_run<8>(p, run);
        else
            narrow_run<4>(p, run);
    }
}
