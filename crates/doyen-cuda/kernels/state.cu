// Nodes whose past is a state of fixed size: causal convolution and linear attention; float32.
//
// A step reads a sequence's state in one slot and writes it to another, which no other sequence of the step uses: blocks never
// read what blocks write.

#include "doyen.cuh"

// The sequences of a step and the slots of one state. Mirrors `Spans`.
struct Spans {
    const int* token_sequence;  // [tokens]
    const int* first;           // [sequences]
    const int* len;
    const int* reads;           // slot before the step, -1 for zeros
    const int* writes;          // slot after it
    float* states;              // [slots, size]
    u64 size;
    u32 tokens;
    u32 sequences;
};

// Mirrors `ConvParams`. The state is [held, channels], oldest first.
struct ConvParams {
    Spans at;
    const float* x;      // [tokens, channels]
    float* y;
    const void* weight;  // [channels, taps]
    const void* bias;    // [channels] or null
    u32 weight_float;
    u32 bias_float;
    u32 channels;
    u32 taps;
    u32 dilation;
    u32 silu;
};

// Row `t` of a sequence's state and then its input.
__device__ __forceinline__ float conv_input(const ConvParams& p, u32 sequence, u32 t, u32 held, u32 c) {
    if (t >= held) return p.x[(u64)(p.at.first[sequence] + t - held) * p.channels + c];
    const int slot = p.at.reads[sequence];
    return slot < 0 ? 0.f : p.at.states[slot * p.at.size + (u64)t * p.channels + c];
}

// Rows are the tokens, then the rows of every sequence's state; a thread a channel.
extern "C" __global__ void __launch_bounds__(256) causal_conv(const __grid_constant__ ConvParams p) {
    in_order();
    const u32 c = blockIdx.x * 256 + threadIdx.x;
    if (c >= p.channels) return;
    const u32 held = (p.taps - 1) * p.dilation;
    for (u32 row = blockIdx.y; row < p.at.tokens + p.at.sequences * held; row += gridDim.y) {
        if (row >= p.at.tokens) {
            const u32 sequence = (row - p.at.tokens) / held, t = (row - p.at.tokens) % held;
            p.at.states[p.at.writes[sequence] * p.at.size + (u64)t * p.channels + c] =
                conv_input(p, sequence, p.at.len[sequence] + t, held, c);
            continue;
        }
        const u32 sequence = p.at.token_sequence[row], t = row - p.at.first[sequence];
        float sum = p.bias ? load_float(p.bias, c, p.bias_float) : 0.f;
        for (u32 j = 0; j < p.taps; j++)
            sum = fmaf(load_float(p.weight, (u64)c * p.taps + j, p.weight_float),
                       conv_input(p, sequence, t + j * p.dilation, held, c), sum);
        p.y[(u64)row * p.channels + c] = p.silu ? sum * sigmoid(sum) : sum;
    }
}

// Mirrors `LinearParams`. The state is [kv_heads, key_size, value_size].
struct LinearParams {
    Spans at;
    const float* query;  // [tokens, q_heads, key_size]
    const float* key;    // [tokens, key_heads, key_size]
    const float* value;  // [tokens, kv_heads, value_size]
    const float* decay;  // [tokens, kv_heads] or [tokens, kv_heads, key_size], in log space; null where nothing decays
    const float* beta;   // [tokens, betas]; null where nothing is corrected
    float* y;            // [tokens, heads, value_size]
    u32 q_heads;
    u32 key_heads;
    u32 kv_heads;
    u32 heads;
    u32 key_size;
    u32 value_size;
    u32 decay_per_key;
    u32 betas;
    float scale;
};

#define SCAN_WARPS 4

// What a lane needs of a token: KEPT of the key channels, and its value channel.
template <int KEPT>
struct Token {
    float key[KEPT], query[KEPT], factor[KEPT], value, beta;
};

// The key channel of a lane's element `r`: 4 in a row, so that LANES lanes read whole lines.
template <int LANES>
__device__ __forceinline__ u32 channel(u32 part, u32 r) {
    return r / 4 * (4 * LANES) + part * 4 + r % 4;
}

template <int LANES, int KEPT>
__device__ __forceinline__ void load_channels(float (&out)[KEPT], const float* from, u32 part, u32 size) {
#pragma unroll
    for (u32 r = 0; r < KEPT; r += 4) {
        const u32 c = channel<LANES>(part, r);
        if (size % 4 == 0) {
            const float4 v = c < size ? *(const float4*)(from + c) : make_float4(0.f, 0.f, 0.f, 0.f);
            out[r] = v.x, out[r + 1] = v.y, out[r + 2] = v.z, out[r + 3] = v.w;
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; i++) out[r + i] = c + i < size ? from[c + i] : 0.f;
        }
    }
}

template <int LANES>
__device__ __forceinline__ float lanes_sum(float v) {
#pragma unroll
    for (int o = LANES / 2; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}

template <int LANES, int KEPT>
__device__ __forceinline__ void load_token(Token<KEPT>& token, const LinearParams& p, u32 t, u32 head, u32 column, u32 part) {
    const u32 d = p.key_size;
    load_channels<LANES>(token.key, p.key + ((u64)t * p.key_heads + head / (p.kv_heads / p.key_heads)) * d, part, d);
    const u32 readers = p.heads / p.kv_heads;
    load_channels<LANES>(token.query, p.query + ((u64)t * p.q_heads + head * readers / (p.heads / p.q_heads)) * d, part, d);
    token.value = p.value[((u64)t * p.kv_heads + head) * p.value_size + column];
    token.beta = p.beta ? p.beta[(u64)t * p.betas + head % p.betas] : 1.f;
    if (!p.decay) return;
    if (p.decay_per_key)
        load_channels<LANES>(token.factor, p.decay + ((u64)t * p.kv_heads + head) * d, part, d);
    else
        token.factor[0] = p.decay[(u64)t * p.kv_heads + head];
}

// A lane group of LANES owns a value channel of a head through all tokens of a sequence, each lane KEPT of its key channels
// in registers; the next token is on its way while one is computed.
template <int LANES, int KEPT>
__device__ __forceinline__ void scan(const LinearParams& p) {
    const u32 lane = threadIdx.x % 32, part = lane % LANES;
    const u32 own = (blockIdx.x * SCAN_WARPS + threadIdx.x / 32) * (32 / LANES) + lane / LANES;
    const bool live = own < p.value_size;
    // Lanes past the channels do the last one's work and keep nothing.
    const u32 column = live ? own : p.value_size - 1, head = blockIdx.y, sequence = blockIdx.z;
    const u32 first = p.at.first[sequence], len = p.at.len[sequence];
    const u64 place = (u64)head * p.key_size * p.value_size + column;
    const int slot = p.at.reads[sequence];
    float s[KEPT];
#pragma unroll
    for (u32 r = 0; r < KEPT; r++) {
        const u32 c = channel<LANES>(part, r);
        s[r] = slot >= 0 && c < p.key_size ? p.at.states[slot * p.at.size + place + (u64)c * p.value_size] : 0.f;
    }
    const u32 readers = p.heads / p.kv_heads;
    Token<KEPT> token;
    if (len) load_token<LANES>(token, p, first, head, column, part);
    for (u32 t = first; t < first + len; t++) {
        Token<KEPT> next;
        if (t + 1 < first + len) load_token<LANES>(next, p, t + 1, head, column, part);
        if (p.decay) {
            if (!p.decay_per_key) {
                const float f = expf(token.factor[0]);
#pragma unroll
                for (u32 r = 0; r < KEPT; r++) s[r] *= f;
            } else {
#pragma unroll
                for (u32 r = 0; r < KEPT; r++) s[r] *= expf(token.factor[r]);
            }
        }
        float delta = token.value;
        if (p.beta) {
            float said = 0.f;
#pragma unroll
            for (u32 r = 0; r < KEPT; r++) said = fmaf(s[r], token.key[r], said);
            delta = token.beta * (delta - lanes_sum<LANES>(said));
        }
#pragma unroll
        for (u32 r = 0; r < KEPT; r++) s[r] = fmaf(token.key[r], delta, s[r]);
        for (u32 i = 0; i < readers; i++) {
            const u32 out = head * readers + i;
            if (i) {
                const u32 q = out / (p.heads / p.q_heads);
                load_channels<LANES>(token.query, p.query + ((u64)t * p.q_heads + q) * p.key_size, part, p.key_size);
            }
            float answer = 0.f;
#pragma unroll
            for (u32 r = 0; r < KEPT; r++) answer = fmaf(s[r], token.query[r], answer);
            answer = lanes_sum<LANES>(answer);
            if (live && part == 0) p.y[((u64)t * p.heads + out) * p.value_size + column] = answer * p.scale;
        }
        token = next;
    }
    if (!live) return;
    float* after = p.at.states + p.at.writes[sequence] * p.at.size + place;
#pragma unroll
    for (u32 r = 0; r < KEPT; r++) {
        const u32 c = channel<LANES>(part, r);
        if (c < p.key_size) after[(u64)c * p.value_size] = s[r];
    }
}

// By the most key channels: blocks of SCAN_WARPS * 32 / LANES value channels, heads, sequences.
extern "C" __global__ void __launch_bounds__(128) linear_64(const __grid_constant__ LinearParams p) {
    in_order();
    scan<8, 8>(p);
}
extern "C" __global__ void __launch_bounds__(128) linear_128(const __grid_constant__ LinearParams p) {
    in_order();
    scan<8, 16>(p);
}
extern "C" __global__ void __launch_bounds__(128) linear_256(const __grid_constant__ LinearParams p) {
    in_order();
    scan<16, 16>(p);
}
extern "C" __global__ void __launch_bounds__(128) linear_512(const __grid_constant__ LinearParams p) {
    in_order();
    scan<32, 16>(p);
}

// Any number of key channels: a warp a value channel, the state where it is written.
extern "C" __global__ void __launch_bounds__(128) linear_any(const __grid_constant__ LinearParams p) {
    in_order();
    const u32 lane = threadIdx.x % 32, column = blockIdx.x * SCAN_WARPS + threadIdx.x / 32;
    const u32 head = blockIdx.y, sequence = blockIdx.z, d = p.key_size;
    if (column >= p.value_size) return;
    const u32 first = p.at.first[sequence], len = p.at.len[sequence], readers = p.heads / p.kv_heads;
    const u64 place = (u64)head * d * p.value_size + column;
    const int slot = p.at.reads[sequence];
    float* s = p.at.states + p.at.writes[sequence] * p.at.size + place;
    for (u32 c = lane; c < d; c += 32)
        s[(u64)c * p.value_size] = slot < 0 ? 0.f : p.at.states[slot * p.at.size + place + (u64)c * p.value_size];
    for (u32 t = first; t < first + len; t++) {
        const float* key = p.key + ((u64)t * p.key_heads + head / (p.kv_heads / p.key_heads)) * d;
        const float* decay = p.decay ? p.decay + ((u64)t * p.kv_heads + head) * (p.decay_per_key ? d : 1) : nullptr;
        float said = 0.f;
        for (u32 c = lane; c < d; c += 32) {
            float v = s[(u64)c * p.value_size];
            if (decay) s[(u64)c * p.value_size] = v *= expf(decay[p.decay_per_key ? c : 0]);
            said = fmaf(v, key[c], said);
        }
        float delta = p.value[((u64)t * p.kv_heads + head) * p.value_size + column];
        if (p.beta) delta = p.beta[(u64)t * p.betas + head % p.betas] * (delta - warp_sum(said));
        for (u32 c = lane; c < d; c += 32) s[(u64)c * p.value_size] = fmaf(key[c], delta, s[(u64)c * p.value_size]);
        for (u32 i = 0; i < readers; i++) {
            const u32 out = head * readers + i;
            const float* query = p.query + ((u64)t * p.q_heads + out / (p.heads / p.q_heads)) * d;
            float answer = 0.f;
            for (u32 c = lane; c < d; c += 32) answer = fmaf(s[(u64)c * p.value_size], query[c], answer);
            answer = warp_sum(answer);
            if (lane == 0) p.y[((u64)t * p.heads + out) * p.value_size + column] = answer * p.scale;
        }
    }
}
