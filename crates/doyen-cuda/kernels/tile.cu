// Products of many rows with packed codes on the tensor cores: y[m, rows] = x[m, cols] W^T + bias. Compiled once per BITS
// (2, 4, 8) and OPERAND.
//
// x was narrowed to the operand type beforehand (`narrow` of few.cu, for blocks of 64), the columns of every run of 16 in the order in which codes come
// out of their bytes, so that both sides of a product agree on the order of K. Its tiles go to shared memory by cp.async,
// two ahead; codes are loaded three steps ahead into registers, and dequantized for the next step after this one multiplied.
// float16 weights are kept 2^6 times too large, so that small scales do not lose bits below the smallest normal number (a
// weight beyond 1000 would overflow; no checkpoint has one).
//
// The grouped entries do the same for every expert over the rows routed to it, as in gemm.cu.

#include "doyen.cuh"

#define BN 128
#define BK 64
#define THREADS 256
#define STAGES 3

// Mirrors `TileParams`.
struct TileParams {
    Weights w;
    const u16* x;        // narrowed
    float* y;
    const void* bias;    // [experts, rows]
    const int* order;    // routes, those of an expert next to each other; null: row i is row i
    const int2* tiles;
    const int* ends;
    const int* tile_count;
    u64 x_stride;
    u64 y_stride;
    u32 bias_float;
    u32 m;
    u32 x_div;
    u32 y_by_route;
};

#define UNIT16 Unit<BITS, RUN, OPERAND>

template <int BM>
__device__ __forceinline__ void tile(const TileParams& p, u64 expert, u32 first, u32 end) {
    constexpr int MT = BM / 32;                            // 16-row pieces of a warp; warps are 2 x 4
    constexpr int NT = 4;                                  // 8-column pieces of a warp
    constexpr int X_PIECES = BM * (BK / 8) / THREADS;      // 16-byte pieces of x that a thread brings
    constexpr float UP = OPERAND::EIGHT ? 64.f : 1.f;      // float16 keeps weights larger
    extern __shared__ __align__(128) u8 memory[];
    const u32 xs = shared_address(memory);
    u8* ws = memory + STAGES * BM * BK * 2;
    const u32 ws_address = shared_address(ws);

    const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const u32 wm = warp / 4, wn = warp % 4;
    const u32 n0 = blockIdx.x * BN, cols = p.w.cols;
    const u32 steps = (cols + BK - 1) / BK;

    const u16* x_rows[X_PIECES];
    bool x_live[X_PIECES];
#pragma unroll
    for (int i = 0; i < X_PIECES; i++) {
        u32 r = first + tid / 8 + i * (THREADS / 8);
        x_live[i] = r < end;
        u64 row = x_live[i] ? r : first;
        if (p.x_div) row = (p.order ? (u32)p.order[row] : (u32)row) / p.x_div;
        x_rows[i] = p.x + row * p.x_stride;
    }
    auto bring = [&](u32 step) {
        if (step < steps) {
            u32 column = step * BK + (tid % 8) * 8;
#pragma unroll
            for (int i = 0; i < X_PIECES; i++) {
                u32 r = tid / 8 + i * (THREADS / 8);
                bool live = x_live[i] && column < cols;
                bring16(xs + (step % STAGES) * (BM * BK * 2) + at16(r, tid % 8), x_rows[i] + (live ? column : 0), live);
            }
        }
        cp_async_commit();
    };

    // Two runs of a weight row are this thread's.
    const u32 w_row = n0 + tid / 2;
    const bool w_live = w_row < p.w.rows;
    const u8* w_codes = p.w.codes + expert * p.w.codes_stride + (u64)(w_live ? w_row : 0) * p.w.row_bytes;
    // Codes of two steps are on their way: those of even steps in one set of registers, of odd ones in the other.
    UNIT16 codes[2][2];
    float scale[2][2], zero[2][2];
    const u64 w_scales = expert * p.w.scales_stride + (u64)(w_live ? w_row : 0) * p.w.blocks;
    const bool default_zero = p.w.zero_kind == ZERO_DEFAULT;
    const bool one_block = p.w.block_shift >= 5;  // both runs are of one block
    const bool pairs_aligned = p.w.row_bytes % (4 * BITS) == 0;
    auto load = [&](u32 step, int set) {
        const u32 column0 = step * BK + (tid % 2) * 32;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            codes[set][h].zero();
            scale[set][h] = 0.f, zero[set][h] = (float)(1u << (BITS - 1));
        }
        if (!w_live) return;
        const u8* from = w_codes + (u64)column0 * BITS / 8;
        if (BITS == 4 && pairs_aligned && column0 + 32 <= cols) {
            // Both runs in one access: half the lines touched.
            uint4 v = *(const uint4*)from;
            codes[set][0].word[0] = v.x, codes[set][0].word[1 % (BITS / 2)] = v.y;
            codes[set][1].word[0] = v.z, codes[set][1].word[1 % (BITS / 2)] = v.w;
        } else if (BITS == 2 && pairs_aligned && column0 + 32 <= cols) {
            uint2 v = *(const uint2*)from;
            codes[set][0].word[0] = v.x;
            codes[set][1].word[0] = v.y;
        } else {
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (column0 + h * RUN < cols) codes[set][h].load(from + h * 2 * BITS);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 column = column0 + h * RUN;
            if (column >= cols) break;
            if (h && one_block) {
                scale[set][1] = scale[set][0], zero[set][1] = zero[set][0];
                break;
            }
            scale[set][h] = load_float(p.w.scales, w_scales + (column >> p.w.block_shift), p.w.scale_float) * UP;
            if (!default_zero) zero[set][h] = weight_zero<BITS>(p.w, expert, w_row, column);
        }
    };
    // Unpacks a set into the buffer of its number.
    auto unpack = [&](int set) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 pairs[RUN / 2];
            codes[set][h].pairs(pairs, (u32)zero[set][h]);
            u32 s = OPERAND::pack(scale[set][h], scale[set][h]);
#pragma unroll
            for (int i = 0; i < RUN / 2; i++) pairs[i] = fma2(pairs[i], s, 0x80008000u, OPERAND());
            u8* to = ws + set * (BN * BK * 2);
            u32 piece = (tid % 2) * 4 + h * 2;
            *(uint4*)(to + at16(tid / 2, piece)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            *(uint4*)(to + at16(tid / 2, piece + 1)) = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
        }
    };

    float acc[MT][NT][4];
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) acc[i][j][c] = 0.f;

    auto multiply = [&](u32 step, int set) {
        const u32 x_at = xs + (step % STAGES) * (BM * BK * 2), w_at = ws_address + set * (BN * BK * 2);
#pragma unroll
        for (int kk = 0; kk < BK / 16; kk++) {
            u32 a[MT][4], b[NT / 2][4];
#pragma unroll
            for (int i = 0; i < MT; i++)
                ldmatrix4(a[i], x_at + at16(wm * (MT * 16) + i * 16 + lane % 16, kk * 2 + lane / 16));
#pragma unroll
            for (int j = 0; j < NT / 2; j++)
                ldmatrix4(b[j], w_at + at16(wn * (NT * 8) + j * 16 + (lane / 16) * 8 + lane % 8, kk * 2 + (lane / 8) % 2));
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NT; j++)
                    OPERAND::mma(acc[i][j], a[i], b[j / 2][(j % 2) * 2], b[j / 2][(j % 2) * 2 + 1]);
        }
    };

    bring(0);
    bring(1);
    load(0, 0);
    load(1, 1);
    unpack(0);
    load(2, 0);
    for (u32 step0 = 0; step0 < steps; step0 += 2) {
#pragma unroll
        for (int set = 0; set < 2; set++) {
            const u32 step = step0 + set;
            if (step >= steps) break;
            // This step's activations are there, everybody's codes of it unpacked, and nobody reads what comes next.
            cp_async_wait<1>();
            __syncthreads();
            bring(step + 2);
            multiply(step, set);
            if (step + 1 < steps) {
                unpack(1 - set);
                load(step + 3, 1 - set);
            }
        }
    }

#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 r = first + wm * (MT * 16) + i * 16 + half * 8 + lane / 4;
            if (r >= end) continue;
            u64 to = p.order && p.y_by_route ? (u64)p.order[r] : (u64)r;
            float* y = p.y + to * p.y_stride;
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    u32 n = n0 + wn * (NT * 8) + j * 8 + (lane % 4) * 2 + c;
                    if (n >= p.w.rows) continue;
                    float v = acc[i][j][half * 2 + c] * (1.f / UP);
                    if (p.bias) v += load_float(p.bias, expert * p.w.rows + n, p.bias_float);
                    y[n] = v;
                }
        }
}

template <int BM>
__device__ __forceinline__ void grouped(const TileParams& p) {
    if ((int)blockIdx.y >= *p.tile_count) return;
    int2 t = p.tiles[blockIdx.y];
    tile<BM>(p, t.x, t.y, min((u32)p.ends[t.x], (u32)t.y + BM));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) tile_64(const __grid_constant__ TileParams p) {
    in_order();
    tile<64>(p, 0, blockIdx.y * 64, min(p.m, blockIdx.y * 64 + 64));
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) tile_128(const __grid_constant__ TileParams p) {
    in_order();
    tile<128>(p, 0, blockIdx.y * 128, min(p.m, blockIdx.y * 128 + 128));
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped_64(const __grid_constant__ TileParams p) {
    in_order();
    grouped<64>(p);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped_128(const __grid_constant__ TileParams p) {
    in_order();
    grouped<128>(p);
}
