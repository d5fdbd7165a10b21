// The up-projection of latent attention, on either side of it: queries are multiplied by the rows of their head's keys, sums of
// latent rows by those of its values. Row `n` of head h is h * (nope + v) + n. Compiled once per BITS (2, 4, 8: codes; 16, 32:
// floats); float32.

#include "doyen.cuh"

// Mirrors `AbsorbParams`.
struct AbsorbParams {
    Weights w;       // heads * (nope + v) rows of `rank` columns
    const float* x;  // queries [tokens, heads, nope + rope], or sums of rows [tokens, heads, rank]
    float* y;        // absorbed queries [tokens, heads, rank + rope], or values [tokens, heads, v]
    u32 tokens;
    u32 heads;
    u32 nope;
    u32 rope;
    u32 v;
};

// The numbers of a run, scaled.
__device__ __forceinline__ void load_numbers(float (&out)[RUN], const Weights& w, u32 row, u32 column) {
    Run<BITS> run;
    run.load(w, 0, row, column, w.cols - column);
    const float s = weight_scale<BITS>(w, 0, row, column), z = weight_zero<BITS>(w, 0, row, column);
#pragma unroll
    for (int i = 0; i < RUN; i++) out[i] = (run.get(i, w.scale_float) - z) * s;
}

#define WARPS 8
#define QUERY_TOKENS 2

// Blocks: heads, lots of QUERY_TOKENS tokens, lots of 32 * RUN columns. Warps share the rows of a head.
extern "C" __global__ void __launch_bounds__(32 * WARPS) absorb_queries(const __grid_constant__ AbsorbParams p) {
    in_order();
    __shared__ float parts[WARPS][RUN][32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x;
    const u32 token0 = blockIdx.y * QUERY_TOKENS, tokens = min((u32)QUERY_TOKENS, p.tokens - token0);
    const u32 rank = p.w.cols, column = (blockIdx.z * 32 + lane) * RUN, wide = p.nope + p.rope;
    const float* x = p.x + ((u64)token0 * p.heads + head) * wide;
    float sum[QUERY_TOKENS][RUN];
#pragma unroll
    for (int t = 0; t < QUERY_TOKENS; t++)
#pragma unroll
        for (int i = 0; i < RUN; i++) sum[t][i] = 0.f;
    for (u32 n = warp; n < p.nope && column < rank; n += WARPS) {
        float row[RUN];
        load_numbers(row, p.w, head * (p.nope + p.v) + n, column);
#pragma unroll
        for (int t = 0; t < QUERY_TOKENS; t++) {
            const float q = t < tokens ? x[(u64)t * p.heads * wide + n] : 0.f;
#pragma unroll
            for (int i = 0; i < RUN; i++) sum[t][i] = fmaf(q, row[i], sum[t][i]);
        }
    }
#pragma unroll
    for (int t = 0; t < QUERY_TOKENS; t++) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < RUN; i++) parts[warp][i][lane] = sum[t][i];
        __syncthreads();
        if (t >= tokens) continue;
        float* y = p.y + ((u64)(token0 + t) * p.heads + head) * (rank + p.rope);
        for (u32 at = threadIdx.x; at < 32 * RUN; at += 32 * WARPS) {
            const u32 c = blockIdx.z * 32 * RUN + at;
            if (c >= rank) continue;
            float total = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) total += parts[w][at % RUN][at / RUN];
            y[c] = total;
        }
        // The channels that all heads share.
        if (blockIdx.z == 0)
            for (u32 c = threadIdx.x; c < p.rope; c += 32 * WARPS) y[rank + c] = x[(u64)t * p.heads * wide + p.nope + c];
    }
}

#define VALUE_TOKENS 4

// Blocks: lots of WARPS value channels, heads, lots of VALUE_TOKENS tokens. A warp a channel.
extern "C" __global__ void __launch_bounds__(32 * WARPS) absorb_values(const __grid_constant__ AbsorbParams p) {
    in_order();
    const u32 lane = threadIdx.x % 32, channel = blockIdx.x * WARPS + threadIdx.x / 32, head = blockIdx.y;
    if (channel >= p.v) return;
    const u32 token0 = blockIdx.z * VALUE_TOKENS, tokens = min((u32)VALUE_TOKENS, p.tokens - token0), rank = p.w.cols;
    const float* x = p.x + ((u64)token0 * p.heads + head) * rank;
    float sum[VALUE_TOKENS];
#pragma unroll
    for (int t = 0; t < VALUE_TOKENS; t++) sum[t] = 0.f;
    for (u32 column = lane * RUN; column < rank; column += 32 * RUN) {
        float row[RUN];
        load_numbers(row, p.w, head * (p.nope + p.v) + p.nope + channel, column);
#pragma unroll
        for (int t = 0; t < VALUE_TOKENS; t++)
#pragma unroll
            for (int i = 0; i < RUN; i++)
                if (t < tokens && column + i < rank) sum[t] = fmaf(row[i], x[(u64)t * p.heads * rank + column + i], sum[t]);
    }
#pragma unroll
    for (int t = 0; t < VALUE_TOKENS; t++) {
        const float total = warp_sum(sum[t]);
        if (lane == 0 && t < tokens) p.y[((u64)(token0 + t) * p.heads + head) * p.v + channel] = total;
    }
}
