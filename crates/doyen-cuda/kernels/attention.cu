// Attention over a paged cache: norms and rotation of query and key heads, append, attend, join of split keys.
//
// A tile is up to 16 rows of (query, head) that share a sequence and a key head, so that keys and values are read once
// for all of them. Softmax runs online over pieces of 32 keys; where keys are split over blocks, each block leaves its
// maximum, sum and unnormalised values, and `attention_join` puts them together.

#include "doyen.cuh"

// Bytes of a row of KV_I8_ROW: codes, and the scale that they share.
__device__ __forceinline__ u32 scaled_row(u32 head_size) { return head_size + 4; }

__device__ __forceinline__ float store_get(const Store& s, u64 row, u32 head, u32 c) {
    u64 at = row * s.head_size + c;
    if (s.kind <= KV_BF16) return load_float(s.rows, at, s.kind);
    if (s.kind == KV_I8_ROW) {
        const u8* own = s.rows + row * scaled_row(s.head_size);
        return (float)(signed char)own[c] * *(const float*)(own + s.head_size);
    }
    float scale = s.scales[s.per_channel ? head * s.head_size + c : 0];
    if (s.kind == KV_I8) return (float)(signed char)s.rows[at] * scale;
    u32 code = (s.rows[at / 2] >> (4 * (c % 2))) & 15;
    return (float)((int)code - 8) * scale;
}

// Nearest code, ties to even; a NaN becomes 0, and its row is noted as lost.
__device__ __forceinline__ int store_code(const Store& s, u32 head, u32 c, float v) {
    float q = rintf(v / s.scales[s.per_channel ? head * s.head_size + c : 0]);
    float most = s.kind == KV_I8 ? 127.f : 7.f;
    q = q > most ? most : (q < -most - 1.f ? -most - 1.f : q);
    return q == q ? (int)q : 0;
}

// Mirrors `PrepareParams`.
struct PrepareParams {
    Batch batch;
    Store keys;
    Store values;
    const float* q;
    const float* k;
    const float* v;
    float* q_out;          // [tokens, heads, head_size]
    const void* q_norm;
    const void* k_norm;
    const void* cos;
    const void* sin;
    const i64* positions;  // given ones, or null: running ones
    int* fault;
    u64 q_stride;
    u64 k_stride;
    u64 v_stride;
    u32 heads;
    u32 q_norm_float;
    u32 k_norm_float;
    u32 rotary_float;
    u32 rotary_half;       // 0: no rotation
    u32 rotary_rows;
    u32 interleaved;
    float eps;
    u32 node;
};

// Channels and rotations that a lane keeps in registers; more are read where they are used.
#define KEPT_CHANNELS 4
#define KEPT_ROTATIONS 2

// A warp a head of a token, or where there are many tokens several heads one after the other; heads are those of q, then k, then
// v. Shared memory: 4 heads of the larger head size.
extern "C" __global__ void __launch_bounds__(128) attention_prepare(const __grid_constant__ PrepareParams p) {
    allow_next();
    extern __shared__ float lines[];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 kv = p.batch.kv_heads, own = blockIdx.y * 4 + warp;
    if (own >= p.heads + 2 * kv) return await_earlier();
    const u32 token = blockIdx.x;
    // Tables of the step, weights of the norm and rotations are not written by earlier launches.
    const int sequence = p.batch.token_sequence[token];
    const int position = p.batch.past[sequence] + ((int)token - p.batch.first[sequence]);
    float* line = lines + warp * max(p.keys.head_size, p.values.head_size);
    for (u32 unit = own; unit < p.heads + 2 * kv; unit += gridDim.y * 4) {
        u32 head = unit;
        const bool is_q = head < p.heads, is_v = head >= p.heads + kv;
        const u32 d = is_v ? p.values.head_size : p.keys.head_size;
        const float* from;
        if (is_q)
            from = p.q + token * p.q_stride + head * d;
        else if (!is_v)
            head -= p.heads, from = p.k + token * p.k_stride + head * d;
        else
            head -= p.heads + kv, from = p.v + token * p.v_stride + head * d;
        const u64 row = is_q ? 0 : cache_row(p.batch, sequence, head, position);
        const bool norms = !is_v && p.q_norm, turns = !is_v && p.rotary_half;
        const void* gamma = is_q ? p.q_norm : p.k_norm;
        const u32 kind = is_q ? p.q_norm_float : p.k_norm_float, half = p.rotary_half;
        float weight[KEPT_CHANNELS], cosine[KEPT_ROTATIONS], sine[KEPT_ROTATIONS], x[KEPT_CHANNELS];
#pragma unroll
        for (u32 i = 0; i < KEPT_CHANNELS; i++) weight[i] = norms && i * 32 + lane < d ? load_float(gamma, i * 32 + lane, kind) : 0.f;
        i64 at = position;
        auto rotations = [&]() {
            const i64 known = at < 0 || at >= p.rotary_rows ? 0 : at;
#pragma unroll
            for (u32 i = 0; i < KEPT_ROTATIONS; i++) {
                if (i * 32 + lane >= half) break;
                cosine[i] = load_float(p.cos, known * half + i * 32 + lane, p.rotary_float);
                sine[i] = load_float(p.sin, known * half + i * 32 + lane, p.rotary_float);
            }
        };
        if (turns && !p.positions) rotations();
        await_earlier();
        if (turns && p.positions) {
            at = p.positions[token];
            rotations();
        }
#pragma unroll
        for (u32 i = 0; i < KEPT_CHANNELS; i++) x[i] = i * 32 + lane < d ? from[i * 32 + lane] : 0.f;
        float squares = 0.f;
#pragma unroll
        for (u32 i = 0; i < KEPT_CHANNELS; i++) squares += x[i] * x[i];
        for (u32 c = KEPT_CHANNELS * 32 + lane; c < d; c += 32) {
            const float v = from[c];
            line[c] = v;
            squares += v * v;
        }
        const float inv = norms ? 1.f / sqrtf(warp_sum(squares) / d + p.eps) : 1.f;
#pragma unroll
        for (u32 i = 0; i < KEPT_CHANNELS; i++)
            if (i * 32 + lane < d) line[i * 32 + lane] = norms ? x[i] * inv * weight[i] : x[i];
        for (u32 c = KEPT_CHANNELS * 32 + lane; norms && c < d; c += 32) line[c] = line[c] * inv * load_float(gamma, c, kind);
        __syncwarp();
        if (turns) {
            if (at < 0 || at >= p.rotary_rows) {
                if (lane == 0) atomicMax(p.fault, (int)p.node);
                at = 0;
            }
            auto turn = [&](u32 i, float cs, float sn) {
                const u32 i1 = p.interleaved ? 2 * i : i, i2 = p.interleaved ? 2 * i + 1 : half + i;
                const float x1 = line[i1], x2 = line[i2];
                line[i1] = x1 * cs - x2 * sn;
                line[i2] = x1 * sn + x2 * cs;
            };
#pragma unroll
            for (u32 i = 0; i < KEPT_ROTATIONS; i++)
                if (i * 32 + lane < half) turn(i * 32 + lane, cosine[i], sine[i]);
            for (u32 i = KEPT_ROTATIONS * 32 + lane; i < half; i += 32)
                turn(i, load_float(p.cos, at * half + i, p.rotary_float), load_float(p.sin, at * half + i, p.rotary_float));
            __syncwarp();
        }
        if (is_q) {
            float* to = p.q_out + ((u64)token * p.heads + head) * d;
            for (u32 c = lane; c < d; c += 32) to[c] = line[c];
            __syncwarp();
            continue;
        }
        const Store& s = is_v ? p.values : p.keys;
        bool bad = false;
        if (s.kind > KV_BF16) {
            for (u32 c = lane; c < d; c += 32) bad |= line[c] != line[c];
            bad = __any_sync(0xffffffffu, bad);
            if (s.lost && lane == 0) s.lost[row] = bad;
        }
        if (s.kind <= KV_BF16)
            for (u32 c = lane; c < d; c += 32) store_float(s.rows, row * d + c, s.kind, line[c]);
        else if (s.kind == KV_I8_ROW) {
            float most = 0.f;
            for (u32 c = lane; c < d; c += 32) most = fmaxf(most, fabsf(line[c]));
            // A NaN makes the scale one, and with it the row.
            const float scale = bad ? QUIET_NAN : warp_max(most) / 127.f, inverse = scale > 0.f ? 1.f / scale : 0.f;
            u8* own = s.rows + row * scaled_row(d);
            for (u32 c = lane; c < d; c += 32) {
                // Ties to even; a NaN becomes 0.
                const float q = fminf(fmaxf(rintf(line[c] * inverse), -127.f), 127.f);
                own[c] = (u8)(signed char)(line[c] == line[c] ? (int)q : 0);
            }
            if (lane == 0) *(float*)(own + d) = scale;
        } else if (s.kind == KV_I8)
            for (u32 c = lane; c < d; c += 32) s.rows[row * d + c] = (u8)(signed char)store_code(s, head, c, line[c]);
        else
            for (u32 c = lane; c < d / 2; c += 32) {
                int lo = store_code(s, head, 2 * c, line[2 * c]) + 8, hi = store_code(s, head, 2 * c + 1, line[2 * c + 1]) + 8;
                s.rows[row * (d / 2) + c] = (u8)(lo | hi << 4);
            }
        __syncwarp();
    }
}

#define PIECE 32
#define ROWS 16
#define ATTEND_THREADS 128

// ---- attention on the tensor cores ---------------------------------------------------------------------------------

// Rows of a tile for keys and values of 16-bit floats of `D` channels. A warp takes every fourth lot of 16 keys, straight
// from the cache into the right operands of mma.m16n8k16, and keeps maxima, sums and outputs of its own; the warps are put
// together at the end. Lane 4g + t of the products with keys has 8 channels of key g in every 32; of the products with
// values it has the channels 8 g + j of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 for tile j of every 64.
#define LOT 16

// A query, and a lot of its heads.
struct Tile {
    u32 sequence, kv_head, first, past;  // first: the query, among the sequence's new tokens
    u32 token, member0, members, group;
    u32 begin, least, end;  // keys; least: the first that the query sees
};

__device__ __forceinline__ u32 halves(u32 a, u32 b, bool high) { return __byte_perm(a, b, high ? 0x7632 : 0x5410); }

template <class T, int D>
__device__ __forceinline__ void attend_tile(const AttendParams& p, const Tile& at, bool waits, float* memory, float* row_max,
                                            float* row_sum) {
    const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    const u32 rows = at.members;
    uint4 keys[2][D / 32], values[2][2][D / 64];
    const uint4 none = make_uint4(0, 0, 0, 0);
    const int* table = p.batch.pages + p.batch.table_start[at.sequence];
    // A lot lies in one page, whose number is there before its keys are wanted.
    auto page_of = [&](u32 k0) { return k0 < at.end ? (u32)table[k0 >> p.batch.page_shift] : 0; };
    auto row_of = [&](u32 page, u32 k0) {
        return (((u64)page * p.batch.kv_heads + at.kv_head) << p.batch.page_shift) + (k0 & ((1u << p.batch.page_shift) - 1));
    };
    // What the query does not see stays zeros: it may be no numbers, which a weight of 0 does not take away, or of a page that is
    // somebody else's.
    const u32 seen_keys = at.end > at.least ? at.end - at.least : 0;
    auto live = [&](u32 key) { return key - at.least < seen_keys; };
    const u32 own = at.begin + warp * LOT, step = ATTEND_THREADS / 32 * LOT;
    u64 row = row_of(page_of(own), own);
    u32 next_page = page_of(own + step);
    auto load_keys = [&](u32 k0) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint4* from = (const uint4*)((const u16*)p.keys.rows + (row + j * 8 + g) * D + t * 8);
#pragma unroll
            for (int c = 0; c < D / 32; c++) keys[j][c] = live(k0 + j * 8 + g) ? from[c * 4] : none;
        }
    };
    auto load_values = [&](u32 k0) {
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 key = j * 8 + 2 * t + i;
                const uint4* from = (const uint4*)((const u16*)p.values.rows + (row + key) * D + g * 8);
#pragma unroll
                for (int c = 0; c < D / 64; c++) values[j][i][c] = live(k0 + key) ? from[c * 8] : none;
            }
    };
    // Keys of earlier steps are there before the launches that this one waits for.
    const bool early = waits && own + LOT <= min(at.past, at.end);
    if (early) load_keys(own), load_values(own);
    if (waits) await_earlier();
    if (!early && own < at.end) load_keys(own), load_values(own);
    u32 q[D / 32][2][4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 r = g + 8 * h;
        const u32 head = at.kv_head * at.group + at.member0 + r;
#pragma unroll
        for (int c = 0; c < D / 32; c++) {
            float4 v[2] = {make_float4(0.f, 0.f, 0.f, 0.f), make_float4(0.f, 0.f, 0.f, 0.f)};
            if (r < rows) {
                const float4* from = (const float4*)(p.q + ((u64)at.token * p.heads + head) * D + c * 32 + t * 8);
                v[0] = from[0], v[1] = from[1];
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                q[c][h][2 * i] = T::pack(v[i].x * p.scale, v[i].y * p.scale);
                q[c][h][2 * i + 1] = T::pack(v[i].z * p.scale, v[i].w * p.scale);
            }
        }
    }
    float out[D / 8][4], most[2] = {-INF, -INF}, sum[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < D / 8; i++) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0.f;

    for (u32 k0 = own; k0 < at.end; k0 += step) {
        const u32 next = k0 + step;
        float s[2][4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
#pragma unroll
            for (int c = 0; c < D / 32; c++) {
                u32 first[4] = {q[c][0][0], q[c][1][0], q[c][0][1], q[c][1][1]};
                T::mma(s[j], first, keys[j][c].x, keys[j][c].y);
                u32 second[4] = {q[c][0][2], q[c][1][2], q[c][0][3], q[c][1][3]};
                T::mma(s[j], second, keys[j][c].z, keys[j][c].w);
            }
        }
        row = row_of(next_page, next);
        next_page = page_of(next + step);
        float largest[2] = {most[0], most[1]};
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 h = i / 2, r = g + 8 * h, key = k0 + j * 8 + 2 * t + i % 2;
                const bool seen = r < rows && live(key);
                float v = s[j][i];
                if (p.softcap > 0.f) v = p.softcap * tanhf(v / p.softcap);
                if (p.bias && seen) {
                    const u32 head = at.kv_head * at.group + at.member0 + r;
                    const u64 b = at.sequence * p.bias_stride[0] + head * p.bias_stride[1] + at.first * p.bias_stride[2] +
                                  key * p.bias_stride[3];
                    v += key < p.bias_keys ? p.bias[b] : -INF;
                }
                s[j][i] = seen ? v : -INF;
                largest[h] = fmaxf(largest[h], s[j][i]);
            }
        float keep[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 1));
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 2));
            // Nothing seen yet: any finite maximum will do.
            keep[h] = most[h] == -INF ? 0.f : __expf(most[h] - largest[h]);
            most[h] = largest[h];
            sum[h] *= keep[h];
        }
        float e[2][4];
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                e[j][i] = s[j][i] == -INF ? 0.f : __expf(s[j][i] - most[i / 2]);
                sum[i / 2] += e[j][i];
            }
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            out[i][0] *= keep[0], out[i][1] *= keep[0];
            out[i][2] *= keep[1], out[i][3] *= keep[1];
        }
        u32 a[4] = {T::pack(e[0][0], e[0][1]), T::pack(e[0][2], e[0][3]), T::pack(e[1][0], e[1][1]), T::pack(e[1][2], e[1][3])};
#pragma unroll
        for (int c = 0; c < D / 64; c++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const auto word = [&](const uint4& v) { return j / 2 == 0 ? v.x : j / 2 == 1 ? v.y : j / 2 == 2 ? v.z : v.w; };
                const u32 b0 = halves(word(values[0][0][c]), word(values[0][1][c]), j % 2);
                const u32 b1 = halves(word(values[1][0][c]), word(values[1][1][c]), j % 2);
                T::mma(out[c * 8 + j], a, b0, b1);
            }
        if (next < at.end) load_keys(next), load_values(next);
    }
    // Warps one after the other: maxima, sums, outputs. Column n of tile j of every 64 is channel 8 n + j; a row is stored tile by
    // tile, 8 floats apart from the next, so that no two lanes meet in a bank.
    constexpr u32 LINE = D + 8, WARPS = ATTEND_THREADS / 32;
    float* maxima = memory;
    float* sums = maxima + WARPS * ROWS;
    float* outs = sums + WARPS * ROWS;
    float* joined = outs + WARPS * ROWS * LINE;
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        const u32 r = warp * ROWS + g + 8 * h;
        if (t == 0) maxima[r] = most[h], sums[r] = sum[h];
#pragma unroll
        for (int c = 0; c < D / 64; c++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                *(float2*)(outs + r * LINE + c * 64 + j * 8 + 2 * t) = make_float2(out[c * 8 + j][2 * h], out[c * 8 + j][2 * h + 1]);
    }
    __syncthreads();
    // What the outputs of each warp count.
    if (tid < ROWS) {
        float largest = -INF, total = 0.f;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) largest = fmaxf(largest, maxima[w * ROWS + tid]);
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            const float m = maxima[w * ROWS + tid], scale = m == -INF ? 0.f : __expf(m - largest);
            total = fmaf(sums[w * ROWS + tid], scale, total);
            maxima[w * ROWS + tid] = scale;
        }
        row_max[tid] = largest, row_sum[tid] = total;
    }
    __syncthreads();
    for (u32 i = tid; i < rows * D; i += ATTEND_THREADS) {
        const u32 r = i / D, place = i % D;
        float o = 0.f;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) o = fmaf(outs[(w * ROWS + r) * LINE + place], maxima[w * ROWS + r], o);
        joined[r * D + place / 64 * 64 + place % 8 * 8 + place % 64 / 8] = o;
    }
    __syncthreads();
}

// Floats of shared memory: keys, values, queries, scores, outputs.
//   PIECE * (dk + 1) + PIECE * dv + ROWS * dk + ROWS * (PIECE + 1) + ROWS * dv
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS) attend(const __grid_constant__ AttendParams p) {
    allow_next();
    extern __shared__ float memory[];
    const u32 dk = p.keys.head_size, dv = p.values.head_size;
    float* ks = memory;
    float* vs = ks + PIECE * (dk + 1);
    float* qs = vs + PIECE * dv;
    float* scores = qs + ROWS * dk;
    float* out = scores + ROWS * (PIECE + 1);
    __shared__ float row_max[ROWS], row_sum[ROWS], row_scale[ROWS];
    __shared__ bool lost[PIECE];

    const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int2 tile = p.tiles[blockIdx.x];
    const int sequence = tile.x;
    const u32 kv_head = blockIdx.y, split = blockIdx.z;
    const u32 group = p.heads / p.batch.kv_heads;
    const u32 past = p.batch.past[sequence], len = p.batch.len[sequence], first = p.batch.first[sequence];
    const u32 queries = min(p.queries, len - (u32)tile.y);

    // Group members go in lots of ROWS / queries, so that any number of heads to a key head fits.
    const u32 lot = max(1u, ROWS / p.queries);
    for (u32 member0 = 0; member0 < group; member0 += lot) {
        const u32 members = min(lot, group - member0);
        const u32 rows = queries * members;
        // Keys that some query of the tile sees.
        u32 least = 0, end = p.causal ? past + tile.y + queries : past + len;
        if (p.window && past + tile.y + 1 > p.window) least = past + tile.y + 1 - p.window;
        if (p.splits > 1) {
            least = max(least, split * p.split_keys);
            end = min(end, (split + 1) * p.split_keys);
        }
        const u32 begin = least / PIECE * PIECE;
        // Rows of one query see the same keys; where they do not, prefill.cu has the tensor cores' way.
        const bool mma = queries == 1 && p.keys.kind == p.values.kind && (p.keys.kind == KV_F16 || p.keys.kind == KV_BF16) && dk == dv &&
                         (dk == 64 || dk == 128) && p.batch.page_shift >= 4;
        if (mma) {
            const Tile part = {(u32)sequence, kv_head, (u32)tile.y, past, first + tile.y, member0, members, group, begin, least, end};
            if (p.keys.kind == KV_F16)
                dk == 64 ? attend_tile<Half, 64>(p, part, member0 == 0, memory, row_max, row_sum)
                         : attend_tile<Half, 128>(p, part, member0 == 0, memory, row_max, row_sum);
            else
                dk == 64 ? attend_tile<Brain, 64>(p, part, member0 == 0, memory, row_max, row_sum)
                         : attend_tile<Brain, 128>(p, part, member0 == 0, memory, row_max, row_sum);
            // Behind what the warps left.
            out = memory + ATTEND_THREADS / 32 * ROWS * (2 + dk + 8);
        } else if (member0 == 0)
            await_earlier();
        for (u32 i = tid; !mma && i < rows * dk; i += ATTEND_THREADS) {
            u32 r = i / dk, c = i % dk;
            u32 token = first + tile.y + r / members, head = kv_head * group + member0 + r % members;
            qs[i] = p.q[((u64)token * p.heads + head) * dk + c] * p.scale;
        }
        if (!mma) {
            for (u32 i = tid; i < rows * dv; i += ATTEND_THREADS) out[i] = 0.f;
            if (tid < ROWS) row_max[tid] = -INF, row_sum[tid] = 0.f;
        }
        for (u32 k0 = mma ? end : least; k0 < end; k0 += PIECE) {
            const u32 n = min((u32)PIECE, end - k0);
            __syncthreads();
            for (u32 i = tid; i < n * dk; i += ATTEND_THREADS) {
                u32 key = i / dk, c = i % dk;
                ks[key * (dk + 1) + c] = store_get(p.keys, cache_row(p.batch, sequence, kv_head, k0 + key), kv_head, c);
            }
            for (u32 i = tid; i < n * dv; i += ATTEND_THREADS) {
                u32 key = i / dv, c = i % dv;
                vs[i] = store_get(p.values, cache_row(p.batch, sequence, kv_head, k0 + key), kv_head, c);
            }
            if (p.keys.lost && tid < n) {
                const u64 row = cache_row(p.batch, sequence, kv_head, k0 + tid);
                lost[tid] = p.keys.lost[row] | p.values.lost[row];
            }
            __syncthreads();
            // A warp a row, a lane a key.
            for (u32 r = warp; r < rows; r += ATTEND_THREADS / 32) {
                u32 at = past + tile.y + r / members, key = k0 + lane;
                bool seen = lane < n && (!p.causal || key <= at) && (!p.window || key + p.window > at);
                float s = 0.f;
                if (seen) {
                    const float* q = qs + r * dk;
                    const float* k = ks + lane * (dk + 1);
                    for (u32 c = 0; c < dk; c++) s = fmaf(q[c], k[c], s);
                    if (p.softcap > 0.f) s = p.softcap * tanhf(s / p.softcap);
                    if (p.bias) {
                        u32 head = kv_head * group + member0 + r % members;
                        u64 b = sequence * p.bias_stride[0] + head * p.bias_stride[1] +
                                (tile.y + r / members) * p.bias_stride[2] + key * p.bias_stride[3];
                        s += key < p.bias_keys ? p.bias[b] : -INF;
                    }
                    if (p.keys.lost && lost[lane]) s = QUIET_NAN;
                }
                float piece_max = warp_max(seen ? s : -INF);
                float largest = fmaxf(row_max[r], piece_max);
                // Nothing seen yet: any finite maximum will do.
                float base = largest == -INF ? 0.f : largest;
                float e = seen ? expf(s - base) : 0.f;
                float sum = warp_sum(e);
                scores[r * (PIECE + 1) + lane] = e;
                if (lane == 0) {
                    float keep = row_max[r] == -INF ? 0.f : expf(row_max[r] - base);
                    row_scale[r] = keep;
                    row_sum[r] = row_sum[r] * keep + sum;
                    row_max[r] = largest;
                }
            }
            __syncthreads();
            for (u32 i = tid; i < rows * dv; i += ATTEND_THREADS) {
                u32 r = i / dv, c = i % dv;
                float o = out[i] * row_scale[r];
                // What the row does not see may be a NaN, which a weight of 0 does not take away.
                const u32 at = past + tile.y + r / members;
                const u32 last = p.causal ? min(n, at + 1 > k0 ? at + 1 - k0 : 0u) : n;
                u32 key = p.window && at + 1 > k0 + p.window ? at + 1 - k0 - p.window : 0;
                for (; key < last; key++) o = fmaf(scores[r * (PIECE + 1) + key], vs[key * dv + c], o);
                out[i] = o;
            }
        }
        __syncthreads();
        for (u32 i = tid; i < rows * dv; i += ATTEND_THREADS) {
            u32 r = i / dv, c = i % dv;
            u32 token = first + tile.y + r / members, head = kv_head * group + member0 + r % members;
            u64 at = (u64)token * p.heads + head;
            if (p.splits > 1) {
                float* part = p.part + (at * p.splits + split) * (dv + 2);
                part[2 + c] = out[i];
                if (c == 0) part[0] = row_max[r], part[1] = row_sum[r];
                continue;
            }
            float m = row_max[r], sum = row_sum[r], o = out[i];
            if (p.sink || p.zero_sink) {
                float s = p.sink ? p.sink[head] : 0.f;
                float largest = fmaxf(m, s);
                float keep = m == -INF ? 0.f : expf(m - largest);
                sum = sum * keep + expf(s - largest);
                o *= keep;
            }
            p.y[at * dv + c] = o / sum;
        }
        __syncthreads();
    }
}

#define MOST_SPLITS 64  // `Splits::MOST` of attention.rs

// A block a head of a token: the splits in order, all loads of a thread on their way at once.
extern "C" __global__ void __launch_bounds__(128) attention_join(const __grid_constant__ AttendParams p) {
    in_order();
    __shared__ float shares[MOST_SPLITS];
    const u32 dv = p.values.head_size, lane = threadIdx.x % 32;
    const u64 at = (u64)blockIdx.x * p.heads + blockIdx.y;
    const float* part = p.part + at * p.splits * (dv + 2);
    if (threadIdx.x < 32) {
        float most[MOST_SPLITS / 32], sums[MOST_SPLITS / 32], largest = -INF, sum = 0.f;
#pragma unroll
        for (u32 i = 0; i < MOST_SPLITS / 32; i++) {
            const u32 s = i * 32 + lane;
            most[i] = s < p.splits ? part[s * (dv + 2)] : -INF;
            sums[i] = s < p.splits ? part[s * (dv + 2) + 1] : 0.f;
            largest = fmaxf(largest, most[i]);
        }
        largest = warp_max(largest);
        const float sink = p.sink ? p.sink[blockIdx.y] : 0.f;
        const bool has_sink = p.sink || p.zero_sink;
        if (has_sink) largest = fmaxf(largest, sink);
        // Nothing seen: any finite maximum will do.
        const float base = largest == -INF ? 0.f : largest;
#pragma unroll
        for (u32 i = 0; i < MOST_SPLITS / 32; i++) {
            most[i] = most[i] == -INF ? 0.f : expf(most[i] - base);
            sum += sums[i] * most[i];
        }
        sum = warp_sum(sum) + (has_sink ? expf(sink - base) : 0.f);
#pragma unroll
        for (u32 i = 0; i < MOST_SPLITS / 32; i++) shares[i * 32 + lane] = most[i] / sum;
    }
    // The first splits' values do not wait for the shares.
    constexpr u32 FIRST = 8;
    float first[FIRST];
    const u32 c0 = min(threadIdx.x, dv - 1);
#pragma unroll
    for (u32 s = 0; s < FIRST; s++) first[s] = s < p.splits ? part[s * (dv + 2) + 2 + c0] : 0.f;
    __syncthreads();
    for (u32 c = threadIdx.x; c < dv; c += 128) {
        float o = 0.f;
        // A split that saw nothing has no values.
        auto add = [&](u32 s, float v) {
            if (shares[s] != 0.f) o = fmaf(v, shares[s], o);
        };
#pragma unroll
        for (u32 s = 0; s < FIRST; s++)
            if (s < p.splits) add(s, c == threadIdx.x ? first[s] : part[s * (dv + 2) + 2 + c]);
#pragma unroll 8
        for (u32 s = FIRST; s < p.splits; s++) add(s, part[s * (dv + 2) + 2 + c]);
        p.y[at * dv + c] = o;
    }
}
