// Attention of steps that bring several tokens to a sequence, over paged caches of 16-bit floats, on the tensor cores.
//
// A block takes up to ROWS rows of (query, head) that share a sequence and a key head. Tiles of keys and values come to
// shared memory ahead of their use; a warp multiplies its rows with all keys of a tile, keeps maxima, sums and outputs of
// the rows in registers, and takes its weights from there as the left operand of the product with the values.

#include "doyen.cuh"

#define WARPS 4
#define THREADS (32 * WARPS)
#define STAGES 2
#define LOG2E 1.4426950408889634f

// Tiles of heads of D channels. Lines of 16-byte pieces lie so that the same piece of 8 lines meets no bank twice.
template <int D>
struct Shape {
    static constexpr int LOTS = D > 128 ? 1 : 2;  // of 16 rows, of a warp
    static constexpr int ROWS = 16 * LOTS * WARPS;
    static constexpr int KEYS = D > 128 ? 32 : 64;
    static constexpr int PIECES = D / 8;
    static constexpr bool SWAPS = D % 64 == 0;
    static constexpr u32 LINE = 16 * (SWAPS ? PIECES : PIECES + 1);
    static constexpr u32 TILE = KEYS * LINE;
    static constexpr int TAKEN = D % 128 ? 4 : 8;  // keys that a thread brings, all of one page
    static constexpr int UNITS = KEYS / TAKEN * PIECES;
    static constexpr int TURNS = (UNITS + THREADS - 1) / THREADS;

    static __device__ __forceinline__ u32 at(u32 line, u32 piece) {
        return line * LINE + ((SWAPS ? piece ^ (line & 7) : piece) << 4);
    }
};

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Where the rows of a block are, and the keys that they see.
struct Block {
    u32 sequence, kv_head, first, token, position;  // first: of the queries, among the sequence's new tokens
    u32 group, rows;
    u32 least, end;          // keys that some row sees
    u32 all_begin, all_end;  // keys that every row sees

    __device__ __forceinline__ void find(const AttendParams& p) {
        // The last tiles of a prompt see most keys: they start first.
        const u32 kv_heads = p.batch.kv_heads;
        const int2 tile = p.tiles[gridDim.x / kv_heads - 1 - blockIdx.x / kv_heads];
        kv_head = blockIdx.x % kv_heads, sequence = tile.x, first = tile.y;
        const u32 past = p.batch.past[sequence], len = p.batch.len[sequence], queries = min(p.queries, len - first);
        token = p.batch.first[sequence] + first;
        position = past + first;
        group = p.heads / kv_heads;
        rows = queries * group;
        least = oldest(p, position);
        all_begin = oldest(p, position + queries - 1);
        end = p.causal ? position + queries : past + len;
        all_end = p.causal ? position + 1 : end;
    }

    // The first key that a query at a position sees.
    static __device__ __forceinline__ u32 oldest(const AttendParams& p, u32 position) {
        return p.window && position + 1 > p.window ? position + 1 - p.window : 0;
    }

    __device__ __forceinline__ bool sees(const AttendParams& p, u32 position, u32 key) const {
        return key >= oldest(p, position) && key < end && (!p.causal || key <= position);
    }
};

// Whether one of two 16-bit floats is no finite number: one more than all of the exponent reaches the sign.
template <class T>
__device__ __forceinline__ bool unfinite(u32 pair) {
    return ((pair & 0x7fff7fffu) + (0x8000u - T::EXPONENT) * 0x10001u) & 0x80008000u;
}

template <class T, int D>
__device__ __forceinline__ void prefill(const AttendParams& p) {
    using S = Shape<D>;
    constexpr int KEYS = S::KEYS, LOTS = S::LOTS, PIECES = S::PIECES;
    extern __shared__ __align__(128) u8 memory[];
    // Which values of a tile are no numbers: a bit a channel.
    __shared__ __align__(16) u8 lost[KEYS][PIECES];
    const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    // In shared memory: registers are short.
    __shared__ Block b;
    if (tid == 0) b.find(p);
    __syncthreads();

    const u32 begin = b.least / KEYS * KEYS, count = (b.end - begin + KEYS - 1) / KEYS;
    // Keys that no row sees become zeros: pages of them may be gone.
    auto bring = [&](u32 tile) {
        const u32 to = shared_address(memory) + S::ROWS * S::LINE + tile % STAGES * 2 * S::TILE;
#pragma unroll
        for (int i = 0; i < S::TURNS; i++) {
            const u32 unit = tid + i * THREADS;
            if (S::UNITS % THREADS && unit >= S::UNITS) break;
            const u32 line = unit / PIECES * S::TAKEN, piece = unit % PIECES, key = begin + tile * KEYS + line;
            const bool known = key + S::TAKEN > b.least && key < b.end;
            const u64 row = known ? cache_row(p.batch, b.sequence, b.kv_head, key) : 0;
            const u64 from = (row * PIECES + piece) * 16;
#pragma unroll
            for (int j = 0; j < S::TAKEN; j++) {
                const bool live = key + j >= b.least && key + j < b.end;
                bring16(to + S::at(line + j, piece), p.keys.rows + from + j * D * 2, live);
                bring16(to + S::TILE + S::at(line + j, piece), p.values.rows + from + j * D * 2, live);
            }
        }
    };
#pragma unroll
    for (u32 i = 0; i < STAGES - 1; i++) {
        if (i < count) bring(i);
        cp_async_commit();
    }
    // Exponents are of two.
    const float scale = p.softcap > 0.f ? p.scale : p.scale * LOG2E;
    for (u32 i = tid; i < S::ROWS * PIECES; i += THREADS) {
        const u32 r = i / PIECES, piece = i % PIECES;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (r < b.rows) {
            const u64 head = (u64)(b.token + r / b.group) * p.heads + b.kv_head * b.group + r % b.group;
            const float4* from = (const float4*)(p.q + head * D + piece * 8);
            const float4 x = from[0], y = from[1];
            v = make_uint4(T::pack(x.x * scale, x.y * scale), T::pack(x.z * scale, x.w * scale), T::pack(y.x * scale, y.y * scale),
                           T::pack(y.z * scale, y.w * scale));
        }
        *(uint4*)(memory + S::at(r, piece)) = v;
    }

    float out[LOTS][D / 8][4], most[LOTS][2], sum[LOTS][2];
#pragma unroll
    for (int m = 0; m < LOTS; m++) {
        most[m][0] = most[m][1] = -INF, sum[m][0] = sum[m][1] = 0.f;
#pragma unroll
        for (int n = 0; n < D / 8; n++) out[m][n][0] = out[m][n][1] = out[m][n][2] = out[m][n][3] = 0.f;
    }
    const u32 row0 = warp * 16 * LOTS;
    auto row_of = [&](int m, int h) { return row0 + m * 16 + h * 8 + g; };
    const bool works = row0 < b.rows;
    const u32 queries = shared_address(memory) + row0 * S::LINE;

    for (u32 tile = 0; tile < count; tile++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (tile + STAGES - 1 < count) bring(tile + STAGES - 1);
        cp_async_commit();
        const u32 k0 = begin + tile * KEYS, place = S::ROWS * S::LINE + tile % STAGES * 2 * S::TILE;
        const u32 keys = shared_address(memory) + place;
        const bool border = k0 < b.all_begin || k0 + KEYS > b.all_end;
        float s[LOTS][KEYS / 8][4];
        if (works) {
#pragma unroll
            for (int m = 0; m < LOTS; m++)
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
#pragma unroll
            for (int c = 0; c < D / 16; c++) {
                u32 left[LOTS][4];
#pragma unroll
                for (int m = 0; m < LOTS; m++) ldmatrix4(left[m], queries + m * 16 * S::LINE + S::at(lane % 16, 2 * c + lane / 16));
#pragma unroll
                for (int n = 0; n < KEYS / 16; n++) {
                    u32 right[4];
                    ldmatrix4(right, keys + n * 16 * S::LINE + S::at(lane / 16 * 8 + lane % 8, 2 * c + lane / 8 % 2));
#pragma unroll
                    for (int m = 0; m < LOTS; m++) {
                        T::mma(s[m][2 * n], left[m], right[0], right[1]);
                        T::mma(s[m][2 * n + 1], left[m], right[2], right[3]);
                    }
                }
            }
            if (p.softcap > 0.f) {
                // cap * tanh(x / cap) = cap - 2 cap / (1 + 2^(2 x log2(e) / cap)), as an exponent of two.
                const float in = 2.f * LOG2E / p.softcap, cap = p.softcap * LOG2E;
#pragma unroll
                for (int m = 0; m < LOTS; m++)
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) s[m][n][i] = cap - 2.f * cap * reciprocal(1.f + power_of_two(s[m][n][i] * in));
            }
            if (border) {
#pragma unroll
                for (int m = 0; m < LOTS; m++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const u32 position = b.position + row_of(m, h) / b.group;
                        const int own = (int)(k0 + 2 * t), end = (int)(p.causal ? min(b.end, position + 1) : b.end) - own;
                        const int first = (int)b.oldest(p, position) - own;
#pragma unroll
                        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                            for (int i = 0; i < 2; i++)
                                if (n * 8 + i < first || n * 8 + i >= end) s[m][n][2 * h + i] = -INF;
                    }
            }
            bool moved = false;
            float keep[LOTS][2];
#pragma unroll
            for (int m = 0; m < LOTS; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float largest = most[m][h];
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++) largest = fmaxf(largest, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
                    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
                    // Nothing seen yet: any finite maximum will do.
                    const float base = largest == -INF ? 0.f : largest;
                    keep[m][h] = power_of_two(most[m][h] - base);
                    moved |= keep[m][h] != 1.f;
                    most[m][h] = largest;
                    float total = sum[m][h] * keep[m][h];
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            float& v = s[m][n][2 * h + i];
                            v = power_of_two(v - base);
                            total += v;
                        }
                    sum[m][h] = total;
                }
            // Most tiles leave all maxima where they were.
            if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
                for (int m = 0; m < LOTS; m++)
#pragma unroll
                    for (int n = 0; n < D / 8; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) out[m][n][i] *= keep[m][i / 2];
            }
        }
        // Values that are no numbers become zeros, since a weight of 0 would not keep them from rows that do not see them.
        bool any = false;
        if (border) {
            u8* values = memory + place + S::TILE;
            for (u32 i = tid; i < KEYS * PIECES; i += THREADS) {
                const uint4 v = *(const uint4*)(values + S::at(i / PIECES, i % PIECES));
                any |= unfinite<T>(v.x) | unfinite<T>(v.y) | unfinite<T>(v.z) | unfinite<T>(v.w);
            }
            any = __syncthreads_or(any);
            if (any) {
                for (u32 i = tid; i < KEYS * PIECES; i += THREADS) {
                    u16* piece = (u16*)(values + S::at(i / PIECES, i % PIECES));
                    u32 bits = 0;
                    for (u32 j = 0; j < 8; j++)
                        if (unfinite<T>(piece[j])) bits |= 1u << j, piece[j] = 0;
                    lost[i / PIECES][i % PIECES] = bits;
                }
                __syncthreads();
            }
        }
        if (works) {
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++) {
                u32 left[LOTS][4];
#pragma unroll
                for (int m = 0; m < LOTS; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++) left[m][i] = T::pack(s[m][2 * k + i / 2][i % 2 * 2], s[m][2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
                for (int n = 0; n < D / 16; n++) {
                    u32 right[4];
                    ldmatrix4_transposed(right, keys + S::TILE + k * 16 * S::LINE + S::at(lane % 16, 2 * n + lane / 16));
#pragma unroll
                    for (int m = 0; m < LOTS; m++) {
                        T::mma(out[m][2 * n], left[m], right[0], right[1]);
                        T::mma(out[m][2 * n + 1], left[m], right[2], right[3]);
                    }
                }
            }
        }
        // Rows that do see them are no numbers either.
        for (u32 key = 0; any && key < KEYS; key++) {
            const u32* bits = (const u32*)lost[key];
#pragma unroll
            for (int m = 0; m < LOTS; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    if (!b.sees(p, b.position + row_of(m, h) / b.group, k0 + key)) continue;
#pragma unroll
                    for (int n = 0; n < D / 8; n++)
#pragma unroll
                        for (int i = 0; i < 2; i++)
                            if (bits[n / 4] >> (n % 4 * 8 + 2 * t + i) & 1) out[m][n][2 * h + i] = QUIET_NAN;
                }
        }
    }
#pragma unroll
    for (int m = 0; m < LOTS; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float total = sum[m][h];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            const u32 r = row_of(m, h);
            if (r >= b.rows) continue;
            const u32 head = b.kv_head * b.group + r % b.group;
            float share = 1.f;
            if (p.sink || p.zero_sink) {
                const float logit = p.sink ? p.sink[head] * LOG2E : 0.f, largest = fmaxf(most[m][h], logit);
                share = power_of_two(most[m][h] - largest);
                total = total * share + power_of_two(logit - largest);
            }
            share /= total;
            float* y = p.y + ((u64)(b.token + r / b.group) * p.heads + head) * D + 2 * t;
#pragma unroll
            for (int n = 0; n < D / 8; n++) *(float2*)(y + n * 8) = make_float2(out[m][n][2 * h] * share, out[m][n][2 * h + 1] * share);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) prefill_64(const __grid_constant__ AttendParams p) {
    in_order();
    prefill<OPERAND, 64>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) prefill_96(const __grid_constant__ AttendParams p) {
    in_order();
    prefill<OPERAND, 96>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) prefill_128(const __grid_constant__ AttendParams p) {
    in_order();
    prefill<OPERAND, 128>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) prefill_256(const __grid_constant__ AttendParams p) {
    in_order();
    prefill<OPERAND, 256>(p);
}
