// Products of up to 8 rows of activations with packed codes on the tensor cores: as fast as the codes can be read, whatever
// the number of rows. Compiled once per BITS (2, 4, 8) and OPERAND.
//
// Weights are the left operand of mma.m16n8k16, straight from the packed bytes: the order of K inside a fragment is free,
// so lane 4g + t takes UNIT consecutive codes of rows g and g + 8, and the same columns of token g on the other side. Codes
// less their zero points are exact in both operand types; the 4 * UNIT columns of a unit share a block, whose scale goes
// to its float32 sums. Only activations are rounded. A block's warps share the columns of 16 rows.

#include "doyen.cuh"

#define WARPS 8
#define TOKENS 8
#define QUAD 64  // columns of a warp's step: 4 lanes of a run of 16 codes

// Mirrors `FewParams`.
struct FewParams {
    Weights w;
    const float* x;
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
    Activation act;
};

// Sums of rows `row[0]` and `row[1]` (one of each lane's quarter warp) with the tokens, this warp's share of the columns.
template <int UNIT>
__device__ __forceinline__ void share(float (&sum)[4], const Weights& w, u64 matrix, const u32 (&row)[2],
                                      const float* x) {
    const u32 lane = threadIdx.x % 32, t = lane % 4, warp = threadIdx.x / 32;
    const u32 quads = (w.cols + QUAD - 1) / QUAD;
    const u8* codes[2];
#pragma unroll
    for (int r = 0; r < 2; r++) codes[r] = w.codes + matrix * w.codes_stride + (u64)row[r] * w.row_bytes;
#pragma unroll 2
    for (u32 quad = warp; quad < quads; quad += WARPS) {
#pragma unroll
        for (int u = 0; u < RUN / UNIT; u++) {
            const u32 base = quad * QUAD + u * (4 * UNIT), column = base + t * UNIT;
            if (base >= w.cols) break;
            const bool live = column < w.cols;
            Unit<BITS, UNIT, OPERAND> unit[2];
            float scale[2], zero[2];
            u32 minus[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                unit[r].zero();
                if (live) unit[r].load(codes[r] + (u64)column * BITS / 8);
                scale[r] = weight_scale<BITS>(w, matrix, row[r], base);
                zero[r] = weight_zero<BITS>(w, matrix, row[r], base);
                minus[r] = magic(OPERAND()).negative + (u32)zero[r] * 0x10001u;
            }
            float v[UNIT];
#pragma unroll
            for (int i = 0; i < UNIT / 4; i++) {
                float4 q = make_float4(0.f, 0.f, 0.f, 0.f);
                if (x && live) q = *(const float4*)(x + column + 4 * i);
                v[4 * i] = q.x, v[4 * i + 1] = q.y, v[4 * i + 2] = q.z, v[4 * i + 3] = q.w;
            }
            u32 a[2][UNIT / 2];
#pragma unroll
            for (int r = 0; r < 2; r++) unit[r].pairs(a[r], minus[r], zero[r]);
            float part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int i = 0; i < UNIT / 2; i += 2) {
                u32 left[4] = {a[0][i], a[1][i], a[0][i + 1], a[1][i + 1]};
                u32 b0 = OPERAND::pack(v[Unit<BITS, UNIT, OPERAND>::first(i)], v[Unit<BITS, UNIT, OPERAND>::second(i)]);
                u32 b1 = OPERAND::pack(v[Unit<BITS, UNIT, OPERAND>::first(i + 1)], v[Unit<BITS, UNIT, OPERAND>::second(i + 1)]);
                OPERAND::mma(part, left, b0, b1);
            }
            sum[0] = fmaf(scale[0], part[0], sum[0]);
            sum[1] = fmaf(scale[0], part[1], sum[1]);
            sum[2] = fmaf(scale[1], part[2], sum[2]);
            sum[3] = fmaf(scale[1], part[3], sum[3]);
        }
    }
}

// The 16 rows of the block: sums of all warps, in the first one. False in the others.
__device__ __forceinline__ bool rows16(float (&sum)[4], const Weights& w, u64 matrix, const u32 (&row)[2],
                                       const float* x) {
    __shared__ float4 parts[WARPS][32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = 0.f;
    if (w.block_shift >= 6)
        share<16>(sum, w, matrix, row, x);
    else if (w.block_shift == 5)
        share<8>(sum, w, matrix, row, x);
    else
        share<4>(sum, w, matrix, row, x);
    parts[warp][lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    if (warp) return false;
#pragma unroll
    for (int i = 1; i < WARPS; i++) {
        float4 v = parts[i][lane];
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
__device__ __forceinline__ const float* token(const FewParams& p, const Place& at) {
    u32 r = at.first + (threadIdx.x % 32) / 4;
    if (r >= at.end) return nullptr;
    u64 row = r;
    if (p.x_div) row = (p.order ? (u32)p.order[r] : r) / p.x_div;
    return p.x + row * p.x_stride;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) few(const __grid_constant__ FewParams p) {
    Place at;
    if (!place(p, at)) return;
    const u32 g = (threadIdx.x % 32) / 4, t = threadIdx.x % 4;
    const u32 n[2] = {blockIdx.x * 16 + g, blockIdx.x * 16 + 8 + g};
    const u32 row[2] = {n[0] < p.w.rows ? n[0] : 0, n[1] < p.w.rows ? n[1] : 0};
    float sum[4];
    if (!rows16(sum, p.w, at.expert, row, token(p, at))) return;
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
extern "C" __global__ void __launch_bounds__(32 * WARPS) few_activated(const __grid_constant__ FewParams p) {
    Place at;
    if (!place(p, at)) return;
    const u32 g = (threadIdx.x % 32) / 4, t = threadIdx.x % 4;
    const bool gated = p.act.gate != GATE_NONE;
    const u32 inter = gated ? p.w.rows / 2 : p.w.rows;
    u32 value[2], n[2];
    value[0] = blockIdx.x * (gated ? 8 : 16) + g;
    value[1] = gated ? value[0] : value[0] + 8;
    if (p.act.gate == GATE_INTERLEAVED)
        n[0] = 2 * value[0], n[1] = 2 * value[0] + 1;
    else if (p.act.gate == GATE_CONCATENATED)
        n[0] = value[0], n[1] = inter + value[0];
    else
        n[0] = value[0], n[1] = value[1];
    const u32 row[2] = {value[0] < inter ? n[0] : 0, value[1] < inter ? n[1] : 0};
    float sum[4];
    if (!rows16(sum, p.w, at.expert, row, token(p, at))) return;
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
