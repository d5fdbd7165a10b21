// Dense products of a few experts at a time: which tiles are theirs, and the products in float32.

#include "doyen.cuh"

// Mirrors `SliceParams`.
struct SliceParams {
    const int2* tiles;  // expert and first place of every tile, experts ascending
    const int* tile_count;
    int2* own;          // tiles of the experts `begin .. end`, which count from 0 there
    int* own_count;
    u32 begin;
    u32 end;
};

// One block.
extern "C" __global__ void __launch_bounds__(256) slice_tiles(const __grid_constant__ SliceParams p) {
    in_order();
    __shared__ float buffer[32];
    const u32 count = *p.tile_count;
    u32 before = 0, inside = 0;
    for (u32 i = threadIdx.x; i < count; i += 256) {
        const u32 expert = p.tiles[i].x;
        before += expert < p.begin;
        inside += expert >= p.begin && expert < p.end;
    }
    // Counts below 2^24 are exact as floats; the host allows no more routes.
    before = (u32)block_sum((float)before, buffer);
    inside = (u32)block_sum((float)inside, buffer);
    for (u32 i = threadIdx.x; i < inside; i += 256) {
        const int2 tile = p.tiles[before + i];
        p.own[i] = make_int2(tile.x - (int)p.begin, tile.y);
    }
    if (threadIdx.x == 0) *p.own_count = inside;
}

// `GemmParams` of gemm.cu, the weights float32.
struct RowsParams {
    Weights w;
    const float* x;
    float* y;
    const void* bias;    // [experts, rows]
    const int* order;    // routes, those of an expert next to each other
    const int2* tiles;   // expert and first place in `order` of each tile
    const int* ends;     // end of each expert's places in `order`
    const int* tile_count;
    u64 x_stride;
    u64 y_stride;
    u32 bias_float;
    u32 m;
    u32 x_div;           // routes that share a row of x; 0: x is in the experts' order
    u32 y_by_route;      // rows of y are routes; otherwise places in `order`
};

#define TILE 16
#define WARPS 8

// A warp a row of weights, for the TILE rows of activations of a tile.
extern "C" __global__ void __launch_bounds__(32 * WARPS) dense_rows(const __grid_constant__ RowsParams p) {
    in_order();
    if ((int)blockIdx.y >= *p.tile_count) return;
    const int2 tile = p.tiles[blockIdx.y];
    const u32 row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= p.w.rows) return;
    const u32 count = min((u32)TILE, (u32)(p.ends[tile.x] - tile.y));
    const float* w = (const float*)(p.w.codes + tile.x * p.w.codes_stride) + (u64)row * p.w.cols;
    const float* x[TILE];
    float sum[TILE];
#pragma unroll
    for (u32 t = 0; t < TILE; t++) {
        const u32 place = tile.y + (t < count ? t : 0);
        x[t] = p.x + (p.x_div ? p.order[place] / p.x_div : place) * p.x_stride;
        sum[t] = 0.f;
    }
    for (u32 c = lane; c < p.w.cols; c += 32) {
        const float v = w[c];
#pragma unroll
        for (u32 t = 0; t < TILE; t++) sum[t] = fmaf(v, x[t][c], sum[t]);
    }
    const float b = p.bias ? load_float(p.bias, (u64)tile.x * p.w.rows + row, p.bias_float) : 0.f;
#pragma unroll
    for (u32 t = 0; t < TILE; t++) {
        const float total = warp_sum(sum[t]);
        if (lane || t >= count) continue;
        const u64 at = p.y_by_route ? p.order[tile.y + t] : tile.y + t;
        p.y[at * p.y_stride + row] = total + b;
    }
}
