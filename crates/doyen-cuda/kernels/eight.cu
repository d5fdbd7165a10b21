// Products of up to 8 rows of activations with packed codes, read as stream.cu reads them: 16 bytes a lane, several loads
// ahead, straight into the left operand of mma.m16n8k16. Compiled once per BITS (2, 4, 8) and OPERAND.
//
// A warp owns 16 weight rows, or shares their columns with others, and goes on to the next 16 when they are done. Lane
// 4g + t takes 16 bytes of rows g and g + 8 in every segment of 4 x 16 bytes; it scales the weights it unpacked, so that
// every column of the right operand is a row of activations. Those lie in shared memory as lanes read them: 16 bytes a
// lane, one lane after the other. float16 weights are kept 2^6 times too large, as in tile.cu.
//
// The grouped entries do the same for every expert over the rows routed to it. Not for blocks of fewer columns than a
// lane's 16 bytes hold; those are few.cu's.

#include "doyen.cuh"

#define LANE (128 / BITS)    // columns of a lane in a segment
#define SEGMENT (4 * LANE)
#define WORD (32 / BITS)     // columns of a word
#define CHUNKS (LANE / 8)    // 16-byte pieces of a lane's activations in a segment
#define STAGES 3             // segments on their way to a warp
#define WARPS 8
#define TOKENS 8
#define UP (OPERAND::EIGHT ? 64.f : 1.f)

// Mirrors `EightParams`.
struct EightParams {
    Weights w;
    const void* x;       // float32, or in the operand type in the order of the codes of a word
    void* y;
    const void* bias;    // [experts, rows]
    const int* order;    // routes in the experts' order, and their tiles, as of gemm.cu; null: one matrix
    const int2* tiles;
    const int* ends;
    const int* tile_count;
    u64 x_stride;
    u64 y_stride;
    u32 bias_float;
    u32 m;
    u32 x_div;           // routes that share a row of x; 0: x is in the experts' order
    u32 y_by_route;      // rows of y are routes; otherwise places in `order`
    u32 narrowed;        // whether x is in the operand type
    u32 split;           // warps that share the columns of 16 rows: 1, 2, 4 or 8
    u32 y_span;          // codes of a word of who reads y in the operand type; 0: y is float32
    Activation act;
};

// What a lane keeps of a segment of two rows until it is multiplied.
template <bool ZEROS>
struct Lot {
    uint4 codes[2];
    u32 scales[2];  // as they are stored
    u32 zeros[ZEROS ? 2 : 1];
};

// Two rows of the block's matrix, as a lane reads them: bytes and elements from the matrix's first ones, which fit 32 bits.
struct Rows {
    u32 codes[2];
    u32 scales[2];
    u32 row[2];
};

// The matrix of a block.
struct Matrix {
    const u8* codes;
    const u8* scales;
    u64 index;
};

__device__ __forceinline__ Rows rows_of(const Weights& w, const u32 (&row)[2]) {
    Rows at;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        at.row[r] = row[r];
        at.codes[r] = row[r] * w.row_bytes + threadIdx.x % 4 * 16;
        at.scales[r] = row[r] * w.blocks;
    }
    return at;
}

template <bool ZEROS>
__device__ __forceinline__ void fetch(Lot<ZEROS>& lot, const Weights& w, const Matrix& m, const Rows& at, u32 segment) {
    const u32 column = segment * SEGMENT + threadIdx.x % 4 * LANE;
    const bool live = column < w.cols;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        lot.codes[r] = make_uint4(0, 0, 0, 0);
        lot.scales[r] = 0;
        if (live) {
            lot.codes[r] = __ldcs((const uint4*)(m.codes + at.codes[r] + segment * 64));
            const u32 scale = at.scales[r] + (column >> w.block_shift);
            lot.scales[r] = w.scale_float == F32 ? ((const u32*)m.scales)[scale] : ((const u16*)m.scales)[scale];
        }
        if constexpr (ZEROS) lot.zeros[r] = live ? (u32)weight_zero<BITS>(w, m.index, at.row[r], column) : 0;
    }
}

// Adds a segment's products to the lane's sums: rows g and g + 8 with tokens 2 t and 2 t + 1. `x` is where the lane's
// activations of the segment lie.
template <bool ZEROS>
__device__ __forceinline__ void consume(float (&sum)[4], const Lot<ZEROS>& lot, const Weights& w, const uint4* x) {
    u32 scale[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const u32 v = lot.scales[r];
        const float f = UP * (w.scale_float == F16 ? f16_to_f32((u16)v) : __uint_as_float(w.scale_float == F32 ? v : v << 16));
        scale[r] = OPERAND::pack(f, f);
    }
    uint4 piece;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 a[2][WORD / 2], b[WORD / 2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint4& q = lot.codes[r];
            Unit<BITS, WORD, OPERAND> unit;
            unit.word[0] = i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w;
            unit.pairs(a[r], ZEROS ? lot.zeros[ZEROS ? r : 0] : 1u << (BITS - 1));
#pragma unroll
            for (int j = 0; j < WORD / 2; j++) a[r][j] = fma2(a[r][j], scale[r], 0x80008000u, OPERAND());
        }
        if constexpr (WORD == 4) {
            if (i % 2 == 0) piece = x[i / 2 * 32];
            b[0] = i % 2 ? piece.z : piece.x, b[1] = i % 2 ? piece.w : piece.y;
        } else {
#pragma unroll
            for (int j = 0; j < WORD / 8; j++) {
                piece = x[(i * (WORD / 8) + j) * 32];
                b[4 * j] = piece.x, b[4 * j + 1] = piece.y, b[4 * j + 2] = piece.z, b[4 * j + 3] = piece.w;
            }
        }
#pragma unroll
        for (int j = 0; j < WORD / 2; j += 2) {
            u32 left[4] = {a[0][j], a[1][j], a[0][j + 1], a[1][j + 1]};
            OPERAND::mma(sum, left, b[j], b[j + 1]);
        }
    }
}

// Adds the warps that share rows. True in the warps that have the result.
__device__ __forceinline__ bool join(float (&sum)[4], u32 part, u32 split) {
    __shared__ float4 parts[WARPS][32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (split == 1) return true;
    if (part) parts[warp][lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    if (part == 0)
        for (u32 i = 1; i < split; i++) {
            float4 v = parts[warp + i][lane];
            sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
    __syncthreads();
    return part == 0;
}

// Which rows of activations a block takes, and of which expert.
struct Place {
    u64 expert;
    u32 first;
    u32 end;
};

__device__ __forceinline__ bool place(const EightParams& p, Place& at) {
    if (p.tiles) {
        if ((int)blockIdx.y >= *p.tile_count) return false;
        int2 tile = p.tiles[blockIdx.y];
        at = {(u64)tile.x, (u32)tile.y, min((u32)p.ends[tile.x], (u32)tile.y + TOKENS)};
    } else
        at = {0, blockIdx.y * TOKENS, min(p.m, blockIdx.y * TOKENS + TOKENS)};
    return true;
}

// Brings a block's rows of activations to shared memory: a thread 16 columns of one, which are two of a lane's pieces. What
// belongs to rows that are not there is left as it is: no other column of the products sees it.
__device__ __forceinline__ void bring(uint4* shared, const EightParams& p, const Place& at) {
    using Codes = Unit<BITS, RUN, OPERAND>;
    const u32 cols = p.w.cols, runs = (cols + SEGMENT - 1) / SEGMENT * (SEGMENT / RUN);
    for (u32 i = threadIdx.x; i < runs * TOKENS; i += blockDim.x) {
        // Lanes one after the other, then the pieces of a lane, then segments.
        const u32 lane = i % 32, g = lane / 4, q = i / 32 % (CHUNKS / 2), segment = i / 32 / (CHUNKS / 2);
        if (at.first + g >= at.end) continue;
        const u32 column = segment * SEGMENT + lane % 4 * LANE + q * RUN;
        u64 row = at.first + g;
        if (p.x_div) row = (p.order ? (u32)p.order[row] : (u32)row) / p.x_div;
        uint4 out[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
        if (column < cols && p.narrowed) {
            const uint4* from = (const uint4*)((const u16*)p.x + row * p.x_stride + column);
            out[0] = from[0], out[1] = from[1];
        } else if (column < cols) {
            const float4* from = (const float4*)((const float*)p.x + row * p.x_stride + column);
            float v[RUN];
#pragma unroll
            for (int j = 0; j < RUN / 4; j++) {
                const float4 f = from[j];
                v[4 * j] = f.x, v[4 * j + 1] = f.y, v[4 * j + 2] = f.z, v[4 * j + 3] = f.w;
            }
            u32 w[RUN / 2];
#pragma unroll
            for (int j = 0; j < RUN / 2; j++) w[j] = OPERAND::pack(v[Codes::first(j)], v[Codes::second(j)]);
            out[0] = make_uint4(w[0], w[1], w[2], w[3]), out[1] = make_uint4(w[4], w[5], w[6], w[7]);
        }
        uint4* to = shared + (segment * CHUNKS + 2 * q) * 32 + lane;
        to[0] = out[0], to[32] = out[1];
    }
}

// Products of a block's rows of activations: `rows_at(group, n)` names the two weight rows of a lane in a group of 16,
// `store(group, sum)` takes their sums with tokens 2 t and 2 t + 1.
template <bool ZEROS, class RowsAt, class Store>
__device__ __forceinline__ void multiply(const EightParams& p, const Place& at, u32 groups, RowsAt rows_at, Store store) {
    extern __shared__ __align__(16) u8 shared[];
    const Weights& w = p.w;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % p.split, per_block = WARPS / p.split;
    const u32 step = gridDim.x * per_block, first = blockIdx.x * per_block;
    const u32 times = (groups - first + step - 1) / step;
    const u32 segments = (w.cols + SEGMENT - 1) / SEGMENT, each = (segments - part + p.split - 1) / p.split;
    const Matrix matrix = {w.codes + at.expert * w.codes_stride,
                           (const u8*)w.scales + at.expert * w.scales_stride * (w.scale_float == F32 ? 4 : 2), at.expert};
    auto rows_in = [&](u32 time) {
        u32 row[2];
        rows_at(first + warp / p.split + time * step, row);
        return rows_of(w, row);
    };
    // What is fetched next, ahead of what is multiplied.
    u32 ahead_time = 0, ahead = 0;
    Rows ahead_rows = rows_in(0);
    Lot<ZEROS> lots[STAGES];
    auto fetch_next = [&](Lot<ZEROS>& lot) {
        if (ahead_time >= times) return;
        fetch(lot, w, matrix, ahead_rows, part + ahead * p.split);
        if (++ahead == each) {
            ahead = 0;
            if (++ahead_time < times) ahead_rows = rows_in(ahead_time);
        }
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) fetch_next(lots[i]);
    bring((uint4*)shared, p, at);
    __syncthreads();
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    u32 time = 0, done = 0;
    while (time < times) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) {
            if (time >= times) break;
            consume(sum, lots[i], w, (const uint4*)shared + (part + done * p.split) * (CHUNKS * 32) + lane);
            fetch_next(lots[i]);
            if (++done < each) continue;
            if (join(sum, part, p.split)) {
#pragma unroll
                for (int j = 0; j < 4; j++) sum[j] *= 1.f / UP;
                store(first + warp / p.split + time * step, sum);
            }
            sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
            done = 0, time++;
        }
    }
}

template <bool ZEROS>
__device__ __forceinline__ void product(const EightParams& p, const Place& at) {
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, rows = p.w.rows;
    auto rows_at = [&](u32 group, u32 (&row)[2]) {
#pragma unroll
        for (u32 h = 0; h < 2; h++) row[h] = group * 16 + h * 8 + g < rows ? group * 16 + h * 8 + g : 0;
    };
    multiply<ZEROS>(p, at, (rows + 15) / 16, rows_at, [&](u32 group, float (&sum)[4]) {
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const u32 n = group * 16 + h * 8 + g;
            if (n >= rows) continue;
            const float b = p.bias ? load_float(p.bias, at.expert * rows + n, p.bias_float) : 0.f;
#pragma unroll
            for (u32 c = 0; c < 2; c++) {
                const u32 r = at.first + 2 * t + c;
                if (r >= at.end) continue;
                const u64 to = p.order && p.y_by_route ? (u64)p.order[r] : (u64)r;
                ((float*)p.y)[to * p.y_stride + n] = sum[2 * h + c] + b;
            }
        }
    });
}

// FC1 and the activation: row g of a lane is a gate, row g + 8 its linear row. y is in the order of places.
template <bool ZEROS>
__device__ __forceinline__ void activated(const EightParams& p, const Place& at) {
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const bool gated = p.act.gate != GATE_NONE;
    const u32 inter = gated ? p.w.rows / 2 : p.w.rows, per_group = gated ? 8 : 16;
    auto rows_at = [&](u32 group, u32 (&row)[2]) {
        const u32 value = group * per_group + g, other = value + 8;
        const u32 n = value < inter ? value : 0;
        if (p.act.gate == GATE_INTERLEAVED)
            row[0] = 2 * n, row[1] = 2 * n + 1;
        else if (p.act.gate == GATE_CONCATENATED)
            row[0] = n, row[1] = inter + n;
        else
            row[0] = n, row[1] = other < inter ? other : 0;
    };
    auto put = [&](u32 r, u32 i, float v) {
        if (p.y_span == 0) {
            ((float*)p.y)[r * p.y_stride + i] = v;
            return;
        }
        const u32 half = p.y_span / 2, c = i % p.y_span;
        ((u16*)p.y)[r * p.y_stride + i - c + c % half * 2 + c / half] = (u16)OPERAND::pack(v, 0.f);
    };
    multiply<ZEROS>(p, at, (inter + per_group - 1) / per_group, rows_at, [&](u32 group, float (&sum)[4]) {
        const u32 value = group * per_group + g, other = value + 8;
        u32 row[2];
        rows_at(group, row);
        float b[2] = {0.f, 0.f};
        if (p.bias)
#pragma unroll
            for (int h = 0; h < 2; h++) b[h] = load_float(p.bias, at.expert * p.w.rows + row[h], p.bias_float);
#pragma unroll
        for (u32 c = 0; c < 2; c++) {
            const u32 r = at.first + 2 * t + c;
            if (r >= at.end) continue;
            const float h0 = sum[c] + b[0], h1 = sum[2 + c] + b[1];
            if (value < inter) put(r, value, activate(p.act, h0, h1));
            if (!gated && other < inter) put(r, other, activate(p.act, h1, 0.f));
        }
    });
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 3) eight(const __grid_constant__ EightParams p) {
    in_order();
    Place at;
    if (!place(p, at)) return;
    if (p.w.zero_kind == ZERO_DEFAULT)
        product<false>(p, at);
    else
        product<true>(p, at);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 3) eight_activated(const __grid_constant__ EightParams p) {
    in_order();
    Place at;
    if (!place(p, at)) return;
    if (p.w.zero_kind == ZERO_DEFAULT)
        activated<false>(p, at);
    else
        activated<true>(p, at);
}
