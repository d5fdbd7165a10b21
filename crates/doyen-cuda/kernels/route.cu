// Routing, and the order of routes by expert.
//
// Selection: the k largest logits in descending order, ties to the lowest index, NaN after every number, -inf an
// ordinary value. Mixing weights as the operator contract says (section 1.6).

#include "doyen.cuh"

enum WeightingKind : u32 { SOFTMAX_ALL = 0, SOFTMAX_SELECTED = 1, GIVEN = 2, GIVEN_NORMALIZED = 3, SPARSE_MIXER = 4 };

// Mirrors `RouteParams`.
struct RouteParams {
    const float* logits;  // [tokens, experts]
    const float* given;   // [tokens, experts] or null
    int* ids;             // [tokens, k]
    float* weights;       // [tokens, k]
    u32 experts;
    u32 k;
    u32 weighting;
};

struct Best {
    float v;
    int i;
};

// Whether `a` is selected before `b`.
__device__ __forceinline__ bool before(Best a, Best b) {
    if (b.i < 0) return true;
    if (a.i < 0) return false;
    bool an = a.v != a.v, bn = b.v != b.v;
    if (an || bn) return an == bn ? a.i < b.i : bn;
    return a.v > b.v || (a.v == b.v && a.i < b.i);
}

__device__ __forceinline__ Best warp_best(Best b) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        Best other = {__shfl_xor_sync(0xffffffffu, b.v, o), __shfl_xor_sync(0xffffffffu, b.i, o)};
        if (before(other, b)) b = other;
    }
    return b;
}

// Experts that a lane keeps in registers; more are looked up round by round.
#define KEPT 8

// A key whose unsigned order is the order of selection: 0 for what is taken, 1 for NaN, numbers above.
__device__ __forceinline__ u32 key_of(float v) {
    if (v != v) return 1;
    u32 b = __float_as_uint(v + 0.f);  // -0 is 0
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// The number whose key it is.
__device__ __forceinline__ float of_key(u32 key) {
    return __uint_as_float(key == 1 ? 0x7fc00000u : key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Routes of a token with up to 32 * KEPT experts of which up to 32 are selected, in registers: lane j has the jth.
__device__ __forceinline__ void route_kept(const RouteParams& p, const float* logits, const float* given, u32 token) {
    const u32 lane = threadIdx.x;
    float values[KEPT];
    u32 keys[KEPT];
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) values[i] = i * 32 + lane < p.experts ? __ldcg(logits + i * 32 + lane) : -INF;
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) keys[i] = i * 32 + lane < p.experts ? key_of(values[i]) : 0;
    u32 mine = 0, key = 0;
    for (u32 j = 0; j < p.k; j++) {
        u32 best = 0, at = 0xffffffffu;
#pragma unroll
        for (u32 i = 0; i < KEPT; i++)
            if (keys[i] > best) best = keys[i], at = i * 32 + lane;
        u32 most = __reduce_max_sync(0xffffffffu, best);
        u32 id = __reduce_min_sync(0xffffffffu, best == most ? at : 0xffffffffu);
#pragma unroll
        for (u32 i = 0; i < KEPT; i++)
            if (i * 32 + lane == id) keys[i] = 0;
        if (lane == j) mine = id, key = most;
    }
    const bool live = lane < p.k;
    float v = !live ? 0.f : given ? given[mine] : of_key(key);
    const float largest = of_key(__shfl_sync(0xffffffffu, key, 0));
    float sum = 0.f;
    if (p.weighting == SOFTMAX_ALL)
#pragma unroll
        for (u32 i = 0; i < KEPT; i++)
            if (i * 32 + lane < p.experts) sum += expf(values[i] - largest);
    if (p.weighting == SOFTMAX_ALL || p.weighting == SOFTMAX_SELECTED) v = live ? expf(v - largest) : 0.f;
    if (p.weighting == SOFTMAX_SELECTED || p.weighting == GIVEN_NORMALIZED) sum = v;
    sum = warp_sum(sum);
    if (p.weighting == GIVEN_NORMALIZED)
        v = sum == 0.f ? 0.f : v / sum;
    else if (p.weighting != GIVEN)
        v /= sum;
    if (!live) return;
    p.ids[(u64)token * p.k + lane] = (int)mine;
    p.weights[(u64)token * p.k + lane] = v;
}

// A warp a token. Shared memory: k floats, then a byte per expert (taken).
extern "C" __global__ void __launch_bounds__(32) route(const __grid_constant__ RouteParams p) {
    in_order();
    extern __shared__ float values[];  // [k], then taken[experts]
    u8* taken = (u8*)(values + p.k);
    const u32 lane = threadIdx.x, token = blockIdx.x;
    const float* logits = p.logits + (u64)token * p.experts;
    const float* given = p.given ? p.given + (u64)token * p.experts : nullptr;
    int* ids = p.ids + (u64)token * p.k;
    float* weights = p.weights + (u64)token * p.k;
    if (p.experts <= 32 * KEPT && p.k <= 32 && p.weighting != SPARSE_MIXER) {
        route_kept(p, logits, given, token);
        return;
    }
    for (u32 e = lane; e < p.experts; e += 32) taken[e] = 0;
    __syncwarp();
    for (u32 j = 0; j < p.k; j++) {
        Best best = {0.f, -1};
        for (u32 e = lane; e < p.experts; e += 32) {
            Best b = {logits[e], (int)e};
            if (!taken[e] && before(b, best)) best = b;
        }
        best = warp_best(best);
        if (p.weighting == SPARSE_MIXER) {
            // The softmax of this round over the entries near its winner: (m - s) / max(|s|, m) <= 0.02.
            float sum = 0.f;
            for (u32 e = lane; e < p.experts; e += 32) {
                float s = logits[e];
                if (!taken[e] && !((best.v - s) / fmaxf(fabsf(s), best.v) > 0.02f)) sum += expf(s - best.v);
            }
            sum = warp_sum(sum);
            if (lane == 0) values[j] = 1.f / sum;
        } else if (lane == 0)
            values[j] = given ? given[best.i] : best.v;
        if (lane == 0) {
            taken[best.i] = 1;
            ids[j] = best.i;
        }
        __syncwarp();
    }
    float largest = logits[ids[0]];
    float sum = 0.f;
    if (p.weighting == SOFTMAX_ALL)
        for (u32 e = lane; e < p.experts; e += 32) sum += expf(logits[e] - largest);
    if (p.weighting == SOFTMAX_SELECTED)
        for (u32 j = lane; j < p.k; j += 32) sum += expf(values[j] - largest);
    if (p.weighting == GIVEN_NORMALIZED)
        for (u32 j = lane; j < p.k; j += 32) sum += values[j];
    sum = warp_sum(sum);
    for (u32 j = lane; j < p.k; j += 32) {
        float v = values[j];
        if (p.weighting == SOFTMAX_ALL || p.weighting == SOFTMAX_SELECTED) v = expf(v - largest) / sum;
        if (p.weighting == GIVEN_NORMALIZED) v = sum == 0.f ? 0.f : v / sum;
        weights[j] = v;
    }
}

// Mirrors `GroupParams`.
struct GroupParams {
    const int* ids;    // expert of each route
    int* ends;         // [experts]
    int* order;        // [routes]
    int2* tiles;
    int* tile_count;
    u32 routes;
    u32 experts;
    u32 tile_rows;
};

#define GROUP_THREADS 1024  // at most
#define GROUP_LOTS 8         // loads of a warp on their way

// The experts of 32 x GROUP_LOTS routes from `from` on, lane by lane; -1 from `end` on.
__device__ __forceinline__ void load_ids(int (&id)[GROUP_LOTS], const int* ids, u32 from, u32 end) {
#pragma unroll
    for (int i = 0; i < GROUP_LOTS; i++) {
        const u32 r = from + 32 * i + threadIdx.x % 32;
        id[i] = r < end ? ids[r] : -1;
    }
}

// A block an expert: its routes in ascending order, and its tiles. Every block counts all routes, which is cheaper than a
// launch that does it once; a warp goes through a run of routes of its own, once to count and once to place. Shared memory: a
// number an expert.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS) group(const __grid_constant__ GroupParams p) {
    in_order();
    extern __shared__ int counts[];
    __shared__ float buffer[32];
    __shared__ int warp_counts[GROUP_THREADS / 32];
    const int e = blockIdx.x;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (u32 i = threadIdx.x; i < p.experts; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    const u32 run = (p.routes + blockDim.x - 1) / blockDim.x * 32;
    const u32 first = min(warp * run, p.routes), last = min(first + run, p.routes);
    int id[GROUP_LOTS], mine = 0;
    for (u32 from = first; from < last; from += 32 * GROUP_LOTS) {
        load_ids(id, p.ids, from, last);
#pragma unroll
        for (int i = 0; i < GROUP_LOTS; i++) {
            if (id[i] >= 0) atomicAdd(&counts[id[i]], 1);
            mine += __popc(__ballot_sync(0xffffffffu, id[i] == e));
        }
    }
    if (lane == 0) warp_counts[warp] = mine;
    __syncthreads();
    int before = 0, tiles_before = 0;
    for (int i = threadIdx.x; i < e; i += blockDim.x) {
        before += counts[i];
        tiles_before += (counts[i] + p.tile_rows - 1) / p.tile_rows;
    }
    // Counts below 2^24 are exact as floats; the host allows no more routes.
    int start = (int)block_sum((float)before, buffer);
    int tile = (int)block_sum((float)tiles_before, buffer);
    int count = counts[e], tiles = (count + p.tile_rows - 1) / p.tile_rows;
    for (int t = threadIdx.x; t < tiles; t += blockDim.x) p.tiles[tile + t] = make_int2(e, start + t * p.tile_rows);
    if (threadIdx.x == 0) {
        p.ends[e] = start + count;
        if (e == (int)p.experts - 1) *p.tile_count = tile + tiles;
    }
    if (!mine) return;
    int at = start;
    for (u32 w = 0; w < warp; w++) at += warp_counts[w];
    for (u32 from = first; from < last; from += 32 * GROUP_LOTS) {
        load_ids(id, p.ids, from, last);
#pragma unroll
        for (int i = 0; i < GROUP_LOTS; i++) {
            const u32 found = __ballot_sync(0xffffffffu, id[i] == e);
            if (id[i] == e) p.order[at + __popc(found & ((1u << lane) - 1))] = from + 32 * i + lane;
            at += __popc(found);
        }
    }
}

// Mirrors `ActivateParams`. h1: FC1 rows of each place, h3: FC3 rows where the linear part is apart.
struct ActivateParams {
    const float* h1;
    const float* h3;
    float* y;
    u64 n;       // places x inter
    u32 inter;
    Activation act;
};

extern "C" __global__ void __launch_bounds__(256) activate_rows(const __grid_constant__ ActivateParams p) {
    in_order();
    for (u64 at = blockIdx.x * 256ull + threadIdx.x; at < p.n; at += gridDim.x * 256ull) {
        u64 row = at / p.inter, i = at % p.inter;
        float g, l = 0.f;
        switch (p.act.gate) {
            case GATE_INTERLEAVED: g = p.h1[2 * at], l = p.h1[2 * at + 1]; break;
            case GATE_CONCATENATED: g = p.h1[2 * row * p.inter + i], l = p.h1[(2 * row + 1) * p.inter + i]; break;
            case GATE_SEPARATE: g = p.h1[at], l = p.h3[at]; break;
            default: g = p.h1[at];
        }
        p.y[at] = activate(p.act, g, l);
    }
}

// y[token, n] = sum over j of mix[token, j] * rows[token, j, n], j in order. Mirrors `CombineParams`.
struct CombineParams {
    const float* rows;
    const float* mix;
    float* y;
    u64 n;  // tokens x hidden
    u32 hidden;
    u32 k;
};

extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ CombineParams p) {
    in_order();
    if (p.hidden % 4 == 0) {
        const u32 line = p.hidden / 4;
        for (u64 at = blockIdx.x * 256ull + threadIdx.x; at < p.n / 4; at += gridDim.x * 256ull) {
            const u64 token = at / line;
            const float4* row = (const float4*)p.rows + token * p.k * line + at % line;
            float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
            for (u32 j = 0; j < p.k; j++) {
                const float mix = p.mix[token * p.k + j];
                const float4 v = __ldcs(row + j * (u64)line);
                sum.x += mix * v.x, sum.y += mix * v.y, sum.z += mix * v.z, sum.w += mix * v.w;
            }
            ((float4*)p.y)[at] = sum;
        }
        return;
    }
    for (u64 at = blockIdx.x * 256ull + threadIdx.x; at < p.n; at += gridDim.x * 256ull) {
        u64 token = at / p.hidden, i = at % p.hidden;
        float sum = 0.f;
        for (u32 j = 0; j < p.k; j++) sum += p.mix[token * p.k + j] * p.rows[(token * p.k + j) * p.hidden + i];
        p.y[at] = sum;
    }
}

// ---- norm, router and routes in one launch --------------------------------------------------------------------------

#define ROUTER_WARPS 8
#define ROUTER_AHEAD 16  // loads of a lane before the norm

// Mirrors `RouterParams`: the logits of normalised rows, and the routes of those.
struct RouterParams {
    NormParams norm;
    Weights w;           // floats, [experts, width]
    RouteParams route;   // its `logits` are written here
    const void* bias;
    float* logits;
    u32* arrived;        // [tokens], zeros, which are left behind too
    u32 bias_float;
    u32 m;
};

// A warp an expert of a token; every block normalises the token's row again, which is cheaper than a launch that does it once. The
// token's last block selects its routes. Shared memory: the row.
extern "C" __global__ void __launch_bounds__(32 * ROUTER_WARPS) router(const __grid_constant__ RouterParams p) {
    extern __shared__ float row[];
    __shared__ float buffer[32];
    __shared__ bool last;
    allow_next();
    const u32 lane = threadIdx.x % 32, expert = blockIdx.x * ROUTER_WARPS + threadIdx.x / 32, token = blockIdx.y;
    const u32 width = p.norm.width, bytes = p.w.row_bytes;
    const u8* weights = p.w.codes + (u64)min(expert, p.w.rows - 1) * bytes;
    // Weights are not of this step.
    float4 first[ROUTER_AHEAD];
#pragma unroll
    for (u32 i = 0; i < ROUTER_AHEAD; i++) {
        const u32 c = (i * 32 + lane) * 4;
        first[i] = c < width ? load_float4(weights, c, p.w.scale_float) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    await_earlier();
    const NormParams& n = p.norm;
    const bool leaves = blockIdx.x == 0;
    float total = 0.f, squares = 0.f;
    for (u32 c = threadIdx.x * 4; c < width; c += blockDim.x * 4) {
        const float4 v = before_norm(n, token, c);
        *(float4*)(row + c) = v;
        if (leaves && n.sum) *(float4*)(n.sum + (u64)token * width + c) = v;
        total += v.x + v.y + v.z + v.w;
    }
    const float mean = n.layer ? block_sum(total, buffer) / width : 0.f;
    for (u32 c = threadIdx.x * 4; c < width; c += blockDim.x * 4) {
        float4 v = *(const float4*)(row + c);
        v.x -= mean, v.y -= mean, v.z -= mean, v.w -= mean;
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float inv = 1.f / sqrtf(block_sum(squares, buffer) / width + n.eps);
    for (u32 c = threadIdx.x * 4; c < width; c += blockDim.x * 4) {
        const float4 v = *(const float4*)(row + c), gamma = load_float4(n.gamma, c, n.gamma_float);
        float4 y = make_float4((v.x - mean) * inv * gamma.x, (v.y - mean) * inv * gamma.y, (v.z - mean) * inv * gamma.z,
                               (v.w - mean) * inv * gamma.w);
        if (n.beta) add4(y, load_float4(n.beta, c, n.beta_float));
        *(float4*)(row + c) = y;
        if (leaves) *(float4*)(n.y + (u64)token * width + c) = y;
    }
    __syncthreads();
    if (expert < p.w.rows) {
        float sum = 0.f;
        auto add = [&](u32 c, const float4& w) {
            const float4 x = *(const float4*)(row + c);
            sum += x.x * w.x + x.y * w.y + x.z * w.z + x.w * w.w;
        };
#pragma unroll
        for (u32 i = 0; i < ROUTER_AHEAD; i++)
            if ((i * 32 + lane) * 4 < width) add((i * 32 + lane) * 4, first[i]);
#pragma unroll 8
        for (u32 c = (ROUTER_AHEAD * 32 + lane) * 4; c < width; c += 128) add(c, load_float4(weights, c, p.w.scale_float));
        sum = warp_sum(sum);
        if (lane == 0) {
            if (p.bias) sum += load_float(p.bias, expert, p.bias_float);
            p.logits[(u64)token * p.w.rows + expert] = sum;
            __threadfence();
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(p.arrived + token, 1u) == gridDim.x - 1;
        if (last) p.arrived[token] = 0;
    }
    __syncthreads();
    if (!last || threadIdx.x >= 32) return;
    __threadfence();
    route_kept(p.route, p.logits + (u64)token * p.w.rows, nullptr, token);
}
