// Products with few rows of activations, in float32 throughout: a warp computes output rows from weights as they lie in
// the file, each lane taking runs of 16 columns. Compiled once per BITS (2, 4, 8: codes; 16, 32: floats).
//
// Also the experts' products when few tokens are routed: every route (token, j) reads its own expert's rows.

#include "doyen.cuh"

// Activations of a run, zero past the columns.
template <int M>
__device__ __forceinline__ void load_x(float (&v)[M][RUN], const float* x, u64 stride, u32 column, u32 guard, u32 m) {
#pragma unroll
    for (int t = 0; t < M; t++) {
        const float* p = x + (t < m ? t : 0) * stride + column;
        if (guard >= RUN && stride % 4 == 0) {
#pragma unroll
            for (int i = 0; i < RUN / 4; i++) {
                float4 q = ((const float4*)p)[i];
                v[t][4 * i] = q.x, v[t][4 * i + 1] = q.y, v[t][4 * i + 2] = q.z, v[t][4 * i + 3] = q.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < RUN; i++) v[t][i] = i < guard ? p[i] : 0.f;
        }
    }
}

// Dot products of ROWS weight rows with M activation rows, the sums in every lane. Rows past the matrix repeat row 0.
template <int ROWS, int M>
__device__ __forceinline__ void dots(float (&sum)[ROWS][M], const Weights& w, u64 matrix, const u32 (&row)[ROWS],
                                     const float* x, u64 stride, u32 m) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int t = 0; t < M; t++) sum[r][t] = 0.f;
    for (u32 column = lane * RUN; column < w.cols; column += 32 * RUN) {
        u32 guard = w.cols - column;
        Run<BITS> run[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) run[r].load(w, matrix, row[r], column, guard);
        float v[M][RUN];
        load_x<M>(v, x, stride, column, guard, m);
        float total[M];
#pragma unroll
        for (int t = 0; t < M; t++) {
            total[t] = 0.f;
            if (BITS < 16)
#pragma unroll
                for (int i = 0; i < RUN; i++) total[t] += v[t][i];
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float part[M];
#pragma unroll
            for (int t = 0; t < M; t++) part[t] = 0.f;
#pragma unroll
            for (int i = 0; i < RUN; i++) {
                float q = run[r].get(i, w.scale_float);
#pragma unroll
                for (int t = 0; t < M; t++) part[t] = fmaf(q, v[t][i], part[t]);
            }
            float s = weight_scale<BITS>(w, matrix, row[r], column);
            float z = weight_zero<BITS>(w, matrix, row[r], column);
#pragma unroll
            for (int t = 0; t < M; t++)
                sum[r][t] = BITS < 16 ? fmaf(s, fmaf(-z, total[t], part[t]), sum[r][t]) : sum[r][t] + part[t];
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int t = 0; t < M; t++) sum[r][t] = warp_sum(sum[r][t]);
}

// y[m, rows] = x[m, cols] W^T + bias. Mirrors `GemvParams`.
struct GemvParams {
    Weights w;
    const float* x;
    float* y;
    const void* bias;
    u64 x_stride;
    u64 y_stride;
    u32 bias_float;
    u32 m;
};

#define GEMV_ROWS 2
#define GEMV_WARPS 4

template <int M>
__device__ __forceinline__ void gemv(const GemvParams& p) {
    u32 first = (blockIdx.x * GEMV_WARPS + threadIdx.x / 32) * GEMV_ROWS;
    if (first >= p.w.rows) return;
    const float* x = p.x + (u64)blockIdx.y * M * p.x_stride;
    float* y = p.y + (u64)blockIdx.y * M * p.y_stride;
    u32 m = min(p.m - blockIdx.y * M, (u32)M);
    u32 row[GEMV_ROWS];
#pragma unroll
    for (int r = 0; r < GEMV_ROWS; r++) row[r] = first + r < p.w.rows ? first + r : 0;
    float sum[GEMV_ROWS][M];
    dots<GEMV_ROWS, M>(sum, p.w, 0, row, x, p.x_stride, m);
    if (threadIdx.x % 32) return;
#pragma unroll
    for (int r = 0; r < GEMV_ROWS; r++) {
        if (first + r >= p.w.rows) continue;
        float b = p.bias ? load_float(p.bias, first + r, p.bias_float) : 0.f;
#pragma unroll
        for (int t = 0; t < M; t++)
            if (t < m) y[t * p.y_stride + first + r] = sum[r][t] + b;
    }
}

extern "C" __global__ void __launch_bounds__(128) gemv_1(const __grid_constant__ GemvParams p) {
    in_order();
    gemv<1>(p);
}
extern "C" __global__ void __launch_bounds__(128) gemv_2(const __grid_constant__ GemvParams p) {
    in_order();
    gemv<2>(p);
}
extern "C" __global__ void __launch_bounds__(128) gemv_4(const __grid_constant__ GemvParams p) {
    in_order();
    gemv<4>(p);
}

// One product of every route: y[route, rows] = W[expert] x[route / x_div] + bias[expert]. Mirrors `RoutedParams`.
struct RoutedParams {
    Weights w;
    const float* x;
    float* y;
    const void* bias;  // [experts, rows]
    const int* experts;  // [routes]
    const float* mix;  // [routes], of routed_sum alone
    u32 bias_float;
    u32 x_div;   // routes that share a row of x
    u32 routes;
    u32 k;       // routes of a token
    Activation act;
};

extern "C" __global__ void __launch_bounds__(128) routed(const __grid_constant__ RoutedParams p) {
    in_order();
    u32 first = (blockIdx.x * GEMV_WARPS + threadIdx.x / 32) * GEMV_ROWS;
    if (first >= p.w.rows) return;
    u32 route = blockIdx.y;
    u64 expert = p.experts[route];
    u32 row[GEMV_ROWS];
#pragma unroll
    for (int r = 0; r < GEMV_ROWS; r++) row[r] = first + r < p.w.rows ? first + r : 0;
    float sum[GEMV_ROWS][1];
    dots<GEMV_ROWS, 1>(sum, p.w, expert, row, p.x + (u64)(route / p.x_div) * p.w.cols, p.w.cols, 1);
    if (threadIdx.x % 32) return;
#pragma unroll
    for (int r = 0; r < GEMV_ROWS; r++) {
        if (first + r >= p.w.rows) continue;
        float b = p.bias ? load_float(p.bias, expert * p.w.rows + first + r, p.bias_float) : 0.f;
        p.y[(u64)route * p.w.rows + first + r] = sum[r][0] + b;
    }
}

// FC1 and the activation in one: y[route, inter], inter being half of the rows where gate and linear rows share FC1.
extern "C" __global__ void __launch_bounds__(128) routed_activated(const __grid_constant__ RoutedParams p) {
    in_order();
    u32 inter = p.act.gate == GATE_NONE ? p.w.rows : p.w.rows / 2;
    u32 i = blockIdx.x * GEMV_WARPS + threadIdx.x / 32;
    if (i >= inter) return;
    u32 route = blockIdx.y;
    u64 expert = p.experts[route];
    const float* x = p.x + (u64)(route / p.x_div) * p.w.cols;
    u32 row[2] = {i, i};
    if (p.act.gate == GATE_INTERLEAVED) row[0] = 2 * i, row[1] = 2 * i + 1;
    if (p.act.gate == GATE_CONCATENATED) row[1] = inter + i;
    float h[2] = {0.f, 0.f};
    if (p.act.gate == GATE_NONE) {
        u32 one[1] = {i};
        float sum[1][1];
        dots<1, 1>(sum, p.w, expert, one, x, p.w.cols, 1);
        h[0] = sum[0][0];
    } else {
        float sum[2][1];
        dots<2, 1>(sum, p.w, expert, row, x, p.w.cols, 1);
        h[0] = sum[0][0], h[1] = sum[1][0];
    }
    if (threadIdx.x % 32) return;
    if (p.bias) {
        h[0] += load_float(p.bias, expert * p.w.rows + row[0], p.bias_float);
        h[1] += load_float(p.bias, expert * p.w.rows + row[1], p.bias_float);
    }
    p.y[(u64)route * inter + i] = activate(p.act, h[0], h[1]);
}

#define SUM_WARPS 8

// FC2 and the weighted sum in one: y[token, rows] = sum_j mix[token, j] (W[e_j] x[token, j] + bias[e_j]), j in order. A
// block owns two rows of a token; its warps share the token's routes.
extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS) routed_sum(const __grid_constant__ RoutedParams p) {
    in_order();
    extern __shared__ float part[];  // [k][GEMV_ROWS]
    u32 first = blockIdx.x * GEMV_ROWS;
    u32 token = blockIdx.y;
    u32 row[GEMV_ROWS];
#pragma unroll
    for (int r = 0; r < GEMV_ROWS; r++) row[r] = first + r < p.w.rows ? first + r : 0;
    for (u32 j = threadIdx.x / 32; j < p.k; j += SUM_WARPS) {
        u32 route = token * p.k + j;
        u64 expert = p.experts[route];
        float sum[GEMV_ROWS][1];
        dots<GEMV_ROWS, 1>(sum, p.w, expert, row, p.x + (u64)route * p.w.cols, p.w.cols, 1);
        if (threadIdx.x % 32 == 0)
#pragma unroll
            for (int r = 0; r < GEMV_ROWS; r++) {
                float b = p.bias ? load_float(p.bias, expert * p.w.rows + row[r], p.bias_float) : 0.f;
                part[j * GEMV_ROWS + r] = p.mix[route] * (sum[r][0] + b);
            }
    }
    __syncthreads();
    if (threadIdx.x < GEMV_ROWS && first + threadIdx.x < p.w.rows) {
        float total = 0.f;
        for (u32 j = 0; j < p.k; j++) total += part[j * GEMV_ROWS + threadIdx.x];
        p.y[(u64)token * p.w.rows + first + threadIdx.x] = total;
    }
}
