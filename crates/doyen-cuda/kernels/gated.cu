// The gated operators of hybrid models; float32.

#include "doyen.cuh"

// y = rms(x) * gamma * act(gate), each over groups of `width` numbers. Mirrors `GatedNormParams`.
struct GatedNormParams {
    const float* x;
    const float* gate;
    const void* gamma;  // [width]
    float* y;
    u64 groups;
    u32 width;
    u32 gamma_float;
    u32 silu;           // otherwise the sigmoid
    float eps;
};

// A warp a group.
extern "C" __global__ void __launch_bounds__(128) gated_norm(const __grid_constant__ GatedNormParams p) {
    in_order();
    const u64 group = blockIdx.x * 4ull + threadIdx.x / 32;
    if (group >= p.groups) return;
    const u64 base = group * p.width;
    float squares = 0.f;
    for (u32 i = threadIdx.x % 32; i < p.width; i += 32) squares = fmaf(p.x[base + i], p.x[base + i], squares);
    const float inv = 1.f / sqrtf(warp_sum(squares) / p.width + p.eps);
    for (u32 i = threadIdx.x % 32; i < p.width; i += 32) {
        const float g = p.gate[base + i], act = p.silu ? g * sigmoid(g) : sigmoid(g);
        p.y[base + i] = p.x[base + i] * inv * load_float(p.gamma, i, p.gamma_float) * act;
    }
}

// y = a + b * gate, one gate a row of `width` numbers. Mirrors `GatedAddParams`.
struct GatedAddParams {
    const float* a;
    const float* b;
    const float* gate;
    float* y;
    u64 n;
    u32 width;
};

extern "C" __global__ void __launch_bounds__(256) gated_add(const __grid_constant__ GatedAddParams p) {
    in_order();
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < p.n; i += gridDim.x * 256ull)
        p.y[i] = fmaf(p.b[i], p.gate[i / p.width], p.a[i]);
}

// decay = scale * softplus(a + bias) and beta = sigmoid(b), numbers of a head repeating with every token. Mirrors `GatesParams`.
struct GatesParams {
    const float* a;
    const float* b;      // or null
    const void* bias;    // [heads]
    const void* scale;   // [heads]
    float* decay;        // or null
    float* beta;         // or null
    u64 n;
    u32 heads;
    u32 bias_float;
    u32 scale_float;
};

extern "C" __global__ void __launch_bounds__(256) gates(const __grid_constant__ GatesParams p) {
    in_order();
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < p.n; i += gridDim.x * 256ull) {
        const u32 head = i % p.heads;
        const float x = p.a[i] + load_float(p.bias, head, p.bias_float);
        if (p.decay) p.decay[i] = load_float(p.scale, head, p.scale_float) * (fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
        if (p.beta) p.beta[i] = sigmoid(p.b[i]);
    }
}
