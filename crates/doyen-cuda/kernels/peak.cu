// What the tensor cores do at most through mma: products of registers, for `doyen doctor`.

#include "doyen.cuh"

// Mirrors `PeakParams`.
struct PeakParams {
    float* y;  // a number a block, so that nothing is left out
    u32 rounds;
};

#define CHAINS 8  // products that do not wait for each other

extern "C" __global__ void __launch_bounds__(256) peak(const __grid_constant__ PeakParams p) {
    in_order();
    float sum[CHAINS][4];
#pragma unroll
    for (int c = 0; c < CHAINS; c++) sum[c][0] = sum[c][1] = sum[c][2] = sum[c][3] = 0.f;
    const u32 a[4] = {threadIdx.x, threadIdx.x * 3, threadIdx.x * 5, threadIdx.x * 7};
    for (u32 i = 0; i < p.rounds; i++)
#pragma unroll
        for (int c = 0; c < CHAINS; c++) Brain::mma(sum[c], a, i + c, i - c);
    float total = 0.f;
#pragma unroll
    for (int c = 0; c < CHAINS; c++) total += sum[c][0] + sum[c][1] + sum[c][2] + sum[c][3];
    total = warp_sum(total);
    if (threadIdx.x == 0) p.y[blockIdx.x] = total;
}
