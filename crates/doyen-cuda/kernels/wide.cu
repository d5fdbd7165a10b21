// Products of many rows of activations with packed codes on Hopper's warpgroup instructions: y[m, rows] = x[m, cols] W^T + bias.
// Compiled once per BITS (2, 4, 8) and OPERAND, for sm_90a alone; tile.cu does the same elsewhere.
//
// Weights are the left operand, from registers: a lane of a warpgroup takes 16 codes of each of its two rows in every step of 64
// columns, unpacks and scales them and never stores them. Activations, narrowed and in the order of the codes (`narrow_wide`),
// are the right operand, in shared memory. Warps of their own bring them, a step each in turn: what shows copies to the
// tensor cores waits for all loads of a thread, and those that multiply have codes on their way. Warpgroups meet those warps alone, so
// that one unpacks while another multiplies. float16 weights are kept 2^6 times too large, as in tile.cu.
//
// Where weight rows are too few for the card, blocks of a cluster share the columns of the same rows: each multiplies a run of
// steps, and adds up its share of the sums from the shared memory of all.
//
// The grouped entries do the same for every expert over the rows routed to it; `activated` ends FC1 with the activation and
// leaves rows in the order in which FC2 reads them.

#include "doyen.cuh"

#define GROUP_ROWS 64     // weight rows of a warpgroup
#define GROUP_THREADS 128
#define BK 64             // columns of a step
#define STAGES 8          // of activations
#define BRINGING 4        // warps that bring them, a step each in turn

// Warpgroups of a block: two, or four where there are blocks enough, which read activations half as often.
#define LOW 2
#define TALL 4

// Mirrors `WideParams`.
struct WideParams {
    Weights w;
    const u16* x;        // narrowed by `narrow_wide`
    void* y;
    const void* bias;    // [experts, rows]
    const int* order;    // routes, those of an expert next to each other; null: row i is row i
    const int2* tiles;   // expert and first place in `order` of each tile
    const int* ends;     // end of each expert's places in `order`
    const int* tile_count;
    u64 x_stride;
    u64 y_stride;
    u32 bias_float;
    u32 m;
    u32 x_div;           // routes that share a row of x; 0: x is in the experts' order
    u32 y_by_route;      // rows of y are routes; otherwise places in `order`
    u32 y_span;          // of wide_activated: codes of a word of who reads y
    Activation act;
};

#define UNIT16 Unit<BITS, RUN, OPERAND>

// A step's columns in shared memory: four k16 steps, whose right operand has lane t's columns at 2 t, 2 t + 1, 2 t + 8 and
// 2 t + 9: pairs 2 i and 2 i + 1 of its 16 codes in step i.

// ---- warpgroup instructions -------------------------------------------------------------------------------------

#define PLACES_48 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23"
#define SUMS_48(c) \
    "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
    "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), \
    "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23])
#define PLACES_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_64(c) \
    "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
    "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), \
    "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), \
    "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
#define PLACES_96 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS_96(c) \
    "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
    "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), \
    "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), \
    "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), \
    "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), \
    "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47])

// c[64, N] += a[64, 16] b[16, N]: `a` as of mma.m16n8k16, 16 rows a warp; `b` in shared memory.
template <int N>
__device__ __forceinline__ void wgmma(float (&c)[N / 2], const u32 (&a)[4], u64 b);

#define WGMMA(N, A, B, TYPE)                                                                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" PLACES_##N         \
                 "}, {" A "}, " B ", 1, 1, 1, 0;"                                                        \
                 : SUMS_##N(c)                                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <>
__device__ __forceinline__ void wgmma<48>(float (&c)[24], const u32 (&a)[4], u64 b) {
    if constexpr (OPERAND::EIGHT)
        WGMMA(48, "%24, %25, %26, %27", "%28", "f16");
    else
        WGMMA(48, "%24, %25, %26, %27", "%28", "bf16");
}

template <>
__device__ __forceinline__ void wgmma<64>(float (&c)[32], const u32 (&a)[4], u64 b) {
    if constexpr (OPERAND::EIGHT)
        WGMMA(64, "%32, %33, %34, %35", "%36", "f16");
    else
        WGMMA(64, "%32, %33, %34, %35", "%36", "bf16");
}

template <>
__device__ __forceinline__ void wgmma<96>(float (&c)[48], const u32 (&a)[4], u64 b) {
    if constexpr (OPERAND::EIGHT)
        WGMMA(96, "%48, %49, %50, %51", "%52", "f16");
    else
        WGMMA(96, "%48, %49, %50, %51", "%52", "bf16");
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Lines of 64 elements of 2 bytes, rows of 8 swizzled over 128 bytes: 1024 bytes from one group of 8 rows to the next.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// ---- clusters ---------------------------------------------------------------------------------------------------

// Waits for all blocks of the cluster, and sees what they wrote.
__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A number in the shared memory of another block of the cluster.
__device__ __forceinline__ float of_block(u32 address, u32 block) {
    u32 there;
    float v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
    return v;
}

// ---- the product ------------------------------------------------------------------------------------------------

// What a lane keeps of a step of its two rows.
struct Step {
    UNIT16 codes[2];
    u32 scales[2];  // as they are stored
    u32 zeros[2];
};

// Which weight rows a lane has, and which rows of activations its block.
struct Place {
    u64 expert;
    u32 first;
    u32 end;
    u32 row[2];
};

// A run of steps.
struct Span {
    u32 first;
    u32 end;
};

__device__ __forceinline__ u32 steps_of(const Weights& w) { return (w.cols + BK - 1) / BK; }

// ---- bringing activations ----------------------------------------------------------------------------------------

// What a warp that brings activations does, the `turn`th of them: `place(r)` is where row r of them begins, in pieces of 16 bytes
// from `x` on.
template <int N, class Places>
__device__ __forceinline__ void bring(u32 turn, u32 xs, u32 full, u32 empty, const u16* x, const Place& at, const Span& span,
                                      Places place) {
    static_assert(STAGES % BRINGING == 0);
    const u32 lane = threadIdx.x % 32;
    constexpr int PIECES = N / 4;  // of a lane in a step
    u32 from[PIECES];
    const u32 live = min(at.end - at.first, (u32)N);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const u32 r = lane / 8 + 4 * i;
        from[i] = place(at.first + (r < live ? r : 0)) + lane % 8;
    }
    for (u32 step = turn; step < span.end - span.first; step += BRINGING) {
        const u32 stage = step % STAGES, round = step / STAGES;
        // The first round finds all stages empty.
        if (round) barrier_wait(empty + stage * 8, (round - 1) % 2);
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const u32 r = lane / 8 + 4 * i;
            bring16(xs + stage * (N * BK * 2) + at16(r, lane % 8), (const uint4*)x + from[i] + (u64)(span.first + step) * (BK / 8), r < live);
        }
        cp_async_wait_all();
        fence_async();
        __syncwarp();
        if (lane == 0) barrier_arrive(full + stage * 8);
    }
}

// Products of a block's weight rows, as `at` has them, and activations. False in the warps that bring those.
template <int N, int GROUPS, bool PLAIN, class Places>
__device__ __forceinline__ bool multiplied(float (&c)[N / 2], const Weights& w, const u16* x, const Place& at, const Span& span,
                                           Places place) {
    constexpr u32 THREADS = GROUPS * GROUP_THREADS;
    constexpr int AHEAD = 2;  // steps of codes on their way
    constexpr float UP = OPERAND::EIGHT ? 64.f : 1.f;  // float16 keeps weights larger
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 xs = shared_address(memory), full = shared_address(barriers), empty = full + STAGES * 8;
    const u32 tid = threadIdx.x, t = tid % 4;
    if (tid < STAGES) barrier_init(full + tid * 8, 1), barrier_init(empty + tid * 8, THREADS / 32);
    __syncthreads();
    if (tid >= THREADS) {
        bring<N>(tid / 32 - THREADS / 32, xs, full, empty, x, at, span, place);
        return false;
    }

    const u8* codes[2];
    const u8* scales[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        codes[r] = w.codes + at.expert * w.codes_stride + (u64)at.row[r] * w.row_bytes + t * (2 * BITS);
        scales[r] = (const u8*)w.scales + (at.expert * w.scales_stride + (u64)at.row[r] * w.blocks) * (PLAIN || w.scale_float != F32 ? 2 : 4);
    }
    auto load = [&](Step& s, u32 step) {
        const u32 column = step * BK + t * RUN, block = column >> w.block_shift;
        const bool live = column < w.cols && step < span.end;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            s.codes[r].zero();
            s.scales[r] = 0;
            if constexpr (!PLAIN) s.zeros[r] = 1u << (BITS - 1);
            if (!live) continue;
            s.codes[r].load_ahead(codes[r] + step * (8 * BITS));
            if constexpr (PLAIN)
                s.scales[r] = ((const u16*)scales[r])[block];
            else {
                s.scales[r] = w.scale_float == F32 ? ((const u32*)scales[r])[block] : ((const u16*)scales[r])[block];
                if (w.zero_kind != ZERO_DEFAULT) s.zeros[r] = (u32)weight_zero<BITS>(w, at.expert, at.row[r], column);
            }
        }
    };
    // Left operands of the four k16 steps.
    auto unpack = [&](u32 (&a)[4][4], const Step& s) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 pairs[RUN / 2];
            s.codes[r].pairs(pairs, PLAIN ? 1u << (BITS - 1) : s.zeros[r]);
            const u32 stored = s.scales[r];
            const float scale = UP * (w.scale_float == F16 ? f16_to_f32((u16)stored)
                                                           : __uint_as_float(!PLAIN && w.scale_float == F32 ? stored : stored << 16));
            const u32 both = OPERAND::pack(scale, scale);
#pragma unroll
            for (int i = 0; i < RUN / 2; i++) {
                u32 v = fma2(pairs[i], both, 0x80008000u, OPERAND());
                // Computed here: inputs that are defined among warpgroup instructions make those wait for each other.
                asm volatile("" : "+r"(v)::"memory");
                a[i / 2][i % 2 * 2 + r] = v;
            }
        }
    };

    u32 a[4][4];
    Step ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < N / 2; i++) c[i] = 0.f;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) load(ahead[i], span.first + i);
    u32 stage = 0, round = 0;
    for (u32 step0 = span.first; step0 < span.end; step0 += AHEAD)
#pragma unroll
        for (int set = 0; set < AHEAD; set++) {
            const u32 step = step0 + set;
            if (step >= span.end) break;
            unpack(a, ahead[set]);
            load(ahead[set], step + AHEAD);
            barrier_wait(full + stage * 8, round);
            wgmma_fence();
            const u64 b = descriptor(xs + stage * (N * BK * 2));
#pragma unroll
            for (int i = 0; i < BK / 16; i++) wgmma<N>(c, a[i], b + i * (32 >> 4));
            wgmma_commit();
            // Left operands that are defined while others are in use make warpgroup instructions wait for each other; the other
            // warpgroups multiply in the meantime.
            wgmma_wait<0>();
            if (tid % 32 == 0) barrier_arrive(empty + stage * 8);
            if (++stage == STAGES) stage = 0, round ^= 1;
        }
#pragma unroll
    for (int i = 0; i < N / 2; i++) c[i] *= 1.f / UP;
    return true;
}

template <int N, int GROUPS, class Places>
__device__ __forceinline__ bool multiply(float (&c)[N / 2], const Weights& w, const u16* x, const Place& at, const Span& span,
                                         Places place) {
    // Default zero points and scales of 2 bytes.
    if (w.zero_kind == ZERO_DEFAULT && w.scale_float != F32) return multiplied<N, GROUPS, true>(c, w, x, at, span, place);
    return multiplied<N, GROUPS, false>(c, w, x, at, span, place);
}

// The rows of activations of a block: a tile of an expert, or of all rows. False where there is none.
template <int N>
__device__ __forceinline__ bool place(const WideParams& p, Place& at) {
    if (!p.tiles) {
        at.expert = 0, at.first = blockIdx.y * N, at.end = min(p.m, at.first + N);
        return true;
    }
    if ((int)blockIdx.y >= *p.tile_count) return false;
    const int2 tile = p.tiles[blockIdx.y];
    at.expert = tile.x, at.first = tile.y, at.end = min((u32)p.ends[tile.x], (u32)tile.y + N);
    return true;
}

// Where a row of activations begins, in pieces of 16 bytes.
__device__ __forceinline__ u32 piece_of(const WideParams& p, u64 r) {
    if (p.x_div) r = (p.order ? (u32)p.order[r] : (u32)r) / p.x_div;
    return (u32)(r * p.x_stride / 8);
}

template <int N, int GROUPS>
__device__ __forceinline__ void product_of(const WideParams& p, Place& at) {
    constexpr u32 ROWS = GROUPS * GROUP_ROWS;
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    u32 n[2];
    n[0] = blockIdx.x * ROWS + threadIdx.x / 32 * 16 + g, n[1] = n[0] + 8;
#pragma unroll
    for (int h = 0; h < 2; h++) at.row[h] = n[h] < p.w.rows ? n[h] : 0;
    float c[N / 2];
    if (!multiply<N, GROUPS>(c, p.w, p.x, at, {0, steps_of(p.w)}, [&](u64 r) { return piece_of(p, r); })) return;
    float bias[2] = {0.f, 0.f};
    if (p.bias)
#pragma unroll
        for (int h = 0; h < 2; h++) bias[h] = load_float(p.bias, at.expert * p.w.rows + at.row[h], p.bias_float);
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const u32 r = at.first + j * 8 + 2 * t + e;
            if (r >= at.end) continue;
            const u64 to = p.order && p.y_by_route ? (u64)p.order[r] : (u64)r;
            float* y = (float*)p.y + to * p.y_stride;
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (n[h] < p.w.rows) y[n[h]] = c[4 * j + 2 * h + e] + bias[h];
        }
}

// The last tile of an expert may be half empty.
template <int N, int GROUPS>
__device__ __forceinline__ void product(const WideParams& p) {
    Place at;
    if (!place<N>(p, at)) return;
    if (N == 96 && at.end - at.first <= 48)
        product_of<48, GROUPS>(p, at);
    else
        product_of<N, GROUPS>(p, at);
}

// A product of several that share their activations.
struct Part {
    Weights w;
    float* y;         // [m, rows]
    const void* bias;
    u32 bias_float;
    u32 blocks;       // blocks of rows of it and of the parts before it
};

#define PARTS_MOST 3
#define SPLIT_ROWS 64  // of activations

// Mirrors `SplitParams`.
struct SplitParams {
    Part parts[PARTS_MOST];
    const u16* x;     // narrowed by `narrow_wide`
    u64 x_stride;
    u32 count;
    u32 m;
};

// Products whose weight rows are too few for the card: the blocks of a cluster share the columns of the same rows.
__device__ __forceinline__ void split_product(const SplitParams& p) {
    constexpr int N = SPLIT_ROWS;
    constexpr u32 ROWS = LOW * GROUP_ROWS, THREADS = LOW * GROUP_THREADS;
    u32 block = blockIdx.x, which = 0;
    while (which + 1 < p.count && block >= p.parts[which].blocks) which++;
    if (which) block -= p.parts[which - 1].blocks;
    const Part& own = p.parts[which];
    const Weights& w = own.w;
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Place at = {0, blockIdx.y * N, min(p.m, blockIdx.y * N + N), {0, 0}};
    u32 n[2];
    n[0] = block * ROWS + threadIdx.x / 32 * 16 + g, n[1] = n[0] + 8;
#pragma unroll
    for (int h = 0; h < 2; h++) at.row[h] = n[h] < w.rows ? n[h] : 0;
    float c[N / 2];
    const u32 steps = steps_of(w), split = gridDim.z, rank = blockIdx.z;
    const Span span = {steps * rank / split, steps * (rank + 1) / split};
    const bool multiplies = multiply<N, LOW>(c, w, p.x, at, span, [&](u64 r) { return (u32)(r * p.x_stride / 8); });
    // The stages of activations have room for the sums of all threads; no warp reads them any more.
    extern __shared__ __align__(1024) u8 memory[];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        if (multiplies) ((float*)memory)[i * THREADS + threadIdx.x] = c[i];
    cluster_meet();
    float bias[2] = {0.f, 0.f};
    if (own.bias)
#pragma unroll
        for (int h = 0; h < 2; h++) bias[h] = load_float(own.bias, at.row[h], own.bias_float);
    for (u32 i = rank; multiplies && i < N / 2; i += split) {
        float v = 0.f;
        for (u32 other = 0; other < split; other++) v += of_block(shared_address(memory) + (i * THREADS + threadIdx.x) * 4, other);
        const u32 r = at.first + i / 4 * 8 + 2 * t + i % 2, row = i / 2 % 2 ? n[1] : n[0];
        if (r < at.end && row < w.rows) own.y[(u64)r * w.rows + row] = v + (i / 2 % 2 ? bias[1] : bias[0]);
    }
    // Nobody leaves while others read from it.
    cluster_meet();
}

// Place of column `i` in a row that `wide_column` orders, for codes of `span` a word.
__device__ __forceinline__ u32 wide_place(u32 i, u32 span) {
    const u32 half = span / 2, t = i % BK / RUN, c = i % RUN;
    const u32 pair = c / span * half + c % half;
    return i / BK * BK + pair / 2 * 16 + pair % 2 * 8 + 2 * t + c % span / half;
}

template <int N, int GROUPS>
__device__ __forceinline__ void activated_of(const WideParams& p, Place& at) {
    constexpr u32 ROWS = GROUPS * GROUP_ROWS;
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
    const bool gated = p.act.gate != GATE_NONE;
    const u32 inter = gated ? p.w.rows / 2 : p.w.rows;
    u32 value[2], n[2];
    value[0] = gated ? blockIdx.x * (ROWS / 2) + warp * 8 + g : blockIdx.x * ROWS + warp * 16 + g;
    value[1] = gated ? value[0] : value[0] + 8;
    if (p.act.gate == GATE_INTERLEAVED)
        n[0] = 2 * value[0], n[1] = 2 * value[0] + 1;
    else if (p.act.gate == GATE_CONCATENATED)
        n[0] = value[0], n[1] = inter + value[0];
    else
        n[0] = value[0], n[1] = value[1];
#pragma unroll
    for (int h = 0; h < 2; h++) at.row[h] = value[h] < inter ? n[h] : 0;
    float c[N / 2];
    if (!multiply<N, GROUPS>(c, p.w, p.x, at, {0, steps_of(p.w)}, [&](u64 r) { return piece_of(p, r); })) return;
    float bias[2] = {0.f, 0.f};
    if (p.bias)
#pragma unroll
        for (int h = 0; h < 2; h++) bias[h] = load_float(p.bias, at.expert * p.w.rows + at.row[h], p.bias_float);
    // Columns that fill the last step are zeros.
    const u32 filled = (inter + BK - 1) / BK * BK;
    u16* y = (u16*)p.y;
    const u32 to[2] = {wide_place(value[0], p.y_span), wide_place(value[1], p.y_span)};
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const u32 r = at.first + j * 8 + 2 * t + e;
            if (r >= at.end) continue;
            const float h0 = c[4 * j + e] + bias[0], h1 = c[4 * j + 2 + e] + bias[1];
            u16* row = y + r * p.y_stride;
            if (value[0] < filled)
                row[to[0]] = (u16)OPERAND::pack(value[0] < inter ? activate(p.act, h0, h1) : 0.f, 0.f);
            if (!gated && value[1] < filled)
                row[to[1]] = (u16)OPERAND::pack(value[1] < inter ? activate(p.act, h1, 0.f) : 0.f, 0.f);
        }
}

template <int N, int GROUPS>
__device__ __forceinline__ void activated(const WideParams& p) {
    Place at;
    if (!place<N>(p, at)) return;
    if (N == 96 && at.end - at.first <= 48)
        activated_of<48, GROUPS>(p, at);
    else
        activated_of<N, GROUPS>(p, at);
}

extern "C" __global__ void __launch_bounds__(LOW * GROUP_THREADS + 32 * BRINGING, 2) wide_48(const __grid_constant__ WideParams p) {
    in_order();
    product<48, LOW>(p);
}
extern "C" __global__ void __launch_bounds__(LOW * GROUP_THREADS + 32 * BRINGING, 2) wide_64(const __grid_constant__ WideParams p) {
    in_order();
    product<64, LOW>(p);
}
extern "C" __global__ void __launch_bounds__(LOW * GROUP_THREADS + 32 * BRINGING, 1) wide_96(const __grid_constant__ WideParams p) {
    in_order();
    product<96, LOW>(p);
}
extern "C" __global__ void __launch_bounds__(LOW * GROUP_THREADS + 32 * BRINGING, 2) wide_split(const __grid_constant__ SplitParams p) {
    in_order();
    split_product(p);
}
extern "C" __global__ void __launch_bounds__(LOW * GROUP_THREADS + 32 * BRINGING, 2) wide_activated_48(const __grid_constant__ WideParams p) {
    in_order();
    activated<48, LOW>(p);
}
extern "C" __global__ void __launch_bounds__(LOW * GROUP_THREADS + 32 * BRINGING, 2) wide_activated_64(const __grid_constant__ WideParams p) {
    in_order();
    activated<64, LOW>(p);
}
extern "C" __global__ void __launch_bounds__(LOW * GROUP_THREADS + 32 * BRINGING, 1) wide_activated_96(const __grid_constant__ WideParams p) {
    in_order();
    activated<96, LOW>(p);
}
extern "C" __global__ void __launch_bounds__(TALL * GROUP_THREADS + 32 * BRINGING, 1) tall_64(const __grid_constant__ WideParams p) {
    in_order();
    product<64, TALL>(p);
}
extern "C" __global__ void __launch_bounds__(TALL * GROUP_THREADS + 32 * BRINGING, 1) tall_96(const __grid_constant__ WideParams p) {
    in_order();
    product<96, TALL>(p);
}
extern "C" __global__ void __launch_bounds__(TALL * GROUP_THREADS + 32 * BRINGING, 1) tall_activated_64(const __grid_constant__ WideParams p) {
    in_order();
    activated<64, TALL>(p);
}
extern "C" __global__ void __launch_bounds__(TALL * GROUP_THREADS + 32 * BRINGING, 1) tall_activated_96(const __grid_constant__ WideParams p) {
    in_order();
    activated<96, TALL>(p);
}

// Mirrors `NarrowWideParams`: rows of `cols` float32 numbers to the operand type, in the order of `wide_column`, zeros behind
// them up to a whole step.
struct NarrowWideParams {
    const float* x;
    u16* y;
    u64 rows;
    u32 cols;
};

// A thread 8 places.
extern "C" __global__ void __launch_bounds__(256) narrow_wide(const __grid_constant__ NarrowWideParams p) {
    in_order();
    const u32 pieces = (p.cols + BK - 1) / BK * (BK / 8);
    for (u64 at = blockIdx.x * 256ull + threadIdx.x; at < p.rows * pieces; at += gridDim.x * 256ull) {
        const u64 row = at / pieces;
        const u32 piece = at % pieces, step = piece / 8;
        const float* x = p.x + row * p.cols;
        u32 out[4];
#pragma unroll
        for (u32 t = 0; t < 4; t++) {
            const int pair = piece % 8;
            const u32 base = step * BK + t * RUN;
            float v[2] = {0.f, 0.f};
            if (base < p.cols) v[0] = x[base + UNIT16::first(pair)], v[1] = x[base + UNIT16::second(pair)];
            out[t] = OPERAND::pack(v[0], v[1]);
        }
        ((uint4*)p.y)[at] = make_uint4(out[0], out[1], out[2], out[3]);
    }
}
