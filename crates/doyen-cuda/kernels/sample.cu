// A token from every row of logits: what `Draw::choose` of doyen-graph gives, to the last bit. Weights are integers, so that
// their sums do not depend on the order of threads; their exponential is made of products and sums that nobody may fuse.

#include "doyen.cuh"

#define THREADS 1024
#define WARPS (THREADS / 32)
#define BINS 2048           // of exponents, the largest first
#define LEAST (-28.f)         // exponents below have no weight
#define NO_TOKEN 0xffffffffu

// One row's draw, as `draw_bytes` of the session writes it.
struct Draw {
    u64 least;      // weight that min-p asks for
    float temperature;
    u32 top_k;      // 0: all
    u32 top_p;      // share to keep in units of 2^-32; 0: all
    u32 random;     // 24 bits
};

// Mirrors `SampleParams`.
struct SampleParams {
    const float* logits;  // [rows, vocab]
    const Draw* draws;    // [rows]
    u32* tokens;          // [rows]; NO_TOKEN where no logit is a number
    u32 vocab;
};

// What a draw keeps of a row: logits of larger keys, and as many as `ties` of this one, lowest ids first.
struct Cutoff {
    u32 key;
    u32 ties;
};

struct Row {
    const float* logits;
    float best;
    float temperature;
};

// A number whose order is that of logits; NaN comes first.
__device__ __forceinline__ u32 key_of(float v) {
    if (v != v) return 0;
    const u32 b = __float_as_uint(__fadd_rn(v, 0.f));  // -0 is 0
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

__device__ __forceinline__ float of_key(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ float exponent(const Row& row, float logit) {
    return __fdiv_rn(__fsub_rn(logit, row.best), row.temperature);
}

// 2^40 e^x for x of 0 or less, rounded down; 0 for NaN.
__device__ __forceinline__ u64 weight(float x) {
    if (!(x >= LEAST)) return 0;
    const float n = __fsub_rn(__fadd_rn(__fmul_rn(x, 1.44269504f), 12582912.f), 12582912.f);
    const float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, -2.12194440e-4f));
    float p = 1.987569150e-4f;
    p = __fadd_rn(__fmul_rn(p, r), 1.398199951e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 8.333452046e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 4.166579619e-2f);
    p = __fadd_rn(__fmul_rn(p, r), 1.666666567e-1f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    const float y = __fadd_rn(__fadd_rn(__fmul_rn(__fmul_rn(p, r), r), r), 1.f);
    const u64 mantissa = (u64)(u32)(y * 16777216.f);
    const int shift = (int)n + 16;
    return shift >= 0 ? mantissa << shift : mantissa >> -shift;
}

__device__ __forceinline__ u32 bin_of(float x) { return min((u32)(__fmul_rn(-x, BINS / -LEAST)), BINS - 1u); }

// `part / 2^bits` of `total`, rounded down; bits below 64.
__device__ __forceinline__ u64 share(u64 total, u64 part, u32 bits) {
    return __umul64hi(total, part) << (64 - bits) | (total * part) >> bits;
}

__device__ __forceinline__ u64 warp_max64(u64 v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        const u64 other = __shfl_xor_sync(0xffffffffu, v, o);
        if (other > v) v = other;
    }
    return v;
}

__device__ __forceinline__ u64 warp_sum64(u64 v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}

// The sum of the lanes up to this one.
__device__ __forceinline__ u64 warp_scan64(u64 v) {
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        const u64 other = __shfl_up_sync(0xffffffffu, v, o);
        if (threadIdx.x % 32 >= o) v += other;
    }
    return v;
}

struct Shared {
    u64 warp[WARPS];
    u32 ties[WARPS];
    u64 weights[BINS];
    u32 counts[BINS];
    u64 digits[256];
    u64 found;
    u64 before;
};

#define AHEAD 8  // loads of a thread on their way

// Calls `f(logit, id)` for the logits from `first` on, every `step`th of them up to `last`.
template <class F>
__device__ __forceinline__ void each(const Row& row, u32 first, u32 last, u32 step, F f) {
    for (u32 from = first; from < last; from += AHEAD * step) {
        float l[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) l[i] = from + i * step < last ? __ldcg(row.logits + from + i * step) : QUIET_NAN;
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) f(l[i], from + i * step);
    }
}

// The first of `n` amounts whose running sum reaches `goal`, and the sum before it, in `found` and `before`; n if none does.
// The amounts are those of `at(i)`.
template <class At>
__device__ __forceinline__ void reach(Shared& s, u32 n, u64 goal, At at) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 each = (n + THREADS - 1) / THREADS, first = threadIdx.x * each;
    u64 own = 0;
    for (u32 i = first; i < min(first + each, n); i++) own += at(i);
    u64 sum = warp_scan64(own);
    if (lane == 31) s.warp[warp] = sum;
    if (threadIdx.x == 0) s.found = n;
    __syncthreads();
    for (u32 w = 0; w < warp; w++) sum += s.warp[w];
    u64 before = sum - own;
    if (before < goal && sum >= goal) {
        u32 i = first;
        for (; before + at(i) < goal; i++) before += at(i);
        s.found = i, s.before = before;
    }
    __syncthreads();
}

// The cutoff where the amounts of the likeliest tokens reach `goal`: of counts, or of weights. Keys of 0 and no ties where
// they never do.
template <bool WEIGHTS>
__device__ __forceinline__ Cutoff select(Shared& s, const Row& row, u32 vocab, u64 goal) {
    reach(s, BINS, goal, [&](u32 i) { return WEIGHTS ? s.weights[i] : (u64)s.counts[i]; });
    const u32 bin = (u32)s.found;
    if (bin == BINS) return {0, 0};
    u64 left = goal - s.before;
    u32 key = 0;
    for (int digit = 3; digit >= 0; digit--) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < 256; i += THREADS) s.digits[i] = 0;
        __syncthreads();
        each(row, threadIdx.x, vocab, THREADS, [&](float l, u32) {
            const float x = exponent(row, l);
            if (!(x >= LEAST) || bin_of(x) != bin) return;
            const u32 k = key_of(l);
            if (digit < 3 && (k ^ key) >> 8 * (digit + 1)) return;
            atomicAdd(&s.digits[255 - (k >> 8 * digit & 255)], WEIGHTS ? weight(x) : (u64)1);
        });
        __syncthreads();
        reach(s, 256, left, [&](u32 i) { return s.digits[i]; });
        key |= (255 - (u32)s.found) << 8 * digit;
        left -= s.before;
    }
    // What is left is of tokens with this very key.
    if (!WEIGHTS) return {key, (u32)left};
    const u64 w = weight(exponent(row, of_key(key)));
    return {key, (u32)((left + w - 1) / w)};
}

// A run of ids whose weights are summed: a piece of it for every warp.
struct Span {
    u32 first;
    u32 last;
    u32 ties;   // of the cutoff's key before it
};

// Sums of the kept weights of every warp's piece of a run, in `warp`; the whole is returned. `ties` has how many of the cutoff's
// key lie in each piece.
__device__ __forceinline__ u64 sums(Shared& s, const Row& row, const Cutoff& cut, u64 least, const Span& span, u32 piece) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 first = min(span.first + warp * piece, span.last), last = min(first + piece, span.last);
    u64 sum = 0;
    u32 ties = 0;
    each(row, first + lane, last, 32, [&](float l, u32) {
        const u32 k = key_of(l);
        const u64 w = weight(exponent(row, l));
        if (k > cut.key && w >= least) sum += w;
        // What is no number counts for nothing.
        ties += k && k == cut.key;
    });
    sum = warp_sum64(sum), ties = (u32)warp_sum64(ties);
    __syncthreads();
    if (lane == 0) s.warp[warp] = sum, s.ties[warp] = ties;
    __syncthreads();
    u64 tie = cut.key ? weight(exponent(row, of_key(cut.key))) : 0;
    if (tie < least) tie = 0;
    u64 total = 0;
    u32 before = span.ties;
    for (u32 w = 0; w < WARPS; w++) {
        const u32 room = cut.ties > before ? cut.ties - before : 0;
        total += s.warp[w] + min(room, s.ties[w]) * tie;
        before += s.ties[w];
    }
    return total;
}

// The piece in which the running sum of kept weights passes `target`, which becomes what is left of it there.
__device__ __forceinline__ Span narrow(Shared& s, const Row& row, const Cutoff& cut, u64 least, const Span& span, u32 piece,
                                       u64& target) {
    u64 tie = cut.key ? weight(exponent(row, of_key(cut.key))) : 0;
    if (tie < least) tie = 0;
    u32 before = span.ties;
    for (u32 w = 0; w < WARPS; w++) {
        const u32 room = cut.ties > before ? cut.ties - before : 0;
        const u64 here = s.warp[w] + min(room, s.ties[w]) * tie;
        if (here > target) {
            const u32 first = min(span.first + w * piece, span.last);
            return {first, min(first + piece, span.last), before};
        }
        target -= here;
        before += s.ties[w];
    }
    return {span.last, span.last, before};
}

// The first id of a run at which the running sum of kept weights passes `target`. One warp.
__device__ __forceinline__ u32 find(const Row& row, const Cutoff& cut, u64 least, const Span& span, u64 target) {
    const u32 lane = threadIdx.x % 32;
    u32 before = span.ties;
    for (u32 from = span.first; from < span.last; from += 32) {
        const u32 i = from + lane;
        const float l = i < span.last ? row.logits[i] : QUIET_NAN;
        const u32 k = key_of(l);
        const bool tie = k && k == cut.key;
        const u32 ties = __ballot_sync(0xffffffffu, tie);
        const u32 rank = before + __popc(ties & ((1u << lane) - 1));
        u64 w = weight(exponent(row, l));
        if (w < least || k < cut.key || (tie && rank >= cut.ties)) w = 0;
        const u64 sum = warp_scan64(w);
        const u32 passed = __ballot_sync(0xffffffffu, sum > target);
        if (passed) return from + __ffs(passed) - 1;
        target -= __shfl_sync(0xffffffffu, sum, 31);
        before += __popc(ties);
    }
    return NO_TOKEN;
}

// A block a row.
extern "C" __global__ void __launch_bounds__(THREADS, 1) sample(const __grid_constant__ SampleParams p) {
    in_order();
    __shared__ Shared s;
    const Draw draw = p.draws[blockIdx.x];
    Row row = {p.logits + (u64)blockIdx.x * p.vocab, 0.f, draw.temperature};
    const u32 warp = threadIdx.x / 32;

    // The largest logit, the lowest id first; NaN has key 0.
    u64 best = 0;
    u32 most = 0, at = 0;
    each(row, threadIdx.x, p.vocab, THREADS, [&](float l, u32 i) {
        const u32 k = key_of(l);
        if (k > most) most = k, at = i;
    });
    best = warp_max64((u64)most << 32 | (most ? ~at : 0));
    if (threadIdx.x % 32 == 0) s.warp[warp] = best;
    __syncthreads();
    best = warp_max64(s.warp[threadIdx.x % 32]);
    const u32 first = best ? ~(u32)best : NO_TOKEN;
    row.best = of_key((u32)(best >> 32));
    if (!best || draw.temperature == 0.f || fabsf(row.best) == INF) {
        if (threadIdx.x == 0) p.tokens[blockIdx.x] = first;
        return;
    }

    Cutoff cut = {0, 0};
    const u32 piece = (p.vocab + WARPS - 1) / WARPS;
    const Span whole = {0, p.vocab, 0};
    if (draw.top_k || draw.top_p) {
        for (u32 i = threadIdx.x; i < BINS; i += THREADS) s.weights[i] = 0, s.counts[i] = 0;
        __syncthreads();
        each(row, threadIdx.x, p.vocab, THREADS, [&](float l, u32) {
            const float x = exponent(row, l);
            if (!(x >= LEAST)) return;
            atomicAdd(&s.counts[bin_of(x)], 1u);
            atomicAdd(&s.weights[bin_of(x)], weight(x));
        });
        __syncthreads();
        if (draw.top_k) cut = select<false>(s, row, p.vocab, draw.top_k);
        if (draw.top_p) {
            const u64 need = share(sums(s, row, cut, 0, whole, piece), draw.top_p, 32);
            __syncthreads();
            cut = select<true>(s, row, p.vocab, need ? need : 1);
        }
    }
    u64 target = share(sums(s, row, cut, draw.least, whole, piece), draw.random, 24);
    // Twice a warp's piece of a run, then one by one.
    const Span part = narrow(s, row, cut, draw.least, whole, piece, target);
    const u32 smaller = (piece + WARPS - 1) / WARPS;
    sums(s, row, cut, draw.least, part, smaller);
    const Span last = narrow(s, row, cut, draw.least, part, smaller, target);
    if (warp) return;
    const u32 token = find(row, cut, draw.least, last, target);
    if (threadIdx.x == 0) p.tokens[blockIdx.x] = token == NO_TOKEN ? first : token;
}
