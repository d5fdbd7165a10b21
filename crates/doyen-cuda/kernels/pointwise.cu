// Norms, embeddings, element-wise operators, softmax over rows, row selection, transposition; float32.

#include "doyen.cuh"

// ---- normalisation -------------------------------------------------------------------------------------------------

#define NORM_THREADS 512
#define NORM_LOTS 4  // of 4 numbers that a thread keeps

// A row that the block's threads keep in registers: every load is on its way before the first is used.
__device__ __forceinline__ void normalize_kept(const NormParams& p, float* buffer) {
    const u64 base = (u64)blockIdx.x * p.width;
    float4 v[NORM_LOTS], gamma[NORM_LOTS];
    u32 at[NORM_LOTS];
#pragma unroll
    for (u32 i = 0; i < NORM_LOTS; i++) {
        at[i] = (i * blockDim.x + threadIdx.x) * 4;
        v[i] = gamma[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (at[i] < p.width) gamma[i] = load_float4(p.gamma, at[i], p.gamma_float);
    }
    // Weights are not of this step.
    await_earlier();
#pragma unroll
    for (u32 i = 0; i < NORM_LOTS; i++)
        if (at[i] < p.width) v[i] = *(const float4*)(p.x + base + at[i]);
    if (p.skip)
#pragma unroll
        for (u32 i = 0; i < NORM_LOTS; i++)
            if (at[i] < p.width) add4(v[i], *(const float4*)(p.skip + base + at[i]));
    float total = 0.f;
#pragma unroll
    for (u32 i = 0; i < NORM_LOTS; i++) {
        if (at[i] >= p.width) continue;
        if (p.bias) add4(v[i], load_float4(p.bias, at[i], p.bias_float));
        if (p.sum) *(float4*)(p.sum + base + at[i]) = v[i];
        total += v[i].x + v[i].y + v[i].z + v[i].w;
    }
    const float mean = p.layer ? block_sum(total, buffer) / p.width : 0.f;
    float squares = 0.f;
#pragma unroll
    for (u32 i = 0; i < NORM_LOTS; i++) {
        if (at[i] >= p.width) continue;
        v[i].x -= mean, v[i].y -= mean, v[i].z -= mean, v[i].w -= mean;
        squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    }
    const float inv = 1.f / sqrtf(block_sum(squares, buffer) / p.width + p.eps);
#pragma unroll
    for (u32 i = 0; i < NORM_LOTS; i++) {
        if (at[i] >= p.width) continue;
        float4 y = make_float4(v[i].x * inv * gamma[i].x, v[i].y * inv * gamma[i].y, v[i].z * inv * gamma[i].z,
                               v[i].w * inv * gamma[i].w);
        if (p.beta) add4(y, load_float4(p.beta, at[i], p.beta_float));
        *(float4*)(p.y + base + at[i]) = y;
    }
}

// A block a row. Shared memory: the row.
extern "C" __global__ void __launch_bounds__(NORM_THREADS) normalize(const __grid_constant__ NormParams p) {
    extern __shared__ float row[];
    __shared__ float buffer[32];
    allow_next();
    const bool aligned = ((u64)p.gamma | (u64)p.beta | (u64)p.bias) % 16 == 0;
    if (aligned && p.width % 4 == 0 && p.width <= 4 * NORM_LOTS * blockDim.x) {
        normalize_kept(p, buffer);
        return;
    }
    await_earlier();
    u64 base = (u64)blockIdx.x * p.width;
    float total = 0.f;
    for (u32 i = threadIdx.x; i < p.width; i += blockDim.x) {
        float v = p.x[base + i];
        if (p.skip) v += p.skip[base + i];
        if (p.bias) v += load_float(p.bias, i, p.bias_float);
        row[i] = v;
        if (p.sum) p.sum[base + i] = v;
        total += v;
    }
    float mean = p.layer ? block_sum(total, buffer) / p.width : 0.f;
    float squares = 0.f;
    for (u32 i = threadIdx.x; i < p.width; i += blockDim.x) squares += (row[i] - mean) * (row[i] - mean);
    float inv = 1.f / sqrtf(block_sum(squares, buffer) / p.width + p.eps);
    for (u32 i = threadIdx.x; i < p.width; i += blockDim.x) {
        float v = (row[i] - mean) * inv * load_float(p.gamma, i, p.gamma_float);
        if (p.beta) v += load_float(p.beta, i, p.beta_float);
        p.y[base + i] = v;
    }
}

// ---- embeddings ----------------------------------------------------------------------------------------------------

// Rows of a table. Indices outside of it give zeros, and raise `fault` where they are an error. Mirrors `EmbedParams`.
struct EmbedParams {
    Weights w;
    const void* indices;
    float* y;
    int* fault;
    u32 bits;
    u32 wide;    // int64 indices instead of int32
    u32 strict;
    u32 node;    // what `fault` becomes
};

template <int BITS>
__device__ __forceinline__ void embed_row(const EmbedParams& p, i64 row, float* y) {
    for (u32 c = threadIdx.x * RUN; c < p.w.cols; c += blockDim.x * RUN) {
        u32 guard = p.w.cols - c;
        Run<BITS> run;
        run.load(p.w, 0, (u32)row, c, guard);
        float s = weight_scale<BITS>(p.w, 0, (u32)row, c), z = weight_zero<BITS>(p.w, 0, (u32)row, c);
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            float v = run.get(i, p.w.scale_float);
            if (i < guard) y[c + i] = BITS < 16 ? (v - z) * s : v;
        }
    }
}

extern "C" __global__ void __launch_bounds__(128) embed(const __grid_constant__ EmbedParams p) {
    in_order();
    i64 row = p.wide ? ((const i64*)p.indices)[blockIdx.x] : (i64)((const int*)p.indices)[blockIdx.x];
    if (row < 0) row += p.w.rows;
    float* y = p.y + (u64)blockIdx.x * p.w.cols;
    if (row < 0 || row >= p.w.rows) {
        for (u32 c = threadIdx.x; c < p.w.cols; c += blockDim.x) y[c] = 0.f;
        if (p.strict && threadIdx.x == 0) atomicMax(p.fault, (int)p.node);
        return;
    }
    switch (p.bits) {
        case 2: embed_row<2>(p, row, y); break;
        case 4: embed_row<4>(p, row, y); break;
        case 8: embed_row<8>(p, row, y); break;
        case 16: embed_row<16>(p, row, y); break;
        default: embed_row<32>(p, row, y);
    }
}

// ---- element-wise --------------------------------------------------------------------------------------------------

enum UnaryKind : u32 {
    U_ABS, U_CEIL, U_COS, U_ERF, U_EXP, U_FLOOR, U_GELU, U_GELU_TANH, U_LOG, U_NEG, U_RECIPROCAL, U_RELU, U_ROUND,
    U_SIGMOID, U_SIGN, U_SIN, U_SOFTPLUS, U_SQRT, U_SWISH, U_TANH, U_CLIP
};

// Mirrors `UnaryParams`.
struct UnaryParams {
    const float* x;
    float* y;
    u64 n;
    u32 kind;
    float alpha;
    float beta;
};

__device__ __forceinline__ float unary_value(u32 kind, float x, float alpha, float beta) {
    switch (kind) {
        case U_ABS: return fabsf(x);
        case U_CEIL: return ceilf(x);
        case U_COS: return cosf(x);
        case U_ERF: return erff(x);
        case U_EXP: return expf(x);
        case U_FLOOR: return floorf(x);
        case U_GELU: return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
        case U_GELU_TANH: return gelu_tanh(x);
        case U_LOG: return logf(x);
        case U_NEG: return -x;
        case U_RECIPROCAL: return 1.f / x;
        case U_RELU: return x > 0.f ? x : (x == x ? 0.f : x);
        case U_ROUND: return rintf(x);
        case U_SIGMOID: return sigmoid(x);
        case U_SIGN: return x > 0.f ? 1.f : (x < 0.f ? -1.f : x);
        case U_SIN: return sinf(x);
        case U_SOFTPLUS: return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x)));
        case U_SQRT: return sqrtf(x);
        case U_SWISH: return x * sigmoid(alpha * x);
        case U_CLIP: x = x < alpha ? alpha : x; return x > beta ? beta : x;
        default: return tanhf(x);
    }
}

extern "C" __global__ void __launch_bounds__(256) unary(const __grid_constant__ UnaryParams p) {
    in_order();
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < p.n; i += gridDim.x * 256ull)
        p.y[i] = unary_value(p.kind, p.x[i], p.alpha, p.beta);
}

#define MAX_RANK 8

enum BinaryKind : u32 {
    B_ADD, B_SUB, B_MUL, B_DIV, B_SILU_MUL, B_MIN, B_MAX, B_EQUAL, B_GREATER, B_GREATER_OR_EQUAL, B_LESS, B_LESS_OR_EQUAL
};

// Mirrors `BinaryParams`; strides in elements, 0 where an operand repeats.
struct BinaryParams {
    const void* a;
    const void* b;
    float* y;   // bytes of comparisons
    u64 n;
    u64 a_stride[MAX_RANK];
    u64 b_stride[MAX_RANK];
    u32 dims[MAX_RANK];
    u32 rank;   // 0: both operands have every element of y, in order
    u32 kind;
    u32 a_float;
    u32 b_float;
};

extern "C" __global__ void __launch_bounds__(256) binary(const __grid_constant__ BinaryParams p) {
    in_order();
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < p.n; i += gridDim.x * 256ull) {
        u64 ia = i, ib = i;
        if (p.rank) {
            u64 rest = i;
            ia = ib = 0;
            for (int d = (int)p.rank - 1; d >= 0; d--) {
                u64 c = rest % p.dims[d];
                rest /= p.dims[d];
                ia += c * p.a_stride[d];
                ib += c * p.b_stride[d];
            }
        }
        float a = load_float(p.a, ia, p.a_float), b = load_float(p.b, ib, p.b_float), v;
        switch (p.kind) {
            case B_ADD: v = a + b; break;
            case B_SUB: v = a - b; break;
            case B_MUL: v = a * b; break;
            case B_DIV: v = a / b; break;
            case B_SILU_MUL: v = a * sigmoid(a) * b; break;
            // A NaN stays one.
            case B_MIN: v = a != a || a < b ? a : b; break;
            case B_MAX: v = a != a || a > b ? a : b; break;
            case B_EQUAL: v = a == b; break;
            case B_GREATER: v = a > b; break;
            case B_GREATER_OR_EQUAL: v = a >= b; break;
            case B_LESS: v = a < b; break;
            default: v = a <= b;
        }
        if (p.kind < B_EQUAL)
            p.y[i] = v;
        else
            ((u8*)p.y)[i] = v != 0.f;
    }
}

// y = which ? a : b. Mirrors `ChooseParams`; strides in elements, 0 where an operand repeats.
struct ChooseParams {
    const u8* which;
    const void* a;
    const void* b;
    float* y;
    u64 n;
    u64 which_stride[MAX_RANK];
    u64 a_stride[MAX_RANK];
    u64 b_stride[MAX_RANK];
    u32 dims[MAX_RANK];
    u32 rank;
    u32 a_float;
    u32 b_float;
};

extern "C" __global__ void __launch_bounds__(256) choose(const __grid_constant__ ChooseParams p) {
    in_order();
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < p.n; i += gridDim.x * 256ull) {
        u64 rest = i, which = 0, ia = 0, ib = 0;
        for (int d = (int)p.rank - 1; d >= 0; d--) {
            const u64 c = rest % p.dims[d];
            rest /= p.dims[d];
            which += c * p.which_stride[d];
            ia += c * p.a_stride[d];
            ib += c * p.b_stride[d];
        }
        p.y[i] = p.which[which] ? load_float(p.a, ia, p.a_float) : load_float(p.b, ib, p.b_float);
    }
}

// Softmax of rows. Mirrors `SoftmaxParams`.
struct SoftmaxParams {
    const float* x;
    float* y;
    u32 width;
    u32 log;
};

extern "C" __global__ void __launch_bounds__(256) softmax(const __grid_constant__ SoftmaxParams p) {
    in_order();
    __shared__ float buffer[32];
    const float* x = p.x + (u64)blockIdx.x * p.width;
    float* y = p.y + (u64)blockIdx.x * p.width;
    float largest = -INF;
    float bad = 0.f;
    for (u32 i = threadIdx.x; i < p.width; i += 256) {
        largest = fmaxf(largest, x[i]);
        if (x[i] != x[i]) bad = 1.f;
    }
    largest = block_max(largest, buffer);
    // The maximum passes a NaN over; the row is NaN all the same.
    bad = block_max(bad, buffer);
    float sum = 0.f;
    for (u32 i = threadIdx.x; i < p.width; i += 256) sum += expf(x[i] - largest);
    sum = block_sum(sum, buffer);
    for (u32 i = threadIdx.x; i < p.width; i += 256) {
        float v = p.log ? x[i] - largest - logf(sum) : expf(x[i] - largest) / sum;
        y[i] = bad > 0.f ? QUIET_NAN : v;
    }
}

// ---- movements -----------------------------------------------------------------------------------------------------

// Rows of `words` 4-byte words picked by `rows`. Mirrors `SelectParams`.
struct SelectParams {
    const u32* x;
    const u32* rows;
    u32* y;
    u32 words;
};

extern "C" __global__ void __launch_bounds__(256) select_rows(const __grid_constant__ SelectParams p) {
    in_order();
    const u32* x = p.x + (u64)p.rows[blockIdx.x] * p.words;
    u32* y = p.y + (u64)blockIdx.x * p.words;
    for (u32 i = threadIdx.x; i < p.words; i += 256) y[i] = x[i];
}

// y[n, k] = x[k, n] of elements of 2 or 4 bytes. Mirrors `TransposeParams`.
struct TransposeParams {
    const void* x;
    void* y;
    u32 k;
    u32 n;
    u32 wide;
};

template <class T>
__device__ __forceinline__ void transpose_tile(const TransposeParams& p) {
    __shared__ T tile[32][33];
    u32 n0 = blockIdx.x * 32, k0 = blockIdx.y * 32;
    for (u32 i = threadIdx.y; i < 32; i += 8)
        if (k0 + i < p.k && n0 + threadIdx.x < p.n)
            tile[i][threadIdx.x] = ((const T*)p.x)[(u64)(k0 + i) * p.n + n0 + threadIdx.x];
    __syncthreads();
    for (u32 i = threadIdx.y; i < 32; i += 8)
        if (n0 + i < p.n && k0 + threadIdx.x < p.k)
            ((T*)p.y)[(u64)(n0 + i) * p.k + k0 + threadIdx.x] = tile[threadIdx.x][i];
}

extern "C" __global__ void __launch_bounds__(256) transpose(const __grid_constant__ TransposeParams p) {
    in_order();
    if (p.wide)
        transpose_tile<u32>(p);
    else
        transpose_tile<u16>(p);
}
