// Products of one or a few rows of activations with packed codes, for decode: codes are read 16 bytes a lane, several loads
// ahead, straight into the left operand of mma.m16n8k16. Compiled once per BITS (2, 4, 8), PARTS (1, 2, 4) and OPERAND.
//
// A warp owns 16 weight rows, or shares their columns with others. Lane 4g + t takes 16 bytes of rows g and g + 8 in every
// segment of 4 x 16 bytes. Where a segment has several blocks (PARTS), the columns of the right operand are not tokens alone:
// column n holds token n / PARTS, and zeros but for the columns of part n % PARTS, so that every block has sums of its own,
// which its scale multiplies in float32. Codes less their zero points are exact; only activations are rounded.
//
// Not for blocks of fewer columns than a lane's 16 bytes hold; those are few.cu's.

#include "doyen.cuh"

#define LANE (128 / BITS)     // columns of a lane in a segment
#define SEGMENT (4 * LANE)
#define WORD (32 / BITS)      // columns of a word
#define STAGES 3              // segments on their way to a warp
#define WARPS 8
#define SUM_WARPS 16
#define SUM_STAGES 3
#define NORMED_STAGES 2  // beside what a norm keeps in registers

// Mirrors `StreamParams`.
struct StreamParams {
    Weights w;
    const void* x;       // float32; of stream_sum in the operand type, in the order of its codes
    void* y;
    const void* bias;    // [experts, rows]
    const int* experts;  // [tokens, k]; null: one matrix
    const float* mix;    // [tokens, k], of stream_sum
    u64 x_stride;
    u64 y_stride;
    u32 bias_float;
    u32 m;               // rows of x
    u32 k;               // routes of a token
    u32 split;           // warps that share the columns of 16 rows: 1, 2, 4 or 8
    u32 y_span;          // codes of a word of who reads y in the operand type; 0: y is float32
    Activation act;
};

// What a lane keeps of a segment of two rows until it is multiplied.
template <bool PLAIN>
struct Lot {
    uint4 codes[2];
    u32 scales[PLAIN ? 2 : 4];  // of the lane's two columns of sums: 2 bytes each, or float32
    u32 zeros[PLAIN ? 1 : 2];
};

#define SUMS (PARTS == 1 ? 2 : 1)  // tokens of a lane

__device__ __forceinline__ u32 segments_of(const Weights& w) { return (w.cols + SEGMENT - 1) / SEGMENT; }

// Two rows of a matrix, as a lane reads them.
struct Rows {
    const u8* codes[2];
    u64 scales[2];  // element of the first scale
    u64 matrix;
    u32 row[2];
};

__device__ __forceinline__ Rows rows_of(const Weights& w, u64 matrix, const u32 (&row)[2]) {
    Rows at;
    at.matrix = matrix;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        at.row[r] = row[r];
        at.codes[r] = w.codes + matrix * w.codes_stride + (u64)row[r] * w.row_bytes + threadIdx.x % 4 * 16;
        at.scales[r] = matrix * w.scales_stride + (u64)row[r] * w.blocks;
    }
    return at;
}

// The first block of the lane's sums in a segment.
__device__ __forceinline__ u32 block_of(const Weights& w, u32 segment) {
    if (PARTS == 1) return segment * SEGMENT >> w.block_shift;
    return segment * PARTS + 2 * (threadIdx.x % 4) % PARTS;
}

template <bool PLAIN>
__device__ __forceinline__ void fetch(Lot<PLAIN>& lot, const Weights& w, const Rows& at, u32 segment) {
    const bool live = segment * 4 + threadIdx.x % 4 < w.row_bytes / 16;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        lot.codes[r] = make_uint4(0, 0, 0, 0);
        if (live) lot.codes[r] = __ldcs((const uint4*)(at.codes[r] + (u64)segment * 64));
        if constexpr (PLAIN) {
            lot.scales[r] = 0;
            const u32 block = block_of(w, segment);
            if (block < w.blocks) {
                const u16* p = (const u16*)w.scales + at.scales[r] + block;
                lot.scales[r] = PARTS == 1 ? *p : *(const u32*)p;
            }
        } else {
            const u32 block = block_of(w, segment);
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 b = block + (PARTS == 1 ? 0 : i);
                const float s = b < w.blocks ? load_float(w.scales, at.scales[r] + b, w.scale_float) : 0.f;
                lot.scales[2 * r + i] = __float_as_uint(s);
            }
            const u32 column = min(segment * SEGMENT + threadIdx.x % 4 * LANE, w.cols - 1);
            lot.zeros[r] = (u32)weight_zero<BITS>(w, at.matrix, at.row[r], column);
        }
    }
}

// Adds a segment's products to the lane's sums. `x` is where the lane's columns of activations lie in shared memory.
template <bool PLAIN>
__device__ __forceinline__ void consume(float (&sum)[2][2], const Lot<PLAIN>& lot, const Weights& w, const u8* x,
                                        float mix) {
    u32 zero[2] = {1u << (BITS - 1), 1u << (BITS - 1)};
    if constexpr (!PLAIN) zero[0] = lot.zeros[0], zero[1] = lot.zeros[1];
    float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        using Codes = Unit<BITS, WORD, OPERAND>;
        u32 a[2][WORD / 2], b[WORD / 2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint4& q = lot.codes[r];
            Codes unit;
            unit.word[0] = i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w;
            unit.pairs(a[r], zero[r]);
        }
        const u8* from = x + i * (WORD * 2);
        if constexpr (WORD == 4) {
            uint2 v = *(const uint2*)from;
            b[0] = v.x, b[1] = v.y;
        } else {
#pragma unroll
            for (int j = 0; j < WORD / 8; j++) {
                uint4 v = ((const uint4*)from)[j];
                b[4 * j] = v.x, b[4 * j + 1] = v.y, b[4 * j + 2] = v.z, b[4 * j + 3] = v.w;
            }
        }
#pragma unroll
        for (int j = 0; j < WORD / 2; j += 2) {
            u32 left[4] = {a[0][j], a[1][j], a[0][j + 1], a[1][j + 1]};
            OPERAND::mma(c, left, b[j], b[j + 1]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float s[2];
        if constexpr (PLAIN) {
            const u32 v = lot.scales[r];
            const bool half = w.scale_float == F16;
            s[0] = half ? f16_to_f32((u16)v) : __uint_as_float(v << 16);
            s[1] = PARTS == 1 ? s[0] : half ? f16_to_f32((u16)(v >> 16)) : __uint_as_float(v & 0xffff0000u);
        } else {
            s[0] = __uint_as_float(lot.scales[2 * r]), s[1] = __uint_as_float(lot.scales[2 * r + 1]);
        }
        if constexpr (SUMS == 2) {
            sum[r][0] = fmaf(s[0] * mix, c[2 * r], sum[r][0]);
            sum[r][1] = fmaf(s[0] * mix, c[2 * r + 1], sum[r][1]);
        } else
            sum[r][0] = fmaf(s[0] * mix, c[2 * r], fmaf(s[1] * mix, c[2 * r + 1], sum[r][0]));
    }
}

// The token of a lane's sum `i`, once lanes that share one were added.
__device__ __forceinline__ u32 token_of(int i) {
    const u32 t = threadIdx.x % 4;
    return PARTS == 1 ? 2 * t + i : PARTS == 2 ? t : t / 2;
}

// Adds lanes that share a token, then the warps that share rows. True in the warps that have the result.
__device__ __forceinline__ bool join(float (&sum)[2][2], float4 (*parts)[32], u32 part, u32 split) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (PARTS == 4)
#pragma unroll
        for (int r = 0; r < 2; r++) sum[r][0] += __shfl_xor_sync(0xffffffffu, sum[r][0], 1);
    if (split == 1) return true;
    if (part) parts[warp][lane] = make_float4(sum[0][0], sum[0][1], sum[1][0], sum[1][1]);
    __syncthreads();
    if (part == 0)
        for (u32 i = 1; i < split; i++) {
            float4 v = parts[warp + i][lane];
            sum[0][0] += v.x, sum[0][1] += v.y, sum[1][0] += v.z, sum[1][1] += v.w;
        }
    __syncthreads();
    return part == 0;
}

// Bytes of a row of activations in shared memory, whole segments.
__device__ __forceinline__ u32 line_bytes(u32 cols) { return (cols + SEGMENT - 1) / SEGMENT * (SEGMENT * 2); }

// Zeros that lanes read whose columns are not of their part: as many as a lane's columns.
#define ZEROS (LANE * 2)

// Brings `m` rows of float32 activations to shared memory in the operand type, in the order of the codes, behind the zeros.
__device__ __forceinline__ void narrow_rows(u8* shared, const float* x, u64 stride, u32 m, u32 cols) {
    using Codes = Unit<BITS, RUN, OPERAND>;
    for (u32 i = threadIdx.x; i < ZEROS / 4; i += blockDim.x) ((u32*)shared)[i] = 0;
    const u32 runs = line_bytes(cols) / (RUN * 2);
    for (u32 i = threadIdx.x; i < m * runs; i += blockDim.x) {
        const u32 row = m == 1 ? 0 : i / runs, run = m == 1 ? i : i % runs;
        float v[RUN];
#pragma unroll
        for (int j = 0; j < RUN / 4; j++) {
            float4 q = make_float4(0.f, 0.f, 0.f, 0.f);
            if (run * RUN < cols) q = ((const float4*)(x + row * stride))[run * 4 + j];
            v[4 * j] = q.x, v[4 * j + 1] = q.y, v[4 * j + 2] = q.z, v[4 * j + 3] = q.w;
        }
        u32 out[RUN / 2];
#pragma unroll
        for (int j = 0; j < RUN / 2; j++) out[j] = OPERAND::pack(v[Codes::first(j)], v[Codes::second(j)]);
        uint4* to = (uint4*)(shared + ZEROS) + i * 2;
        to[0] = make_uint4(out[0], out[1], out[2], out[3]);
        to[1] = make_uint4(out[4], out[5], out[6], out[7]);
    }
}

// Where a lane reads the activations of segment 0, and how far the next one's are.
struct Columns {
    u32 first;
    u32 step;
};

__device__ __forceinline__ Columns columns_of(u32 m, u32 cols) {
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const u32 token = g / PARTS;
    if (token >= m || g % PARTS != t * PARTS / 4) return {0, 0};
    return {ZEROS + token * line_bytes(cols) + t * (LANE * 2), SEGMENT * 2};
}

// y[m, rows] = x[m, cols] W^T + bias for up to 8 / PARTS rows of x. Blocks go on to the next rows until there are none.
template <bool PLAIN>
__device__ __forceinline__ void product(const StreamParams& p, u8* shared, float4 (*parts)[32]) {
    const Weights& w = p.w;
    const u32 segments = segments_of(w);
    const u32 g = threadIdx.x % 32 / 4, warp = threadIdx.x / 32;
    const u32 part = warp % p.split, groups = (w.rows + 15) / 16, per_block = WARPS / p.split;
    const u32 first = blockIdx.x * per_block;
    const u32 times = (groups - first + gridDim.x * per_block - 1) / (gridDim.x * per_block);
    const u32 each = (segments - part + p.split - 1) / p.split;  // segments of 16 rows

    auto rows_at = [&](u32 time, u32 (&n)[2]) {
        const u32 group = first + warp / p.split + time * gridDim.x * per_block;
        n[0] = group * 16 + g, n[1] = n[0] + 8;
    };
    auto rows_in = [&](u32 time) {
        u32 n[2];
        rows_at(time, n);
        const u32 row[2] = {n[0] < w.rows ? n[0] : 0, n[1] < w.rows ? n[1] : 0};
        return rows_of(w, 0, row);
    };
    // What is fetched next, ahead of what is multiplied.
    u32 ahead_time = 0, ahead = 0;
    Rows ahead_rows = rows_in(0);
    Lot<PLAIN> lots[STAGES];
    auto fetch_next = [&](Lot<PLAIN>& lot) {
        if (ahead_time >= times) return;
        fetch<PLAIN>(lot, w, ahead_rows, part + ahead * p.split);
        if (++ahead == each) {
            ahead = 0;
            if (++ahead_time < times) ahead_rows = rows_in(ahead_time);
        }
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) fetch_next(lots[i]);
    await_earlier();
    narrow_rows(shared, (const float*)p.x, p.x_stride, p.m, w.cols);
    __syncthreads();
    const Columns at = columns_of(p.m, w.cols);
    float sum[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
    u32 time = 0, done = 0;
    while (time < times) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) {
            if (time >= times) break;
            const u32 segment = part + done * p.split;
            consume<PLAIN>(sum, lots[i], w, shared + at.first + segment * at.step, 1.f);
            fetch_next(lots[i]);
            if (++done < each) continue;
            if (join(sum, parts, part, p.split)) {
                u32 n[2];
                rows_at(time, n);
#pragma unroll
                for (int r = 0; r < 2; r++)
#pragma unroll
                    for (int s = 0; s < SUMS; s++) {
                        const u32 token = token_of(s);
                        if (token >= p.m || n[r] >= w.rows) continue;
                        const float b = p.bias ? load_float(p.bias, n[r], p.bias_float) : 0.f;
                        ((float*)p.y)[token * p.y_stride + n[r]] = sum[r][s] + b;
                    }
            }
            sum[0][0] = sum[0][1] = sum[1][0] = sum[1][1] = 0.f;
            done = 0, time++;
        }
    }
}

// A product of several that share their activations.
struct Part {
    Weights w;
    float* y;          // [m, rows]
    const void* bias;
    u32 bias_float;
    u32 groups;        // groups of 16 rows of it and of the parts before it
};

#define PARTS_MOST 3

// Mirrors `NormedParams`: the products of normalised rows.
struct NormedParams {
    NormParams norm;
    Part parts[PARTS_MOST];
    u32 count;
    u32 m;
    u32 split;
};

// Normalises `m` rows and brings them to shared memory as `narrow_rows` does. One block of the launch leaves the rows and what
// was normalised for others. `kept` has room for a row.
__device__ __forceinline__ void normed_rows(u8* shared, float* kept, const NormParams& p, u32 m) {
    using Codes = Unit<BITS, RUN, OPERAND>;
    __shared__ float buffer[32];
    for (u32 i = threadIdx.x; i < ZEROS / 4; i += blockDim.x) ((u32*)shared)[i] = 0;
    const u32 runs = line_bytes(p.width) / (RUN * 2);
    const bool leaves = blockIdx.x == 0;
    for (u32 row = 0; row < m; row++) {
        float total = 0.f, squares = 0.f;
        for (u32 c = threadIdx.x * 4; c < p.width; c += blockDim.x * 4) {
            const float4 v = before_norm(p, row, c);
            *(float4*)(kept + c) = v;
            if (leaves && p.sum) *(float4*)(p.sum + (u64)row * p.width + c) = v;
            total += v.x + v.y + v.z + v.w;
            squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
        total = p.layer ? block_sum(total, buffer) / p.width : 0.f;
        if (p.layer) {
            squares = 0.f;
            for (u32 c = threadIdx.x * 4; c < p.width; c += blockDim.x * 4) {
                float4 v = *(const float4*)(kept + c);
                v.x -= total, v.y -= total, v.z -= total, v.w -= total;
                squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            }
        }
        const float inv = 1.f / sqrtf(block_sum(squares, buffer) / p.width + p.eps);
        for (u32 run = threadIdx.x; run < runs; run += blockDim.x) {
            float v[RUN];
#pragma unroll
            for (u32 j = 0; j < RUN / 4; j++) {
                const u32 c = run * RUN + 4 * j;
                float4 q = make_float4(0.f, 0.f, 0.f, 0.f);
                if (c < p.width) {
                    const float4 x = *(const float4*)(kept + c), gamma = load_float4(p.gamma, c, p.gamma_float);
                    q = make_float4((x.x - total) * inv * gamma.x, (x.y - total) * inv * gamma.y,
                                    (x.z - total) * inv * gamma.z, (x.w - total) * inv * gamma.w);
                    if (p.beta) add4(q, load_float4(p.beta, c, p.beta_float));
                    if (leaves) *(float4*)(p.y + (u64)row * p.width + c) = q;
                }
                v[4 * j] = q.x, v[4 * j + 1] = q.y, v[4 * j + 2] = q.z, v[4 * j + 3] = q.w;
            }
            u32 out[RUN / 2];
#pragma unroll
            for (int j = 0; j < RUN / 2; j++) out[j] = OPERAND::pack(v[Codes::first(j)], v[Codes::second(j)]);
            uint4* to = (uint4*)(shared + ZEROS) + (row * runs + run) * 2;
            to[0] = make_uint4(out[0], out[1], out[2], out[3]);
            to[1] = make_uint4(out[4], out[5], out[6], out[7]);
        }
        __syncthreads();
    }
}

// Products of the same normalised rows: every block normalises them again, which is cheaper than a launch that does it once.
// A warp has 16 rows of a part, or shares their columns.
template <bool PLAIN>
__device__ __forceinline__ void normed(const NormedParams& p, u8* shared, float4 (*parts)[32]) {
    const u32 g = threadIdx.x % 32 / 4, warp = threadIdx.x / 32, part = warp % p.split;
    u32 group = blockIdx.x * (WARPS / p.split) + warp / p.split, at = 0;
    while (at + 1 < p.count && group >= p.parts[at].groups) at++;
    if (at) group -= p.parts[at - 1].groups;
    const Part& own = p.parts[at];
    const Weights& w = own.w;
    const u32 segments = segments_of(w);
    const u32 n[2] = {group * 16 + g, group * 16 + 8 + g};
    const u32 row[2] = {n[0] < w.rows ? n[0] : 0, n[1] < w.rows ? n[1] : 0};
    const Rows rows = rows_of(w, 0, row);
    Lot<PLAIN> lots[NORMED_STAGES];
#pragma unroll
    for (int i = 0; i < NORMED_STAGES; i++) fetch<PLAIN>(lots[i], w, rows, part + i * p.split);
    // Behind the activations. Weights of the norm are not of this step.
    float* kept = (float*)(shared + ZEROS + p.m * line_bytes(p.norm.width));
    for (u32 at = threadIdx.x * 128; at < p.norm.width * (p.norm.gamma_float == F32 ? 4 : 2); at += blockDim.x * 128)
        asm volatile("prefetch.global.L1 [%0];" ::"l"((const u8*)p.norm.gamma + at));
    await_earlier();
    normed_rows(shared, kept, p.norm, p.m);

    __syncthreads();
    const Columns columns = columns_of(p.m, w.cols);
    float sum[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
    for (u32 segment0 = part; segment0 < segments; segment0 += NORMED_STAGES * p.split)
#pragma unroll
        for (int i = 0; i < NORMED_STAGES; i++) {
            const u32 segment = segment0 + i * p.split;
            if (segment >= segments) break;
            consume<PLAIN>(sum, lots[i], w, shared + columns.first + segment * columns.step, 1.f);
            fetch<PLAIN>(lots[i], w, rows, segment + NORMED_STAGES * p.split);
        }
    if (!join(sum, parts, part, p.split)) return;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int s = 0; s < SUMS; s++) {
            const u32 token = token_of(s);
            if (token >= p.m || n[r] >= w.rows) continue;
            const float b = own.bias ? load_float(own.bias, n[r], own.bias_float) : 0.f;
            own.y[(u64)token * w.rows + n[r]] = sum[r][s] + b;
        }
}

// FC1 and the activation, route by route: row g of a lane is a gate, row g + 8 its linear row.
template <bool PLAIN>
__device__ __forceinline__ void activated(const StreamParams& p, u8* shared, float4 (*parts)[32]) {
    const Weights& w = p.w;
    const u32 segments = segments_of(w);
    const u32 g = threadIdx.x % 32 / 4, warp = threadIdx.x / 32, part = warp % p.split;
    const u32 route = blockIdx.x;
    const u64 expert = (u64)__ldcg(p.experts + route);
    const bool gated = p.act.gate != GATE_NONE;
    const u32 inter = gated ? w.rows / 2 : w.rows;
    u32 value[2], n[2];
    value[0] = (blockIdx.y * (WARPS / p.split) + warp / p.split) * (gated ? 8 : 16) + g;
    value[1] = gated ? value[0] : value[0] + 8;
    if (p.act.gate == GATE_INTERLEAVED)
        n[0] = 2 * value[0], n[1] = 2 * value[0] + 1;
    else if (p.act.gate == GATE_CONCATENATED)
        n[0] = value[0], n[1] = inter + value[0];
    else
        n[0] = value[0], n[1] = value[1];
    const u32 row[2] = {value[0] < inter ? n[0] : 0, value[1] < inter ? n[1] : 0};
    const Rows rows = rows_of(w, expert, row);
    Lot<PLAIN> lots[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; i++) fetch<PLAIN>(lots[i], w, rows, part + i * p.split);
    narrow_rows(shared, (const float*)p.x + route / p.k * p.x_stride, 0, 1, w.cols);
    __syncthreads();
    const Columns at = columns_of(1, w.cols);
    float sum[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
    for (u32 segment0 = part; segment0 < segments; segment0 += STAGES * p.split)
#pragma unroll
        for (int i = 0; i < STAGES; i++) {
            const u32 segment = segment0 + i * p.split;
            if (segment >= segments) break;
            consume<PLAIN>(sum, lots[i], w, shared + at.first + segment * at.step, 1.f);
            fetch<PLAIN>(lots[i], w, rows, segment + STAGES * p.split);
        }
    if (!join(sum, parts, part, p.split) || threadIdx.x % 4) return;
    float h[2];
#pragma unroll
    for (int r = 0; r < 2; r++)
        h[r] = sum[r][0] + (p.bias ? load_float(p.bias, expert * w.rows + row[r], p.bias_float) : 0.f);
    auto store = [&](u32 i, float v) {
        if (i >= inter) return;
        if (p.y_span == 0) {
            ((float*)p.y)[route * p.y_stride + i] = v;
            return;
        }
        const u32 half = p.y_span / 2, c = i % p.y_span;
        const u32 to = i - c + c % half * 2 + c / half;
        ((u16*)p.y)[route * p.y_stride + to] = (u16)OPERAND::pack(v, 0.f);
    };
    store(value[0], activate(p.act, h[0], h[1]));
    if (!gated) store(value[1], activate(p.act, h[1], 0.f));
}

// FC2 and the weighted sum of a token's routes: a block has 16 rows, a route some of its warps.
template <bool PLAIN>
__device__ __forceinline__ void summed(const StreamParams& p, u8* shared, float4 (*parts)[32]) {
    const Weights& w = p.w;
    const u32 segments = segments_of(w);
    const u32 g = threadIdx.x % 32 / 4, warp = threadIdx.x / 32;
    const u32 token = blockIdx.x;
    const u32 n[2] = {blockIdx.y * 16 + g, blockIdx.y * 16 + 8 + g};
    const u32 row[2] = {n[0] < w.rows ? n[0] : 0, n[1] < w.rows ? n[1] : 0};
    const u32 each = p.k < SUM_WARPS ? SUM_WARPS / p.k : 1, part = warp % each, step = SUM_WARPS / each;
    u32 route = warp / each < step ? warp / each : p.k;
    // Routes were there before the launch that this one may overlap.
    auto rows_in = [&]() { return rows_of(w, (u64)__ldcg(p.experts + token * p.k + route), row); };
    Rows rows;
    Lot<PLAIN> lots[SUM_STAGES];
    auto fetch_first = [&]() {
        rows = rows_in();
#pragma unroll
        for (int i = 0; i < SUM_STAGES; i++) fetch<PLAIN>(lots[i], w, rows, part + i * each);
    };
    if (route < p.k) fetch_first();
    await_earlier();
    for (u32 i = threadIdx.x; i < ZEROS / 4; i += blockDim.x) ((u32*)shared)[i] = 0;
    const u32 pieces = w.cols / 8, line = line_bytes(w.cols) / 16;
    for (u32 i = threadIdx.x; i < p.k * line; i += blockDim.x) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (i % line < pieces) v = __ldcg((const uint4*)((const u16*)p.x + (token * p.k + i / line) * p.x_stride) + i % line);
        ((uint4*)(shared + ZEROS))[i] = v;
    }
    __syncthreads();
    const Columns at = columns_of(1, w.cols);
    float sum[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
    while (route < p.k) {
        const float mix = __ldcg(p.mix + token * p.k + route);
        const u8* x = shared + at.first + (at.step ? route * line * 16 : 0);
        for (u32 segment0 = part; segment0 < segments; segment0 += SUM_STAGES * each)
#pragma unroll
            for (int i = 0; i < SUM_STAGES; i++) {
                const u32 segment = segment0 + i * each;
                if (segment >= segments) break;
                consume<PLAIN>(sum, lots[i], w, x + segment * at.step, mix);
                fetch<PLAIN>(lots[i], w, rows, segment + SUM_STAGES * each);
            }
        route += step;
        if (route < p.k) fetch_first();
    }
    if (!join(sum, parts, warp, SUM_WARPS) || threadIdx.x % 4) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (n[r] >= w.rows) continue;
        float v = sum[r][0];
        for (u32 j = 0; p.bias && j < p.k; j++) {
            const u64 expert = p.experts[token * p.k + j];
            v = fmaf(p.mix[token * p.k + j], load_float(p.bias, expert * w.rows + n[r], p.bias_float), v);
        }
        ((float*)p.y)[token * p.y_stride + n[r]] = v;
    }
}

// Whether scales can be read in pairs of 2 bytes, and zero points are the default ones.
__device__ __forceinline__ bool is_plain(const Weights& w) {
    return w.zero_kind == ZERO_DEFAULT && w.scale_float != F32 && (PARTS == 1 || w.blocks % 2 == 0);
}

#define BY_LAYOUT(F, WARPS, W)                  \
    extern __shared__ __align__(16) u8 shared[]; \
    __shared__ float4 parts[WARPS][32];       \
    if (is_plain(W))                        \
        F<true>(p, shared, parts);            \
    else                                      \
        F<false>(p, shared, parts);

extern "C" __global__ void __launch_bounds__(32 * WARPS, 3) stream(const __grid_constant__ StreamParams p) {
    allow_next();
    BY_LAYOUT(product, WARPS, p.w)
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 3) stream_normed(const __grid_constant__ NormedParams p) {
    allow_next();
    BY_LAYOUT(normed, WARPS, p.parts[0].w)
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 3) stream_activated(const __grid_constant__ StreamParams p) {
    await_earlier();
    // Not before: who follows reads the routes without waiting.
    allow_next();
    BY_LAYOUT(activated, WARPS, p.w)
}

extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS, 1) stream_sum(const __grid_constant__ StreamParams p) {
    allow_next();
    BY_LAYOUT(summed, SUM_WARPS, p.w)
}
