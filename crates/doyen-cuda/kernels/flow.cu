// Products of up to 8 rows of activations with packed codes that flow through shared memory, for cards with bulk copies: whole
// weight rows are brought there ahead of their use, and no activation is read twice. Compiled once per BITS (2, 4, 8) and
// OPERAND, for 9.0 and newer; eight.cu does the same elsewhere.
//
// A warp owns 256 columns and keeps their activations as right operands of mma.m16n8k16 in registers, for as long as its block's
// rows of activations stay the same. A stage is `lots` times `turns` groups of 16 weight rows, each row a bulk copy that one
// of the warps asks for; asked for by a single warp they take twice as long. `slices` warps share the columns of a group and add
// their sums up through shared memory while the next stage is multiplied. Blocks go through runs of stages of equal length, over the
// experts' tiles one after the other. One barrier a stage says that the sums of the stage before are complete and that its
// codes may be overwritten.
//
// Codes stay as they are: in float16 the bits of a code are 2^-24 times it, or a power of two more, which the sums take
// back; what zero points are worth is the same for all rows and is where the sums begin. In bfloat16, whose smallest numbers
// have no room in float32 sums, codes become numbers first. Scales multiply the sums of a block in float32.
//
// Not for zero points other than the default ones, scales of 4 bytes, and blocks of fewer columns than UNIT.

#include "doyen.cuh"

#define LANE (128 / BITS)                 // columns of 16 bytes
#define WORD (32 / BITS)                  // columns of a word
#define SLICE 256                         // columns of a warp
#define SLICE_BYTES (SLICE * BITS / 8)
#define CHUNKS (SLICE / LANE)             // runs of 16 bytes of a row and slice
#define PAIRS (WORD / 2)
#define STEPS (PAIRS / 2)                 // mma of a word
#define TOKENS 8
#define THREADS 256                       // at most
#define STAGES_AT 128                     // bytes before the first stage: barriers
#define PITCH 20                          // floats from a token's sums to the next one's, so that no two lanes meet in a bank
#define SUMS (TOKENS * PITCH)             // floats of a warp's sums
#define SLACK 64                          // bytes behind rows of codes that a last, partial unit reads
#define SMALL (OPERAND::EIGHT)            // codes are float16 numbers of exponent zero
#define PARTS (SMALL ? STEPS : 1)         // sums of a unit, a power of two each

// Mirrors `FlowParams`.
struct FlowParams {
    Weights w;
    const void* x;       // float32, or in the operand type
    void* y;             // float32; of flow_activated in the operand type
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
    u32 early;           // whether the tiles were there before the launch that this one may overlap
    u32 slices;          // warps that share the columns of a group of 16 rows
    u32 lots;            // groups of 16 rows that a block's warps multiply at once
    u32 turns;           // of those in a stage
    u32 stages;
    Activation act;
};

// ---- shared memory --------------------------------------------------------------------------------------------------

// Where things lie: a barrier a stage, stages, then two sets of sums, which share their place with rows of activations. Mirrors
// `Layout` of flow.rs.
struct Layout {
    u32 rows;         // of a stage
    u32 pitch;        // bytes from a row to the next: an odd number of runs of 16, so that no two of eight rows meet in a bank
    u32 scale_bytes;  // of a row
    u32 scales;       // first byte of them in a stage
    u32 stage;        // bytes
    u32 sums;
    u32 act_pitch;
};

__device__ __forceinline__ Layout layout_of(const FlowParams& p) {
    Layout l;
    l.rows = p.lots * p.turns * 16;
    l.pitch = p.w.row_bytes | 16;
    l.scale_bytes = p.w.blocks * 2;
    l.scales = l.rows * l.pitch + SLACK;
    l.stage = l.scales + l.rows * l.scale_bytes;
    l.sums = STAGES_AT + p.stages * l.stage;
    l.act_pitch = p.slices * (SLICE * 2) + 64;
    return l;
}

// ---- bulk copies ----------------------------------------------------------------------------------------------------

// One lane of a warp that is whole. Who asks for copies has to be known as one, or lanes are gone through one by one.
__device__ __forceinline__ bool elected() {
    u32 is;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(is));
    return is;
}

// Arrives, and says how many bytes are to come before the phase is over.
__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

// `bytes` bytes from global to shared memory, a multiple of 16, counted by a barrier.
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 at) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(at)
                 : "memory");
}

// ---- codes and their products ---------------------------------------------------------------------------------------

// Pair `i` of a word as float16 numbers of exponent zero: bits that `i` % STEPS moves up.
__device__ __forceinline__ u32 small_pair(u32 word, int i) {
    if constexpr (BITS == 8) return __byte_perm(word, 0, i ? 0x4342 : 0x4140);
    constexpr int per_shift = 8 / BITS;
    return (word >> (8 * (i / per_shift))) & ((((1u << BITS % 8) - 1) * 0x10001u) << (BITS * (i % per_shift)));
}

// Adds the products of a word of rows g and g + 8 each.
__device__ __forceinline__ void multiply(float (&c)[PARTS][4], u32 word0, u32 word1, const u32 (*b)[2]) {
    u32 a[2][PAIRS];
    if constexpr (SMALL) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) a[0][i] = small_pair(word0, i), a[1][i] = small_pair(word1, i);
    } else {
        Unit<BITS, WORD, OPERAND> unit;
        unit.word[0] = word0;
        unit.pairs(a[0], 1u << (BITS - 1));
        unit.word[0] = word1;
        unit.pairs(a[1], 1u << (BITS - 1));
    }
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        const u32 left[4] = {a[0][k], a[1][k], a[0][k + STEPS], a[1][k + STEPS]};
        OPERAND::mma(c[SMALL ? k : 0], left, b[k][0], b[k][1]);
    }
}

// A warp's activations, and where the sums of each unit of columns that share a scale begin.
template <int UNIT>
struct Right {
    u32 b[SLICE / 16][2];
    // Of all four sums where registers allow it, otherwise of the two tokens.
    static constexpr int STARTS = UNIT == 64 ? 4 : 2;
    float start[SMALL ? SLICE / UNIT : 1][STARTS];
};

// Adds a stage's products to the lane's sums: rows g and g + 8 with tokens 2 t and 2 t + 1. `codes` is where the lane's row of
// ldmatrix begins; `scales` are those of rows g and g + 8. WHOLE: the slice is whole and every unit a block, otherwise `live`
// columns are there and `first` is the first one.
template <int UNIT, bool WHOLE>
__device__ __forceinline__ void consume(float (&sum)[4], const Right<UNIT>& right, u32 codes, const u8* const (&scales)[2],
                                        const Weights& w, u32 first, u32 live) {
    constexpr int UNITS = SLICE / UNIT;
    // A run of two chunks is read while the one before is multiplied.
    u32 words[2][4];
    auto read = [&](int i) {
        if (WHOLE || i * 2 * LANE < live) ldmatrix4(words[i % 2], codes + i * 32);
    };
    read(0);
    u32 packed[2][UNITS / 2];
    if constexpr (WHOLE) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if constexpr (UNITS == 4) {
                const uint2 v = *(const uint2*)(scales[r] + first / UNIT * 2);
                packed[r][0] = v.x, packed[r][1] = v.y;
            } else {
                const uint4 v = *(const uint4*)(scales[r] + first / UNIT * 2);
                packed[r][0] = v.x, packed[r][1] = v.y, packed[r][2] = v.z, packed[r][3] = v.w;
            }
        }
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        if (!WHOLE && u * UNIT >= live) break;
        float c[PARTS][4];
#pragma unroll
        for (int k = 0; k < PARTS; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[k][i] = SMALL && k == 0 ? right.start[SMALL ? u : 0][i % Right<UNIT>::STARTS] : 0.f;
#pragma unroll
        for (int j = 0; j < UNIT / LANE; j++) {
            const int chunk = u * (UNIT / LANE) + j;
            if (chunk % 2 == 0 && chunk + 2 < CHUNKS) read(chunk / 2 + 1);
            const u32(&pair)[4] = words[chunk / 2 % 2];
            multiply(c, pair[chunk % 2 * 2], pair[chunk % 2 * 2 + 1], right.b + chunk * STEPS);
        }
#pragma unroll
        for (int k = 1; k < PARTS; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[0][i] = fmaf(c[k][i], 1.f / (1 << BITS * k), c[0][i]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float scale;
            if constexpr (WHOLE)
                scale = f16_to_f32((u16)(u % 2 ? packed[r][u / 2] >> 16 : packed[r][u / 2]));
            else
                scale = load_float(scales[r], (first + u * UNIT) >> w.block_shift, w.scale_float);
            sum[2 * r] = fmaf(scale, c[0][2 * r], sum[2 * r]);
            sum[2 * r + 1] = fmaf(scale, c[0][2 * r + 1], sum[2 * r + 1]);
        }
    }
}

// ---- activations ----------------------------------------------------------------------------------------------------

// Rows of activations and the expert that they go to.
struct Rows {
    u64 expert;
    u32 first;
    u32 end;
};

__device__ __forceinline__ Rows rows_at(const FlowParams& p, u32 tile) {
    if (!p.tiles) return {0, 0, p.m};
    const int2 t = p.tiles[tile];
    return {(u64)t.x, (u32)t.y, min((u32)p.ends[t.x], (u32)t.y + TOKENS)};
}

// Brings a tile's rows to shared memory as they lie, in the operand type, zeros behind them up to whole slices. Rows that are not there are
// left as they are: no other column of the products sees them.
__device__ __forceinline__ void bring(u8* acts, const FlowParams& p, const Rows& at, const Layout& l) {
    const u32 cols = p.w.cols, live = at.end - at.first;
    u32 from[TOKENS];
#pragma unroll
    for (u32 r = 0; r < TOKENS; r++) {
        const u32 row = at.first + (r < live ? r : 0);
        from[r] = p.x_div ? (p.order ? (u32)p.order[row] : row) / p.x_div : row;
    }
    const u32 each = p.narrowed ? 8 : 4, all = p.slices * (SLICE / each);
    for (u32 i = threadIdx.x; i < all; i += blockDim.x) {
        uint4 v[TOKENS];
#pragma unroll
        for (u32 r = 0; r < TOKENS; r++) {
            v[r] = make_uint4(0, 0, 0, 0);
            if (r < live && i * each < cols) v[r] = __ldcg((const uint4*)((const u8*)p.x + from[r] * p.x_stride * (16 / each)) + i);
        }
#pragma unroll
        for (u32 r = 0; r < TOKENS; r++) {
            if (r >= live) continue;
            u8* to = acts + r * l.act_pitch;
            if (p.narrowed)
                ((uint4*)to)[i] = v[r];
            else
                ((uint2*)to)[i] = make_uint2(OPERAND::pack(__uint_as_float(v[r].x), __uint_as_float(v[r].y)),
                                             OPERAND::pack(__uint_as_float(v[r].z), __uint_as_float(v[r].w)));
        }
    }
}

// A warp's right operands: columns of a word in the order of its pairs.
template <int UNIT>
__device__ __forceinline__ void take(Right<UNIT>& right, const u8* acts, const Layout& l, u32 slice) {
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const u8* row = acts + g * l.act_pitch + (slice * SLICE + t * WORD) * 2;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const u8* from = row + chunk * (LANE * 2);
        u32 b[PAIRS];
        if constexpr (BITS == 8) {
            const uint2 v = *(const uint2*)from;
            b[0] = v.x, b[1] = v.y;
        } else {
            // Pair i is column i of the first half with column i of the second.
            u32 lo[PAIRS / 2], hi[PAIRS / 2];
            if constexpr (BITS == 4) {
                const uint4 v = *(const uint4*)from;
                lo[0] = v.x, lo[1] = v.y, hi[0] = v.z, hi[1] = v.w;
            } else {
                const uint4 v = ((const uint4*)from)[0], u = ((const uint4*)from)[1];
                lo[0] = v.x, lo[1] = v.y, lo[2] = v.z, lo[3] = v.w;
                hi[0] = u.x, hi[1] = u.y, hi[2] = u.z, hi[3] = u.w;
            }
#pragma unroll
            for (int j = 0; j < PAIRS / 2; j++)
                b[2 * j] = __byte_perm(lo[j], hi[j], 0x5410), b[2 * j + 1] = __byte_perm(lo[j], hi[j], 0x7632);
        }
#pragma unroll
        for (int k = 0; k < STEPS; k++) right.b[chunk * STEPS + k][0] = b[k], right.b[chunk * STEPS + k][1] = b[k + STEPS];
    }
    if constexpr (SMALL) {
        constexpr u32 minus = 0x80008000u | (1u << (BITS - 1)) * 0x10001u;
        const u32 left[4] = {minus, minus, minus, minus};
#pragma unroll
        for (int u = 0; u < SLICE / UNIT; u++) {
            float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int i = 0; i < UNIT / 16; i++) OPERAND::mma(c, left, right.b[u * (UNIT / 16) + i][0], right.b[u * (UNIT / 16) + i][1]);
#pragma unroll
            for (int i = 0; i < Right<UNIT>::STARTS; i++) right.start[SMALL ? u : 0][i] = c[i];
        }
    }
}

// ---- stages ---------------------------------------------------------------------------------------------------------

// The stages of a block, one after the other: those of a tile, then of the next tile.
struct Cursor {
    u32 item;
    u32 stage;
    u32 tile;
    Rows at;

    __device__ __forceinline__ void start(const FlowParams& p, u32 first, u32 stages) {
        item = first, tile = first / stages, stage = first % stages;
        at = rows_at(p, tile);
    }
    __device__ __forceinline__ void next(const FlowParams& p, u32 last, u32 stages) {
        if (++item >= last || ++stage < stages) return;
        stage = 0, tile++;
        at = rows_at(p, tile);
    }
};

template <bool ACTIVATED, int UNIT, bool WHOLE>
__device__ __forceinline__ void run(const FlowParams& p) {
    extern __shared__ __align__(128) u8 shared[];
    const Weights& w = p.w;
    const Layout l = layout_of(p);
    const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32, slice = warp % p.slices, lot = warp / p.slices;
    const u32 g = lane / 4, t = lane % 4, threads = blockDim.x;
    const bool gated = ACTIVATED && p.act.gate != GATE_NONE, apart = ACTIVATED && p.act.gate == GATE_CONCATENATED;
    // Values of a group of 16 rows.
    const u32 shift = gated ? 3 : 4, per_group = 1u << shift, values = gated ? w.rows / 2 : w.rows;
    const u32 per_stage = p.lots * p.turns * per_group, stages = (values + per_stage - 1) / per_stage;
    const u32 total = (p.tiles ? (u32)*p.tile_count : 1) * stages;
    const u32 first = (u32)((u64)total * blockIdx.x / gridDim.x), last = (u32)((u64)total * (blockIdx.x + 1) / gridDim.x);
    if (first >= last) {
        await_earlier();
        return;
    }
    const u32 memory = shared_address(shared);

    const u32 full = memory, warps = threads / 32;
    if (tid < p.stages) barrier_init(full + tid * 8, warps);
    fence_async();
    __syncthreads();

    // Each warp brings some rows of the next stage: 16 consecutive ones of the matrix, or 8 gates and their linear rows.
    Cursor ahead;
    ahead.start(p, first, stages);
    auto bring_next = [&](u32 stage) {
        if (ahead.item >= last) return;
        // A matrix has whole groups.
        const u32 group = ahead.stage * p.lots * p.turns, rows = min(l.rows, w.rows - group * 16);
        if (elected()) {
            const u32 to = memory + STAGES_AT + stage * l.stage, at = full + stage * 8;
            const u8* codes = w.codes + ahead.at.expert * w.codes_stride;
            const u8* scales = (const u8*)w.scales + ahead.at.expert * w.scales_stride * 2;
            const u32 mine = (rows + warps - 1 - warp) / warps;
            barrier_expect(at, mine * w.row_bytes + (warp == 0 ? rows * l.scale_bytes : 0));
            if (!apart) {
                for (u32 r = warp; r < rows; r += warps)
                    bulk_copy(to + r * l.pitch, codes + (u64)(group * 16 + r) * w.row_bytes, w.row_bytes, at);
                if (warp == 0) bulk_copy(to + l.scales, scales + (u64)(group * 16) * l.scale_bytes, rows * l.scale_bytes, at);
            } else {
                // Scales of 8 rows are whole runs of 16 bytes.
                auto row_of = [&](u32 r) { return (r & 8 ? values : 0) + (group + r / 16) * 8 + r % 8; };
                for (u32 r = warp; r < rows; r += warps)
                    bulk_copy(to + r * l.pitch, codes + (u64)row_of(r) * w.row_bytes, w.row_bytes, at);
                for (u32 r = 0; warp == 0 && r < rows; r += 8)
                    bulk_copy(to + l.scales + r * l.scale_bytes, scales + (u64)row_of(r) * l.scale_bytes, 8 * l.scale_bytes, at);
            }
        }
        __syncwarp();
        ahead.next(p, last, stages);
    };
    for (u32 i = 0; i + 1 < p.stages; i++) bring_next(i);
    await_earlier();

    float* sums = (float*)(shared + l.sums);
    u8* acts = shared + l.sums;
    const u32 set = p.turns * threads / 32 * SUMS;
    // Sums of the warps that share columns, ended and stored.
    const u32 outputs = per_stage * TOKENS, turn_step = outputs % threads;
    u32 turn = 0;
    auto finish = [&](const Cursor& of, const float* from) {
        u32 e = tid >= turn ? tid - turn : tid + threads - turn;
        turn += turn_step;
        if (turn >= threads) turn -= threads;
        for (; e < outputs; e += threads) {
            const u32 n = e & (per_group - 1), token = (e >> shift) % TOKENS, which = (e >> shift) / TOKENS;
            const u32 r = of.at.first + token, value = of.stage * per_stage + which * per_group + n;
            if (r >= of.at.end || value >= values) continue;
            const float* own = from + which * p.slices * SUMS + token * PITCH;
            const u32 row0 = gated && !apart ? 2 * n : n, row1 = apart ? n + 8 : row0 + 1;
            float h0 = 0.f, h1 = 0.f;
#pragma unroll 4
            for (u32 s = 0; s < p.slices; s++) {
                h0 += own[s * SUMS + row0];
                if (gated) h1 += own[s * SUMS + row1];
            }
            if constexpr (SMALL) h0 *= 16777216.f, h1 *= 16777216.f;
            if (p.bias) {
                const u64 bias = of.at.expert * w.rows;
                h0 += load_float(p.bias, bias + (gated && !apart ? 2 * value : value), p.bias_float);
                if (gated) h1 += load_float(p.bias, bias + (apart ? values + value : 2 * value + 1), p.bias_float);
            }
            if constexpr (ACTIVATED)
                ((u16*)p.y)[r * p.y_stride + value] = (u16)OPERAND::pack(activate(p.act, h0, h1), 0.f);
            else
                ((float*)p.y)[(p.order && p.y_by_route ? (u64)p.order[r] : (u64)r) * p.y_stride + value] = h0;
        }
    };

    Right<UNIT> right;
    Cursor now, before;
    now.start(p, first, stages);
    u32 taken = 0xffffffffu, stage = 0, parity = 0;
    const u32 columns = slice * SLICE, live = w.cols - columns;
    const u32 codes_at = (lot * 16 + lane % 16) * l.pitch + lane / 16 * 16 + slice * SLICE_BYTES;
    const u32 scales_at = l.scales + (lot * 16 + g) * l.scale_bytes, sums_at = warp * SUMS + 2 * t * PITCH + g;
    // From a turn of the warps to the next.
    const u32 turn_codes = p.lots * 16 * l.pitch, turn_scales = p.lots * 16 * l.scale_bytes, turn_sums = threads / 32 * SUMS;
    for (u32 i = 0;; i++) {
        __syncthreads();
        bring_next(stage ? stage - 1 : p.stages - 1);
        if (i) finish(before, sums + (i - 1) % 2 * set);
        if (now.item >= last) break;
        if (now.tile != taken) {
            // Sums and activations share their place.
            __syncthreads();
            bring(acts, p, now.at, l);
            __syncthreads();
            take(right, acts, l, slice);
            __syncthreads();
            taken = now.tile;
        }
        barrier_wait(full + stage * 8, parity);
        u32 codes = memory + STAGES_AT + stage * l.stage + codes_at;
        const u8* scale = shared + STAGES_AT + stage * l.stage + scales_at;
        float* to = sums + i % 2 * set + sums_at;
#pragma unroll 1
        for (u32 turn = 0; turn < p.turns; turn++) {
            const u8* const scales[2] = {scale, scale + 8 * l.scale_bytes};
            float sum[4] = {0.f, 0.f, 0.f, 0.f};
            consume<UNIT, WHOLE>(sum, right, codes, scales, w, columns, live);
#pragma unroll
            for (u32 j = 0; j < 4; j++) to[j % 2 * PITCH + j / 2 * 8] = sum[j];
            codes += turn_codes, scale += turn_scales, to += turn_sums;
        }
        before = now;
        now.next(p, last, stages);
        if (++stage == p.stages) stage = 0, parity ^= 1;
    }
}

template <bool ACTIVATED>
__device__ __forceinline__ void by_block(const FlowParams& p) {
    const u32 shift = p.w.block_shift;
    const bool whole = p.w.cols % SLICE == 0 && p.w.scale_float == F16;
    if (shift == 5) {
        if constexpr (BITS > 2) {
            if (whole)
                run<ACTIVATED, 32, true>(p);
            else
                run<ACTIVATED, 32, false>(p);
        }
    } else if (shift == 6 && whole)
        run<ACTIVATED, 64, true>(p);
    else
        run<ACTIVATED, 64, false>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) flow(const __grid_constant__ FlowParams p) {
    allow_next();
    if (!p.early) await_earlier();
    by_block<false>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) flow_activated(const __grid_constant__ FlowParams p) {
    await_earlier();
    // Not before: who follows reads the tiles without waiting.
    allow_next();
    by_block<true>(p);
}
