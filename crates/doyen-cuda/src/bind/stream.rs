//! Products of one or a few rows of activations with packed codes, for decode: launches of `stream.cu`.

use super::{Context, ready};
use crate::{
    driver::{Addr, Function, Gpu, Grid},
    error::CudaError,
    module::{Module, Operand, Parts},
    params,
    weights::{Bank, Floats, optional},
};
use doyen_tensor::format::Bits;

/// Warps of a block, and of one of `stream_sum`.
const WARPS: usize = 8;
const SUM_WARPS: u32 = 16;
/// Blocks of a multiprocessor at once.
const BLOCKS: usize = 3;
/// Most dynamic shared memory: with the static part it needs no attribute, and `BLOCKS` blocks have room.
const SHARED: usize = 36 << 10;

/// The kernels of a bank.
pub(super) struct Stream {
    product: Function,
    normed: Function,
    activated: Function,
    sum: Function,
}

/// Codes of a word, which decide the order of narrowed activations.
pub(super) const fn span(bits: Bits) -> u32 {
    match bits {
        Bits::B2 => 16,
        Bits::B4 => 8,
        Bits::B8 => 2,
    }
}

/// Columns of a segment.
const fn segment(bits: Bits) -> usize {
    512 / bits.get()
}

/// Dynamic shared memory for `rows` rows of activations, whole segments, behind zeros for a lane.
const fn shared(bits: Bits, cols: usize, rows: usize) -> usize {
    segment(bits) / 2 + rows * cols.next_multiple_of(segment(bits)) * 2
}

/// Whether a bank is multiplied with `rows` rows at once.
pub(super) fn takes(bank: &Bank, rows: usize) -> bool {
    let fits =
        |(bits, parts): (Bits, Parts)| rows <= 8 / parts.get() && shared(bits, bank.cols(), rows) <= SHARED;
    bank.stream().is_some_and(fits)
}

/// Whether FC1 is multiplied route by route, and FC2 with all `k` routes of a token.
pub(super) fn takes_experts(fc1: &Bank, fc2: &Bank, k: usize) -> bool {
    let sums = fc2.stream().is_some_and(|(bits, _)| shared(bits, fc2.cols(), k) <= SHARED);
    takes(fc1, 1) && sums
}

/// Warps that share the columns of 16 rows: as many as the card runs at once, each with a segment at least.
const fn split(groups: usize, segments: usize, multiprocessors: usize) -> usize {
    let mut split = 1;
    while split < WARPS && groups * split * 2 <= multiprocessors * BLOCKS * WARPS && split * 2 <= segments {
        split *= 2;
    }
    split
}

/// One projection with its rows of activations.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    pub(super) bank: &'a Bank,
    pub(super) bias: Option<&'a Floats>,
    pub(super) x: Addr,
    pub(super) y: Addr,
}

/// Routes of some tokens.
#[derive(Clone, Copy)]
pub(super) struct Routes {
    pub(super) experts: Addr,
    pub(super) mix: Addr,
    pub(super) tokens: usize,
    pub(super) k: usize,
}

impl Stream {
    /// # Errors
    /// When they cannot be compiled.
    pub(super) fn load(gpu: &Gpu, bank: &Bank, operand: Operand) -> Result<Option<Self>, CudaError> {
        let Some((bits, parts)) = bank.stream() else { return Ok(None) };
        let function = |entry| gpu.function(Module::Stream(bits, parts, operand), entry, 0);
        Ok(Some(Self {
            product: function("stream")?,
            normed: function("stream_normed")?,
            activated: function("stream_activated")?,
            sum: function("stream_sum")?,
        }))
    }

    fn params(job: &Job<'_>) -> Result<params::Stream, CudaError> {
        let (bias, bias_float) = optional(job.bias);
        Ok(params::Stream {
            w: job.bank.params()?,
            x: job.x,
            y: job.y,
            bias,
            experts: Addr::NONE,
            mix: Addr::NONE,
            x_stride: job.bank.cols() as u64,
            y_stride: job.bank.rows() as u64,
            bias_float,
            m: 1,
            k: 1,
            split: 1,
            y_span: 0,
            act: params::Activation::IDENTITY,
        })
    }

    fn bits(bank: &Bank) -> Result<Bits, CudaError> {
        Ok(ready(bank.stream().as_ref())?.0)
    }

    /// `m` rows with one matrix.
    ///
    /// # Errors
    /// When the launch fails.
    pub(super) fn product(&self, cx: &Context<'_>, job: &Job<'_>, m: usize) -> Result<(), CudaError> {
        let bits = Self::bits(job.bank)?;
        let groups = job.bank.rows().div_ceil(16);
        let sms = cx.gpu.multiprocessors();
        let split = split(groups, job.bank.cols().div_ceil(segment(bits)), sms);
        let params = params::Stream { m: m as u32, split: split as u32, ..Self::params(job)? };
        let blocks = groups.div_ceil(WARPS / split).min(sms * BLOCKS);
        let grid = Grid::new([blocks, 1, 1], 32 * WARPS as u32).shared(shared(bits, job.bank.cols(), m));
        cx.gpu.launch(&self.product, grid, params)
    }

    /// Products of the rows that `norm` makes; `end` of each part counts its groups of 16 rows. False, and nothing launched,
    /// where blocks would take turns: each of them normalises the rows again.
    ///
    /// # Errors
    /// When the launch fails.
    pub(super) fn normed(
        &self,
        cx: &Context<'_>,
        (norm, m): (params::Norm, usize),
        (parts, count): ([params::Part; params::PARTS], usize),
        bank: &Bank,
    ) -> Result<bool, CudaError> {
        let (bits, sms) = (Self::bits(bank)?, cx.gpu.multiprocessors());
        let (groups, cols) = (parts[count - 1].end as usize, norm.width as usize);
        let split = split(groups, cols.div_ceil(segment(bits)), sms);
        let blocks = groups.div_ceil(WARPS / split);
        // With its static part a block must do without an attribute.
        if blocks > sms * BLOCKS || shared(bits, cols, m) + 4 * cols > SHARED + (6 << 10) {
            return Ok(false);
        }
        let params = params::Normed { norm, parts, count: count as u32, m: m as u32, split: split as u32 };
        // A row as it is stays beside the narrowed ones.
        let shared = shared(bits, cols, m) + 4 * cols;
        let grid = Grid::new([blocks, 1, 1], 32 * WARPS as u32).shared(shared);
        cx.gpu.launch(&self.normed, grid, params)?;
        Ok(true)
    }

    /// FC1 and the activation of every route, narrowed for FC2's codes.
    ///
    /// # Errors
    /// When the launch fails.
    pub(super) fn activated(
        &self,
        cx: &Context<'_>,
        job: &Job<'_>,
        routes: Routes,
        act: params::Activation,
        fc2: &Bank,
    ) -> Result<(), CudaError> {
        let bits = Self::bits(job.bank)?;
        let (values, per_group) =
            if act.gate == 0 { (job.bank.rows(), 16) } else { (job.bank.rows() / 2, 8) };
        let (count, groups) = (routes.tokens * routes.k, values.div_ceil(per_group));
        let segments = job.bank.cols().div_ceil(segment(bits));
        let split = split(groups * count, segments, cx.gpu.multiprocessors());
        let params = params::Stream {
            experts: routes.experts,
            y_stride: values as u64,
            k: routes.k as u32,
            split: split as u32,
            y_span: span(Self::bits(fc2)?),
            act,
            ..Self::params(job)?
        };
        let grid = Grid::new([count, groups.div_ceil(WARPS / split), 1], 32 * WARPS as u32);
        cx.gpu.launch(&self.activated, grid.shared(shared(bits, job.bank.cols(), 1)), params)
    }

    /// FC2 and the weighted sums, of what [`Stream::activated`] left.
    ///
    /// # Errors
    /// When the launch fails.
    pub(super) fn sum(&self, cx: &Context<'_>, job: &Job<'_>, routes: Routes) -> Result<(), CudaError> {
        let bits = Self::bits(job.bank)?;
        let params = params::Stream {
            experts: routes.experts,
            mix: routes.mix,
            m: routes.tokens as u32,
            k: routes.k as u32,
            ..Self::params(job)?
        };
        let grid = Grid::new([routes.tokens, job.bank.rows().div_ceil(16), 1], 32 * SUM_WARPS);
        cx.gpu.launch(&self.sum, grid.shared(shared(bits, job.bank.cols(), routes.k)), params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_shared_until_the_card_is_full() {
        assert_eq!(split(9496, 16, 132), 1);
        assert_eq!(split(768, 16, 132), 4);
        assert_eq!(split(256, 32, 132), 8);
        assert_eq!(split(16, 1, 132), 1);
        assert_eq!(split(16, 3, 132), 2);
    }

    #[test]
    fn activations_fill_whole_segments() {
        assert_eq!(shared(Bits::B4, 2048, 1), 64 + 4096);
        assert_eq!(shared(Bits::B4, 200, 2), 64 + 2 * 512);
        assert_eq!(shared(Bits::B2, 768, 8), 128 + 8 * 1536);
    }
}
