// Products with many rows of activations on the tensor cores: y[m, rows] = x[m, cols] W^T + bias. Activations are
// rounded to the operand type (OPERAND: Half or Brain) and weights dequantized to it on their way into shared memory;
// sums are float32. Compiled once per BITS and OPERAND.
//
// The grouped entries do the same for every expert over the rows routed to it: `tiles` names an expert and a first row
// for every tile of BM rows, `order` the routes in the experts' order.

#include "doyen.cuh"

#define BN 64
#define BK 64
#define PAD 8
#define LINE (BK + PAD)
#define THREADS 128

// Mirrors `GemmParams`.
struct GemmParams {
    Weights w;
    const float* x;
    float* y;
    const void* bias;    // [experts, rows]
    const int* order;    // routes, those of an expert next to each other; null: row i is row i
    const int2* tiles;   // expert and first place in `order` of each tile
    const int* ends;     // end of each expert's places in `order`
    const int* tile_count;
    u64 x_stride;
    u64 y_stride;
    u32 bias_float;
    u32 m;
    u32 x_div;           // routes that share a row of x; 0: x is in the experts' order
    u32 y_by_route;      // rows of y are routes; otherwise places in `order`
};

template <int BM>
__device__ __forceinline__ void gemm(const GemmParams& p, u64 expert, u32 first, u32 end) {
    // A warp owns a part of the tile of whole 16 x 8 pieces.
    constexpr int WARPS_M = BM >= 64 ? 2 : 1;
    constexpr int WARPS_N = 4 / WARPS_M;
    constexpr int MT = BM / (16 * WARPS_M);
    constexpr int NT = BN / (8 * WARPS_N);
    constexpr int X_LOADS = BM * BK / 4 / THREADS;
    __shared__ __align__(16) u16 xs[BM * LINE];
    __shared__ __align__(16) u16 ws[BN * LINE];

    const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const u32 wm = warp / WARPS_N, wn = warp % WARPS_N;
    const u32 n0 = blockIdx.x * BN;
    const u32 cols = p.w.cols;

    // Rows of x that this thread brings: the same 4 columns of every 16th row per 64 threads.
    const u32 x_col = (tid % (BK / 4)) * 4;
    const float* x_rows[X_LOADS];
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
        u32 r = first + tid / (BK / 4) + i * (THREADS / (BK / 4));
        x_rows[i] = nullptr;
        if (r < end) {
            u64 at = r;
            if (p.order && p.x_div) at = p.order[r] / p.x_div;
            x_rows[i] = p.x + at * p.x_stride;
        }
    }
    // The half line of weights that this thread brings.
    const u32 w_row = n0 + tid / 2;
    const u32 w_col = (tid % 2) * (BK / 2);
    const bool w_live = w_row < p.w.rows;

    float acc[MT][NT][4];
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) acc[i][j][c] = 0.f;

    float4 x_next[X_LOADS];
    Run<BITS> w_next[2];
    const bool x_vector = p.x_stride % 4 == 0;

    auto fetch = [&](u32 k0) {
#pragma unroll
        for (int i = 0; i < X_LOADS; i++) {
            float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
            u32 c = k0 + x_col;
            if (x_rows[i] && c < cols) {
                const float* q = x_rows[i] + c;
                if (x_vector && c + 4 <= cols)
                    v = *(const float4*)q;
                else {
                    v.x = q[0];
                    if (c + 1 < cols) v.y = q[1];
                    if (c + 2 < cols) v.z = q[2];
                    if (c + 3 < cols) v.w = q[3];
                }
            }
            x_next[i] = v;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 c = k0 + w_col + h * RUN;
            if (w_live && c < cols) w_next[h].load(p.w, expert, w_row, c, cols - c);
        }
    };

    fetch(0);
    for (u32 k0 = 0; k0 < cols; k0 += BK) {
#pragma unroll
        for (int i = 0; i < X_LOADS; i++) {
            u32 r = tid / (BK / 4) + i * (THREADS / (BK / 4));
            *(uint2*)&xs[r * LINE + x_col] =
                make_uint2(OPERAND::pack(x_next[i].x, x_next[i].y), OPERAND::pack(x_next[i].z, x_next[i].w));
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 c = k0 + w_col + h * RUN;
            u32 out[RUN / 2];
            if (w_live && c < cols) {
                float s = weight_scale<BITS>(p.w, expert, w_row, c);
                float z = weight_zero<BITS>(p.w, expert, w_row, c);
#pragma unroll
                for (int i = 0; i < RUN / 2; i++) {
                    float a = w_next[h].get(2 * i, p.w.scale_float), b = w_next[h].get(2 * i + 1, p.w.scale_float);
                    if (BITS < 16) a = (a - z) * s, b = (b - z) * s;
                    if (c + 2 * i >= cols) a = 0.f;
                    if (c + 2 * i + 1 >= cols) b = 0.f;
                    out[i] = OPERAND::pack(a, b);
                }
            } else {
#pragma unroll
                for (int i = 0; i < RUN / 2; i++) out[i] = 0;
            }
            uint4* to = (uint4*)&ws[(tid / 2) * LINE + w_col + h * RUN];
            to[0] = make_uint4(out[0], out[1], out[2], out[3]);
            to[1] = make_uint4(out[4], out[5], out[6], out[7]);
        }
        __syncthreads();
        if (k0 + BK < cols) fetch(k0 + BK);
#pragma unroll
        for (int kk = 0; kk < BK; kk += 16) {
            u32 a[MT][4], b[NT / 2][4];
#pragma unroll
            for (int i = 0; i < MT; i++) {
                u32 r = wm * (MT * 16) + i * 16 + lane % 16;
                ldmatrix4(a[i], shared_address(&xs[r * LINE + kk + (lane / 16) * 8]));
            }
#pragma unroll
            for (int j = 0; j < NT / 2; j++) {
                // Matrices: columns n 0-7 at k 0-7, the same at k 8-15, then n 8-15 likewise.
                u32 r = wn * (NT * 8) + j * 16 + (lane / 16) * 8 + lane % 8;
                ldmatrix4(b[j], shared_address(&ws[r * LINE + kk + ((lane / 8) % 2) * 8]));
            }
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NT; j++)
                    OPERAND::mma(acc[i][j], a[i], b[j / 2][(j % 2) * 2], b[j / 2][(j % 2) * 2 + 1]);
        }
        __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 r = first + wm * (MT * 16) + i * 16 + half * 8 + lane / 4;
            if (r >= end) continue;
            u64 to = p.order && p.y_by_route ? (u64)p.order[r] : (u64)r;
            float* y = p.y + to * p.y_stride;
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    u32 n = n0 + wn * (NT * 8) + j * 8 + (lane % 4) * 2 + c;
                    if (n >= p.w.rows) continue;
                    float v = acc[i][j][half * 2 + c];
                    if (p.bias) v += load_float(p.bias, expert * p.w.rows + n, p.bias_float);
                    y[n] = v;
                }
        }
}

template <int BM>
__device__ __forceinline__ void grouped(const GemmParams& p) {
    if ((int)blockIdx.y >= *p.tile_count) return;
    int2 tile = p.tiles[blockIdx.y];
    gemm<BM>(p, tile.x, tile.y, min((u32)p.ends[tile.x], (u32)tile.y + BM));
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_16(const __grid_constant__ GemmParams p) {
    in_order();
    gemm<16>(p, 0, blockIdx.y * 16, min(p.m, blockIdx.y * 16 + 16));
}
extern "C" __global__ void __launch_bounds__(THREADS) gemm_64(const __grid_constant__ GemmParams p) {
    in_order();
    gemm<64>(p, 0, blockIdx.y * 64, min(p.m, blockIdx.y * 64 + 64));
}
extern "C" __global__ void __launch_bounds__(THREADS) grouped_16(const __grid_constant__ GemmParams p) {
    in_order();
    grouped<16>(p);
}
extern "C" __global__ void __launch_bounds__(THREADS) grouped_64(const __grid_constant__ GemmParams p) {
    in_order();
    grouped<64>(p);
}
