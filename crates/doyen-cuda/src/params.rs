//! What kernels take: the structures of the CUDA files, field for field.
//!
//! Pointers are [`Addr`]s; the sizes are compared with the CUDA declarations by hand and pinned by a test below.

macro_rules! params {
    ($($name:ident),*) => { $(
        // Binding checks the extents of the operands when it fills them in.
        // SAFETY: `repr(C)` with the fields of the CUDA structure in its order, every field of the same size.
        unsafe impl Params for $name {}
    )* };
}
use params;

mod dense;
mod latent;
mod parts;
mod state;

pub(crate) use dense::{Expand, Mini, MiniExpand, MiniRouted, MiniTurn, Peak, Slice};
pub(crate) use latent::{Absorb, Latent};
pub(crate) use parts::{CopyRuns, Pick, Reduce, Rotate, Scatter, TopK};
pub(crate) use state::{Conv, GatedAdd, GatedNorm, Gates, Linear, Spans};

use crate::driver::{Addr, Params};

/// `Weights` of doyen.cuh: a bank of matrices of one format.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weights {
    pub(crate) codes: Addr,
    pub(crate) scales: Addr,
    pub(crate) zeros: Addr,
    pub(crate) codes_stride: u64,
    pub(crate) scales_stride: u64,
    pub(crate) zeros_stride: u64,
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    pub(crate) row_bytes: u32,
    pub(crate) blocks: u32,
    pub(crate) block_shift: u32,
    pub(crate) zero_row_bytes: u32,
    pub(crate) zero_kind: u32,
    pub(crate) zero_float: u32,
    pub(crate) scale_float: u32,
    pub(crate) aligned: u32,
}

/// `Activation` of doyen.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Activation {
    pub(crate) kind: u32,
    pub(crate) gate: u32,
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    pub(crate) limit: f32,
}

impl Activation {
    /// None at all.
    pub(crate) const IDENTITY: Self = Self { kind: 0, gate: 0, alpha: 1.0, beta: 0.0, limit: f32::INFINITY };
}

/// `GemvParams` of gemv.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Gemv {
    pub(crate) w: Weights,
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) bias: Addr,
    pub(crate) x_stride: u64,
    pub(crate) y_stride: u64,
    pub(crate) bias_float: u32,
    pub(crate) m: u32,
}

/// `RoutedParams` of gemv.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Routed {
    pub(crate) w: Weights,
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) bias: Addr,
    pub(crate) experts: Addr,
    pub(crate) mix: Addr,
    pub(crate) bias_float: u32,
    pub(crate) x_div: u32,
    pub(crate) routes: u32,
    pub(crate) k: u32,
    pub(crate) act: Activation,
}

/// `GemmParams` of gemm.cu, and `TileParams` of tile.cu, whose `x` is narrowed.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Gemm {
    pub(crate) w: Weights,
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) bias: Addr,
    pub(crate) order: Addr,
    pub(crate) tiles: Addr,
    pub(crate) ends: Addr,
    pub(crate) tile_count: Addr,
    pub(crate) x_stride: u64,
    pub(crate) y_stride: u64,
    pub(crate) bias_float: u32,
    pub(crate) m: u32,
    pub(crate) x_div: u32,
    pub(crate) y_by_route: u32,
}

/// `WideParams` of wide.cu, which begin with those of a [`Gemm`].
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Wide {
    pub(crate) gemm: Gemm,
    pub(crate) y_span: u32,
    pub(crate) act: Activation,
}

/// `NarrowWideParams` of wide.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct NarrowWide {
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) rows: u64,
    pub(crate) cols: u32,
}

/// `NarrowParams` of few.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Narrow {
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) runs: u64,
    pub(crate) block_shift: u32,
}

/// `FewParams` of few.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Few {
    pub(crate) w: Weights,
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) bias: Addr,
    pub(crate) experts: Addr,
    pub(crate) order: Addr,
    pub(crate) tiles: Addr,
    pub(crate) ends: Addr,
    pub(crate) tile_count: Addr,
    pub(crate) x_stride: u64,
    pub(crate) y_stride: u64,
    pub(crate) bias_float: u32,
    pub(crate) m: u32,
    pub(crate) x_div: u32,
    pub(crate) y_by_route: u32,
    pub(crate) narrowed: u32,
    pub(crate) split: u32,
    pub(crate) act: Activation,
}

/// `StreamParams` of stream.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Stream {
    pub(crate) w: Weights,
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) bias: Addr,
    pub(crate) experts: Addr,
    pub(crate) mix: Addr,
    pub(crate) x_stride: u64,
    pub(crate) y_stride: u64,
    pub(crate) bias_float: u32,
    pub(crate) m: u32,
    pub(crate) k: u32,
    pub(crate) split: u32,
    pub(crate) y_span: u32,
    pub(crate) act: Activation,
}

/// `EightParams` of eight.cu, which begin with those of a [`Gemm`].
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Eight {
    pub(crate) gemm: Gemm,
    pub(crate) narrowed: u32,
    pub(crate) split: u32,
    pub(crate) y_span: u32,
    pub(crate) act: Activation,
}

/// `FlowParams` of flow.cu, which begin with those of a [`Gemm`].
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Flow {
    pub(crate) gemm: Gemm,
    pub(crate) narrowed: u32,
    pub(crate) early: u32,
    pub(crate) slices: u32,
    pub(crate) lots: u32,
    pub(crate) turns: u32,
    pub(crate) stages: u32,
    pub(crate) act: Activation,
}

/// `RouteParams` of route.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Route {
    pub(crate) logits: Addr,
    pub(crate) given: Addr,
    pub(crate) ids: Addr,
    pub(crate) weights: Addr,
    pub(crate) experts: u32,
    pub(crate) k: u32,
    pub(crate) weighting: u32,
}

/// `RouterParams` of route.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Router {
    pub(crate) norm: Norm,
    pub(crate) w: Weights,
    pub(crate) route: Route,
    pub(crate) bias: Addr,
    pub(crate) logits: Addr,
    pub(crate) arrived: Addr,
    pub(crate) bias_float: u32,
    pub(crate) m: u32,
}

/// `GroupParams` of route.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Group {
    pub(crate) ids: Addr,
    pub(crate) ends: Addr,
    pub(crate) order: Addr,
    pub(crate) tiles: Addr,
    pub(crate) tile_count: Addr,
    pub(crate) routes: u32,
    pub(crate) experts: u32,
    pub(crate) tile_rows: u32,
}

/// `ActivateParams` of route.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Activate {
    pub(crate) h1: Addr,
    pub(crate) h3: Addr,
    pub(crate) y: Addr,
    pub(crate) n: u64,
    pub(crate) inter: u32,
    pub(crate) act: Activation,
}

/// `CombineParams` of route.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Combine {
    pub(crate) rows: Addr,
    pub(crate) mix: Addr,
    pub(crate) y: Addr,
    pub(crate) n: u64,
    pub(crate) hidden: u32,
    pub(crate) k: u32,
}

/// `NormParams` of doyen.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Norm {
    pub(crate) x: Addr,
    pub(crate) skip: Addr,
    pub(crate) bias: Addr,
    pub(crate) gamma: Addr,
    pub(crate) beta: Addr,
    pub(crate) y: Addr,
    pub(crate) sum: Addr,
    pub(crate) width: u32,
    pub(crate) bias_float: u32,
    pub(crate) gamma_float: u32,
    pub(crate) beta_float: u32,
    pub(crate) layer: u32,
    pub(crate) eps: f32,
}

/// Products that share their activations in one launch at most.
pub(crate) const PARTS: usize = 3;

/// `Part` of stream.cu and of wide.cu: a product of several.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) w: Weights,
    pub(crate) y: Addr,
    pub(crate) bias: Addr,
    pub(crate) bias_float: u32,
    /// Groups of rows, or blocks of them, of it and of the parts before it.
    pub(crate) end: u32,
}

/// `NormedParams` of stream.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Normed {
    pub(crate) norm: Norm,
    pub(crate) parts: [Part; PARTS],
    pub(crate) count: u32,
    pub(crate) m: u32,
    pub(crate) split: u32,
}

/// `SplitParams` of wide.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Split {
    pub(crate) parts: [Part; PARTS],
    pub(crate) x: Addr,
    pub(crate) x_stride: u64,
    pub(crate) count: u32,
    pub(crate) m: u32,
}

/// `EmbedParams` of pointwise.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Embed {
    pub(crate) w: Weights,
    pub(crate) indices: Addr,
    pub(crate) y: Addr,
    pub(crate) fault: Addr,
    pub(crate) bits: u32,
    pub(crate) wide: u32,
    pub(crate) strict: u32,
    pub(crate) node: u32,
}

/// `UnaryParams` of pointwise.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Unary {
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) n: u64,
    pub(crate) kind: u32,
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
}

/// Extents that [`Binary`] has room for.
pub(crate) const MAX_RANK: usize = 8;

/// `BinaryParams` of pointwise.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Binary {
    pub(crate) a: Addr,
    pub(crate) b: Addr,
    pub(crate) y: Addr,
    pub(crate) n: u64,
    pub(crate) a_stride: [u64; MAX_RANK],
    pub(crate) b_stride: [u64; MAX_RANK],
    pub(crate) dims: [u32; MAX_RANK],
    pub(crate) rank: u32,
    pub(crate) kind: u32,
    pub(crate) a_float: u32,
    pub(crate) b_float: u32,
}

/// `ChooseParams` of pointwise.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Choose {
    pub(crate) which: Addr,
    pub(crate) a: Addr,
    pub(crate) b: Addr,
    pub(crate) y: Addr,
    pub(crate) n: u64,
    pub(crate) which_stride: [u64; MAX_RANK],
    pub(crate) a_stride: [u64; MAX_RANK],
    pub(crate) b_stride: [u64; MAX_RANK],
    pub(crate) dims: [u32; MAX_RANK],
    pub(crate) rank: u32,
    pub(crate) a_float: u32,
    pub(crate) b_float: u32,
}

/// `SoftmaxParams` of pointwise.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Softmax {
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) width: u32,
    pub(crate) log: u32,
}

/// `SelectParams` of pointwise.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Select {
    pub(crate) x: Addr,
    pub(crate) rows: Addr,
    pub(crate) y: Addr,
    pub(crate) words: u32,
}

/// `TransposeParams` of pointwise.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Transpose {
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) k: u32,
    pub(crate) n: u32,
    pub(crate) wide: u32,
}

/// `Store` of doyen.cuh: keys or values of a layer.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Store {
    pub(crate) rows: Addr,
    pub(crate) scales: Addr,
    pub(crate) lost: Addr,
    pub(crate) kind: u32,
    pub(crate) per_channel: u32,
    pub(crate) head_size: u32,
}

/// `Batch` of doyen.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Batch {
    pub(crate) token_sequence: Addr,
    pub(crate) first: Addr,
    pub(crate) len: Addr,
    pub(crate) past: Addr,
    pub(crate) table_start: Addr,
    pub(crate) pages: Addr,
    pub(crate) page_shift: u32,
    pub(crate) kv_heads: u32,
}

/// `PrepareParams` of attention.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Prepare {
    pub(crate) batch: Batch,
    pub(crate) keys: Store,
    pub(crate) values: Store,
    pub(crate) q: Addr,
    pub(crate) k: Addr,
    pub(crate) v: Addr,
    pub(crate) q_out: Addr,
    pub(crate) q_norm: Addr,
    pub(crate) k_norm: Addr,
    pub(crate) cos: Addr,
    pub(crate) sin: Addr,
    pub(crate) positions: Addr,
    pub(crate) fault: Addr,
    pub(crate) q_stride: u64,
    pub(crate) k_stride: u64,
    pub(crate) v_stride: u64,
    pub(crate) heads: u32,
    pub(crate) q_norm_float: u32,
    pub(crate) k_norm_float: u32,
    pub(crate) rotary_float: u32,
    pub(crate) rotary_half: u32,
    pub(crate) rotary_rows: u32,
    pub(crate) interleaved: u32,
    pub(crate) eps: f32,
    pub(crate) node: u32,
}

/// `AttendParams` of doyen.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Attend {
    pub(crate) batch: Batch,
    pub(crate) keys: Store,
    pub(crate) values: Store,
    pub(crate) q: Addr,
    pub(crate) y: Addr,
    pub(crate) part: Addr,
    pub(crate) tiles: Addr,
    pub(crate) sink: Addr,
    pub(crate) bias: Addr,
    pub(crate) bias_stride: [u64; 4],
    pub(crate) bias_keys: u32,
    pub(crate) heads: u32,
    pub(crate) queries: u32,
    pub(crate) window: u32,
    pub(crate) causal: u32,
    pub(crate) zero_sink: u32,
    pub(crate) splits: u32,
    pub(crate) split_keys: u32,
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
}

/// `SampleParams` of sample.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) logits: Addr,
    pub(crate) draws: Addr,
    pub(crate) tokens: Addr,
    pub(crate) vocab: u32,
}

params!(
    Gemv, Routed, Gemm, Route, Group, Activate, Combine, Norm, Embed, Unary, Binary, Choose, Softmax, Select
);
params!(
    Transpose, Prepare, Attend, Few, Narrow, Stream, Eight, Flow, Wide, NarrowWide, Sample, Normed, Split,
    Router
);

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes that NVRTC gives the structures: 8-byte pointers and 64-bit numbers first, then 4-byte ones, padded to 8.
    #[test]
    fn sizes_are_those_of_the_cuda_structures() {
        assert_eq!(size_of::<Weights>(), 6 * 8 + 10 * 4);
        assert_eq!(size_of::<Activation>(), 20);
        assert_eq!(size_of::<Gemv>(), 88 + 5 * 8 + 8);
        assert_eq!(size_of::<Routed>(), 88 + 5 * 8 + 4 * 4 + 20 + 4);
        assert_eq!(size_of::<Gemm>(), 88 + 9 * 8 + 4 * 4);
        assert_eq!(size_of::<Few>(), 88 + 10 * 8 + 6 * 4 + 20 + 4);
        assert_eq!(size_of::<Stream>(), 88 + 7 * 8 + 5 * 4 + 20);
        assert_eq!(size_of::<Eight>(), 88 + 9 * 8 + 7 * 4 + 20);
        assert_eq!(size_of::<Flow>(), 88 + 9 * 8 + 10 * 4 + 20 + 4);
        assert_eq!(size_of::<Wide>(), 88 + 9 * 8 + 5 * 4 + 20);
        assert_eq!(size_of::<NarrowWide>(), 3 * 8 + 4 + 4);
        assert_eq!(size_of::<Narrow>(), 3 * 8 + 4 + 4);
        assert_eq!(size_of::<Group>(), 5 * 8 + 3 * 4 + 4);
        assert_eq!(size_of::<Norm>(), 7 * 8 + 6 * 4);
        assert_eq!(size_of::<Router>(), 80 + 88 + 48 + 3 * 8 + 2 * 4);
        assert_eq!(size_of::<Part>(), 88 + 2 * 8 + 2 * 4);
        assert_eq!(size_of::<Normed>(), 80 + 3 * 112 + 3 * 4 + 4);
        assert_eq!(size_of::<Split>(), 3 * 112 + 2 * 8 + 2 * 4);
        assert_eq!(size_of::<Sample>(), 3 * 8 + 4 + 4);
        assert_eq!(size_of::<Unary>(), 3 * 8 + 3 * 4 + 4);
        assert_eq!(size_of::<Binary>(), 4 * 8 + 16 * 8 + 8 * 4 + 4 * 4);
        assert_eq!(size_of::<Choose>(), 5 * 8 + 24 * 8 + 8 * 4 + 3 * 4 + 4);
        assert_eq!(size_of::<Store>(), 3 * 8 + 3 * 4 + 4);
        assert_eq!(size_of::<Batch>(), 6 * 8 + 2 * 4);
        assert_eq!(size_of::<Prepare>(), 56 + 40 + 40 + 10 * 8 + 3 * 8 + 9 * 4 + 4);
        assert_eq!(size_of::<Attend>(), 56 + 40 + 40 + 6 * 8 + 4 * 8 + 10 * 4);
    }
}
