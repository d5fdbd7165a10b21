// Whole matrices of a bank as floats, for dense products. Compiled once per BITS (2, 4, 8: codes; 16, 32: floats).

#include "doyen.cuh"

// Mirrors `ExpandParams`.
struct ExpandParams {
    Weights w;
    void* y;    // [matrices, rows, cols] of `kind`
    u64 first;  // matrix
    u64 runs;   // of all matrices
    u32 kind;   // FloatKind
};

extern "C" __global__ void __launch_bounds__(256) expand(const __grid_constant__ ExpandParams p) {
    in_order();
    const u32 line = (p.w.cols + RUN - 1) / RUN;
    for (u64 at = blockIdx.x * 256ull + threadIdx.x; at < p.runs; at += gridDim.x * 256ull) {
        const u64 row = at / line, matrix = p.first + row / p.w.rows;
        const u32 column = at % line * RUN, own = row % p.w.rows, guard = p.w.cols - column;
        Run<BITS> run;
        run.load(p.w, matrix, own, column, guard);
        const float s = weight_scale<BITS>(p.w, matrix, own, column), z = weight_zero<BITS>(p.w, matrix, own, column);
#pragma unroll
        for (int i = 0; i < RUN; i++)
            if (i < guard) store_float(p.y, row * p.w.cols + column + i, p.kind, (run.get(i, p.w.scale_float) - z) * s);
    }
}
