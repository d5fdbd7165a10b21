// What every kernel shares: integer names, float conversions, loads of quantized weights, warp reductions, and the
// tensor-core instructions as inline PTX. No toolkit header is included: NVRTC packages carry none.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INF __int_as_float(0x7f800000)
#define QUIET_NAN __int_as_float(0x7fc00000)

// ---- float types in memory -----------------------------------------------------------------------------------------

enum FloatKind : u32 { F32 = 0, F16 = 1, BF16 = 2 };

__device__ __forceinline__ float f16_to_f32(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ float bf16_to_f32(u16 h) { return __uint_as_float((u32)h << 16); }

__device__ __forceinline__ u16 f32_to_f16(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

__device__ __forceinline__ u16 f32_to_bf16(float f) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

// Element `i` of floats stored as `kind`; the branch is the same for a whole grid.
__device__ __forceinline__ float load_float(const void* p, u64 i, u32 kind) {
    if (kind == F32) return ((const float*)p)[i];
    u16 h = ((const u16*)p)[i];
    return kind == F16 ? f16_to_f32(h) : bf16_to_f32(h);
}

__device__ __forceinline__ void store_float(void* p, u64 i, u32 kind, float v) {
    if (kind == F32)
        ((float*)p)[i] = v;
    else
        ((u16*)p)[i] = kind == F16 ? f32_to_f16(v) : f32_to_bf16(v);
}

// Operands of the tensor cores. `pack` puts `lo` into the low half.
struct Half {
    static constexpr bool EIGHT = true;  // 8-bit codes fit beside a power of two
    static constexpr u32 EXPONENT = 0x7c00;  // all of it is set in what is no finite number
    static __device__ __forceinline__ float wide(u16 h) { return f16_to_f32(h); }
    static __device__ __forceinline__ u32 pack(float lo, float hi) {
        u32 d;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
        return d;
    }
    static __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

struct Brain {
    static constexpr bool EIGHT = false;
    static constexpr u32 EXPONENT = 0x7f80;
    static __device__ __forceinline__ float wide(u16 h) { return bf16_to_f32(h); }
    static __device__ __forceinline__ u32 pack(float lo, float hi) {
        u32 d;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
        return d;
    }
    static __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

// ---- shared memory -------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix4_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// 16 bytes from global to shared memory, past the registers.
__device__ __forceinline__ void cp_async16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// The same; zeros where `live` is false.
__device__ __forceinline__ void bring16(u32 to, const void* from, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Shows what this thread wrote to shared memory to the tensor cores, once the block has met.
__device__ __forceinline__ void fence_async() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// A barrier in shared memory (cards of 9.0 and newer): `count` arrivals end a phase.
__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

// Whether the phase of that parity is over.
__device__ __forceinline__ bool barrier_passed(u32 at, u32 parity) {
    u32 passed;
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(passed)
                 : "r"(at), "r"(parity)
                 : "memory");
    return passed;
}

__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
    while (!barrier_passed(at, parity)) {
    }
}

// Byte of a 16-byte piece of a line of 128; pieces are exchanged so that no two rows of 8 meet in a bank.
__device__ __forceinline__ u32 at16(u32 row, u32 piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

// ---- launches that overlap ------------------------------------------------------------------------------------------

// Lets the next launch of the stream start where there is room; it sees what this one wrote after `await_earlier` alone.
__device__ __forceinline__ void allow_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for everything launched before. A kernel launched early calls it in every block, so that the order is kept from
// launch to launch.
__device__ __forceinline__ void await_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// How a kernel begins that has nothing to do before its inputs are there.
__device__ __forceinline__ void in_order() {
    allow_next();
    await_earlier();
}

// ---- reductions ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}

// Sum over the block, in every thread. `buffer` holds 32 floats and is free again on return.
__device__ __forceinline__ float block_sum(float v, float* buffer) {
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = v;
    __syncthreads();
    u32 warps = (blockDim.x + 31) / 32;
    v = threadIdx.x % 32 < warps ? buffer[threadIdx.x % 32] : 0.f;
    v = warp_sum(v);
    __syncthreads();
    return v;
}

__device__ __forceinline__ float block_max(float v, float* buffer) {
    v = warp_max(v);
    if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = v;
    __syncthreads();
    u32 warps = (blockDim.x + 31) / 32;
    v = threadIdx.x % 32 < warps ? buffer[threadIdx.x % 32] : -INF;
    v = warp_max(v);
    __syncthreads();
    return v;
}

// ---- paged caches -------------------------------------------------------------------------------------------------

// Mirrors `Batch`: the sequences of a step.
struct Batch {
    const int* token_sequence;  // [tokens]
    const int* first;           // [sequences]
    const int* len;
    const int* past;
    const int* table_start;     // where the pages of a sequence begin in `pages`
    const int* pages;
    u32 page_shift;
    u32 kv_heads;
};

__device__ __forceinline__ u64 cache_row(const Batch& b, int sequence, u32 head, u32 position) {
    u32 page = (u32)b.pages[b.table_start[sequence] + (position >> b.page_shift)];
    return (((u64)page * b.kv_heads + head) << b.page_shift) + (position & ((1u << b.page_shift) - 1));
}

enum StoreKind : u32 { KV_F32 = 0, KV_F16 = 1, KV_BF16 = 2, KV_I8 = 3, KV_I4 = 4, KV_I8_ROW = 5 };

// Keys or values of a layer: [pages, kv_heads, page_size, head_size]. Mirrors `Store`.
struct Store {
    u8* rows;
    const float* scales;  // one, or one per head and channel
    u8* lost;             // of codes without a scale of their own: whether a row was given a NaN, which no code is
    u32 kind;
    u32 per_channel;
    u32 head_size;
};

// Mirrors `AttendParams`.
struct AttendParams {
    Batch batch;
    Store keys;
    Store values;
    const float* q;       // [tokens, heads, head_size]
    float* y;             // [tokens, heads, v_head_size]
    float* part;          // [tokens, heads, splits, v_head_size + 2] where keys are split
    const int2* tiles;    // sequence and first new token of each tile
    const float* sink;    // [heads], or null
    const float* bias;    // or null
    u64 bias_stride[4];   // sequence, head, new token, key
    u32 bias_keys;
    u32 heads;
    u32 queries;          // of a tile
    u32 window;           // 0: all keys
    u32 causal;
    u32 zero_sink;        // a logit of 0 joins the denominator
    u32 splits;
    u32 split_keys;       // keys of a split; a multiple of PIECE
    float scale;
    float softcap;
};

// ---- normalisation -------------------------------------------------------------------------------------------------

// y = norm(x [+ skip + bias]) * gamma [+ beta] over rows of `width`; `sum` receives what was normalised. Mirrors
// `NormParams`.
struct NormParams {
    const float* x;
    const float* skip;
    const void* bias;
    const void* gamma;
    const void* beta;
    float* y;
    float* sum;
    u32 width;
    u32 bias_float;
    u32 gamma_float;
    u32 beta_float;
    u32 layer;  // subtract the mean
    float eps;
};

// Four floats from `i` on, a multiple of 4.
__device__ __forceinline__ float4 load_float4(const void* p, u32 i, u32 kind) {
    if (kind == F32) return *(const float4*)((const float*)p + i);
    const uint2 v = *(const uint2*)((const u16*)p + i);
    const u16 h[4] = {(u16)v.x, (u16)(v.x >> 16), (u16)v.y, (u16)(v.y >> 16)};
    return kind == F16 ? make_float4(f16_to_f32(h[0]), f16_to_f32(h[1]), f16_to_f32(h[2]), f16_to_f32(h[3]))
                       : make_float4(bf16_to_f32(h[0]), bf16_to_f32(h[1]), bf16_to_f32(h[2]), bf16_to_f32(h[3]));
}

__device__ __forceinline__ void add4(float4& a, float4 b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }

// Four numbers of a row before its norm.
__device__ __forceinline__ float4 before_norm(const NormParams& p, u64 row, u32 column) {
    float4 v = *(const float4*)(p.x + row * p.width + column);
    if (p.skip) add4(v, *(const float4*)(p.skip + row * p.width + column));
    if (p.bias) add4(v, load_float4(p.bias, column, p.bias_float));
    return v;
}

// ---- quantized weights ---------------------------------------------------------------------------------------------

enum ZeroKind : u32 { ZERO_DEFAULT = 0, ZERO_PER_BLOCK = 1, ZERO_ACROSS_ROWS = 2, ZERO_FLOAT = 3 };

// A bank of matrices [rows, cols] of one format, as they lie in the file: integer codes, least-significant bits first
// along cols, or 16- and 32-bit floats. Mirrors `Weights` in weights.rs.
struct Weights {
    const u8* codes;
    const void* scales;
    const void* zeros;
    u64 codes_stride;   // bytes from one matrix to the next
    u64 scales_stride;  // elements from one matrix to the next
    u64 zeros_stride;   // bytes of packed zero points, or elements of float ones
    u32 rows;
    u32 cols;
    u32 row_bytes;
    u32 blocks;       // scales of a row
    u32 block_shift;  // log2 of the columns that share a scale; 31 where a row has one scale
    u32 zero_row_bytes;
    u32 zero_kind;
    u32 zero_float;   // FloatKind of float zero points
    u32 scale_float;  // FloatKind of the scales; of the weights themselves where they are floats
    u32 aligned;      // whether every run of 16 columns starts at a multiple of its own bytes
};

// A run is 16 columns: no block is shorter, so one scale and one zero point serve it.
#define RUN 16

template <int W>
__device__ __forceinline__ float weight_scale(const Weights& w, u64 matrix, u32 row, u32 column) {
    if constexpr (W >= 16) return 1.f;
    u64 at = matrix * w.scales_stride + (u64)row * w.blocks + (column >> w.block_shift);
    return load_float(w.scales, at, w.scale_float);
}

template <int W>
__device__ __forceinline__ float weight_zero(const Weights& w, u64 matrix, u32 row, u32 column) {
    if constexpr (W >= 16) return 0.f;
    if (w.zero_kind == ZERO_DEFAULT) return (float)(1u << (W - 1) % 32);
    u32 block = column >> w.block_shift;
    if (w.zero_kind == ZERO_FLOAT)
        return load_float(w.zeros, matrix * w.zeros_stride + (u64)row * w.blocks + block, w.zero_float);
    const u8* zeros = (const u8*)w.zeros + matrix * w.zeros_stride;
    constexpr u32 per_byte = W < 16 ? 8 / W : 1, mask = (1u << (W < 16 ? W : 0)) - 1;
    u32 at = row;
    if (w.zero_kind == ZERO_PER_BLOCK) {
        zeros += (u64)row * w.zero_row_bytes;
        at = block;
    }
    return (float)((zeros[at / per_byte] >> (W * (at % per_byte))) & mask);
}

// The stored bytes of a run.
template <int W>
struct Run {
    u32 word[W / 2];

    // `guard` is how many columns of the run exist; bytes of columns that do not are not read.
    __device__ __forceinline__ void load(const Weights& w, u64 matrix, u32 row, u32 column, u32 guard) {
        const u8* p = w.codes + matrix * w.codes_stride + (u64)row * w.row_bytes + (u64)column * W / 8;
        if (w.aligned && guard >= RUN) {
            if constexpr (W == 2) {
                word[0] = *(const u32*)p;
            } else if constexpr (W == 4) {
                uint2 v = *(const uint2*)p;
                word[0] = v.x, word[1] = v.y;
            } else {
#pragma unroll
                for (int i = 0; i < W / 8; i++) {
                    uint4 v = ((const uint4*)p)[i];
                    word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
                }
            }
            return;
        }
        u32 bytes = guard >= RUN ? 2 * W : (guard * W + 7) / 8;
#pragma unroll
        for (int i = 0; i < W / 2; i++) {
            u32 v = 0;
            for (u32 j = 0; j < 4; j++)
                if (4 * i + j < bytes) v |= (u32)p[4 * i + j] << (8 * j);
            word[i] = v;
        }
    }

    // Stored number `i`, unscaled: the code, or the float. `i` is a constant after unrolling. 2^23 + code is exact in a
    // float, so that the conversion is an OR and a subtraction.
    __device__ __forceinline__ float get(int i, u32 kind) const {
        if constexpr (W == 32) {
            return __uint_as_float(word[i]);
        } else if constexpr (W == 16) {
            u32 v = word[i / 2];
            if (kind == BF16) return __uint_as_float(i % 2 ? v & 0xffff0000u : v << 16);
            return f16_to_f32((u16)(i % 2 ? v >> 16 : v & 0xffffu));
        } else {
            constexpr int per_word = 32 / W;
            u32 code = (word[i / per_word] >> (W * (i % per_word))) & ((1u << W) - 1);
            return __uint_as_float(0x4b000000u | code) - 8388608.f;
        }
    }
};

// ---- codes as operands of the tensor cores -------------------------------------------------------------------------

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c, Half) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c, Brain) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// A number with room for a code in its last bits: 1024 as float16, 128 as bfloat16. A code `at` bits above the last one
// counts 2^at, which one fma takes back together with the zero point; everything about it is exact.
template <class T>
struct Magic;
template <>
struct Magic<Half> {
    static constexpr u32 ROOM = 8;  // bits for codes, of 10
    static constexpr u32 BASE = 0x6400, ONE = 0x3c00, STEP = 1 << 10;
};
template <>
struct Magic<Brain> {
    static constexpr u32 ROOM = 6;  // bits for codes, of 7
    static constexpr u32 BASE = 0x4300, ONE = 0x3f80, STEP = 1 << 7;
};

__device__ __forceinline__ u32 masked(u32 v, u32 mask, u32 base) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(v), "r"(mask), "r"(base));  // (v & mask) | base
    return d;
}

// Codes that are read once; the 256 bytes around them come to the second-level cache with them.
__device__ __forceinline__ void ahead16(u32 (&v)[4], const void* p) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "l"(p));
}
__device__ __forceinline__ void ahead8(u32 (&v)[2], const void* p) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(p));
}

// UNIT codes as UNIT / 2 pairs of code less zero point. Pair i holds the codes that `first` and `second` name.
template <int W, int UNIT, class T>
struct Unit {
    static constexpr int BYTES = UNIT * W / 8;
    static constexpr int SPAN = UNIT < 32 / W ? UNIT : 32 / W;  // codes of a word
    u32 word[(BYTES + 3) / 4];

    static __device__ __forceinline__ constexpr int first(int pair) {
        return W == 8 ? 2 * pair : pair / (SPAN / 2) * SPAN + pair % (SPAN / 2);
    }
    static __device__ __forceinline__ constexpr int second(int pair) {
        return W == 8 ? 2 * pair + 1 : first(pair) + SPAN / 2;
    }

    __device__ __forceinline__ void load(const u8* p) {
        if constexpr (BYTES == 16) {
            uint4 v = *(const uint4*)p;
            word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
        } else if constexpr (BYTES == 8) {
            uint2 v = *(const uint2*)p;
            word[0] = v.x, word[1] = v.y;
        } else if constexpr (BYTES == 4) {
            word[0] = *(const u32*)p;
        } else if constexpr (BYTES == 2) {
            u32 v = *(const u16*)p;
            word[0] = (v & 0xff) | (v & 0xff00) << 8;
        } else {
            u32 v = *p;
            word[0] = (v & 0xf) | (v & 0xf0) << 12;
        }
    }

    // As `load`; the 256 bytes around codes of 8 bytes and more come to the second-level cache with them.
    __device__ __forceinline__ void load_ahead(const u8* p) {
        if constexpr (BYTES == 16)
            ahead16(word, p);
        else if constexpr (BYTES == 8)
            ahead8(word, p);
        else
            load(p);
    }

    __device__ __forceinline__ void zero() {
#pragma unroll
        for (int i = 0; i < (BYTES + 3) / 4; i++) word[i] = 0;
    }

    __device__ __forceinline__ void pairs(u32 (&out)[UNIT / 2], u32 zero_point) const {
        constexpr u32 BASE = Magic<T>::BASE, STEP = Magic<T>::STEP;
        const u32 zeros = zero_point * 0x10001u;
        if constexpr (W == 8) {
#pragma unroll
            for (int i = 0; i < UNIT / 2; i++) {
                u32 v = word[i / 2];
                if constexpr (T::EIGHT) {
                    u32 pair = __byte_perm(v, BASE * 0x10001u, i % 2 ? 0x5352 : 0x5150);
                    out[i] = fma2(pair, Magic<T>::ONE * 0x10001u, (BASE | 0x8000u) * 0x10001u + zeros, T());
                } else {
                    // bfloat16 has no room for a code beside the magic number, but for the difference.
                    u32 lo = (v >> (16 * (i % 2))) & 255, hi = (v >> (16 * (i % 2) + 8)) & 255;
                    float less = 8388608.f + (float)zero_point;
                    out[i] = T::pack(__uint_as_float(0x4b000000u | lo) - less, __uint_as_float(0x4b000000u | hi) - less);
                }
            }
        } else {
            constexpr u32 mask = ((1u << W) - 1) * 0x10001u;
            constexpr int PER_SHIFT = Magic<T>::ROOM / W;
#pragma unroll
            for (int i = 0; i < UNIT / 2; i++) {
                const int code = i % (SPAN / 2), at = W * (code % PER_SHIFT);
                u32 v = word[i / (SPAN / 2)] >> (W * (code / PER_SHIFT * PER_SHIFT));
                u32 pair = masked(v, mask << at, BASE * 0x10001u);
                u32 minus = ((BASE | 0x8000u) - STEP * at) * 0x10001u + (zeros << at);
                out[i] = fma2(pair, (Magic<T>::ONE - STEP * at) * 0x10001u, minus, T());
            }
        }
    }
};

// ---- activations between the products of an expert -----------------------------------------------------------------

enum ActivationKind : u32 { ACT_IDENTITY = 0, ACT_RELU = 1, ACT_GELU = 2, ACT_SILU = 3, ACT_SWIGLU = 4 };
enum GateKind : u32 { GATE_NONE = 0, GATE_INTERLEAVED = 1, GATE_CONCATENATED = 2, GATE_SEPARATE = 3 };

struct Activation {
    u32 kind;
    u32 gate;
    float alpha;
    float beta;
    float limit;
};

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__device__ __forceinline__ float gelu_tanh(float x) {
    return 0.5f * x * (1.f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// `g` is the gate, `l` the linear part (unused without a gate).
__device__ __forceinline__ float activate(const Activation& a, float g, float l) {
    float v;
    switch (a.kind) {
        case ACT_RELU: v = g > 0.f ? g : (g == g ? 0.f : g); break;
        case ACT_GELU: v = gelu_tanh(g); break;
        case ACT_SILU: v = g * sigmoid(g); break;
        case ACT_SWIGLU: {
            // Comparisons that a NaN fails keep it a NaN.
            g = g > a.limit ? a.limit : g;
            l = l > a.limit ? a.limit : (l < -a.limit ? -a.limit : l);
            return g * sigmoid(a.alpha * g) * (l + a.beta);
        }
        default: v = g;
    }
    return a.gate == GATE_NONE ? v : v * l;
}
