// Attention over latent rows: every position has one row of `rank + rope` numbers, which is the key of all heads and whose
// first `rank` channels are their value. Queries come absorbed (absorb.cu), the sums of rows are projected after.

#include "doyen.cuh"

// Mirrors `LatentParams`.
struct LatentParams {
    Batch batch;
    u8* rows;             // [pages, page_size, rank + rope] of `kind`
    const float* own;     // new rows, [tokens, rank]
    const float* shared;  // [tokens, rope]
    const float* q;       // [tokens, heads, rank + rope]
    float* y;             // [tokens, heads, rank]
    float* part;          // [tokens, heads, splits, rank + 2] where keys are split
    u32 kind;             // FloatKind
    u32 rank;
    u32 rope;
    u32 heads;
    u32 window;           // 0: all keys
    u32 causal;
    u32 splits;
    u32 split_keys;
    float scale;
    float softcap;
};

// A block a token.
extern "C" __global__ void __launch_bounds__(256) latent_append(const __grid_constant__ LatentParams p) {
    in_order();
    const u32 token = blockIdx.x, width = p.rank + p.rope;
    const int sequence = p.batch.token_sequence[token];
    const u32 position = p.batch.past[sequence] + (token - p.batch.first[sequence]);
    const u64 row = cache_row(p.batch, sequence, 0, position) * width;
    for (u32 c = threadIdx.x; c < width; c += 256) {
        const float v = c < p.rank ? p.own[(u64)token * p.rank + c] : p.shared[(u64)token * p.rope + c - p.rank];
        store_float(p.rows, row + c, p.kind, v);
    }
}

#define HEADS 16  // of a block
#define PIECE 16  // keys at a time
#define LATENT_THREADS (HEADS * PIECE)

// Floats of shared memory: keys, queries, weights, factors.
//   (PIECE + HEADS) * (width | 1) + PIECE * HEADS + HEADS
template <int CHANNELS>
__device__ __forceinline__ void latent(const LatentParams& p) {
    extern __shared__ __align__(16) float memory[];
    const u32 width = p.rank + p.rope, line = width | 1;  // odd: keys lie in different banks
    float* keys = memory;
    float* qs = keys + PIECE * line;
    float* weights = qs + HEADS * line;     // [PIECE][HEADS]
    float* factors = weights + PIECE * HEADS;
    const u32 tid = threadIdx.x, token = blockIdx.x, head0 = blockIdx.y * HEADS, split = blockIdx.z;
    const u32 heads = min((u32)HEADS, p.heads - head0);
    const int sequence = p.batch.token_sequence[token];
    const u32 past = p.batch.past[sequence], position = past + (token - p.batch.first[sequence]);
    u32 begin = 0, end = p.causal ? position + 1 : past + p.batch.len[sequence];
    if (p.window && position + 1 > p.window) begin = position + 1 - p.window;
    if (p.splits > 1) {
        begin = max(begin, split * p.split_keys);
        end = min(end, (split + 1) * p.split_keys);
    }
    for (u32 i = tid; i < HEADS * width; i += LATENT_THREADS) {
        const u32 h = i / width, c = i % width;
        qs[h * line + c] = h < heads ? p.q[((u64)token * p.heads + head0 + h) * width + c] * p.scale : 0.f;
    }
    // A thread a head and a key of the piece for the scores; channels of all heads for the sums.
    const u32 h = tid / PIECE, key = tid % PIECE;
    float most = -INF, total = 0.f, out[HEADS][CHANNELS];
#pragma unroll
    for (int i = 0; i < HEADS; i++)
#pragma unroll
        for (int j = 0; j < CHANNELS; j++) out[i][j] = 0.f;
    for (u32 k0 = begin; k0 < end; k0 += PIECE) {
        const u32 n = min((u32)PIECE, end - k0);
        __syncthreads();
        for (u32 i = tid; i < PIECE * width; i += LATENT_THREADS) {
            const u32 k = i / width, c = i % width;
            keys[k * line + c] =
                k < n ? load_float(p.rows, cache_row(p.batch, sequence, 0, k0 + k) * width + c, p.kind) : 0.f;
        }
        __syncthreads();
        float s = 0.f;
        for (u32 c = 0; c < width; c++) s = fmaf(qs[h * line + c], keys[key * line + c], s);
        if (p.softcap > 0.f) s = p.softcap * tanhf(s / p.softcap);
        if (key >= n) s = -INF;
        float largest = s;
#pragma unroll
        for (int o = PIECE / 2; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, o));
        largest = fmaxf(largest, most);
        // Nothing but -inf yet: any finite maximum will do.
        const float base = largest == -INF ? 0.f : largest;
        const float e = key < n ? expf(s - base) : 0.f;
        float sum = e;
#pragma unroll
        for (int o = PIECE / 2; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
        const float keep = most == -INF ? 0.f : expf(most - base);
        total = total * keep + sum;
        most = largest;
        weights[key * HEADS + h] = e;
        if (key == 0) factors[h] = keep;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < HEADS; i++)
#pragma unroll
            for (int j = 0; j < CHANNELS; j++) out[i][j] *= factors[i];
        for (u32 k = 0; k < n; k++) {
            float v[CHANNELS];
#pragma unroll
            for (int j = 0; j < CHANNELS; j++) {
                const u32 c = tid + j * LATENT_THREADS;
                v[j] = c < p.rank ? keys[k * line + c] : 0.f;
            }
#pragma unroll
            for (int i = 0; i < HEADS; i++)
#pragma unroll
                for (int j = 0; j < CHANNELS; j++) out[i][j] = fmaf(weights[k * HEADS + i], v[j], out[i][j]);
        }
    }
    __syncthreads();
    // Maxima and sums for everybody.
    if (key == 0) factors[h] = total, weights[h] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
        if (i >= heads) continue;
        const u64 at = (u64)token * p.heads + head0 + i;
#pragma unroll
        for (int j = 0; j < CHANNELS; j++) {
            const u32 c = tid + j * LATENT_THREADS;
            if (c >= p.rank) continue;
            if (p.splits > 1)
                p.part[(at * p.splits + split) * (p.rank + 2) + 2 + c] = out[i][j];
            else
                p.y[at * p.rank + c] = out[i][j] / factors[i];
        }
        if (p.splits > 1 && tid < 2) p.part[(at * p.splits + split) * (p.rank + 2) + tid] = tid ? factors[i] : weights[i];
    }
}

// By the largest rank: tokens, lots of HEADS heads, splits.
extern "C" __global__ void __launch_bounds__(LATENT_THREADS) latent_256(const __grid_constant__ LatentParams p) {
    in_order();
    latent<1>(p);
}
extern "C" __global__ void __launch_bounds__(LATENT_THREADS) latent_512(const __grid_constant__ LatentParams p) {
    in_order();
    latent<2>(p);
}
extern "C" __global__ void __launch_bounds__(LATENT_THREADS) latent_1024(const __grid_constant__ LatentParams p) {
    in_order();
    latent<4>(p);
}

// A block a head of a token: the splits in order.
extern "C" __global__ void __launch_bounds__(128) latent_join(const __grid_constant__ LatentParams p) {
    in_order();
    const u64 at = (u64)blockIdx.x * p.heads + blockIdx.y;
    const u32 each = p.rank + 2;
    const float* part = p.part + at * p.splits * each;
    float largest = -INF, sum = 0.f;
    for (u32 s = 0; s < p.splits; s++) largest = fmaxf(largest, part[s * each]);
    for (u32 s = 0; s < p.splits; s++)
        if (part[s * each] != -INF) sum += part[s * each + 1] * expf(part[s * each] - largest);
    for (u32 c = threadIdx.x; c < p.rank; c += 128) {
        float o = 0.f;
        for (u32 s = 0; s < p.splits; s++)
            if (part[s * each] != -INF) o = fmaf(part[s * each + 2 + c], expf(part[s * each] - largest), o);
        p.y[at * p.rank + c] = o / sum;
    }
}
